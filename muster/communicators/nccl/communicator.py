"""The NCCL communicator: collectives on GPUs, through nccl4py's low-level bindings.

Calls enqueue on the caller's current stream (of torch or CuPy, whose array it is) and return; the host waits
only in ``barrier`` and ``synchronize``. NCCL itself reports nothing when a peer on the same host dies, and
its kernels wait for ever. So only :meth:`NcclCommunicator.abort` from another thread ends a hang; a session
calls it when the scheduler reports a change.

A communicator ends by an abort, from any thread at any moment, or by a regular close. When NCCL aborts it,
no other thread may be inside it. NCCL may free it only once, and CUDA graphs that hold its collectives must
be released before that. So every call into NCCL registers that it is inside, and each call after the end
raises the reason for the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from muster.communicators.array_library import loaded_library
from muster.communicators.arrays import SOME_GPU, Array, Description, check_apart, describe, describers
from muster.communicators.base import Backend, Communicator, NetPlugin, check_place
from muster.communicators.membership import Membership, Peer
from muster.communicators.nccl import bootstrap as handles
from muster.communicators.nccl.bootstrap import fewest_ctas
from muster.communicators.nccl.bootstrap_tls import BootstrapTls, offers_tls
from muster.communicators.nccl.ended_connection import why_ended
from muster.communicators.nccl.reduction import MOVED_AS, NCCL_TYPES, Operations, whole
from muster.communicators.nccl.streams import (
    CudaLibrary,
    device_model,
    library_of,
    use_device,
)
from muster.communicators.nccl.warmup import WarmUp
from muster.communicators.reduce_ops import PreMultipliedSum, ReduceOp
from muster.communicators.work import Work
from muster.errors import (
    ArrayError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorError,
)
from muster.wire.threads import start_thread

_log = logging.getLogger("muster.worker")
_SUM = ReduceOp.SUM
_INT32 = 2
_FIRST_POLL_S, _LAST_POLL_S = 20e-6, 1e-3
_LATE = 1 / 32
"""The polling interval as a share of the time waited, which limits by how much a wait is too long."""


class IssuedWork:
    """A collective on the caller's stream, on which its result may be used at once."""

    __slots__ = ("_communicator", "library")

    def __init__(self, communicator: NcclCommunicator, library: CudaLibrary) -> None:
        self._communicator = communicator
        self.library = library

    def done(self) -> bool:
        """Whether all work on the current stream, including this, has completed. Never blocks."""
        # One object serves all calls and cannot tell them apart. It asks for the last, which includes all.
        return self.library.idle()

    def wait(self) -> None:
        """Does not wait, as work on one stream is ordered; raises the error that ended the communicator."""
        self._communicator.check()


class Queued:
    """A collective on the communicator's own stream. Keeps its arrays alive until :meth:`wait`."""

    __slots__ = ("_arrays", "_communicator", "_event", "_library")

    def __init__(self, communicator: NcclCommunicator, library: CudaLibrary, event: Any, arrays: Any) -> None:
        self._communicator = communicator
        self._library = library
        self._event = event
        self._arrays = arrays

    def done(self) -> bool:
        """Whether the collective has completed. Never blocks."""
        return self._library.happened(self._event)

    def wait(self) -> None:
        """Makes the current stream wait for the collective."""
        self._communicator.check()
        self._library.wait(self._event)
        self._arrays = None


class NcclCommunicator(Communicator):
    """Collectives among the GPUs of one group. Made by :meth:`NcclBackend.connect` and :meth:`split`.

    Args:
        nccl: the bindings.
        comm: NCCL's communicator on which collectives run.
        root: NCCL's communicator from which it was split, if that is freed with it.
        membership: the members of the group.
        device: the communicator's GPU.
        timeout_s: the seconds for which the host waits for collectives, and within which close() must finish.
        min_ctas: the requested minimum number of CTAs; None: NCCL's choice.
        plugin: the network plug-in that NCCL uses between hosts; None: its own network.

    Attributes:
        nccl: the bindings.
        closing: whether :meth:`close` is running.
    """

    name = "nccl"
    on_device = capturable = pre_multiplies = True

    leave_wait_s = 0.2
    """How long an abort waits for another thread to leave NCCL, in seconds."""

    destroy_wait_s = 2.0
    """How long an abort waits for a close in progress, in seconds."""

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
        plugin: NetPlugin | None = None,
    ) -> None:
        self.nccl = nccl
        self._plugin = plugin
        self._comm = comm
        self._root = root
        self._operations = Operations(nccl, comm, self._call)
        self.membership = membership
        self.device_index = device
        self.timeout_s = timeout_s
        self._min_ctas = min_ctas
        mended: Callable[..., Any] = whole if membership.world_size == 1 else lambda reduction: reduction
        self._all_reduce = mended(nccl.all_reduce)
        self._reduce, self._reduce_scatter = mended(nccl.reduce), mended(nccl.reduce_scatter)
        self._users: dict[type, tuple[Callable[[], int], IssuedWork]] = {}
        self._libraries: dict[str, CudaLibrary] = {}
        self._own_streams: dict[str, tuple[Any, int]] = {}
        self._alive = [each for each in (comm, root) if each is not None]
        self._error: Exception | None = None
        self._closed = self.closing = False
        self._destroyed = threading.Event()
        self._inside = False
        self._grouped = False
        self._ending = threading.Lock()
        self._is_aborted = False
        self._children: list[NcclCommunicator] = []
        self._before_end: dict[int, Callable[[], None]] = {}

    # ------------------------------------------------------------ collectives

    def all_reduce(
        self, send: Array, recv: Array, op: ReduceOp | PreMultipliedSum, *, async_op: bool = False
    ) -> Work:
        """Combines ``send`` of all ranks elementwise into ``recv`` on all ranks.

        Both have the same shape and dtype; they may be one array (in place).
        """
        # The hot path: everything that is not needed for a small all_reduce is elsewhere.
        kind = type(send)
        source = send if kind is Description else (describers.get(kind) or describe)(send, "send")
        dtype = NCCL_TYPES.get(source.dtype)
        if dtype is None or source.device != self.device_index:
            dtype = self._admit(source, "send", moved=False)
        pointer = target = source.address
        if recv is not send:
            other = (describers.get(type(recv)) or describe)(recv, "recv")
            target = other.address
            alike = (
                other.size == source.size and other.dtype == source.dtype and other.device == source.device
            )
            if not alike or 0 < abs(target - pointer) < source.size * source.itemsize or other.device < 0:
                self._take_like(other, source, source.size, dtype)  # refuses it, or waits for its stream
        number = 0 if op is _SUM else self._operations.number(op, dtype, self._grouped)
        if async_op or self._error is not None:
            args = (pointer, target, source.size, dtype, number, self._comm)
            return self._run(self._all_reduce, args, (source, recv), async_op)
        current, issued = self._users.get(type(source.array)) or self._learn(source)
        self._inside = True
        try:
            self._all_reduce(pointer, target, source.size, dtype, number, self._comm, current())
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
        """Like :meth:`all_reduce`, but only ``root`` gets the result; ``recv`` is None on the other ranks."""
        self.membership.check_rank(root, "root")
        source, dtype = self._take(send)
        target = source
        if self.rank == root:
            target = self._take_like(recv, source, source.size, dtype)
        number = self._operations.number(op, dtype, self._grouped)
        args = (source.address, target.address, source.size, dtype, number, root, self._comm)
        return self._run(self._reduce, args, (source, target), async_op)

    def broadcast(self, buffer: Array, root: int, *, async_op: bool = False) -> Work:
        """Copies ``buffer`` of ``root`` into ``buffer`` of all ranks, in place."""
        self.membership.check_rank(root, "root")
        given, dtype = self._take(buffer, moved=True)
        args = (given.address, given.address, given.size, dtype, root, self._comm)
        return self._run(self.nccl.broadcast, args, (given,), async_op)

    def all_gather(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """Gathers ``send`` of all ranks on all ranks: part r of ``recv`` becomes rank r's ``send``.

        ``recv`` has ``world_size * send.size`` elements of the same dtype.
        """
        source, dtype = self._take(send, moved=True)
        target = self._take_whole(recv, source, dtype, moved=True)
        args = (source.address, target.address, source.size, dtype, self._comm)
        return self._run(self.nccl.all_gather, args, (source, target), async_op)

    def reduce_scatter(
        self, send: Array, recv: Array, op: ReduceOp | PreMultipliedSum, *, async_op: bool = False
    ) -> Work:
        """Combines ``send`` of all ranks elementwise, and leaves part r of the result in rank r's ``recv``.

        ``send`` has ``world_size * recv.size`` elements of the same dtype.
        """
        target, dtype = self._take(recv)
        source = self._take_whole(send, target, dtype)
        number = self._operations.number(op, dtype, self._grouped)
        args = (source.address, target.address, target.size, dtype, number, self._comm)
        return self._run(self._reduce_scatter, args, (source, target), async_op)

    def gather(self, send: Array, recv: Array | None, root: int, *, async_op: bool = False) -> Work:
        """Like :meth:`all_gather`, but only ``root`` gets the result; ``recv`` is None on the other ranks."""
        self.membership.check_rank(root, "root")
        source, dtype = self._take(send, moved=True)
        target, moves = source, [(self.nccl.send, source.address, root)]
        if self.rank == root:
            target = self._take_whole(recv, source, dtype, moved=True)
            moves += self._with_all(self.nccl.recv, target)
        return self._run(self._exchange, (moves, source.size, dtype), (source, target), async_op)

    def scatter(self, send: Array | None, recv: Array, root: int, *, async_op: bool = False) -> Work:
        """Hands out the parts of ``root``'s ``send``: part r becomes rank r's ``recv``.

        ``send`` has ``world_size * recv.size`` elements, and is None on the other ranks.
        """
        self.membership.check_rank(root, "root")
        target, dtype = self._take(recv, moved=True)
        source, moves = target, [(self.nccl.recv, target.address, root)]
        if self.rank == root:
            source = self._take_whole(send, target, dtype, moved=True)
            moves += self._with_all(self.nccl.send, source)
        return self._run(self._exchange, (moves, target.size, dtype), (target, source), async_op)

    def all_to_all(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """Exchanges parts: part j of rank i's ``send`` becomes part i of rank j's ``recv``.

        Both have the same dtype and size, which ``world_size`` divides.
        """
        source, dtype = self._take(send, moved=True)
        count, rest = divmod(source.size, self.world_size)
        if rest:
            raise ArrayError(
                f"all_to_all of {source.size} elements cannot be divided among {self.world_size} ranks"
            )
        target = self._take_like(recv, source, source.size, dtype, None, moved=True)
        moves = [*self._with_all(self.nccl.send, source), *self._with_all(self.nccl.recv, target)]
        return self._run(self._exchange, (moves, count, dtype), (source, target), async_op)

    def send(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """Sends ``buffer`` to ``peer``, which calls :meth:`recv` with the same dtype and size."""
        return self._transfer(self.nccl.send, buffer, peer, async_op)

    def recv(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """Receives into ``buffer`` from ``peer``."""
        return self._transfer(self.nccl.recv, buffer, peer, async_op)

    def _transfer(self, function: Callable[..., Any], buffer: Array, peer: int, async_op: bool) -> Work:
        self.membership.check_peer(peer, itself=self._grouped)
        given, dtype = self._take(buffer, moved=True)
        return self._run(function, (given.address, given.size, dtype, peer, self._comm), (given,), async_op)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Context in which issued collectives start together, in one launch, when the block ends.

        They go on the caller's current stream; ``async_op`` is refused inside.
        """
        self.check()
        self._call(self.nccl.group_start, ())
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

    def mark(self) -> Callable[[], None]:
        """Marks the end of the caller's current stream; an abort or the deadline also ends the wait for it.

        The mark is on the current stream of each library whose arrays this communicator has used. Unlike the
        libraries' own synchronisation, the wait raises the error that ended the communicator.
        """
        marks = [(library, library.mark()) for library in self._libraries_in_use()]

        def wait() -> None:
            for library, event in marks:
                self._await(library, event, "the current stream")

        return wait

    # ------------------------------------------------------------ groups

    def split(self, group: str, ranks: Sequence[int]) -> NcclCommunicator | None:
        """Makes a communicator of a subset; called by every rank of this one, in the same order."""
        self.check()
        own = self.membership.part(group, ranks)
        waiting = handles.FormationWait(
            self.membership,
            timeout_s=self.timeout_s,
            cancelled=lambda: self._error,
            absent=lambda: f"not every rank called split({group!r})",
            plugin=self._plugin,
        )
        parent = self._comm if self._root is None else self._root
        color, key = (handles.NO_COLOR, 0) if own is None else (0, own.rank)
        try:
            comm = handles.split_child(
                self.nccl, parent, color=color, key=key, waiting=waiting, min_ctas=self._min_ctas
            )
        except Exception as error:
            self.abort(error)
            raise
        if comm is None or own is None:
            return None
        child = NcclCommunicator(
            self.nccl,
            comm,
            None,
            own,
            device=self.device_index,
            timeout_s=self.timeout_s,
            min_ctas=self._min_ctas,
            plugin=self._plugin,
        )
        child._libraries = self._libraries
        self._children = [each for each in self._children if not each._ended] + [child]
        return child

    # ------------------------------------------------------------ arrays

    def _take(self, array: Array, *, moved: bool = False) -> tuple[Description, int]:
        """Describes an array; also returns NCCL's number of its dtype.

        Args:
            array: the array that the user gave.
            moved: whether values are only moved, not reduced. A dtype that NCCL lacks is then sent as another
                one of the same size.

        Raises:
            ArrayError: the array is not on this GPU, or NCCL cannot handle its dtype.
        """
        given = describe(array)
        return given, self._admit(given, "x", moved)

    def _admit(self, given: Description, name: str, moved: bool) -> int:
        check_place(given, self, name)
        if given.device == SOME_GPU:
            if given.stream is not None:
                self._user(given).library.follow_exported(given.stream)
        elif given.device != self.device_index:
            raise ArrayError(
                f"the array is on GPU {given.device}, the communicator of rank {self.rank} on GPU"
                f" {self.device_index}",
                remedy=f"Move the array to GPU {self.device_index}.",
            )
        dtype = NCCL_TYPES.get(given.dtype)
        if dtype is None and moved:
            dtype = MOVED_AS.get(given.itemsize)
        if dtype is None:
            raise ArrayError(
                f"NCCL has no dtype {given.dtype} (an array of shape {given.shape})",
                remedy=f"It has {', '.join(NCCL_TYPES)}.",
            )
        return dtype

    def _take_like(
        self,
        array: Array,
        first: Description,
        count: int,
        dtype: int,
        at: int | None = 0,
        *,
        moved: bool = False,
    ) -> Description:
        """Describes the second array of a collective, and checks that it fits the first.

        Args:
            array: the array that the user gave.
            first: the description of the first array.
            count: the number of elements that this array must have.
            dtype: NCCL's number of its dtype.
            at: the offset in elements at which the first array may lie within this one (in place); at other
                offsets the two must not share memory. None: at no offset.
            moved: as for :meth:`_take`.
        """
        given, found = self._take(array, moved=moved)
        if given.size != count or found != dtype:
            raise ArrayError(
                f"the arrays do not fit: one has {given.size} elements of {given.dtype} where"
                f" {count} of {first.dtype} are needed (group of {self.world_size} ranks)"
            )
        check_apart(given, first, at)
        return given

    def _take_whole(self, array: Array, part: Description, dtype: int, *, moved: bool = False) -> Description:
        """Describes an array of ``world_size`` parts of ``part``'s size; ``part`` may be this rank's part."""
        count = part.size * self.world_size
        return self._take_like(array, part, count, dtype, self.rank * part.size, moved=moved)

    def _with_all(self, function: Callable[..., Any], whole: Description) -> list[tuple[Any, int, int]]:
        """Returns the calls that send to, or receive from, each rank."""
        step = whole.nbytes // self.world_size
        return [(function, whole.address + peer * step, peer) for peer in range(self.world_size)]

    def _learn(self, given: Description) -> tuple[Callable[[], int], IssuedWork]:
        """Finds the library on whose streams arrays of this type are used, and remembers it."""
        roots = {kind.__module__.partition(".")[0] for kind in type(given.array).__mro__}
        name = next((each for each in ("torch", "cupy") if each in roots), None)
        library = self._library(name or loaded_library())
        entry = self._users[type(given.array)] = library.current, IssuedWork(self, library)
        return entry

    def _user(self, given: Description) -> IssuedWork:
        return (self._users.get(type(given.array)) or self._learn(given))[1]

    def _library(self, name: str) -> CudaLibrary:
        library = self._libraries.get(name)
        if library is None:
            library = self._libraries[name] = library_of(name, self.device_index)
        return library

    def _libraries_in_use(self) -> list[CudaLibrary]:
        """Returns the libraries whose arrays were used; before the first collective, the loaded one."""
        return list(self._libraries.values()) or [self._library(loaded_library())]

    def _own_stream(self, library: CudaLibrary) -> tuple[Any, int]:
        stream = self._own_streams.get(library.name)
        if stream is None:
            stream = self._own_streams[library.name] = library.new_stream()
        return stream

    # ------------------------------------------------------------ calls into NCCL

    def _run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        arrays: tuple[Any, ...],
        async_op: bool,
    ) -> Work:
        """Issues ``function(*args, stream)`` on the caller's stream or, if async, on the communicator's."""
        issued = self._user(arrays[0])
        library = issued.library
        if not async_op:
            self._call(function, (*args, library.current()))
            return issued
        if self._grouped:
            raise CommunicatorError(
                "async_op inside group() is not possible, as the whole group is launched at once",
                remedy="Leave async_op out; to overlap with other work, call group() on another stream.",
            )
        stream, address = self._own_stream(library)
        library.follow(stream)
        self._call(function, (*args, address))
        return Queued(self, library, library.mark(stream), arrays)

    def _end_group(self) -> None:
        """Ends NCCL's group call, also during an abort; otherwise this thread's next calls would hang."""
        try:
            # If the abort did not wait for this thread, NCCL frees what the group holds.
            if not self._is_aborted:
                self.nccl.group_end()
        except Exception as error:
            self._fail(error)
        finally:
            self._inside = self._grouped
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _exchange(
        self, moves: list[tuple[Callable[..., Any], int, int]], count: int, dtype: int, stream: int
    ) -> None:
        self.nccl.group_start()
        try:
            for function, pointer, peer in moves:
                function(pointer, count, dtype, peer, self._comm, stream)
        finally:
            self.nccl.group_end()

    def _await(self, library: CudaLibrary, event: Any, what: str) -> None:
        begun = time.monotonic()
        while not library.happened(event):
            self.check()
            waited = time.monotonic() - begun
            if waited > self.timeout_s:
                others = [peer for peer in self.membership.peers if peer.rank != self.rank]
                raise CollectiveTimeoutError(
                    f"{what} did not complete within {self.timeout_s:g} s on rank {self.rank}; waited for"
                    f" {', '.join(map(handles.name_of, others))}",
                    remedy="A rank hangs or called other collectives; see the scheduler's status.",
                )
            time.sleep(min(max(waited * _LATE, _FIRST_POLL_S), _LAST_POLL_S))
        if self._error is not None:
            raise self._error.with_traceback(None)

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
            f" (group {self._group_name!r}): {error}{why_ended(self._plugin, self.membership)}",
            remedy="Run with NCCL_DEBUG=WARN to see why.",
        ) from error

    # ------------------------------------------------------------ the end

    def before_end(self, release: Callable[[], None]) -> Callable[[], None]:
        """Registers a function that releases CUDA graphs with collectives, during an abort or before close().

        Returns:
            A function that removes the registration.
        """
        key = id(release)
        self._before_end[key] = release
        return lambda: self._before_end.pop(key, None) and None

    def capturing(self) -> bool:
        """Whether a CUDA graph is being recorded on the caller's current stream."""
        return any(library.capturing() for library in self._libraries_in_use())

    def check(self) -> None:
        """Raises the error that ended this communicator, or that NCCL reports on it."""
        state = int(self._call(self.nccl.comm_get_async_error, (self._comm,)))
        if state not in (0, handles.IN_PROGRESS):
            raise CommunicatorError(
                f"NCCL failed on rank {self.rank}: {self.nccl.get_error_string(state)}"
                f"{why_ended(self._plugin, self.membership)}",
                remedy="Run with NCCL_DEBUG=WARN to see why.",
            )

    def abort(self, error: Exception) -> None:
        """Makes blocked and later calls raise ``error``, and ends running kernels. Callable from any thread.

        NCCL frees its resources in the background (half a second); another communicator may be built then.
        """
        with self._ending:
            if self._error is None:
                self._error = error
            if self._ended:
                return
            self._closed = True
            closing = self.closing
        for child in self._children:
            child.abort(error)
        if closing:
            # NCCL must free each communicator only once. If a peer died before it destroyed its own, the
            # destruction here hangs. Only then is the communicator aborted while it is being destroyed, which
            # ends the wait and frees nothing.
            self._destroyed.wait(self.destroy_wait_s)
        else:
            self._await_outside()
        with self._ending:
            alive, self._alive = self._alive, []
        if closing and alive:
            _log.warning("closing the communicator of %r hangs and is given up: %s", self._group_name, error)
        # Both run at the same time. NCCL's abort waits for graphs that hold its kernels. The release of a
        # graph waits for its kernels, which only the abort ends.
        handles.abort_in_background(self.nccl, alive)
        self._is_aborted = bool(alive)
        self._release()

    def close(self) -> None:
        """Releases everything after outstanding work is done, or at the deadline; idempotent."""
        with self._ending:
            if self._closed:
                return
            self._closed = self.closing = True
            self._error = CommunicatorAbortedError(
                f"the communicator of group {self._group_name!r} is closed",
                remedy="Make a new one; a closed one cannot be used.",
            )
        late = CommunicatorAbortedError(f"it was not destroyed within {self.timeout_s:g} s")
        over = threading.Event()

        def give_up() -> None:
            if not over.wait(self.timeout_s):
                self.abort(late)

        start_thread(give_up, name="muster-nccl-close")
        try:
            for child in self._children:
                child.close()
            self._release()
            self._destroy()
        finally:
            over.set()
            self.closing = False
            self._destroyed.set()

    @property
    def _ended(self) -> bool:
        """Whether it was aborted, or completely closed."""
        return self._closed and not self.closing

    @property
    def _group_name(self) -> str:
        return self.membership.group

    def _release(self) -> None:
        for release in list(self._before_end.values()):
            try:
                release()
            except Exception as error:  # the following steps must still be done
                _log.warning("a resource of group %r was not released: %s", self._group_name, error)
        self._before_end.clear()

    def _destroy(self) -> None:
        """Lets NCCL free its resources, except those that an abort frees at the same time."""
        if self._alive:
            self._operations.destroy()
        while alive := self._alive:
            with contextlib.suppress(self.nccl.NCCLError):
                self.nccl.comm_destroy(alive[0])
            with self._ending:
                self._alive = self._alive[1:]

    def _await_outside(self) -> None:
        """Waits for another thread to return from NCCL, except for one that only the abort can free."""
        end = time.monotonic() + self.leave_wait_s
        while self._inside and time.monotonic() < end:
            time.sleep(_FIRST_POLL_S)


_BREAK_ON_REBUILD = range(22803, 22809)
"""Releases of NCCL, 2.28.3 to 2.28.8, that may break when a process builds a communicator again."""

_WARM_UP_S = 10.0
"""How long a process that ends waits for a warm-up in progress, in seconds."""


class NcclBackend(Backend):
    """NCCL in this process.

    Args:
        device_index: the GPU of this worker; -1: the one in the membership, else the current one.
        warm_up: the warm-up of this worker's GPU, if it has begun.

    Attributes:
        absent: a function that returns the ranks that have not connected, because NCCL does not report them.
            It is called when a communicator does not form in time. None: nobody knows them.
        bootstrap_tls: NCCL's own TLS; None: it has none, or nothing is encrypted.
    """

    name = "nccl"
    on_device = may_run_nccl = True

    def __init__(self, *, device_index: int = -1, warm_up: WarmUp | None = None) -> None:
        self._nccl = handles.load_bindings()
        version = self._nccl.get_version()
        # Ranks with different releases of NCCL may hang, so the scheduler compares them before ranks connect.
        self.facts = {"nccl": f"{version // 10000}.{version // 100 % 100}.{version % 100}"}
        if version in _BREAK_ON_REBUILD:
            _log.warning(
                "NCCL %s may break when survivors of a loss build the next communicator, as 2.28.3 to 2.28.8"
                " do: install 2.28.9 or later, or 2.27.",
                self.facts["nccl"],
            )
        self._device_index = device_index
        self._warm_up = warm_up
        self.absent: Callable[[], list[Peer]] | None = None
        self._plugin: NetPlugin | None = None
        self.bootstrap_tls: BootstrapTls | None = None

    def seal(self, plugin: NetPlugin) -> None:
        """See :meth:`Backend.seal`; errors then end with the plug-in's reason why a connection ended."""
        self._plugin = plugin
        if self.bootstrap_tls is None and offers_tls(self._nccl):
            self.bootstrap_tls = BootstrapTls(self._nccl)
            self.facts = {**self.facts, "nccl_bootstrap": "TLS"}

    def open_endpoint(self, address: str) -> str:
        """Returns "": NCCL opens its ports itself."""
        return ""

    def mint_unique_ids(self, count: int) -> tuple[bytes, ...]:
        """Makes ``count`` ids; this process hosts NCCL's bootstrap root of each."""
        return tuple(bytes(self._nccl.get_unique_id()) for _ in range(count))

    def connect(
        self, membership: Membership, *, timeout_s: float, cancelled: Callable[[], Exception | None]
    ) -> NcclCommunicator:
        """Builds the communicator of a generation; see :class:`~muster.communicators.base.Backend`."""
        if self._warm_up is not None:
            self._warm_up.end()
        own = membership.peers[membership.rank]
        device = use_device(own.device_index if self._device_index < 0 else self._device_index)
        waiting = handles.FormationWait(
            membership,
            timeout_s=timeout_s,
            cancelled=cancelled,
            absent=lambda: self._absent_words(membership),
            plugin=self._plugin,
        )
        root = handles.create_root(self._nccl, membership, waiting)
        try:
            ctas = fewest_ctas(
                device_model(device),
                hosts=len({peer.host_id for peer in membership.peers}),
                env=os.environ,
            )
            comm = handles.split_child(
                self._nccl, root, color=0, key=membership.rank, waiting=waiting, min_ctas=ctas
            )
        except Exception:
            handles.abort(self._nccl, root)
            raise
        return NcclCommunicator(
            self._nccl,
            comm,
            root,
            membership,
            device=device,
            timeout_s=timeout_s,
            min_ctas=ctas,
            plugin=self._plugin,
        )

    def _absent_words(self, membership: Membership) -> str:
        if self.absent is None:
            others = [peer for peer in membership.peers if peer.rank != membership.rank]
            return "not all of " + ", ".join(map(handles.name_of, others)) + " came"
        absent = self.absent()
        if not absent:
            return "all ranks came, but NCCL did not connect them"
        return "missing: " + ", ".join(map(handles.name_of, absent))

    def close(self) -> None:
        """Ends the warm-up; idempotent."""
        if self._warm_up is not None:  # an interpreter that ends before the warm-up does could crash
            self._warm_up.end(_WARM_UP_S)
