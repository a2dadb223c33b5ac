"""The contract of communicators and backends: collectives of one group of ranks in one generation.

Backends (``tcp``, ``nccl``) implement :class:`Backend` and :class:`Communicator`; one
contract suite (``tests/contracts``) runs on all of them.

``send`` and ``recv`` may be the same array if the collective allows it (in place). Results are written
into ``recv``. :mod:`muster.communicators.arrays` says which arrays are accepted.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from muster.communicators.arrays import HOST, Array, Description, kind_of
from muster.communicators.membership import Membership
from muster.communicators.reduce_ops import ReduceOp
from muster.communicators.work import Work
from muster.errors import ArrayError, CommunicatorError


class Communicator(abc.ABC):
    """Collectives among the ranks of one group in one generation.

    Every rank must call the same collectives in the same order. Each call returns a :class:`Work`.
    With ``async_op=False`` the call returns when the result may be used: on CPU when it is there, on
    CUDA when it is enqueued on the caller's current stream. With ``async_op=True`` it returns at once
    (CPU: a thread of the communicator does the work in order; CUDA: the communicator's own stream)
    and the buffers must not be touched until ``wait()`` returns.

    Counts are checked before anything is sent (:class:`~muster.errors.ArrayError`). If ranks disagree,
    all of them get :class:`~muster.errors.CollectiveMismatchError`, with backends that can detect it.
    """

    name: str
    """The backend's name, for messages: "tcp" or "nccl"."""

    on_device = False
    """Whether its arrays are on a GPU, so that only the GPU knows when a collective is over."""

    capturable = False
    """Whether a CUDA graph may hold its collectives; it then has ``before_end``."""

    pre_multiplies = False
    """Whether it takes a :class:`PreMultipliedSum`."""

    takes_host = False
    """Whether it also takes arrays in the host's memory, if ``on_device``."""

    membership: Membership

    finished = False
    """Set before :meth:`close` if this worker has finished, so that others that wait for it hear of it."""

    timeout_s: float
    """Deadline of each collective, in seconds; on GPUs, of each wait of the host for them."""

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
        """Combines ``send`` of all ranks elementwise into ``recv`` on all ranks.

        Both have the same shape and dtype; they may be one array (in place).
        """

    @abc.abstractmethod
    def reduce(
        self, send: Array, recv: Array | None, op: ReduceOp, root: int, *, async_op: bool = False
    ) -> Work:
        """Like :meth:`all_reduce`, but only ``root`` gets the result; ``recv`` is None on the other ranks."""

    @abc.abstractmethod
    def broadcast(self, buffer: Array, root: int, *, async_op: bool = False) -> Work:
        """Copies ``buffer`` of ``root`` into ``buffer`` of all ranks, in place."""

    @abc.abstractmethod
    def all_gather(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """Gathers ``send`` of all ranks on all ranks: part r of ``recv`` becomes rank r's ``send``.

        ``recv`` has ``world_size * send.size`` elements of the same dtype.
        """

    @abc.abstractmethod
    def reduce_scatter(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        """Combines ``send`` of all ranks elementwise, and leaves part r of the result in rank r's ``recv``.

        ``send`` has ``world_size * recv.size`` elements of the same dtype.
        """

    @abc.abstractmethod
    def gather(self, send: Array, recv: Array | None, root: int, *, async_op: bool = False) -> Work:
        """Like :meth:`all_gather`, but only ``root`` gets the result; ``recv`` is None on the other ranks."""

    @abc.abstractmethod
    def scatter(self, send: Array | None, recv: Array, root: int, *, async_op: bool = False) -> Work:
        """Hands out the parts of ``root``'s ``send``: part r becomes rank r's ``recv``.

        ``send`` has ``world_size * recv.size`` elements, and is None on the other ranks.
        """

    @abc.abstractmethod
    def all_to_all(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """Exchanges parts: part j of rank i's ``send`` becomes part i of rank j's ``recv``.

        Both have the same dtype and size, which ``world_size`` divides.
        """

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
        """Blocks the host until all work on the caller's stream has completed; raises its error if it failed.

        Without a GPU there is nothing to wait for: a call returns when its result is there.
        """
        wait = self.mark()
        if wait is not None:
            wait()

    def mark(self) -> Callable[[], None] | None:
        """Marks the end of the issued work; returns a function that waits for it.

        It waits like :meth:`synchronize`. So the host can issue more before it waits, and learns later
        whether the earlier work failed. Returns None if all of it has completed.
        """
        return None

    def group(self) -> AbstractContextManager[None]:
        """Context in which issued collectives start together, in one launch, when the block ends.

        Raises:
            CommunicatorError: this backend can only start collectives one by one.
        """
        raise CommunicatorError(
            f'The backend "{self.name}" starts each collective by itself.',
            remedy="Leave group() out, and give async_op=True to what is to run side by side.",
        )

    def note(self, name: str) -> None:
        """Records, for hang reports, the start of a unit of collectives, for example "captured_step"."""
        return

    def measure_waits(self, take: Callable[[], float | None]) -> None:
        """Registers a source of how long the device has waited for other ranks.

        Args:
            take: a bound method, held weakly, that returns the last measurement in seconds, None if there is
                no new one.
        """
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


class NetPlugin(Protocol):
    """The plug-in through which NCCL, run in this process, sends to other hosts."""

    def use_secret(self, generation: int, secret: bytes) -> None:
        """Makes connections opened from now on prove knowledge of this generation's secret."""

    def reason(self) -> str:
        """Returns why a connection failed; empty: none has failed."""

    def forget_reason(self) -> None:
        """Forgets why earlier connections ended."""


@runtime_checkable
class TellsOfLinks(Protocol):
    """A communicator that measures its connections."""

    def sending_s(self) -> Mapping[int, float]:
        """Returns the total seconds for which data for each rank could not be sent."""


class Backend(abc.ABC):
    """One kind of communicator in this process; outlives generations."""

    name: str

    on_device = False
    """See :attr:`Communicator.on_device`."""

    may_run_nccl = False
    """Whether NCCL may carry this worker's data, in this process or in a program that it starts."""

    answers_probes = False
    """Whether its endpoint answers probes, so that no other listener is needed for them."""

    facts: Mapping[str, str] = MappingProxyType({})
    """Facts by name that must be the same on all workers, in addition to those that all backends compare."""

    @abc.abstractmethod
    def open_endpoint(self, address: str) -> str:
        """Prepares to be reached by peers; called once, before joining.

        Args:
            address: the local address (no port) that peers can reach.

        Returns:
            ``host:port`` to hand to peers, or "" when the backend needs none.
        """

    def seal(self, plugin: NetPlugin) -> None:  # noqa: B027 - a backend without NCCL has nothing to seal
        """Takes the plug-in that encrypts what NCCL sends between hosts; before the first :meth:`connect`."""

    @abc.abstractmethod
    def mint_unique_ids(self, count: int) -> tuple[bytes, ...]:
        """Makes ``count`` fresh unique ids of a generation; called in rank 0's process only."""

    @abc.abstractmethod
    def connect(
        self, membership: Membership, *, timeout_s: float, cancelled: Callable[[], Exception | None]
    ) -> Communicator:
        """Builds the communicator of a generation.

        Args:
            membership: the members of the group, and the unique ids.
            timeout_s: deadline for the connection; also that of each later collective
                unless the communicator's ``timeout_s`` is set otherwise.
            cancelled: polled while waiting. If it returns an exception, the generation is over, and the
                exception is raised.

        Raises:
            FormationTimeoutError: not all ranks connected in time; the message names the missing ones.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the endpoint; idempotent."""


def check_place(given: Description, communicator: Communicator, name: str = "x") -> Description:
    """Checks that an array is in the memory that a communicator works on; returns it.

    Raises:
        ArrayError: the array is on a GPU and the communicator works on the host, or vice versa.
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
