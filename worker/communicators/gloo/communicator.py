"""Collectives by Gloo, on NumPy arrays.

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

from muster.worker.communicators import numpy_arrays as arrays
from muster.worker.communicators.base import Array, Membership, ReduceOp, Work
from muster.worker.communicators.numpy_arrays import CheckedCommunicator, NumpyArray, checked, dtype_code
from muster.worker.communicators.tcp.handshake import peer_name
from muster.worker.communicators.validation import part_of
from muster.worker.communicators.work import FINISHED, WorkQueue
from muster.worker.errors import (
    ArrayError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorError,
)

GroupMaker = Callable[[Membership, str, float], Any]
"""Makes torch's process group of a membership: given its path in the store, and a deadline in seconds."""

_REDUCIBLE = frozenset(("f2", "f4", "f8", "i1", "i4", "i8", "u1"))


class _AbortableWork:
    """Work in the queue that an abort of its communicator ends for the caller."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.error: Exception | None = None

    def done(self) -> bool:
        """Whether it has completed, well or not."""
        return self.event.is_set()

    def wait(self) -> None:
        """Waits for it, and raises what it failed with."""
        self.event.wait()
        if self.error is not None:
            raise self.error


class GlooCommunicator(CheckedCommunicator):
    """Collectives by Gloo. Calls that disagree among ranks are not detected: they time out or fail.

    Reductions take float16/32/64, int8/32/64 and uint8; other collectives take every dtype.
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
        self._pending: set[_AbortableWork] = set()
        self._error: Exception | None = None

    def all_reduce(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_reduce`."""
        source, target = checked(send, "send"), checked(recv, "recv", writable=True)
        arrays.check_pair(source, target)
        arrays.check_overlap(source, target)
        return self._issue("all_reduce", lambda: self._reduce_into(source, target, op), async_op, source, op)

    def reduce(
        self, send: Array, recv: Array | None, op: ReduceOp, root: int, *, async_op: bool = False
    ) -> Work:
        """See :meth:`Communicator.reduce`."""
        source, target = checked(send, "send"), self._at_root(recv, "recv", root)
        if target is not None:
            arrays.check_pair(source, target)

        def run() -> None:
            result = source.copy()
            options = dist.ReduceOptions()
            options.reduceOp, options.rootRank = _op(op), root
            self._wait(self._group.reduce([torch.from_numpy(result)], options))
            if target is not None:
                target[...] = result
                arrays.finish(op, target, self.world_size)

        return self._issue("reduce", run, async_op, source, op)

    def broadcast(self, buffer: Array, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.broadcast`."""
        self._check_rank(root, "root")
        target = checked(buffer, "buffer", writable=self.rank != root)

        def run() -> None:
            options = dist.BroadcastOptions()
            options.rootRank = root
            self._wait(self._group.broadcast([_tensor(target)], options))

        return self._issue("broadcast", run, async_op, target)

    def all_gather(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_gather`."""
        source, target = checked(send, "send"), checked(recv, "recv", writable=True)
        arrays.check_pair(source, target, recv_parts=self.world_size)
        arrays.check_overlap(target, source, self.rank * source.size)

        def run() -> None:
            parts = [_tensor(part) for part in self._parts(target)]
            self._wait(self._group.allgather([parts], [_tensor(source.copy())]))

        return self._issue("all_gather", run, async_op, source)

    def reduce_scatter(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.reduce_scatter`; reduces all and keeps a part."""
        source, target = checked(send, "send"), checked(recv, "recv", writable=True)
        arrays.check_pair(source, target, send_parts=self.world_size)
        arrays.check_overlap(source, target, self.rank * target.size)

        def run() -> None:
            whole = np.empty_like(source)
            self._reduce_into(source, whole, op)
            target[...] = self._parts(whole)[self.rank]

        return self._issue("reduce_scatter", run, async_op, source, op)

    def gather(self, send: Array, recv: Array | None, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.gather`."""
        source, target = checked(send, "send"), self._at_root(recv, "recv", root)
        if target is not None:
            arrays.check_pair(source, target, recv_parts=self.world_size)

        def run() -> None:
            options = dist.GatherOptions()
            options.rootRank = root
            parts = [] if target is None else [[_tensor(part) for part in self._parts(target)]]
            self._wait(self._group.gather(parts, [_tensor(source.copy())], options))

        return self._issue("gather", run, async_op, source)

    def scatter(self, send: Array | None, recv: Array, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.scatter`."""
        target = checked(recv, "recv", writable=True)
        source = self._at_root(send, "send", root, writable=False)
        if source is not None:
            arrays.check_pair(source, target, send_parts=self.world_size)

        def run() -> None:
            options = dist.ScatterOptions()
            options.rootRank = root
            parts = [] if source is None else [[_tensor(part) for part in self._parts(source.copy())]]
            self._wait(self._group.scatter([_tensor(target)], parts, options))

        return self._issue("scatter", run, async_op, target)

    def all_to_all(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_to_all`."""
        source, target = checked(send, "send"), checked(recv, "recv", writable=True)
        arrays.check_pair(source, target)
        if source.size % self.world_size:
            raise ArrayError(f"send has {source.size} elements, which {self.world_size} ranks cannot share.")

        def run() -> None:
            options = dist.AllToAllOptions()
            self._wait(self._group.alltoall_base(_tensor(target), _tensor(source.copy()), [], [], options))

        return self._issue("all_to_all", run, async_op, source)

    def send(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.send`."""
        source = checked(buffer, "buffer")
        self._check_peer(peer)
        return self._issue(
            "send", lambda: self._wait(self._group.send([_tensor(source)], peer, 0)), async_op, source
        )

    def recv(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.recv`."""
        target = checked(buffer, "buffer", writable=True)
        self._check_peer(peer)
        return self._issue(
            "recv", lambda: self._wait(self._group.recv([_tensor(target)], peer, 0)), async_op, target
        )

    def barrier(self) -> None:
        """See :meth:`Communicator.barrier`."""
        self._issue("barrier", lambda: self._wait(self._group.barrier()), False)

    def split(self, group: str, ranks: Sequence[int]) -> GlooCommunicator | None:
        """See :meth:`Communicator.split`."""
        membership = part_of(self.membership, group, ranks)
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
        with self._lock:
            if self._error is None:
                self._error = error
            pending, self._pending = self._pending, set()
        for work in pending:
            work.error = self._error
            work.event.set()
        self._group = None

    def close(self) -> None:
        """See :meth:`Communicator.close`."""
        if self._error is None:
            self._queue.close()
            self._error = CommunicatorAbortedError("The communicator was closed.")
            self._group = None

    # ------------------------------------------------------------ running

    def _issue(
        self,
        kind: str,
        action: Callable[[], None],
        async_op: bool,
        array: NumpyArray | None = None,
        op: ReduceOp | None = None,
    ) -> Work:
        if array is not None and op is not None:
            self._check_op(array, ReduceOp(op))
        if self._error is not None:
            raise self._error.with_traceback(None)  # it may be raised again and again
        if array is not None and array.size == 0:
            return FINISHED
        work = _AbortableWork()
        with self._lock:
            self._pending.add(work)
        self._queue.put(lambda: self._run(kind, action, work))
        if not async_op:
            work.wait()
        return work

    def _run(self, kind: str, action: Callable[[], None], work: _AbortableWork) -> None:
        error = self._error
        if error is None:
            try:
                action()
            except Exception as failure:
                error = self._explain(kind, failure)
        with self._lock:
            if work not in self._pending:
                return
            self._pending.discard(work)
            if error is not None:
                self._error = error = self._error or error
        work.error = error
        work.event.set()

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

    def _reduce_into(self, source: NumpyArray, target: NumpyArray, op: ReduceOp) -> None:
        if source.ctypes.data != target.ctypes.data:
            target[...] = source
        options = dist.AllreduceOptions()
        options.reduceOp = _op(op)
        self._wait(self._group.allreduce([torch.from_numpy(target)], options))
        arrays.finish(ReduceOp(op), target, self.world_size)

    def _check_op(self, array: NumpyArray, op: ReduceOp) -> None:
        arrays.check_op(array, op)
        if dtype_code(array) not in _REDUCIBLE:
            raise ArrayError(f"Gloo cannot reduce {array.dtype}.", remedy="Use the backend 'tcp'.")


def _op(op: ReduceOp) -> Any:
    return {
        ReduceOp.SUM: dist.ReduceOp.SUM,
        ReduceOp.MEAN: dist.ReduceOp.SUM,
        ReduceOp.MIN: dist.ReduceOp.MIN,
        ReduceOp.MAX: dist.ReduceOp.MAX,
        ReduceOp.PROD: dist.ReduceOp.PRODUCT,
    }[ReduceOp(op)]


def _tensor(array: NumpyArray) -> Any:
    """The array's bytes as a tensor over the same memory."""
    data = array.view(np.uint8)
    return torch.from_numpy(data if data.flags.writeable else data.copy())
