"""A worker that prints where it is: one line of JSON. Run by the tests of several hosts."""

import json
import os

import numpy as np

import muster

session = muster.init()
total = muster.all_reduce(np.ones(50_000), op="sum")
print(
    json.dumps(
        {
            "rank": session.rank,
            "local": [session.local_rank, session.local_world_size],
            "hosts": [member.host.name for member in session.members],
            "data": [member.data_address for member in session.members],
            "sum": float(total[-1]),
            "nccl": os.environ.get("NCCL_SOCKET_IFNAME"),
            "gloo": os.environ.get("GLOO_SOCKET_IFNAME"),
        }
    ),
    flush=True,
)
muster.release()
