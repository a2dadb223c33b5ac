"""Collectives by Gloo, on arrays of the host.

All work runs in a thread of the communicator, so that an abort sets the caller free at once; Gloo's own
call ends when its deadline passes or a peer hangs up.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from muster.worker.communicators.base import (
    ARITHMETIC,
    FINISHED,
    Array,
    Description,
    HostCommunicator,
    Membership,
    NumpyArray,
    ReduceOp,
    Work,
    WorkQueue,
)
from muster.worker.communicators.tcp.endpoint import peer_name
from muster.worker.errors import (
    ArrayError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorError,
)

GroupMaker = Callable[[Membership, str, float], Any]
"""Makes torch's process group of a membership: given its path in the store, and a deadline in seconds."""

_REDUCIBLE = frozenset(("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint8"))
_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MEAN: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PROD: dist.ReduceOp.PRODUCT,
}


class GlooCommunicator(HostCommunicator):
    """Collectives by Gloo. Calls that disagree among ranks are not detected: they time out or fail.

    Reductions take bfloat16, float16/32/64, int8/32/64 and uint8; other collectives take every dtype.
    """

    name = "gloo"

    def __init__(
        self, make_group: GroupMaker, membership: Membership, group: Any, *, path: str, timeout_s: float
    ) -> None:
        self.membership = membership
        self.timeout_s = timeout_s
        self._make_group = make_group
        self._group = group
        self._path = path
        self._splits = 0
        self._queue = WorkQueue(f"muster-gloo-{membership.group}")
        self._lock = threading.Lock()

    def all_reduce(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_reduce`."""
        source, target = self._take_pair(send, recv)
        reduced = self._operation(op, source)
        return self._issue(
            "all_reduce", lambda: self._reduce_into(source, target.flat, reduced), async_op, source
        )

    def reduce(
        self,
        send: Array,
        recv: Array | None,
        op: ReduceOp,
        root: int,
        *,
        async_op: bool = False,
    ) -> Work:
        """See :meth:`Communicator.reduce`."""
        source, target = self._take_rooted(send, recv, root)
        reduced = self._operation(op, source)

        def run() -> None:
            wide = self._widened(source)
            options = dist.ReduceOptions()
            options.reduceOp, options.rootRank = _OPS[reduced], root
            self._wait(self._group.reduce([torch.from_numpy(wide)], options))
            if target is not None:
                ARITHMETIC[source.dtype].finish(reduced, wide, self.world_size, target.flat)

        return self._issue("reduce", run, async_op, source)

    def broadcast(self, buffer: Array, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.broadcast`."""
        self.membership.check_rank(root, "root")
        target = self._take(buffer, "buffer", writable=self.rank != root)

        def run() -> None:
            options = dist.BroadcastOptions()
            options.rootRank = root
            self._wait(self._group.broadcast([_tensor(target.flat)], options))

        return self._issue("broadcast", run, async_op, target)

    def all_gather(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_gather`."""
        source, target = self._take_pair(send, recv, gathers=True)

        def run() -> None:
            parts = [_tensor(part) for part in self._parts(target.flat)]
            self._wait(self._group.allgather([parts], [_tensor(source.flat.copy())]))

        return self._issue("all_gather", run, async_op, source)

    def reduce_scatter(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.reduce_scatter`; reduces all and keeps a part."""
        source, target = self._take_pair(send, recv, scatters=True)
        reduced = self._operation(op, source)

        def run() -> None:
            whole = np.empty_like(source.flat)
            self._reduce_into(source, whole, reduced)
            target.flat[...] = self._parts(whole)[self.rank]

        return self._issue("reduce_scatter", run, async_op, source)

    def gather(self, send: Array, recv: Array | None, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.gather`."""
        source, target = self._take_rooted(send, recv, root, gathers=True)

        def run() -> None:
            options = dist.GatherOptions()
            options.rootRank = root
            parts = [] if target is None else [[_tensor(part) for part in self._parts(target.flat)]]
            self._wait(self._group.gather(parts, [_tensor(source.flat.copy())], options))

        return self._issue("gather", run, async_op, source)

    def scatter(self, send: Array | None, recv: Array, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.scatter`."""
        source, target = self._take_scattered(send, recv, root)

        def run() -> None:
            options = dist.ScatterOptions()
            options.rootRank = root
            parts = [] if source is None else [[_tensor(part) for part in self._parts(source.flat.copy())]]
            self._wait(self._group.scatter([_tensor(target.flat)], parts, options))

        return self._issue("scatter", run, async_op, target)

    def all_to_all(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_to_all`."""
        source, target = self._take_pair(send, recv)
        self._shared(source)

        def run() -> None:
            sent, options = _tensor(source.flat.copy()), dist.AllToAllOptions()
            self._wait(self._group.alltoall_base(_tensor(target.flat), sent, [], [], options))

        return self._issue("all_to_all", run, async_op, source)

    def send(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.send`."""
        source = self._take(buffer, "buffer")
        self.membership.check_peer(peer)
        return self._issue(
            "send", lambda: self._wait(self._group.send([_tensor(source.flat)], peer, 0)), async_op, source
        )

    def recv(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.recv`."""
        target = self._take(buffer, "buffer", writable=True)
        self.membership.check_peer(peer)
        return self._issue(
            "recv", lambda: self._wait(self._group.recv([_tensor(target.flat)], peer, 0)), async_op, target
        )

    def barrier(self) -> None:
        """See :meth:`Communicator.barrier`."""
        self._issue("barrier", lambda: self._wait(self._group.barrier()), False)

    def split(self, group: str, ranks: Sequence[int]) -> GlooCommunicator | None:
        """See :meth:`Communicator.split`."""
        membership = self.membership.part(group, ranks)
        number = self._splits
        self._splits += 1
        self.barrier()
        if membership is None:
            return None
        path = f"{self._path}/{number}:{group}"
        made = self._make_group(membership, path, self.timeout_s)
        return GlooCommunicator(self._make_group, membership, made, path=path, timeout_s=self.timeout_s)

    def abort(self, error: Exception) -> None:
        """See :meth:`Communicator.abort`."""
        self._queue.end_all(self._fail(error))
        self._group = None

    def close(self) -> None:
        """See :meth:`Communicator.close`."""
        if self._error is None:
            self._queue.close()
            self._error = CommunicatorAbortedError("The communicator was closed.")
            self._group = None

    # ------------------------------------------------------------ running

    def _issue(
        self, kind: str, action: Callable[[], None], async_op: bool, array: Description | None = None
    ) -> Work:
        self._check()
        if array is not None and array.size == 0:
            return FINISHED
        return self._queued(lambda: self._run(kind, action), async_op)

    def _run(self, kind: str, action: Callable[[], None]) -> None:
        self._check()
        try:
            action()
        except Exception as failure:
            raise self._fail(self._explain(kind, failure)) from None

    def _fail(self, error: Exception) -> Exception:
        """The first error, with which every later call fails."""
        with self._lock:
            self._error = self._error or error
            return self._error

    def _wait(self, work: Any) -> None:
        work.wait(datetime.timedelta(seconds=self.timeout_s))

    def _explain(self, kind: str, failure: Exception) -> Exception:
        text = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
        where = f"{kind} in group {self.membership.group!r} of generation {self.membership.generation}"
        if "imed out" in text or "imeout" in text:
            others = [peer_name(p) for p in self.membership.peers if p.rank != self.rank]
            return CollectiveTimeoutError(
                f"{where} was not done in {self.timeout_s:g} s: Gloo waited for one of {', '.join(others)}.",
                remedy="See those workers' logs, or raise the deadline (MS_COLLECTIVE_TIMEOUT).",
            )
        return CommunicatorError(f"{where} failed in Gloo: {text}", remedy="See the other workers' logs.")

    def _widened(self, source: Description) -> NumpyArray:
        """A copy of the values, in the dtype in which they are combined."""
        wide = ARITHMETIC[source.dtype].widen(source.flat)
        return wide.copy() if wide is source.flat else wide

    def _reduce_into(self, source: Description, target: NumpyArray, op: ReduceOp) -> None:
        numbers = ARITHMETIC[source.dtype]
        if numbers.is_short:
            whole = self._widened(source)
        else:
            whole = target
            if source.flat is not target:
                whole[...] = source.flat
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        self._wait(self._group.allreduce([torch.from_numpy(whole)], options))
        numbers.finish(op, whole, self.world_size, target)

    def _operation(self, op: ReduceOp, array: Description) -> ReduceOp:
        found = super()._operation(op, array)
        if array.dtype not in _REDUCIBLE:
            raise ArrayError(f"Gloo cannot reduce {array.dtype}.", remedy="Use the backend 'tcp'.")
        return found


def _tensor(array: NumpyArray) -> Any:
    """The array's bytes as a tensor over the same memory."""
    data = array.view(np.uint8)
    return torch.from_numpy(data if data.flags.writeable else data.copy())
