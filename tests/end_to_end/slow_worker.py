"""A worker of a job whose ranks are even but for one: ``slow_worker KIND NODE``, until it is killed."""

from __future__ import annotations

import os
import sys
import time

import numpy as np

import muster
from muster.bench.soak.relay import Relay, Trouble
from muster.communicators.tcp import endpoint
from muster.training.loop import ElasticLoop
from muster.training.sampler import Batch, ShardedSampler
from muster.training.state import TrainingState

STEP_S, LOAD_S, PIECE_S = 0.1, 0.25, 0.05
ELEMENTS = 500_000


def slow_links() -> None:
    """Lets what this worker dials pass a relay that holds each piece up."""
    dialed = endpoint.host_and_port

    def through_a_relay(address: str) -> tuple[str, int]:
        host, port = dialed(address)
        return host, Relay(port, Trouble(delay_s=PIECE_S)).port

    endpoint.host_and_port = through_a_relay


def main() -> None:
    kind, node = sys.argv[1:]
    with muster.init() as session:
        state = TrainingState({"w": np.zeros(4, np.float32)}, ShardedSampler(400_000, 4))
        gradient, total = np.ones(ELEMENTS, np.float32), np.zeros(ELEMENTS, np.float32)

        def load(batch: Batch) -> None:
            if kind == "loader" and session.node_id == node:
                time.sleep(LOAD_S)

        for step in ElasticLoop(session, state, epochs=1, load=load):
            with step:
                time.sleep(STEP_S)  # as work would that leaves this machine alone
                muster.all_reduce(gradient, out=total)


if __name__ == "__main__":
    if sys.argv[1] == "link" and os.environ["MS_NODE_ID"] == sys.argv[2]:
        slow_links()
    main()
