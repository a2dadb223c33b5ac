"""NumPy arrays as the CPU communicators take them: checks before anything is sent, and reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from muster.worker.communicators.base import Array, Communicator, ReduceOp
from muster.worker.communicators.validation import check_peer, check_rank, overlapping, undefined_mean
from muster.worker.errors import ArrayError

NumpyArray = npt.NDArray[Any]

_SUPPORTED = frozenset(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)) | {"f2", "f4", "f8", "b1"}
_COMBINE: dict[ReduceOp, Callable[..., NumpyArray]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PROD: np.multiply,
}


def dtype_code(array: NumpyArray) -> str:
    """The dtype as it is named on the wire: "f4", "i8", "b1"..."""
    return array.dtype.kind + str(array.dtype.itemsize)


def checked(array: Array, name: str, *, writable: bool = False) -> NumpyArray:
    """Returns the array flattened, without a copy.

    Args:
        array: what the user gave.
        name: its name in messages.
        writable: whether it is to be written.

    Raises:
        ArrayError: not a NumPy array, masked, not contiguous, read-only, or of a dtype that is not supported.
    """
    if not isinstance(array, np.ndarray):
        raise ArrayError(f"{name} is a {type(array).__name__}, not a NumPy array.")
    if dtype_code(array) not in _SUPPORTED or not array.dtype.isnative:
        raise ArrayError(
            f"{name} has the dtype {array.dtype}, which cannot be communicated.",
            remedy="Use float16/32/64, int8-64, uint8-64 or bool in native byte order.",
        )
    if not array.flags.c_contiguous:
        raise ArrayError(f"{name} is not C-contiguous.", remedy="Give numpy.ascontiguousarray(x).")
    if writable and not array.flags.writeable:
        raise ArrayError(f"{name} is read-only.", remedy="Give an array that may be written.")
    if hasattr(array, "mask"):
        raise ArrayError(f"{name} is masked, and masks do not travel.", remedy="Give array.filled(...).")
    return array.view(np.ndarray).reshape(-1)  # a numpy.matrix is never flat


def check_pair(send: NumpyArray, recv: NumpyArray, *, send_parts: int = 1, recv_parts: int = 1) -> None:
    """Checks that dtypes are equal and sizes fit: ``send.size * recv_parts == recv.size * send_parts``.

    Raises:
        ArrayError: they do not.
    """
    if send.dtype != recv.dtype:
        raise ArrayError(f"send has the dtype {send.dtype} and recv {recv.dtype}; they must be the same.")
    if send.size * recv_parts != recv.size * send_parts:
        raise ArrayError(
            f"send has {send.size} elements and recv {recv.size};"
            f" they must be as {send_parts} to {recv_parts}."
        )


def check_overlap(whole: NumpyArray, part: NumpyArray, offset: int = 0) -> None:
    """Checks that two arrays share no memory, or exactly the ``part`` that begins ``offset`` elements in.

    Raises:
        ArrayError: they overlap otherwise.
    """
    if not np.may_share_memory(whole, part):
        return
    if part.ctypes.data != whole.ctypes.data + offset * whole.itemsize:
        raise overlapping()


def check_op(array: NumpyArray, op: ReduceOp) -> None:
    """Checks that the operation is defined for the dtype.

    The mean of integers is refused (it would have to be rounded), and so are sum and mean of booleans.

    Raises:
        ArrayError: it is not.
    """
    kind = array.dtype.kind
    if op is ReduceOp.MEAN and kind != "f":
        raise undefined_mean(str(array.dtype))
    if op is ReduceOp.SUM and kind == "b":
        raise ArrayError("The sum of bool is not defined.", remedy="Use max for any, or an integer dtype.")


def as_bytes(array: NumpyArray) -> memoryview:
    """The memory of a flat contiguous array."""
    return array.view(np.uint8).data


def from_bytes(data: memoryview, dtype: np.dtype[Any]) -> NumpyArray:
    """A flat array over bytes that a peer sent."""
    return np.frombuffer(data, dtype) if data else np.empty(0, dtype)


def combine(op: ReduceOp, left: NumpyArray, right: NumpyArray, out: NumpyArray) -> None:
    """Combines two arrays; of a mean, this is the sum. ``out`` may be either."""
    _COMBINE[op](left, right, out=out)


def finish(op: ReduceOp, out: NumpyArray, ranks: int) -> None:
    """Makes the sum of ``ranks`` arrays their mean, if that is asked for."""
    if op is ReduceOp.MEAN:
        np.divide(out, out.dtype.type(ranks), out=out)


def reduce_all(op: ReduceOp, parts: Sequence[NumpyArray], out: NumpyArray) -> None:
    """Combines arrays of all ranks in order of rank; ``out`` may share no memory with them."""
    if len(parts) == 1:
        out[...] = parts[0]
    else:
        combine(op, parts[0], parts[1], out)
        for part in parts[2:]:
            combine(op, out, part, out)
    finish(op, out, len(parts))


class CheckedCommunicator(Communicator):
    """A communicator on NumPy arrays, with the checks that all of them make before anything is sent."""

    def _parts(self, array: NumpyArray) -> list[NumpyArray]:
        return list(array.reshape(self.world_size, -1)) if array.size else [array] * self.world_size

    def _at_root(
        self, array: Array | None, name: str, root: int, *, writable: bool = True
    ) -> NumpyArray | None:
        self._check_rank(root, "root")
        if self.rank != root:
            return None
        if array is None:
            raise ArrayError(f"{name} is None at the root, rank {root}.")
        return checked(array, name, writable=writable)

    def _check_rank(self, rank: int, name: str) -> None:
        check_rank(self.membership, rank, name)

    def _check_peer(self, peer: int) -> None:
        check_peer(self.membership, peer)
