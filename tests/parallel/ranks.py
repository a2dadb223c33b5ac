"""Ranks as threads of one process, with groups, that count what they send."""

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

_REDUCE: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.sum,
    ReduceOp.MEAN: np.mean,
    ReduceOp.MAX: np.max,
    ReduceOp.MIN: np.min,
}


class _Meeting:
    """Where the ranks of one group meet."""

    def __init__(self, size: int, groups: dict[Any, _Meeting], lock: threading.Lock) -> None:
        self.barrier = threading.Barrier(size, timeout=100)
        self.slots: list[Any] = [None] * size
        self.groups, self.lock = groups, lock

    def part(self, key: Any, size: int) -> _Meeting:
        with self.lock:
            return self.groups.setdefault(key, _Meeting(size, self.groups, self.lock))


class RankCommunicator(Communicator):
    """One rank among threads. ``log`` has (kind, world ranks, bytes) of each collective of all groups."""

    name = "threads"

    def __init__(
        self,
        meeting: _Meeting,
        rank: int,
        ranks: tuple[int, ...],
        log: list[tuple[str, tuple[int, ...], int]],
    ) -> None:
        peers = tuple(Peer(r, f"w{r}", r, "h", "h", "") for r in ranks)
        self.membership = Membership("job", 1, "world", rank, peers)
        self.timeout_s = 60.0
        self.ranks, self.log, self._meeting = ranks, log, meeting
        self._splits = 0

    def _exchange(self, kind: str, value: Any, nbytes: int) -> list[Any]:
        self.log.append((kind, self.ranks, nbytes))
        meeting = self._meeting
        meeting.slots[self.rank] = (kind, value.shape, value.dtype, value.copy())
        meeting.barrier.wait()
        seen = list(meeting.slots)
        meeting.barrier.wait()
        assert len({(k, shape, str(dtype)) for k, shape, dtype, _ in seen}) == 1, [s[:3] for s in seen]
        return [each[3] for each in seen]

    def all_reduce(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        parts = self._exchange("all_reduce", send, send.nbytes)
        recv[...] = _REDUCE[ReduceOp(op)](np.stack(parts), axis=0)
        return FINISHED

    def broadcast(self, buffer: Array, root: int, *, async_op: bool = False) -> Work:
        buffer[...] = self._exchange("broadcast", buffer, buffer.nbytes)[root]
        return FINISHED

    def all_gather(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        parts = self._exchange("all_gather", send, recv.nbytes)
        recv[...] = np.concatenate([part.reshape(-1) for part in parts]).reshape(recv.shape)
        return FINISHED

    def reduce_scatter(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        whole = np.sum(np.stack(self._exchange("reduce_scatter", send, send.nbytes)), axis=0)
        recv[...] = whole.reshape(self.world_size, -1)[self.rank].reshape(recv.shape)
        return FINISHED

    def all_to_all(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        parts = self._exchange("all_to_all", send, send.nbytes)
        own = [part.reshape(self.world_size, -1)[self.rank] for part in parts]
        recv[...] = np.concatenate(own).reshape(recv.shape)
        return FINISHED

    def barrier(self) -> None:
        self._meeting.barrier.wait()

    def _absent(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    reduce = gather = scatter = send = recv = _absent

    def split(self, group: str, ranks: Sequence[int]) -> Communicator | None:
        self._splits += 1
        if self.rank not in ranks:
            return None
        world = tuple(self.ranks[r] for r in ranks)
        meeting = self._meeting.part((self._splits, group, world), len(world))
        return RankCommunicator(meeting, list(ranks).index(self.rank), world, self.log)

    def abort(self, error: Exception) -> None:
        self._meeting.barrier.abort()
        for each in self._meeting.groups.values():
            each.barrier.abort()

    def close(self) -> None:
        return None


def run_ranks(size: int, function: Callable[[RankCommunicator], Any]) -> list[Any]:
    """Calls ``function(communicator)`` on ``size`` ranks at once; returns what each returned."""
    meeting = _Meeting(size, {}, threading.Lock())

    def one(rank: int) -> Any:
        communicator = RankCommunicator(meeting, rank, tuple(range(size)), [])
        try:
            return function(communicator)
        except BaseException as error:
            communicator.abort(Exception(str(error)))
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        errors = [future.exception() for future in futures]
        real = [error for error in errors if error and not isinstance(error, threading.BrokenBarrierError)]
        for error in [*real, *filter(None, errors)]:
            raise error
        return [future.result() for future in futures]
