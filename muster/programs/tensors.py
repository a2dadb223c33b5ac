"""Converts tensors to the form that the communicator takes, and checks that those of a call fit together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from muster.communicators.arithmetic import ARITHMETIC
from muster.errors import ArrayError
from muster.programs import BACKEND

Tensor = Any


class FlatTensor:
    """A tensor in the form that the communicator takes: dense, and of a dtype that it knows.

    Args:
        tensor: a dense tensor on the CPU.
        writes: whether a collective writes it.

    Attributes:
        array: shares the tensor's memory if possible; otherwise a copy, which :meth:`finish` writes back.

    Raises:
        ArrayError: the tensor is on another device, or sparse.
    """

    def __init__(self, tensor: Tensor, *, writes: bool = False) -> None:
        if not tensor.is_cpu:
            raise ArrayError(
                f"The process group {BACKEND!r} takes tensors on the CPU; this one is on {tensor.device}.",
                remedy='For those of a GPU make another group, with backend="nccl".',
            )
        if tensor.layout is not torch.strided:
            raise ArrayError("Sparse tensors can be summed by all_reduce, and nothing else.")
        self._tensor = tensor.detach()
        self._writes = writes
        plain = self._tensor.resolve_conj().resolve_neg()
        self._dense = plain.contiguous()
        self._copied = self._dense.data_ptr() != self._tensor.data_ptr() and tensor.numel() > 0
        self.array = in_known_dtype(self._dense)

    def __enter__(self) -> FlatTensor:
        """Returns itself; the block's end calls :meth:`finish`, unless the block has raised."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        """See :meth:`finish`."""
        if kind is None:
            self.finish()

    def finish(self) -> None:
        """Writes the result back to the tensor, if ``array`` is a copy."""
        if self._writes and self._copied:
            self._tensor.copy_(self._dense)


def in_known_dtype(dense: Tensor) -> Tensor:
    """Returns a view of the same memory in a dtype that the communicator knows: pairs of reals, or bytes."""
    if dense.is_complex():
        return torch.view_as_real(dense)
    if str(dense.dtype).removeprefix("torch.") in ARITHMETIC:
        return dense
    return dense.reshape(-1).view(torch.uint8)


def apart(source: Tensor, target: Tensor, offset: int | None = None) -> Tensor:
    """Returns ``source``, or a copy if it shares memory with ``target``.

    Args:
        source: the tensor that a collective reads.
        target: the tensor that it writes.
        offset: the offset in ``target``, in elements, at which ``source`` may lie without a copy; None: none.
    """
    if source.untyped_storage().data_ptr() != target.untyped_storage().data_ptr():
        return source
    if offset is not None and source.data_ptr() == target.data_ptr() + offset * target.element_size():
        return source
    return source.clone()


def hand_out(found: Tensor, parts: Sequence[Tensor]) -> None:
    """Copies each row of ``found`` into the part of its index."""
    for row, part in zip(found, parts, strict=True):
        with FlatTensor(part, writes=True) as flat:
            flat.array.view(-1).copy_(row)


def check_same_dtype(first: Tensor, second: Tensor, what: str) -> None:
    """Checks that input and output of a collective have the same dtype.

    Raises:
        ArrayError: the dtypes differ.
    """
    if first.dtype != second.dtype:
        raise ArrayError(f"{what} needs tensors of one dtype; these have {first.dtype} and {second.dtype}.")


def check_parts(parts: Sequence[Tensor], like: Tensor, size: int, what: str) -> None:
    """Checks that there is one tensor per rank, with the dtype and the number of elements of ``like``.

    Raises:
        ArrayError: the number of tensors, a dtype or a size differs.
    """
    if len(parts) != size:
        raise ArrayError(f"{what} needs a list of {size} tensors, one for each rank; it has {len(parts)}.")
    for part in parts:
        check_same_dtype(part, like, what)
        if part.numel() != like.numel():
            raise ArrayError(f"{what} needs tensors of one size; these have {part.numel()}, {like.numel()}.")


def split_rows(
    flat: Tensor, shape: Sequence[int], sizes: Sequence[int], ranks: int, name: str
) -> list[Tensor]:
    """Splits a tensor into the rows of each rank.

    Args:
        flat: the tensor, flattened.
        shape: the shape that the user gave it.
        sizes: the number of rows of each rank; empty for the same number each.
        ranks: the number of ranks.
        name: "input" or "output", for messages.

    Raises:
        ArrayError: the sizes do not fit the tensor.
    """
    rows = shape[0] if len(shape) else 1
    if not sizes:
        if rows % ranks:
            raise ArrayError(f"The {name} has {rows} rows, which {ranks} ranks cannot share evenly.")
        sizes = [rows // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != rows or min(sizes) < 0:
        raise ArrayError(f"The {name}'s split sizes {list(sizes)} are not {ranks} that sum to {rows} rows.")
    per_row = flat.numel() // rows if rows else math.prod(shape[1:])
    return list(flat.reshape(-1).split([count * per_row for count in sizes]))
