"""Communicators and backends: collectives of one group of ranks in one generation, and their arrays.

Backends (``tcp``, ``nccl``) implement :class:`Backend` and :class:`Communicator`; one
contract suite (``tests/contracts``) runs on all of them.

Arrays here are C-contiguous buffers where the communicator works (NumPy arrays and torch tensors in the
host's memory for ``tcp``; CuPy, torch or anything with ``__cuda_array_interface__`` on a GPU
for ``nccl``; both where ``takes_host``), or what :func:`describe` made of them. ``send`` and ``recv`` may be
the same array where the collective allows it (in place). Results are written into ``recv``.

NumPy, CuPy and torch arrays are read through their own attributes, anything else through
``__cuda_array_interface__``, and last through DLPack (by way of torch or CuPy, whichever is loaded). No
library but NumPy is imported here: an array of a library proves that it is loaded. No memory is ever copied:
results must land in the caller's.

NumPy knows no bfloat16. On the host such an array is one of uint16 over the same memory, and float16 and
bfloat16 are computed with in float32: all ranks' values are combined there, and rounded once, at the end, to
the nearest value (of two equally near the even one), as torch rounds.
"""

from __future__ import annotations

import abc
import enum
import functools
import importlib
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from muster.communicators.array_library import loaded_library
from muster.errors import ArrayError, CommunicatorError
from muster.wire.threads import start_thread

Array = Any
"""An array of the backend's kind, or its description."""

NumpyArray = npt.NDArray[Any]

_SIGNALS_S = 0.1
"""How long one wait lasts at most: a signal that another thread takes is handled between two."""


class ReduceOp(str, enum.Enum):
    """How values of different ranks are combined. ``MEAN`` divides by the size of the group."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PROD = "prod"

    @classmethod
    def of(cls, name: Any) -> ReduceOp:
        """The operation of this name.

        Raises:
            ArrayError: there is none.
        """
        try:
            return cls(name)
        except ValueError:
            legal = ", ".join(each.value for each in cls)
            raise ArrayError(f"op must be one of {legal}; it is {name!r}.") from None


@dataclass(frozen=True, slots=True)
class PreMultipliedSum:
    """An operation for the reducing collectives of NCCL: each rank's values times ``factor``, summed.

    ``muster.all_reduce(gradient, op=muster.PreMultipliedSum(0.5))``; for floating-point dtypes.

    Attributes:
        factor: rounded to the arrays' dtype before it is multiplied.
    """

    factor: float


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank of a group as its communicator sees it. ``rank`` is the rank within the group."""

    rank: int
    node_id: str
    incarnation: int
    host_id: str
    host_name: str
    data_address: str
    device_index: int = -1


@dataclass(frozen=True, slots=True)
class Membership:
    """The ranks of a communicator, and which of them this process is.

    ``peers`` are in order of rank; ``unique_ids`` are secret.
    """

    job_id: str
    generation: int
    group: str
    rank: int
    peers: tuple[Peer, ...]
    unique_ids: tuple[bytes, ...] = field(repr=False, default=())

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return len(self.peers)

    def check_rank(self, rank: int, name: str) -> None:
        """Checks that ``rank``, called ``name`` in the message, is one of the group.

        Raises:
            ArrayError: it is not.
        """
        if not hasattr(rank, "__index__") or not 0 <= rank < self.world_size:
            raise ArrayError(
                f"{name} is {rank!r}; the group {self.group!r} has ranks 0 to {self.world_size - 1}."
            )

    def check_peer(self, peer: int, *, itself: bool = False) -> None:
        """Checks that ``peer`` is another rank of the group or, with ``itself``, any rank of it.

        Raises:
            ArrayError: it is not.
        """
        self.check_rank(peer, "peer")
        if peer == self.rank and not itself:
            raise ArrayError(f"Rank {peer} cannot send to or receive from itself.")

    def part(self, group: str, ranks: Sequence[int]) -> Membership | None:
        """The membership of a subset, in the order of ``ranks``; None on ranks that are not in it.

        Raises:
            ArrayError: a rank is not one of the group, or stands twice, or there is none.
        """
        for rank in ranks:
            self.check_rank(rank, "a rank of the group")
        if not ranks or len(set(ranks)) != len(ranks):
            raise ArrayError(f"The group {group!r} needs each of its ranks once, and one at least.")
        if self.rank not in ranks:
            return None
        peers = tuple(replace(self.peers[rank], rank=i) for i, rank in enumerate(ranks))
        return replace(self, group=group, rank=list(ranks).index(self.rank), peers=peers)


class Work(Protocol):
    """One issued collective."""

    def done(self) -> bool:
        """Whether it has completed (well or not). Never blocks."""

    def wait(self) -> None:
        """Waits until the result may be used; on CUDA, until the current stream may use it.

        Raises:
            CommunicatorError: what the collective failed with.
            MembershipChanged: the communicator was aborted by a change of members.
        """


class FinishedWork:
    """The handle of a collective that was done before its call returned."""

    def done(self) -> bool:
        """True."""
        return True

    def wait(self) -> None:
        """Returns at once."""


FINISHED = FinishedWork()


class QueuedWork:
    """The handle of a collective that the queue's thread runs."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._event = threading.Event()
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether it has completed, well or not."""
        return self._event.is_set()

    def wait(self) -> None:
        """Waits for it, and raises what it failed with."""
        while not self._event.wait(_SIGNALS_S):
            pass
        if self._error is not None:
            raise self._error.with_traceback(None)  # another wait adds to it

    def run(self) -> None:
        """Runs it, in the thread of the queue, and wakes all that wait for it."""
        try:
            self._action()
        except Exception as error:
            self._error = error
        self._event.set()


class WorkQueue:
    """Runs work in order, in one thread that starts with the first of it.

    Attributes:
        idle: whether all that was put has run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._pending = 0
        self._queue: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.idle = True

    def put(self, action: Callable[[], None]) -> QueuedWork:
        """Adds work at the end."""
        work = QueuedWork(action)
        with self._lock:
            self._pending += 1
            self.idle = False
            if self._thread is None:
                self._thread = start_thread(self._serve, name=self._name)
            self._queue.put(work)
        return work

    def close(self) -> None:
        """Waits until all that was put has run, and ends the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _serve(self) -> None:
        while True:
            work = self._queue.get()
            if work is None:
                return
            work.run()
            with self._lock:
                self._pending -= 1
                self.idle = not self._pending


class Communicator(abc.ABC):
    """Collectives among the ranks of one group in one generation.

    Every rank must call the same collectives in the same order. Each call returns a :class:`Work`.
    With ``async_op=False`` the call returns when the result may be used: on CPU when it is there, on
    CUDA when it is enqueued on the caller's current stream. With ``async_op=True`` it returns at once
    (CPU: a thread of the communicator does the work in order; CUDA: the communicator's own stream)
    and the buffers must not be touched until ``wait()`` returns.

    Counts are checked before anything is sent (:class:`~muster.errors.ArrayError`). Where ranks
    disagree, all of them get :class:`~muster.errors.CollectiveMismatchError` (backends that can see it).
    """

    name: str
    """Backend name, for messages: "tcp", "nccl"."""

    on_device = False
    """Whether its arrays are on a GPU, which alone knows when a collective is over."""

    capturable = False
    """Whether a CUDA graph may hold its collectives; it has ``before_end`` then."""

    pre_multiplies = False
    """Whether it takes a :class:`PreMultipliedSum`."""

    takes_host = False
    """Whether it takes arrays in the host's memory, too, where ``on_device``."""

    membership: Membership

    finished = False
    """Set before :meth:`close` where this worker has finished: others that wait for it then hear so."""

    timeout_s: float
    """Deadline of each collective, in seconds; of a backend on GPUs, of what makes the host wait for them."""

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return self.membership.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self.membership.world_size

    @abc.abstractmethod
    def all_reduce(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        """Combines ``send`` of all ranks into ``recv`` of all ranks. Same shape; may be in place."""

    @abc.abstractmethod
    def reduce(
        self, send: Array, recv: Array | None, op: ReduceOp, root: int, *, async_op: bool = False
    ) -> Work:
        """Like all_reduce, but only ``root`` gets the result (``recv`` is None elsewhere)."""

    @abc.abstractmethod
    def broadcast(self, buffer: Array, root: int, *, async_op: bool = False) -> Work:
        """Copies ``buffer`` of ``root`` into ``buffer`` of all ranks, in place."""

    @abc.abstractmethod
    def all_gather(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """``recv`` has ``world_size * send.size`` elements: rank r's ``send`` is its r-th part."""

    @abc.abstractmethod
    def reduce_scatter(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        """``send`` has ``world_size * recv.size`` elements; rank r gets the combined r-th part."""

    @abc.abstractmethod
    def gather(self, send: Array, recv: Array | None, root: int, *, async_op: bool = False) -> Work:
        """Like all_gather, but only ``root`` gets the result (``recv`` is None elsewhere)."""

    @abc.abstractmethod
    def scatter(self, send: Array | None, recv: Array, root: int, *, async_op: bool = False) -> Work:
        """Rank r gets the r-th part of ``root``'s ``send`` (``send`` is None elsewhere)."""

    @abc.abstractmethod
    def all_to_all(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """Part j of rank i's ``send`` becomes part i of rank j's ``recv``. Same size, divisible by ranks."""

    @abc.abstractmethod
    def send(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """Sends ``buffer`` to ``peer``, which calls :meth:`recv` with the same dtype and size."""

    @abc.abstractmethod
    def recv(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """Receives into ``buffer`` from ``peer``."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has called it. On CUDA it synchronises the host."""

    def synchronize(self) -> None:
        """Blocks the host until what was issued on the caller's stream is over; raises what broke it.

        Without a GPU there is nothing to wait for: a call returns when its result is there.
        """
        wait = self.mark()
        if wait is not None:
            wait()

    def mark(self) -> Callable[[], None] | None:
        """Marks the end of what has been issued; returns what waits for it as :meth:`synchronize` does.

        So the host can issue more before it waits, and learns later whether what it had issued broke. None:
        all of it is over.
        """
        return None

    def group(self) -> AbstractContextManager[None]:
        """Context in which issued collectives start together, in one launch, when the block ends.

        Raises:
            CommunicatorError: this backend starts each collective by itself.
        """
        raise CommunicatorError(
            f'The backend "{self.name}" starts each collective by itself.',
            remedy="Leave group() out, and give async_op=True to what is to run side by side.",
        )

    def note(self, name: str) -> None:
        """Notes for hang reports that something with collectives in it starts, "captured_step", say."""
        return

    @abc.abstractmethod
    def split(self, group: str, ranks: Sequence[int]) -> Communicator | None:
        """Makes a communicator of a subset; called by every rank of this one, in the same order.

        ``ranks`` are ranks of this communicator; their order is the rank order of the new one.
        Returns None on ranks that are not in it.
        """

    @abc.abstractmethod
    def abort(self, error: Exception) -> None:
        """Makes blocked and later calls raise ``error``, soon. Callable from any thread, repeatedly."""

    @abc.abstractmethod
    def close(self) -> None:
        """Releases everything after outstanding work is done; idempotent."""


class Backend(abc.ABC):
    """One kind of communicator in this process. Lives across generations."""

    name: str

    on_device = False
    """As :attr:`Communicator.on_device`."""

    answers_probes = False
    """Whether its endpoint answers probes, so that no other listener is needed for them."""

    facts: Mapping[str, str] = MappingProxyType({})
    """What must be the same on all workers, by name, beside what all backends compare."""

    @abc.abstractmethod
    def open_endpoint(self, address: str) -> str:
        """Prepares to be reached by peers; called once, before joining.

        Args:
            address: the local address (no port) that peers can reach.

        Returns:
            ``host:port`` to hand to peers, or "" when the backend needs none.
        """

    @abc.abstractmethod
    def mint_unique_ids(self, count: int) -> tuple[bytes, ...]:
        """Makes ``count`` fresh unique ids of a generation; called in rank 0's process only."""

    @abc.abstractmethod
    def connect(
        self, membership: Membership, *, timeout_s: float, cancelled: Callable[[], Exception | None]
    ) -> Communicator:
        """Builds the communicator of a generation.

        Args:
            membership: who takes part; carries the unique ids.
            timeout_s: deadline for the connection; also that of each later collective
                unless the communicator's ``timeout_s`` is set otherwise.
            cancelled: polled while waiting; an exception it returns is raised (the generation is over).

        Raises:
            FormationTimeoutError: not all ranks came; names those that did not.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the endpoint; idempotent."""


# ---------------------------------------------------------------- what is known of an array

HOST = -1
SOME_GPU = -2
"""Device index of an array whose interface does not name its GPU."""

_BY_CHARACTER = {
    "?": "bool",
    "b": "int8",
    "B": "uint8",
    "h": "int16",
    "H": "uint16",
    "i": "int32",
    "I": "uint32",
    "l": "int64",
    "L": "uint64",
    "q": "int64",
    "Q": "uint64",
    "e": "float16",
    "f": "float32",
    "d": "float64",
    "E": "bfloat16",
}
"""Names of dtypes by NumPy's characters; that of bfloat16 is ml_dtypes', which CuPy uses."""


class Description:
    """An array as a communicator must know it. Holds the array, and so its memory.

    Attributes:
        array: the array; a new one where numbers were given.
        size: its number of elements.
        dtype: by NumPy's name, "float32" or "bfloat16", say.
        itemsize: bytes per element.
        device: the index of its GPU, or ``HOST`` or ``SOME_GPU``.
        address: of its first element; on the host 0, which is no address.
        flat: on the host a NumPy array of one dimension over the same memory; else None.
        is_made: whether it was made of numbers, so that no result can land with the caller.
        stream: address of the stream on which what fills it is queued, where its interface says so.
    """

    __slots__ = ("address", "array", "device", "dtype", "flat", "itemsize", "size")

    is_made = False
    stream: int | None = None

    def __init__(
        self, array: Array, size: int, dtype: str, itemsize: int, device: int, address: int, flat: Any
    ) -> None:
        self.array = array
        self.size = size
        self.dtype = dtype
        self.itemsize = itemsize
        self.device = device
        self.address = address
        self.flat = flat

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.size * self.itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        array = self.array
        return tuple(array.shape if hasattr(array, "shape") else array.__cuda_array_interface__["shape"])

    def new(self, shape: tuple[int, ...]) -> Description:
        """A new array of this one's dtype, of its library or one that shares its device."""
        root = _root_of(type(self.array))
        if root == "torch":
            return describe(self.array.new_empty(shape))
        if self.flat is not None:
            return describe(np.empty(shape, self.array.dtype))
        library = importlib.import_module("cupy" if root == "cupy" else loaded_library())
        if library.__name__ == "torch":
            return describe(library.empty(shape, dtype=getattr(library, self.dtype), device="cuda"))
        return describe(library.empty(shape, self.array.dtype if root == "cupy" else self.dtype))


class _Numbers(Description):
    """The description of an array made of Python numbers."""

    __slots__ = ()
    is_made = True


class _Exported(Description):
    """The description of an array with an array interface, which may name a stream."""

    __slots__ = ("stream",)


describers: dict[type, Callable[[Any, str], Description]] = {
    kind: lambda given, name: given for kind in (Description, _Numbers, _Exported)
}
"""The describing function of each array type that :func:`describe` has met."""


def describe(x: Any, name: str = "x") -> Description:
    """Describes an array, or numbers, which become one; returns a description as it is.

    Args:
        x: an array of any kind, or numbers.
        name: its name in messages.

    Raises:
        ArrayError: it is neither, or not C-contiguous, or masked.
    """
    describer = describers.get(type(x))
    if describer is None:
        describer = describers[type(x)] = _describer_of(type(x), x)
    return describer(x, name)


def check_place(given: Description, communicator: Communicator, name: str = "x") -> Description:
    """Checks that an array is where a communicator takes it; returns it.

    Raises:
        ArrayError: it is on a GPU, or is not.
    """
    if (given.device != HOST) is communicator.on_device or communicator.takes_host:
        return given
    kind, backend = kind_of(given.array), communicator.name
    if communicator.on_device:
        raise ArrayError(
            f'{name} is a {kind} on the CPU, and the backend "{backend}" needs an array on a GPU.',
            remedy='Move it there (cupy.asarray, tensor.cuda()), or use the backend "tcp", which takes NumPy'
            " arrays and torch tensors on the CPU.",
        )
    raise ArrayError(
        f'{name} is a {kind} on a GPU, and the backend "{backend}" takes NumPy arrays and torch'
        " tensors on the CPU.",
        remedy="Move it there (cupy.asnumpy, tensor.cpu()); arrays on a GPU need NCCL.",
    )


def check_apart(whole: Description, part: Description, offset: int | None = 0) -> None:
    """Checks that two arrays share no memory, or exactly the ``part`` that begins ``offset`` elements in.

    Args:
        whole: the larger one.
        part: the other one; may be as large.
        offset: None: they may not even share that.

    Raises:
        ArrayError: they overlap otherwise.
    """
    if whole is part and offset == 0:
        return
    first, second = whole.address, part.address
    if whole.flat is not None and part.flat is not None:
        if not np.may_share_memory(whole.flat, part.flat):
            return
        first, second = whole.flat.ctypes.data, part.flat.ctypes.data
    apart = second >= first + whole.nbytes or first >= second + part.nbytes
    if not apart and (offset is None or second != first + offset * whole.itemsize):
        raise ArrayError("send and recv overlap in part.", remedy="Use one array in place, or two apart.")


def undefined_mean(dtype: str) -> ArrayError:
    """The error for a mean of whole numbers, which would have to be rounded."""
    return ArrayError(f"The mean of {dtype} is not defined.", remedy="Use sum, or a float dtype.")


def kind_of(x: Any) -> str:
    """The full name of an array's type: "numpy.ndarray"."""
    kind = type(x)
    root = _root_of(kind)
    return kind.__name__ if root == "builtins" else f"{root}.{kind.__name__}"


# ---------------------------------------------------------------- kinds of arrays


def _root_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _describer_of(kind: type, x: Any) -> Callable[[Any, str], Description]:
    roots = {_root_of(each) for each in kind.__mro__}
    if "torch" in roots and hasattr(kind, "data_ptr"):
        return functools.partial(_of_torch, sys.modules["torch"])
    if "cupy" in roots and hasattr(x, "data"):
        return _of_cupy
    if isinstance(x, np.ndarray):
        return _of_numpy
    if hasattr(x, "__cuda_array_interface__"):
        return _of_interface
    # NumPy makes an object of what has no interface that it knows.
    if hasattr(x, "__dlpack__") and not (hasattr(x, "__array__") or hasattr(x, "__array_interface__")):
        return _of_dlpack
    return _of_numbers


def _of_numpy(array: NumpyArray, name: str, made: type[Description] = Description) -> Description:
    kind = array.dtype
    dtype = _BY_CHARACTER.get(kind.char) if kind.isnative else None
    if not array.flags.c_contiguous:
        raise _scattered(array, name, array.shape)
    if hasattr(array, "mask"):
        raise ArrayError(f"{name} is masked, and masks do not travel.", remedy="Give array.filled(...).")
    flat = array.reshape(-1) if type(array) is np.ndarray else array.view(np.ndarray).reshape(-1)
    if dtype == "bfloat16":
        flat = flat.view(np.uint16)
    return made(array, array.size, dtype or str(kind), kind.itemsize, HOST, 0, flat)


def _of_numbers(x: Any, name: str) -> Description:
    try:
        numbers = np.asarray(x)
    except ValueError as error:
        raise ArrayError(f"{name} cannot become an array: {error}.") from error
    if numbers.dtype == object:
        raise ArrayError(f"{name} is a {kind_of(x)}, neither an array nor numbers.")
    return _of_numpy(np.ascontiguousarray(numbers).reshape(numbers.shape), name, _Numbers)


def _of_cupy(array: Any, name: str) -> Description:
    kind = array.dtype
    dtype = _BY_CHARACTER.get(kind.char) or str(kind)
    if not array.flags.c_contiguous:
        raise _scattered(array, name, array.shape)
    data = array.data
    itemsize = _SIZES.get(dtype) or kind.itemsize
    return Description(array, array.size, dtype, itemsize, data.device_id, data.ptr, None)


_torch_dtypes: dict[Any, tuple[str, int, bool]] = {}


def _of_torch(torch: Any, tensor: Any, name: str) -> Description:
    dtype, itemsize, is_usual = _torch_dtypes.get(tensor.dtype) or _learn_torch(tensor)
    try:
        dense = tensor.is_contiguous()
    except RuntimeError:  # sparse
        dense = False
    if not dense:
        raise _scattered(tensor, name, tuple(tensor.shape))
    if not is_usual and tensor.is_conj():
        raise ArrayError(
            f"the conjugate of {name} is yet to be computed: its memory holds other numbers",
            remedy="Give tensor.resolve_conj().",
        )
    device = tensor.get_device()
    if device >= 0:
        return Description(tensor, tensor.numel(), dtype, itemsize, device, tensor.data_ptr(), None)
    if not tensor.is_cpu:
        raise ArrayError(f"{name} is on {tensor.device}, and collectives take tensors on the CPU or a GPU.")
    flat = None
    if is_usual:
        plain = tensor.detach()
        flat = (plain.view(torch.uint16) if dtype == "bfloat16" else plain).numpy().reshape(-1)
    return Description(tensor, tensor.numel(), dtype, itemsize, HOST, 0, flat)


def _learn_torch(tensor: Any) -> tuple[str, int, bool]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    found = _torch_dtypes[tensor.dtype] = dtype, int(tensor.element_size()), dtype in ARITHMETIC
    return found


def _of_interface(array: Any, name: str) -> Description:
    interface = array.__cuda_array_interface__
    kind = np.dtype(interface["typestr"])
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    if strides is not None and not _is_dense(shape, tuple(strides), kind.itemsize):
        raise _scattered(array, name, shape)
    address, is_read_only = interface["data"]
    if is_read_only:
        raise ArrayError(f"{name} is read-only.", remedy="Give an array that may be written.")
    size = 1
    for length in shape:
        size *= length
    dtype = (_BY_CHARACTER.get(kind.char) if kind.isnative else None) or interface["typestr"]
    found, stream = (
        _Exported(array, size, dtype, kind.itemsize, SOME_GPU, address, None),
        interface.get("stream"),
    )
    found.stream = None if stream is None else int(stream)
    return found


def _of_dlpack(array: Any, name: str) -> Description:
    for library in ("torch", "cupy"):
        module = sys.modules.get(library)
        if module is not None:
            try:
                taken = module.from_dlpack(array)
            except Exception as error:
                raise ArrayError(
                    f"{name} is a {kind_of(array)}, which cannot be read through DLPack: {error}."
                ) from error
            return describe(taken, name)
    raise ArrayError(
        f"{name} is a {kind_of(array)}, and reading it through DLPack needs CuPy or torch, not loaded here.",
        remedy="Import the one you use, or give numpy.from_dlpack(x) if it is on the CPU.",
    )


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length == 0:
            return True
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _scattered(array: Any, name: str, shape: tuple[int, ...]) -> ArrayError:
    return ArrayError(
        f"{name}, a {kind_of(array)} of shape {shape}, is not C-contiguous.",
        remedy="Make a contiguous copy first (numpy.ascontiguousarray, tensor.contiguous()).",
    )


# ---------------------------------------------------------------- computing on the host

_COMBINE: dict[ReduceOp, Callable[..., NumpyArray]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PROD: np.multiply,
}


class Arithmetic:
    """How one dtype is combined on the host.

    Args:
        storage: how NumPy sees its elements.
        wide: in which dtype they are combined.
    """

    def __init__(self, storage: str, wide: str) -> None:
        self.storage, self.wide = np.dtype(storage), np.dtype(wide)
        self.is_short = storage != wide

    def widen(self, values: NumpyArray) -> NumpyArray:
        """The values in the dtype in which they are combined; a copy, or the values themselves."""
        if values.dtype == self.wide:
            return values
        if self.storage.kind == "f":
            return values.astype(self.wide)
        bits = values.astype(np.uint32)
        bits <<= 16
        return bits.view(self.wide)

    def narrow(self, wide: NumpyArray, out: NumpyArray) -> None:
        """Rounds combined values to their dtype, into ``out``."""
        if self.storage.kind == "u" and self.is_short:
            bits = wide.view(np.uint32)
            rounded = bits >> 16
            rounded &= 1
            rounded += 0x7FFF
            rounded += bits  # wraps for some NaNs, which are set below
            rounded >>= 16
            out[...] = rounded
            out[np.isnan(wide)] = 0x7FC0
        elif out is not wide:
            with np.errstate(over="ignore"):  # infinity, as the sum of float32 would be
                out[...] = wide

    def combine(self, op: ReduceOp, left: NumpyArray, right: NumpyArray, out: NumpyArray) -> None:
        """Combines two wide arrays; of a mean, this is the sum. ``out`` may be either."""
        _COMBINE[op](left, right, out=out)

    def finish(self, op: ReduceOp, wide: NumpyArray, ranks: int, out: NumpyArray) -> None:
        """Writes the combined ``wide`` of ``ranks`` arrays into ``out``; ``wide`` may be overwritten."""
        if op is ReduceOp.MEAN:
            np.divide(wide, self.wide.type(ranks), out=wide)
        self.narrow(wide, out)

    def reduce_all(self, op: ReduceOp, parts: Sequence[NumpyArray], out: NumpyArray) -> None:
        """Combines arrays of all ranks in order of rank; ``out`` may share no memory with them."""
        total = np.empty(out.shape, self.wide) if self.is_short else out
        if len(parts) == 1:
            total[...] = self.widen(parts[0])
        else:
            self.combine(op, self.widen(parts[0]), self.widen(parts[1]), total)
        for part in parts[2:]:
            self.combine(op, total, self.widen(part), total)
        self.finish(op, total, len(parts), out)

    def check(self, dtype: str, op: ReduceOp) -> None:
        """Checks that the operation is defined for this dtype.

        The mean of integers is refused (it would have to be rounded), and so are sum and mean of booleans.

        Raises:
            ArrayError: it is not.
        """
        if op is ReduceOp.MEAN and self.wide.kind != "f":
            raise undefined_mean(dtype)
        if op is ReduceOp.SUM and self.wide.kind == "b":
            raise ArrayError(
                "The sum of bool is not defined.", remedy="Use max for any, or an integer dtype."
            )


ARITHMETIC = {
    name: Arithmetic(name, name)
    for name in (
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
        *("float32", "float64", "bool"),
    )
} | {"float16": Arithmetic("float16", "float32"), "bfloat16": Arithmetic("uint16", "float32")}
"""The dtypes that communicators take on the host, by name."""

_SIZES = {name: each.storage.itemsize for name, each in ARITHMETIC.items()}


def as_bytes(array: NumpyArray) -> memoryview:
    """The memory of a flat contiguous array."""
    return array.view(np.uint8).data


class HostCommunicator(Communicator):
    """A communicator on arrays in the host's memory: the checks before anything is sent, and its queue.

    Calls run one at a time, in order, until one fails; every later one raises the first error.
    """

    _queue: WorkQueue
    _error: Exception | None = None

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)  # it may be raised again and again

    def _queued(self, action: Callable[[], None], async_op: bool) -> Work:
        work = self._queue.put(action)
        if not async_op:
            work.wait()
        return work

    def _take(self, array: Array, name: str, *, writable: bool = False) -> Description:
        """Describes the user's array and checks it.

        Raises:
            ArrayError: it cannot be communicated, or not be written.
        """
        given = check_place(describe(array, name), self, name)
        if given.dtype not in ARITHMETIC or given.flat is None:
            raise ArrayError(
                f"{name} has the dtype {given.dtype}, which cannot be communicated.",
                remedy="Use float16/32/64, bfloat16, int8-64, uint8-64 or bool in native byte order.",
            )
        if writable and (given.is_made or not given.flat.flags.writeable):
            raise ArrayError(f"{name} is read-only.", remedy="Give an array that may be written.")
        return given

    def _take_pair(
        self, send: Array, recv: Array, *, gathers: bool = False, scatters: bool = False
    ) -> tuple[Description, Description]:
        """Describes both, which must be of one dtype, fit, and be apart or in place.

        Args:
            send: what is sent.
            recv: what is filled.
            gathers: ``recv`` has as many elements of every rank.
            scatters: ``send`` has as many elements for every rank.

        Raises:
            ArrayError: one cannot be communicated, or they do not go together.
        """
        source = self._take(send, "send")
        target = self._take(source if recv is send else recv, "recv", writable=True)
        if source.dtype != target.dtype:
            raise ArrayError(
                f"send has the dtype {source.dtype} and recv {target.dtype}; they must be the same."
            )
        sent, received = self.world_size if scatters else 1, self.world_size if gathers else 1
        if source.size * received != target.size * sent:
            raise ArrayError(
                f"send has {source.size} elements and recv {target.size};"
                f" they must be as {sent} to {received}."
            )
        if gathers:
            check_apart(target, source, self.rank * source.size)
        else:
            check_apart(source, target, self.rank * target.size if scatters else 0)
        return source, target

    def _take_rooted(
        self, send: Array, recv: Array | None, root: int, *, gathers: bool = False
    ) -> tuple[Description, Description | None]:
        """As :meth:`_take_pair`, but only the root has a ``recv``."""
        if self._has(recv, "recv", root):
            return self._take_pair(send, recv, gathers=gathers)
        return self._take(send, "send"), None

    def _take_scattered(
        self, send: Array | None, recv: Array, root: int
    ) -> tuple[Description | None, Description]:
        """As :meth:`_take_pair` with ``scatters``, but only the root has a ``send``."""
        if self._has(send, "send", root):
            return self._take_pair(send, recv, scatters=True)
        return None, self._take(recv, "recv", writable=True)

    def _has(self, array: Array | None, name: str, root: int) -> bool:
        self.membership.check_rank(root, "root")
        if self.rank == root and array is None:
            raise ArrayError(f"{name} is None at the root, rank {root}.")
        return self.rank == root

    def _shared(self, array: Description) -> Description:
        """The array, if every rank can have a part of it."""
        if array.size % self.world_size:
            raise ArrayError(
                f"send has {array.size} elements, which {self.world_size} ranks cannot share evenly."
            )
        return array

    def _operation(self, op: ReduceOp, array: Description) -> ReduceOp:
        """The operation, which must be defined for the array's dtype.

        Raises:
            ArrayError: it is not.
        """
        found = ReduceOp.of(op)
        ARITHMETIC[array.dtype].check(array.dtype, found)
        return found

    def _parts(self, array: NumpyArray) -> list[NumpyArray]:
        return list(array.reshape(self.world_size, -1)) if array.size else [array] * self.world_size
