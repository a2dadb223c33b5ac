"""The NCCL communicator: collectives on GPUs, through nccl4py's low-level bindings.

Calls enqueue on the caller's current stream (of torch or CuPy, whose array it is) and return; the host waits
only in ``barrier`` and ``synchronize``. NCCL itself reports nothing when a peer on the same host dies, and
its kernels wait for ever, so a hang ends by :meth:`NcclCommunicator.abort` from another thread: that is what
a session does when the scheduler tells it of a change.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from muster.worker.communicators.base import Array, Membership, ReduceOp, Work
from muster.worker.communicators.nccl import bootstrap as handles
from muster.worker.communicators.nccl.arrays import ITEM_SIZES
from muster.worker.communicators.nccl.lifetime import NcclLifetime
from muster.worker.communicators.nccl.reading import ArrayReading
from muster.worker.communicators.nccl.reduction import PreMultipliedSum, Queued, whole
from muster.worker.communicators.nccl.streams import CudaLibrary
from muster.worker.communicators.validation import check_peer, check_rank, part_of
from muster.worker.errors import ArrayError, CollectiveTimeoutError, CommunicatorError

_SUM = ReduceOp.SUM
_INT32 = 2
_FIRST_POLL_S, _LAST_POLL_S = 20e-6, 1e-3
_LATE = 1 / 32
"""By what part of the time waited a wait may end too late: a loop waits after each step; the GPU idles."""


class NcclCommunicator(NcclLifetime, ArrayReading):
    """Collectives among the GPUs of one group. Made by :meth:`NcclBackend.connect` and :meth:`split`."""

    name = "nccl"

    def __init__(
        self,
        nccl: Any,
        comm: Any,
        root: Any | None,
        membership: Membership,
        *,
        device: int,
        timeout_s: float,
        min_ctas: int | None = None,
    ) -> None:
        NcclLifetime.__init__(self, nccl, comm, root, membership, timeout_s=timeout_s)
        ArrayReading.__init__(self, device)
        self._min_ctas = min_ctas
        mended: Callable[..., Any] = whole if membership.world_size == 1 else lambda reduction: reduction
        self._all_reduce = mended(nccl.all_reduce)
        self._reduce, self._reduce_scatter = mended(nccl.reduce), mended(nccl.reduce_scatter)

    # ------------------------------------------------------------ collectives

    def all_reduce(
        self, send: Array, recv: Array, op: ReduceOp | PreMultipliedSum, *, async_op: bool = False
    ) -> Work:
        """Combines ``send`` of all ranks into ``recv`` of all ranks. Same shape; may be in place."""
        # The hot path: everything that is not needed for a small all_reduce is elsewhere.
        read, current, issued = self._readers.get(type(send)) or self._learn(send)
        pointer, count, dtype, device = read(send)
        target = pointer if recv is send else self._read_like(recv, count, dtype, pointer, count, 0)
        if device != self.device_index and device >= 0:
            self._refuse_device(device)
        number = 0 if op is _SUM else self._operations.number(op, dtype, self._grouped)
        if async_op or self._error is not None:
            args = (pointer, target, count, dtype, number, self._comm)
            return self._run(self._all_reduce, args, (send, recv), async_op)
        self._inside = True
        try:
            self._all_reduce(pointer, target, count, dtype, number, self._comm, current())
        except Exception as error:
            self._fail(error)
        finally:
            self._inside = self._grouped
        return issued

    def reduce(
        self,
        send: Array,
        recv: Array | None,
        op: ReduceOp | PreMultipliedSum,
        root: int,
        *,
        async_op: bool = False,
    ) -> Work:
        """Like all_reduce, but only ``root`` gets the result (``recv`` is None elsewhere)."""
        check_rank(self.membership, root, "root")
        pointer, count, dtype = self._read(send)
        target = pointer
        if self.rank == root:
            target = self._read_like(recv, count, dtype, pointer, count, 0)
        number = self._operations.number(op, dtype, self._grouped)
        args = (pointer, target, count, dtype, number, root, self._comm)
        return self._run(self._reduce, args, (send, recv), async_op)

    def broadcast(self, buffer: Array, root: int, *, async_op: bool = False) -> Work:
        """Copies ``buffer`` of ``root`` into ``buffer`` of all ranks, in place."""
        check_rank(self.membership, root, "root")
        pointer, count, dtype = self._read(buffer, moved=True)
        args = (pointer, pointer, count, dtype, root, self._comm)
        return self._run(self._nccl.broadcast, args, (buffer,), async_op)

    def all_gather(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """``recv`` has ``world_size * send.size`` elements: rank r's ``send`` is its r-th part."""
        pointer, count, dtype = self._read(send, moved=True)
        target = self._read_whole(recv, count, dtype, pointer, moved=True)
        return self._run(
            self._nccl.all_gather, (pointer, target, count, dtype, self._comm), (send, recv), async_op
        )

    def reduce_scatter(
        self, send: Array, recv: Array, op: ReduceOp | PreMultipliedSum, *, async_op: bool = False
    ) -> Work:
        """``send`` has ``world_size * recv.size`` elements; rank r gets the combined r-th part."""
        target, count, dtype = self._read(recv)
        pointer = self._read_whole(send, count, dtype, target)
        number = self._operations.number(op, dtype, self._grouped)
        args = (pointer, target, count, dtype, number, self._comm)
        return self._run(self._reduce_scatter, args, (send, recv), async_op)

    def gather(self, send: Array, recv: Array | None, root: int, *, async_op: bool = False) -> Work:
        """Like all_gather, but only ``root`` gets the result (``recv`` is None elsewhere)."""
        check_rank(self.membership, root, "root")
        pointer, count, dtype = self._read(send, moved=True)
        moves = [(self._nccl.send, pointer, root)]
        if self.rank == root:
            target = self._read_whole(recv, count, dtype, pointer, moved=True)
            step = count * ITEM_SIZES[dtype]
            moves += [(self._nccl.recv, target + peer * step, peer) for peer in range(self.world_size)]
        return self._run(self._exchange, (moves, count, dtype), (send, recv), async_op)

    def scatter(self, send: Array | None, recv: Array, root: int, *, async_op: bool = False) -> Work:
        """Rank r gets the r-th part of ``root``'s ``send`` (``send`` is None elsewhere)."""
        check_rank(self.membership, root, "root")
        target, count, dtype = self._read(recv, moved=True)
        moves = [(self._nccl.recv, target, root)]
        if self.rank == root:
            pointer = self._read_whole(send, count, dtype, target, moved=True)
            step = count * ITEM_SIZES[dtype]
            moves += [(self._nccl.send, pointer + peer * step, peer) for peer in range(self.world_size)]
        return self._run(self._exchange, (moves, count, dtype), (send, recv), async_op)

    def all_to_all(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """Part j of rank i's ``send`` becomes part i of rank j's ``recv``. Same size, divisible by ranks."""
        pointer, total, dtype = self._read(send, moved=True)
        count, rest = divmod(total, self.world_size)
        if rest:
            raise ArrayError(
                f"all_to_all of {total} elements cannot be divided among {self.world_size} ranks"
            )
        target = self._read_like(recv, total, dtype, pointer, total, None, moved=True)
        step = count * ITEM_SIZES[dtype]
        moves = [(self._nccl.send, pointer + peer * step, peer) for peer in range(self.world_size)]
        moves += [(self._nccl.recv, target + peer * step, peer) for peer in range(self.world_size)]
        return self._run(self._exchange, (moves, count, dtype), (send, recv), async_op)

    def send(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """Sends ``buffer`` to ``peer``, which calls :meth:`recv` with the same dtype and size."""
        check_peer(self.membership, peer, itself=self._grouped)
        return self._run(
            self._nccl.send, (*self._read(buffer, moved=True), peer, self._comm), (buffer,), async_op
        )

    def recv(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """Receives into ``buffer`` from ``peer``."""
        check_peer(self.membership, peer, itself=self._grouped)
        return self._run(
            self._nccl.recv, (*self._read(buffer, moved=True), peer, self._comm), (buffer,), async_op
        )

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Collectives issued inside start together, in one launch, when the block ends.

        They go on the caller's current stream; ``async_op`` is refused inside.
        """
        self.check()
        self._call(self._nccl.group_start, ())
        outer, self._grouped = self._grouped, True
        self._inside = True
        try:
            yield
        finally:
            self._grouped = outer
            self._end_group()

    def barrier(self) -> None:
        """Returns when every rank has called it; synchronises the host, as :meth:`synchronize` does."""
        library, *others = self._libraries_in_use()
        for other in others:
            self._await(other, other.mark(), "the current stream")
        zero, pointer = library.scratch()
        stream, address = self._own_stream(library)
        library.follow(stream)
        self._call(self._all_reduce, (pointer, pointer, 1, _INT32, 0, self._comm, address))
        self._await(library, library.mark(stream), "barrier")
        del zero

    def synchronize(self) -> None:
        """Blocks the host until the caller's current stream is done, an abort comes, or the deadline.

        That is the current stream of each library whose arrays this communicator was given. Unlike the
        libraries' own synchronisation it raises what ended the communicator.
        """
        for library, event in [(each, each.mark()) for each in self._libraries_in_use()]:
            self._await(library, event, "the current stream")

    # ------------------------------------------------------------ groups

    def split(self, group: str, ranks: Sequence[int]) -> NcclCommunicator | None:
        """Makes a communicator of a subset; called by every rank of this one, in the same order."""
        self.check()
        own = part_of(self.membership, group, ranks)
        waiting = handles.Waiting(
            self.membership,
            timeout_s=self.timeout_s,
            cancelled=lambda: self._error,
            absent=lambda: f"not every rank called split({group!r})",
        )
        parent = self._comm if self._root is None else self._root
        color, key = (handles.NO_COLOR, 0) if own is None else (0, own.rank)
        try:
            comm = handles.split_child(
                self._nccl, parent, color=color, key=key, waiting=waiting, min_ctas=self._min_ctas
            )
        except Exception as error:
            self.abort(error)
            raise
        if comm is None or own is None:
            return None
        child = NcclCommunicator(
            self._nccl,
            comm,
            None,
            own,
            device=self.device_index,
            timeout_s=self.timeout_s,
            min_ctas=self._min_ctas,
        )
        child.share_libraries(self)
        self._children = [each for each in self._children if not each._ended] + [child]
        return child

    # ------------------------------------------------------------ inside

    def _read_whole(self, array: Array, count: int, dtype: int, part: int, *, moved: bool = False) -> int:
        """Address of what has ``count`` elements of each rank, or in which ``part`` is this rank's."""
        total = count * self.world_size
        return self._read_like(array, total, dtype, part, count, -self.rank * count, moved=moved)

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], arrays: tuple[Any, ...], async_op: bool
    ) -> Work:
        """Issues ``function(*args, stream)`` on the caller's stream or, async, on our own."""
        _, current, issued = self._readers[type(arrays[0] if arrays[0] is not None else arrays[1])]
        if not async_op:
            self._call(function, (*args, current()))
            return issued
        if self._grouped:
            raise CommunicatorError(
                "async_op inside group() is not possible: the group starts as one launch",
                remedy="Leave async_op out; make another stream current to run beside other work.",
            )
        library = issued.library
        stream, address = self._own_stream(library)
        library.follow(stream)
        self._call(function, (*args, address))
        return Queued(self, library, library.mark(stream), arrays)

    def _end_group(self) -> None:
        """Also when the communicator is being aborted: this thread's next collectives would be held back."""
        try:
            if not self._endings:  # else the abort waited for too long, and NCCL frees what the group holds
                self._nccl.group_end()
        except Exception as error:
            self._fail(error)
        finally:
            self._inside = self._grouped
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _exchange(
        self, moves: list[tuple[Callable[..., Any], int, int]], count: int, dtype: int, stream: int
    ) -> None:
        self._nccl.group_start()
        try:
            for function, pointer, peer in moves:
                function(pointer, count, dtype, peer, self._comm, stream)
        finally:
            self._nccl.group_end()

    def _await(self, library: CudaLibrary, event: Any, what: str) -> None:
        begun = time.monotonic()
        while not library.happened(event):
            self.check()
            waited = time.monotonic() - begun
            if waited > self.timeout_s:
                others = [peer for peer in self.membership.peers if peer.rank != self.rank]
                raise CollectiveTimeoutError(
                    f"{what} was not over within {self.timeout_s:g} s on rank {self.rank}; waited for"
                    f" {', '.join(map(handles.name_of, others))}",
                    remedy="A rank hangs or called other collectives; see the scheduler's status.",
                )
            time.sleep(min(max(waited * _LATE, _FIRST_POLL_S), _LAST_POLL_S))
        if self._error is not None:
            raise self._error.with_traceback(None)
