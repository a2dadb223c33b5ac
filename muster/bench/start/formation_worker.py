"""Runs one AllReduce over all ranks: a worker of ``muster bench formation``."""

import numpy as np

import muster

session = muster.init("tcp")
total = muster.all_reduce(np.ones(1024, np.float32))
assert total[0] == session.world_size, total[0]
muster.release()
