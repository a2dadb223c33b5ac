"""What each worker of ``python -m bench formation`` runs: one AllReduce over all ranks."""

import numpy as np

import worker

session = worker.init("tcp")
total = worker.all_reduce(np.ones(1024, np.float32))
assert total[0] == session.world_size, total[0]
worker.release()
