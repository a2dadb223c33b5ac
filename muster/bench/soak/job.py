"""What a worker of the soak computes: whole numbers, so that a step has the same result on every worker.

Each step adds up a number for each row and mixes the sum into the weights, modulo 2^64. So the weights after
a step do not depend on how many ranks there were, nor on the order in which they were added. Started by
``bench soak``; on SIGUSR1 a worker's connections to the others are cut.
"""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muster.bench.soak.relay import Relay

ROWS = 720
BATCH = 72
SIZE = 32_768
STOP_VARIABLE = "MUSTER_SOAK_STOP"

Numbers = NDArray[np.uint64]


def first_weights() -> Numbers:
    """The weights before the first step."""
    return np.arange(SIZE, dtype=np.uint64)


def part(step: int, rows: Any) -> Numbers:
    """What these rows add to a step."""
    factors = (np.asarray(rows, np.uint64) + np.uint64(1)) * np.uint64(2 * step + 1)
    total: Numbers = first_weights() * factors.sum(dtype=np.uint64) + (factors * factors).sum(dtype=np.uint64)
    return total


def mix(weights: Numbers, total: Numbers) -> None:
    """Takes one step, in place."""
    weights *= np.uint64(6364136223846793005)
    weights += total


def rows_of(step: int) -> range:
    """The global batch of a step, counted from 0."""
    begin = step * BATCH % ROWS
    return range(begin, begin + BATCH)


def digest_of(weights: Numbers) -> str:
    """Names the weights, to the last bit."""
    return hashlib.sha256(weights.tobytes()).hexdigest()[:16]


def train() -> None:
    """Trains until the file that says stop is there, which all ranks learn in the same step."""
    import muster
    from muster.bench.recovery.loop import RecordingLoop
    from muster.worker.training.loop import Step
    from muster.worker.training.sampler import ShardedSampler
    from muster.worker.training.state import TrainingState

    class DigestingLoop(RecordingLoop):
        def _finish(self, step: Step) -> None:
            self.facts["digest"] = digest_of(weights)
            super()._finish(step)

    weights, stop = first_weights(), Path(os.environ[STOP_VARIABLE])
    with muster.init() as session:
        state = TrainingState({"weights": weights}, ShardedSampler(ROWS, BATCH, shuffle=False))
        for step in DigestingLoop(session, state, epochs=1 << 40):
            with step:
                last = np.array([session.rank == 0 and stop.exists()], np.uint64)
                total = muster.all_reduce(
                    np.concatenate([part(state.step, step.batch.indices), last]), op="sum"
                )
                mix(weights, total[:-1])
            if step.done and total[-1]:
                break


def main() -> None:
    """Puts a relay before the communicator's port, which can be cut, and trains."""
    from muster.worker.communicators.tcp.communicator import TcpBackend

    relays: list[Relay] = []
    open_endpoint = TcpBackend.open_endpoint

    def opened(self: TcpBackend, address: str) -> str:
        relays.append(Relay(int(open_endpoint(self, address).rpartition(":")[2])))
        return f"127.0.0.1:{relays[-1].port}"

    def cut(*_: object) -> None:
        for relay in relays:
            relay.cut()

    TcpBackend.open_endpoint = opened  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, cut)
    train()


if __name__ == "__main__":
    main()
