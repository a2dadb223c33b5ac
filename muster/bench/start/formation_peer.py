"""Runs one AllReduce by mpi4py, for ``mpirun -n N python formation_peer.py``."""

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
total = np.empty(1024, np.float32)
world.Allreduce(np.ones(1024, np.float32), total)
assert total[0] == world.size, total[0]
