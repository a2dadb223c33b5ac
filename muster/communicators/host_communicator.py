"""The common part of communicators for arrays in host memory: checks before sending, and the queue."""

from __future__ import annotations

from collections.abc import Callable

from muster.communicators.arithmetic import ARITHMETIC, NumpyArray
from muster.communicators.arrays import Array, Description, check_apart, describe
from muster.communicators.base import Communicator, check_place
from muster.communicators.reduce_ops import ReduceOp
from muster.communicators.work import Work, WorkQueue
from muster.errors import ArrayError


class HostCommunicator(Communicator):
    """A communicator on arrays in the host's memory: the checks before anything is sent, and its queue.

    Calls run one at a time, in order, until one fails; every later call raises the first error.
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
            ArrayError: the array cannot be communicated, or must be filled and is read-only.
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
        """Describes both arrays, which must have one dtype, fit, and share no memory or be in place.

        Args:
            send: the array to send.
            recv: the array to fill.
            gathers: ``recv`` has one part of ``send``'s size for each rank.
            scatters: ``send`` has one part of ``recv``'s size for each rank.

        Raises:
            ArrayError: an array cannot be communicated, or the two do not match.
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
                f" their ratio must be {sent} to {received}."
            )
        if gathers:
            check_apart(target, source, self.rank * source.size)
        else:
            check_apart(source, target, self.rank * target.size if scatters else 0)
        return source, target

    def _take_rooted(
        self, send: Array, recv: Array | None, root: int, *, gathers: bool = False
    ) -> tuple[Description, Description | None]:
        """Describes the arrays as :meth:`_take_pair` does, but only the root has a ``recv``."""
        if self._has(recv, "recv", root):
            return self._take_pair(send, recv, gathers=gathers)
        return self._take(send, "send"), None

    def _take_scattered(
        self, send: Array | None, recv: Array, root: int
    ) -> tuple[Description | None, Description]:
        """Describes the arrays as :meth:`_take_pair` does, but only the root has a ``send``."""
        if self._has(send, "send", root):
            return self._take_pair(send, recv, scatters=True)
        return None, self._take(recv, "recv", writable=True)

    def _has(self, array: Array | None, name: str, root: int) -> bool:
        self.membership.check_rank(root, "root")
        if self.rank == root and array is None:
            raise ArrayError(f"{name} is None at the root, rank {root}.")
        return self.rank == root

    def _shared(self, array: Description) -> Description:
        """Returns the array; checks that its size is a multiple of the number of ranks."""
        if array.size % self.world_size:
            raise ArrayError(
                f"send has {array.size} elements, which {self.world_size} ranks cannot share evenly."
            )
        return array

    def _operation(self, op: ReduceOp, array: Description) -> ReduceOp:
        """Returns the operation of this name, checked for the array's dtype.

        Raises:
            ArrayError: the operation does not exist, or not for this dtype.
        """
        found = ReduceOp.of(op)
        ARITHMETIC[array.dtype].check(array.dtype, found)
        return found

    def _parts(self, array: NumpyArray) -> list[NumpyArray]:
        return list(array.reshape(self.world_size, -1)) if array.size else [array] * self.world_size
