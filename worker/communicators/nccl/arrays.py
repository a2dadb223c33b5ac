"""What NCCL must know of an array: address, count, dtype, device. Cheap, because every call asks.

CuPy and torch arrays are read through their own attributes, anything else through
``__cuda_array_interface__``, and last through DLPack (by way of whichever of the two libraries is loaded).
No library is imported here: an array of a library proves that it is loaded.

NCCL sees addresses only, so a strided view would be sent as if it were dense. What is not C-contiguous is
therefore refused here, before any rank has started.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from muster.worker.errors import ArrayError

Facts = tuple[int, int, int, int]
"""Address, number of elements, NCCL's number of the dtype, device index (-1: the interface does not say)."""

NCCL_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
"""NCCL's numbers of the dtypes, by NumPy's names (``ncclDataType_t``)."""

TYPE_NAMES = {number: name for name, number in NCCL_TYPES.items()}
ITEM_SIZES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}
"""Bytes per element, by NCCL's number."""

_MOVED_AS = {1: 1, 2: 6, 4: 2, 8: 4}
"""By bytes per element: the number under which an element that NCCL does not know is moved, bit for bit."""

_CUPY_TYPES = {
    "b": 0,
    "B": 1,
    "i": 2,
    "I": 3,
    "l": 4,
    "L": 5,
    "q": 4,
    "Q": 5,
    "e": 6,
    "f": 7,
    "d": 8,
    "E": 9,
}
_INTERFACE_TYPES = {
    "|i1": 0,
    "|u1": 1,
    "<i4": 2,
    "<u4": 3,
    "<i8": 4,
    "<u8": 5,
    "<f2": 6,
    "<f4": 7,
    "<f8": 8,
}


def read_torch(tensor: Any, moved: bool = False) -> Facts:
    """Facts of a ``torch.Tensor``.

    Args:
        tensor: on a GPU, contiguous.
        moved: nothing is computed, so dtypes that NCCL does not know will do, if their size is one it knows.
    """
    dtype = _torch_types().get(tensor.dtype)
    if dtype is None and moved:
        dtype = _MOVED_AS.get(tensor.element_size())
        if tensor.is_conj():
            raise ArrayError(
                "this tensor's conjugate is yet to be computed: its memory holds other numbers",
                remedy="Give tensor.resolve_conj().",
            )
    if dtype is None or not tensor.is_cuda or not tensor.is_contiguous():
        _refuse_torch(tensor, dtype)
    return tensor.data_ptr(), tensor.numel(), dtype, tensor.get_device()


def read_cupy(array: Any, moved: bool = False) -> Facts:
    """Facts of a ``cupy.ndarray``; as :func:`read_torch`."""
    dtype = _CUPY_TYPES.get(array.dtype.char)
    if dtype is None:
        dtype = NCCL_TYPES.get(str(array.dtype))
    if dtype is None and moved:
        dtype = _MOVED_AS.get(array.dtype.itemsize)
    if dtype is None or not array.flags.c_contiguous:
        _refuse(array, dtype, str(array.dtype), array.shape)
    data = array.data
    return data.ptr, array.size, dtype, data.device_id


def read_interface(array: Any, moved: bool = False) -> Facts:
    """Facts of anything with ``__cuda_array_interface__`` (which knows neither bfloat16 nor the device)."""
    interface = array.__cuda_array_interface__
    dtype = _INTERFACE_TYPES.get(interface["typestr"])
    if dtype is None and moved:
        itemsize = interface["typestr"][2:]
        dtype = _MOVED_AS.get(int(itemsize)) if itemsize.isdigit() else None
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    dense = strides is None or dtype is None or _is_dense(shape, tuple(strides), ITEM_SIZES[dtype])
    if dtype is None or not dense:
        _refuse(array, dtype, interface["typestr"], shape)
    if interface["data"][1]:
        raise ArrayError(f"this {_kind(array)} is read-only", remedy="Give an array that can be written.")
    count = 1
    for length in shape:
        count *= length
    return interface["data"][0], count, dtype, -1


def exported_stream(array: Any) -> int | None:
    """The stream on which what fills the array is queued, as its interface tells it; None: none."""
    stream = array.__cuda_array_interface__.get("stream")
    return None if stream is None else int(stream)


def read_dlpack(array: Any, moved: bool = False) -> Facts:
    """Facts of anything that exports DLPack, by way of torch or CuPy."""
    for library, read in (("torch", read_torch), ("cupy", read_cupy)):
        module = sys.modules.get(library)
        if module is not None:
            try:
                return read(module.from_dlpack(array), moved)
            except ArrayError:
                raise
            except Exception as error:
                raise ArrayError(f"this {_kind(array)} cannot be read through DLPack: {error}") from error
    raise ArrayError(
        f"reading a {_kind(array)} through DLPack needs CuPy or torch, and neither is loaded",
        remedy="Import the one you use.",
    )


def reader_of(array: Any) -> Callable[..., Facts]:
    """The function that reads arrays of this array's type.

    Raises:
        ArrayError: NCCL cannot take it (a NumPy array, say).
    """
    roots = {kind.__module__.partition(".")[0] for kind in type(array).__mro__}
    if "torch" in roots and hasattr(array, "data_ptr"):
        return read_torch
    if "cupy" in roots and hasattr(array, "data"):
        return read_cupy
    if hasattr(array, "__cuda_array_interface__"):
        return read_interface
    if hasattr(array, "__dlpack__") and "numpy" not in roots:
        return read_dlpack
    raise ArrayError(
        f"NCCL needs an array on a GPU, not a {_kind(array)}",
        remedy='Move it there (cupy.asarray, tensor.cuda()), or use the "tcp" backend for NumPy arrays.',
    )


_TORCH_TYPES: dict[Any, int] = {}


def _torch_types() -> dict[Any, int]:
    if not _TORCH_TYPES:
        torch = sys.modules["torch"]
        found = {getattr(torch, name, None): number for name, number in NCCL_TYPES.items()}
        _TORCH_TYPES.update({dtype: number for dtype, number in found.items() if dtype is not None})
    return _TORCH_TYPES


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length == 0:
            return True
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _kind(array: Any) -> str:
    return f"{type(array).__module__.partition('.')[0]}.{type(array).__name__}"


def _refuse_torch(tensor: Any, dtype: int | None) -> NoReturn:
    if not tensor.is_cuda:
        raise ArrayError(
            f"NCCL needs a tensor on a GPU; this one is on {tensor.device}",
            remedy='Call tensor.cuda(); on the CPU "tcp" and "gloo" take tensor.detach().numpy().',
        )
    _refuse(tensor, dtype, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _refuse(array: Any, dtype: int | None, dtype_name: str, shape: tuple[int, ...]) -> NoReturn:
    if dtype is None:
        raise ArrayError(
            f"NCCL has no dtype {dtype_name} (a {_kind(array)} of shape {shape})",
            remedy=f"It has {', '.join(NCCL_TYPES)}.",
        )
    raise ArrayError(
        f"this {_kind(array)} of shape {shape} is not C-contiguous",
        remedy="Make a contiguous copy first (tensor.contiguous(), cupy.ascontiguousarray).",
    )
