"""Functions with gradients of their own that divided models call in place of torch's, and their kernels."""
