"""A worker of the soak: trains on integers, so that a step has the same result on every worker.

Each step sums a number for each row and mixes the sum into the weights, modulo 2^64. So the weights do not
depend on the world size, nor on the order of the additions. Started by ``bench soak``; on SIGUSR1 a worker
does to itself the harm in its file of harms.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muster.bench.soak.clock import CLOCK_VARIABLE, follow
from muster.bench.soak.relay import Relay, Trouble

ROWS = 720
BATCH = 72
SIZE = 32_768
BLOCKS = 60
"""The number of blocks of the weights: one to six ranks can hold the same number of blocks each."""

STOP_VARIABLE = "MUSTER_SOAK_STOP"
HARM_VARIABLE = "MUSTER_SOAK_HARM"
"""The file with a worker's harm as JSON: its name, and its length in seconds."""

BAD_NETWORK = Trouble(delay_s=0.02, stall=0.01, stall_s=1.0, reset=0.001, half_close=0.001)
LIAR_NETWORK = Trouble(stall=0.02, stall_s=14.0)
"""A liar's network: collectives with it hang until the scheduler asks which members reach each other."""

Numbers = NDArray[np.uint64]


def first_weights() -> Numbers:
    """Returns the weights before the first step: [SIZE] of uint64."""
    return np.arange(SIZE, dtype=np.uint64)


def part(step: int, rows: Any) -> Numbers:
    """Returns what these rows contribute to a step's sum: [SIZE] of uint64."""
    factors = (np.asarray(rows, np.uint64) + np.uint64(1)) * np.uint64(2 * step + 1)
    total: Numbers = first_weights() * factors.sum(dtype=np.uint64) + (factors * factors).sum(dtype=np.uint64)
    return total


def mix(weights: Numbers, total: Numbers) -> None:
    """Applies a step's sum to the weights, in place."""
    weights *= np.uint64(6364136223846793005)
    weights += total


def rows_of(step: int) -> range:
    """Returns the rows of the global batch of a step, which counts from 0."""
    begin = step * BATCH % ROWS
    return range(begin, begin + BATCH)


def blocks_of(rank: int, world_size: int) -> range:
    """Returns the blocks that a rank holds of sharded weights."""
    return range(rank * BLOCKS // world_size, (rank + 1) * BLOCKS // world_size)


def elements_of(blocks: range) -> slice:
    """Returns the place of these blocks in the weights."""
    return slice(blocks.start * SIZE // BLOCKS, blocks.stop * SIZE // BLOCKS)


def block_digests(weights: Numbers, blocks: range = range(BLOCKS)) -> list[bytes]:
    """Returns the digest of each of these blocks; ``weights`` must hold exactly these."""
    first = elements_of(blocks).start
    found = []
    for block in blocks:
        place = elements_of(range(block, block + 1))
        found.append(hashlib.sha256(weights[place.start - first : place.stop - first].tobytes()).digest()[:8])
    return found


def digest_of_blocks(digests: Sequence[bytes]) -> str:
    """Returns a digest of blocks from the digests of each."""
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


def digest_of(weights: Numbers) -> str:
    """Returns the digest of the weights."""
    return digest_of_blocks(block_digests(weights))


def train() -> None:
    """Trains until the stop file exists. All ranks learn of it in the same step."""
    import muster
    from muster.bench.recovery.loop import RecordingLoop
    from muster.training.loop import Step
    from muster.training.sampler import ShardedSampler
    from muster.training.state import TrainingState

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


class Harm:
    """Harms this worker: its connections to others, and its reports about them."""

    def __init__(self) -> None:
        self.relays: list[Relay] = []
        self._lies_until = 0.0
        self._chance = random.Random(os.getpid())

    def done(self, *_: object) -> None:
        """Does the harm in the file; a signal handler."""
        asked = json.loads(Path(os.environ[HARM_VARIABLE]).read_text())
        what, seconds = asked["what"], float(asked["seconds"])
        if what == "cut data":
            for relay in self.relays:
                relay.cut()
            return
        if what == "lie":
            self._lies_until = time.monotonic() + seconds
        for relay in self.relays:
            relay.trouble = LIAR_NETWORK if what == "lie" else BAD_NETWORK
        threading.Timer(seconds, self._mend).start()

    def _mend(self) -> None:
        for relay in self.relays:
            relay.trouble = Trouble()

    def lie(self, targets: Mapping[str, str], unreached: dict[str, str]) -> dict[str, str]:
        """Returns the probes' results; while this worker lies, with a random peer added as unreachable."""
        if targets and time.monotonic() < self._lies_until:
            victim = self._chance.choice(sorted(targets))
            return {**unreached, victim: f"{targets[victim]}: Connection refused"}
        return unreached


def main(train: Callable[[], None] = train) -> None:
    """Puts a relay before the communicator's port, and runs the training."""
    follow(os.environ[CLOCK_VARIABLE])
    from muster.communicators.tcp.backend import TcpBackend
    from muster.communicators.tcp.probe import Prober

    harm = Harm()
    open_endpoint, probe = TcpBackend.open_endpoint, Prober.__call__

    def opened(self: TcpBackend, address: str) -> str:
        harm.relays.append(Relay(int(open_endpoint(self, address).rpartition(":")[2])))
        return f"127.0.0.1:{harm.relays[-1].port}"

    def probed(self: Prober, targets: Mapping[str, str]) -> dict[str, str]:
        return harm.lie(targets, probe(self, targets))

    TcpBackend.open_endpoint = opened  # type: ignore[method-assign]
    Prober.__call__ = probed  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, harm.done)
    train()


if __name__ == "__main__":
    main()
