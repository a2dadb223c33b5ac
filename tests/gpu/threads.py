"""A communicator among threads of one process, for tests of what stands above communicators."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from muster.communicators.arrays import Array
from muster.communicators.base import Communicator
from muster.communicators.membership import Membership, Peer
from muster.communicators.reduce_ops import ReduceOp
from muster.communicators.work import FINISHED, Work

_REDUCE = {
    ReduceOp.SUM: lambda parts: np.sum(parts, axis=0),
    ReduceOp.MEAN: lambda parts: np.sum(parts, axis=0) / len(parts),
    ReduceOp.MIN: lambda parts: np.min(parts, axis=0),
    ReduceOp.MAX: lambda parts: np.max(parts, axis=0),
    ReduceOp.PROD: lambda parts: np.prod(parts, axis=0),
}


class _Later:
    """A collective that is done when it is waited for, or before the next one."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def done(self) -> bool:
        return self._action is None

    def wait(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=100)
        self.slots: list[Any] = [None] * size


class ThreadCommunicator(Communicator):
    """One rank among threads. With ``async_op`` only an AllGather waits; all else runs at once."""

    name = "threads"

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        size = len(meeting.slots)
        peers = tuple(Peer(r, f"w{r}", r, "h", "h", "") for r in range(size))
        self.membership = Membership("job", 1, "world", rank, peers)
        self.timeout_s = 30.0
        self._meeting = meeting
        self.calls: list[tuple[str, int]] = []
        self._later = _Later(lambda: None)

    def _exchange(self, name: str, value: Any) -> list[Any]:
        self._later.wait()
        self.calls.append((name, 0 if value is None else value.size))
        meeting = self._meeting
        meeting.slots[self.rank] = (name, None if value is None else value.copy())
        meeting.barrier.wait()
        seen = list(meeting.slots)
        meeting.barrier.wait()
        assert {other for other, _ in seen} == {name}, seen
        return [value for _, value in seen]

    def all_reduce(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        recv[...] = _REDUCE[ReduceOp(op)](np.stack(self._exchange("all_reduce", send)))
        return FINISHED

    def broadcast(self, buffer: Array, root: int, *, async_op: bool = False) -> Work:
        buffer[...] = self._exchange("broadcast", buffer)[root]
        return FINISHED

    def all_gather(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        self._later.wait()
        sent = send.copy()

        def action() -> None:
            recv[...] = np.concatenate([part.reshape(-1) for part in self._exchange("all_gather", sent)])

        self._later = _Later(action)
        if not async_op:
            self._later.wait()
        return self._later

    def reduce_scatter(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        whole = _REDUCE[ReduceOp(op)](np.stack(self._exchange("reduce_scatter", send)))
        recv[...] = whole.reshape(self.world_size, -1)[self.rank].reshape(recv.shape)
        return FINISHED

    def barrier(self) -> None:
        self._exchange("barrier", None)

    def _absent(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    reduce = gather = scatter = all_to_all = send = recv = _absent

    def split(self, group: str, ranks: Sequence[int]) -> Communicator | None:
        raise NotImplementedError

    def abort(self, error: Exception) -> None:
        self._meeting.barrier.abort()

    def close(self) -> None:
        return None


def run_ranks(size: int, function: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    """Calls ``function(communicator)`` on ``size`` ranks at once; returns what each returned."""
    meeting = _Meeting(size)

    def one(rank: int) -> Any:
        try:
            return function(ThreadCommunicator(meeting, rank))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        errors = [future.exception() for future in futures]
        real = [error for error in errors if error and not isinstance(error, threading.BrokenBarrierError)]
        for error in [*real, *filter(None, errors)]:
            raise error
        return [future.result() for future in futures]
