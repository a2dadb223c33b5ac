"""The interfaces of communicators and backends: collectives of one group of ranks in one generation.

Backends (``tcp``, ``gloo``, ``nccl``) implement :class:`Backend` and :class:`Communicator`; one
contract suite (``tests/contracts``) runs on all of them.

Arrays here are C-contiguous buffers where the communicator works (NumPy arrays and torch tensors in the
host's memory for ``tcp`` and ``gloo``; CuPy, torch or anything with ``__cuda_array_interface__`` on a GPU
for ``nccl``), or what :func:`~muster.worker.communicators.arrays.describe` made of them. ``send`` and
``recv`` may be the same array where the collective allows it (in place). Results are written into ``recv``.

Here, too, are the handles of collectives that a thread of this process runs, in order (:class:`WorkQueue`).
"""

from __future__ import annotations

import abc
import enum
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from muster.worker.errors import ArrayError, CommunicatorError

Array = Any
"""An array of the backend's kind, or its description."""

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

    def run(self) -> Exception | None:
        """Runs it, in the thread of the queue; returns what it failed with."""
        try:
            self._action()
        except Exception as error:
            return error
        return None

    def end(self, error: Exception | None) -> None:
        """Wakes all that wait for it, with an error; its later result is dropped."""
        if not self._event.is_set():
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
        self._pending: list[QueuedWork] = []
        self._error: Exception | None = None
        self._queue: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.idle = True

    def put(self, action: Callable[[], None]) -> QueuedWork:
        """Adds work at the end."""
        work = QueuedWork(action)
        with self._lock:
            if self._error is not None:
                work.end(self._error)
                return work
            self._pending.append(work)
            self.idle = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._queue.put(work)
        return work

    def end_all(self, error: Exception) -> None:
        """Ends all waits, now and later, with an error; the result of what runs meanwhile is dropped."""
        with self._lock:
            self._error = error
            for work in self._pending:
                work.end(error)

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
            error = work.run()
            with self._lock:
                work.end(error)
                self._pending.remove(work)
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
    """Backend name, for messages: "tcp", "gloo", "nccl"."""

    on_device = False
    """Whether its arrays are on a GPU, which alone knows when a collective is over."""

    capturable = False
    """Whether a CUDA graph may hold its collectives; it has ``before_end`` then."""

    pre_multiplies = False
    """Whether it takes a :class:`PreMultipliedSum`."""

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
