"""The NCCL communicator: collectives on GPUs, through nccl4py's low-level bindings.

Calls enqueue on the caller's current stream (of torch or CuPy, whose array it is) and return; the host waits
only in ``barrier`` and ``synchronize``. NCCL itself reports nothing when a peer on the same host dies, and
its kernels wait for ever, so a hang ends by :meth:`NcclCommunicator.abort` from another thread: that is what
a session does when the scheduler tells it of a change.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from worker.communicators import nccl_handles as handles
from worker.communicators.arguments import check_op, check_peer, check_rank, undefined_mean
from worker.communicators.base import Array, Communicator, Membership, ReduceOp, Work
from worker.communicators.nccl_arrays import ITEM_SIZES, TYPE_NAMES
from worker.communicators.nccl_one_rank import whole
from worker.communicators.nccl_reading import ArrayReading
from worker.communicators.nccl_streams import CudaLibrary
from worker.communicators.nccl_work import PreMultipliedSum, Queued, address_of, scalar_bytes
from worker.errors import ArrayError, CollectiveTimeoutError, CommunicatorAbortedError, CommunicatorError

_log = logging.getLogger("muster.worker")
_SUM, _MEAN = ReduceOp.SUM, ReduceOp.MEAN
_OPS = {_SUM: 0, ReduceOp.PROD: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3, _MEAN: 4}
_INT32, _FIRST_FLOAT = 2, 6
_LEAVE_WAIT_S = 0.2
_DESTROY_WAIT_S = 2.0
_KEPT_FACTORS = 16
_FIRST_POLL_S, _LAST_POLL_S = 20e-6, 1e-3


class NcclCommunicator(Communicator, ArrayReading):
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
        self._nccl = nccl
        self._min_ctas = min_ctas
        self._comm = comm
        self._root = root
        self.membership = membership
        self.timeout_s = timeout_s
        ArrayReading.__init__(self, device)
        mended: Callable[..., Any] = whole if membership.world_size == 1 else lambda reduction: reduction
        self._all_reduce = mended(nccl.all_reduce)
        self._reduce, self._reduce_scatter = mended(nccl.reduce), mended(nccl.reduce_scatter)
        self._alive = [each for each in (comm, root) if each is not None]
        self._error: Exception | None = None
        self._closed = self._closing = False
        self._destroyed = threading.Event()
        self._inside = False
        self._endings: list[threading.Thread] = []
        self._grouped = False
        self._ending = threading.Lock()
        self._factors: dict[tuple[float, int], int] = {}
        self._children: list[NcclCommunicator] = []
        self._before_end: dict[int, Callable[[], None]] = {}

    # ------------------------------------------------------------ collectives

    def all_reduce(
        self, send: Array, recv: Array, op: ReduceOp | PreMultipliedSum, *, async_op: bool = False
    ) -> Work:
        """Combines ``send`` of all ranks into ``recv`` of all ranks. Same shape; may be in place."""
        # The hot path: everything that is not needed for a small all_reduce is elsewhere.
        read, current, issued = self._readers.get(type(send)) or self._learn(send)
        pointer, count, dtype, device = read(send)
        target = pointer if recv is send else self._read_like(recv, count, dtype)
        if device != self.device_index and device >= 0:
            self._refuse_device(device)
        number = 0 if op is _SUM else self._op_number(op, dtype)
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
        target = self._read_like(recv, count, dtype) if self.rank == root else pointer
        args = (pointer, target, count, dtype, self._op_number(op, dtype), root, self._comm)
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
        target = self._read_like(recv, count * self.world_size, dtype, moved=True)
        return self._run(
            self._nccl.all_gather, (pointer, target, count, dtype, self._comm), (send, recv), async_op
        )

    def reduce_scatter(
        self, send: Array, recv: Array, op: ReduceOp | PreMultipliedSum, *, async_op: bool = False
    ) -> Work:
        """``send`` has ``world_size * recv.size`` elements; rank r gets the combined r-th part."""
        target, count, dtype = self._read(recv)
        pointer = self._read_like(send, count * self.world_size, dtype)
        args = (pointer, target, count, dtype, self._op_number(op, dtype), self._comm)
        return self._run(self._reduce_scatter, args, (send, recv), async_op)

    def gather(self, send: Array, recv: Array | None, root: int, *, async_op: bool = False) -> Work:
        """Like all_gather, but only ``root`` gets the result (``recv`` is None elsewhere)."""
        check_rank(self.membership, root, "root")
        pointer, count, dtype = self._read(send, moved=True)
        moves = [(self._nccl.send, pointer, root)]
        if self.rank == root:
            target = self._read_like(recv, count * self.world_size, dtype, moved=True)
            step = count * ITEM_SIZES[dtype]
            moves += [(self._nccl.recv, target + peer * step, peer) for peer in range(self.world_size)]
        return self._run(self._exchange, (moves, count, dtype), (send, recv), async_op)

    def scatter(self, send: Array | None, recv: Array, root: int, *, async_op: bool = False) -> Work:
        """Rank r gets the r-th part of ``root``'s ``send`` (``send`` is None elsewhere)."""
        check_rank(self.membership, root, "root")
        target, count, dtype = self._read(recv, moved=True)
        moves = [(self._nccl.recv, target, root)]
        if self.rank == root:
            pointer = self._read_like(send, count * self.world_size, dtype, moved=True)
            step = count * ITEM_SIZES[dtype]
            moves += [(self._nccl.send, pointer + peer * step, peer) for peer in range(self.world_size)]
        return self._run(self._exchange, (moves, count, dtype), (send, recv), async_op)

    def all_to_all(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """Part j of rank i's ``send`` becomes part i of rank j's ``recv``. Same size, divisible by ranks."""
        pointer, total, dtype = self._read(send, moved=True)
        target = self._read_like(recv, total, dtype, moved=True)
        count, rest = divmod(total, self.world_size)
        if rest:
            raise ArrayError(
                f"all_to_all of {total} elements cannot be divided among {self.world_size} ranks"
            )
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

    # ------------------------------------------------------------ life and death

    def split(self, group: str, ranks: Sequence[int]) -> NcclCommunicator | None:
        """Makes a communicator of a subset; called by every rank of this one, in the same order."""
        self.check()
        distinct = ranks and len(set(ranks)) == len(ranks)
        if not distinct or not all(0 <= rank < self.world_size for rank in ranks):
            raise CommunicatorError(
                f"group {group!r} cannot have the ranks {list(ranks)} of {self.world_size}"
            )
        member = self.rank in ranks
        peers = tuple(self.membership.peers[rank] for rank in ranks)
        own = Membership(
            self.membership.job_id,
            self.membership.generation,
            group,
            list(ranks).index(self.rank) if member else -1,
            peers,
        )
        waiting = handles.Waiting(
            self.membership,
            timeout_s=self.timeout_s,
            cancelled=lambda: self._error,
            absent=lambda: f"not every rank called split({group!r})",
        )
        parent = self._comm if self._root is None else self._root
        color, key = (0, own.rank) if member else (handles.NO_COLOR, 0)
        try:
            comm = handles.split_child(
                self._nccl, parent, color=color, key=key, waiting=waiting, min_ctas=self._min_ctas
            )
        except Exception as error:
            self.abort(error)
            raise
        if comm is None:
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

    def before_end(self, release: Callable[[], None]) -> Callable[[], None]:
        """Registers what must be released before an abort or close: CUDA graphs that hold collectives.

        Returns:
            A function that takes the registration back.
        """
        key = id(release)
        self._before_end[key] = release
        return lambda: self._before_end.pop(key, None) and None

    def check(self) -> None:
        """Raises what ended this communicator, or what NCCL reports of it."""
        state = int(self._call(self._nccl.comm_get_async_error, (self._comm,)))
        if state not in (0, handles.IN_PROGRESS):
            raise CommunicatorError(
                f"NCCL failed on rank {self.rank}: {self._nccl.get_error_string(state)}",
                remedy="Run with NCCL_DEBUG=WARN to see why.",
            )

    def abort(self, error: Exception) -> None:
        """Makes blocked and later calls raise ``error``, and running kernels end. From any thread.

        NCCL frees what it holds in the background (half a second); meanwhile one may build another.
        """
        with self._ending:
            if self._error is None:
                self._error = error
            if self._ended:
                return
            self._closed = True
            closing = self._closing
        for child in self._children:
            child.abort(error)
        if closing:
            # NCCL is to free each communicator once. Only where destroying it hangs, on a peer that died
            # before it destroyed its own, is it aborted amid that: the abort ends the wait and frees nothing.
            self._destroyed.wait(_DESTROY_WAIT_S)
        else:
            self._await_outside()
        with self._ending:
            alive, self._alive = self._alive, []
        if closing and alive:
            _log.warning("closing the communicator of %r hangs and is given up: %s", self._group_name, error)
        # At the same time: NCCL's abort waits for graphs that hold its kernels, and giving up a graph
        # waits for its kernels, which only the abort ends.
        self._endings += handles.abort_in_background(self._nccl, alive)
        self._release()

    def close(self) -> None:
        """Releases everything after outstanding work is done, or at the deadline; idempotent."""
        with self._ending:
            if self._closed:
                return
            self._closed = self._closing = True
            self._error = CommunicatorAbortedError(
                f"the communicator of group {self._group_name!r} is closed",
                remedy="Make a new one; a closed one cannot be used.",
            )
        late = CommunicatorAbortedError(f"it was not destroyed within {self.timeout_s:g} s")
        deadline = threading.Timer(self.timeout_s, self.abort, [late])
        deadline.daemon = True
        deadline.start()
        try:
            for child in self._children:
                child.close()
            self._release()
            self._destroy()
        finally:
            deadline.cancel()
            self._closing = False
            self._destroyed.set()

    def await_ended(self, timeout_s: float) -> bool:
        """After :meth:`abort`: waits until NCCL has freed everything; False where the deadline came first."""
        deadline = time.monotonic() + timeout_s
        for thread in self._endings:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._endings)

    # ------------------------------------------------------------ inside

    @property
    def _ended(self) -> bool:
        """Whether it was aborted, or closed to the end."""
        return self._closed and not self._closing

    @property
    def _group_name(self) -> str:
        return self.membership.group

    def _release(self) -> None:
        for release in list(self._before_end.values()):
            try:
                release()
            except Exception as error:  # what follows must end all the same
                _log.warning("what group %r held was not released: %s", self._group_name, error)
        self._before_end.clear()

    def _destroy(self) -> None:
        """Lets NCCL free what it holds; what an abort takes meanwhile is freed there."""
        for number in self._factors.values() if self._alive else ():
            with contextlib.suppress(self._nccl.NCCLError):
                self._nccl.red_op_destroy(number, self._comm)
        while alive := self._alive:
            with contextlib.suppress(self._nccl.NCCLError):
                self._nccl.comm_destroy(alive[0])
            with self._ending:
                self._alive = self._alive[1:]

    def _await_outside(self) -> None:
        """Waits for another thread to leave NCCL, but not for one that only the abort can free."""
        end = time.monotonic() + _LEAVE_WAIT_S
        while self._inside and time.monotonic() < end:
            time.sleep(_FIRST_POLL_S)

    def _op_number(self, op: ReduceOp | PreMultipliedSum, dtype: int) -> int:
        if not isinstance(op, PreMultipliedSum):
            if op == _MEAN and dtype < _FIRST_FLOAT:
                raise undefined_mean(TYPE_NAMES[dtype])
            return _OPS[check_op(op)]
        number = self._factors.get((op.factor, dtype))
        if number is None:
            scalar = scalar_bytes(op.factor, dtype)
            # NCCL needs an operation until the call that it was given to returns: within a group, its end.
            while len(self._factors) >= _KEPT_FACTORS and not self._grouped:
                oldest = self._factors.pop(next(iter(self._factors)))
                self._call(self._nccl.red_op_destroy, (oldest, self._comm))
            # HostImmediate: NCCL reads the factor during the call
            number = self._call(
                self._nccl.red_op_create_pre_mul_sum, (address_of(scalar), dtype, 1, self._comm)
            )
            self._factors[op.factor, dtype] = number
        return number

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

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._error is not None:
            raise self._error.with_traceback(None)
        self._inside = True
        try:
            return function(*args)
        except Exception as error:
            self._fail(error)
        finally:
            self._inside = self._grouped

    def _fail(self, error: Exception) -> NoReturn:
        if self._error is not None:
            raise self._error.with_traceback(None) from None
        raise CommunicatorError(
            f"NCCL refused a call on rank {self.rank} of {self.world_size}"
            f" (group {self._group_name!r}): {error}",
            remedy="Run with NCCL_DEBUG=WARN to see why.",
        ) from error

    def _await(self, library: CudaLibrary, event: Any, what: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        interval = _FIRST_POLL_S
        while not library.happened(event):
            self.check()
            if time.monotonic() > deadline:
                others = [peer for peer in self.membership.peers if peer.rank != self.rank]
                raise CollectiveTimeoutError(
                    f"{what} was not over within {self.timeout_s:g} s on rank {self.rank}; waited for"
                    f" {', '.join(map(handles.name_of, others))}",
                    remedy="A rank hangs or called other collectives; see the scheduler's status.",
                )
            time.sleep(interval)
            interval = min(interval * 2, _LAST_POLL_S)
        if self._error is not None:
            raise self._error.with_traceback(None)
