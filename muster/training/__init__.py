"""Training in NumPy and CuPy, and what every framework needs: loop, state, sampler, checkpoints."""
