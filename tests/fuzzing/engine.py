"""A small coverage-guided fuzzer: what reaches new lines of ours is kept and changed further."""

from __future__ import annotations

import hashlib
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

ROOT = str(Path(__file__).parents[2])
ROOMS = (
    "certs",
    "scheduler",
    "wire",
    "communicators",
    "launch",
    "parallel",
    "programs",
    "torch",
    "training",
    "worker",
)
OURS = tuple(f"{ROOT}/muster/{room}/" for room in ROOMS)
MAX_BYTES = 1 << 16
MAX_KEPT = 2000
_NASTY = (b"\0", b"\xff", b"\x7f", b"\x80", b"\r\n", b"\xff\xff\xff\xff", b"\x80\x80\x80\x80\x10")


@dataclass(frozen=True)
class Target:
    """One decoder.

    Attributes:
        name: shown in reports.
        run: feeds it one input.
        allowed: the errors that it may raise; whatever else it raises is a finding.
        seeds: good inputs to begin with.
        generate: makes an input with the right shape and wrong content; used for half of the cases.
        tokens: what to insert now and then.
    """

    name: str
    run: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]
    generate: Callable[[random.Random], bytes] | None = None
    tokens: tuple[bytes, ...] = ()


@dataclass
class Outcome:
    """What fuzzing one target has found."""

    name: str
    cases: int = 0
    accepted: int = 0
    refused: int = 0
    seconds: float = 0.0
    edges: int = 0
    findings: dict[str, bytes] = field(default_factory=dict)


class Coverage:
    """Which steps from line to line of our own code were taken."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self._fresh: set[int] = set()
        self._codes: dict[Any, bool] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Follows the calling thread."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def grown(self) -> bool:
        """Whether anything new was seen since the last call."""
        new = self._fresh - self.known
        self.known |= new
        self._fresh.clear()
        return bool(new)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        ours = self._codes.get(code)
        if ours is None:
            ours = self._codes[code] = code.co_filename.startswith(OURS)
        if not ours:
            return None
        before, seen, base = [0], self._fresh, hash(code)

        def step(inner: FrameType, what: str, value: Any) -> Any:
            line = inner.f_lineno
            seen.add(hash((base, before[0], line)))
            before[0] = line
            return step

        return step


def mutated(data: bytes, chance: random.Random, target: Target, others: list[bytes]) -> bytes:
    """The input with one to eight changes."""
    out = bytearray(data)
    for _ in range(1 << chance.randrange(4)):
        kind, at = chance.randrange(8), chance.randrange(len(out) + 1)
        end = min(len(out), at + (1 << chance.randrange(7)))
        if kind == 0 and at < len(out):
            out[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = chance.randrange(256)
        elif kind == 2:
            out[at:at] = chance.randbytes(chance.randrange(1, 9))
        elif kind == 3:
            del out[at:end]
        elif kind == 4:
            out[at:at] = out[at:end] * chance.choice((1, 1, 2, 50))
        elif kind == 5:
            out[at:end] = chance.choice(_NASTY + target.tokens)
        elif kind == 6:
            other = chance.choice(others)
            cut = chance.randrange(len(other) + 1)
            out[at:] = other[cut:]
        else:
            del out[chance.randrange(at, len(out) + 1) :]
    return bytes(out[:MAX_BYTES])


def fuzz(
    target: Target,
    *,
    seed: int,
    cases: int = sys.maxsize,
    seconds: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Feeds one target until ``cases`` or ``seconds`` are used up.

    Args:
        target: what is fed.
        seed: makes the same cases again.
        cases: how many at most.
        seconds: how long at most.
        clock: for ``seconds``.
    """
    digest = hashlib.sha256(f"{seed} {target.name}".encode()).digest()
    chance, coverage = random.Random(digest), Coverage()
    outcome, kept, begun = Outcome(target.name), list(target.seeds), clock()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library warns of certificates that it refuses later
        _run(
            target,
            chance,
            kept,
            coverage,
            outcome,
            lambda: outcome.cases < cases and clock() - begun < seconds,
        )
    outcome.seconds, outcome.edges = clock() - begun, len(coverage.known)
    return outcome


def _run(
    target: Target,
    chance: random.Random,
    kept: list[bytes],
    coverage: Coverage,
    outcome: Outcome,
    goes_on: Callable[[], bool],
) -> None:
    for data in target.seeds:
        _try(target, data, coverage, outcome)
    while goes_on():
        if target.generate is not None and chance.random() < 0.5:
            data = target.generate(chance)
        else:
            data = mutated(chance.choice(kept), chance, target, kept)
        if _try(target, data, coverage, outcome) and len(kept) < MAX_KEPT:
            kept.append(data)


def _try(target: Target, data: bytes, coverage: Coverage, outcome: Outcome) -> bool:
    outcome.cases += 1
    threads: set[threading.Thread] = set()
    try:
        with _noting_threads(threads), coverage.watch():
            target.run(data)
        outcome.accepted += 1
    except target.allowed as error:
        outcome.refused += 1
        if not str(error).isprintable():
            outcome.findings.setdefault(f"{type(error).__name__} with control characters", data)
    except Exception as error:
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        where = f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}" if at is not None else "?"
        outcome.findings.setdefault(f"{type(error).__name__} at {where}: {str(error)[:200]}", data)
    for thread in threads:
        if thread.is_alive():
            outcome.findings.setdefault(f"a thread was left behind: {thread.name}", data)
    return coverage.grown()


@contextmanager
def _noting_threads(noted: set[threading.Thread]) -> Iterator[None]:
    """Notes the threads that the calling thread starts, and those that they start.

    What other threads start is not noted: one of an earlier test may go on in the same process.
    """
    caller, start = threading.current_thread(), threading.Thread.start

    def note_and_start(thread: threading.Thread) -> None:
        if threading.current_thread() in {caller, *noted}:
            noted.add(thread)
        start(thread)

    with mock.patch.object(threading.Thread, "start", note_and_start):
        yield
