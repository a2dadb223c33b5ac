"""Reads from arrays of several libraries what a communicator needs: address, size and dtype.

An array is a C-contiguous buffer in the memory on which the communicator works, or the result of
:func:`describe`. For ``tcp`` that means NumPy arrays and torch tensors in the host's memory; for ``nccl``
CuPy arrays, torch tensors, or anything with ``__cuda_array_interface__`` on a GPU. A communicator with
``takes_host`` accepts both.

NumPy, CuPy and torch arrays are read through their own attributes, anything else through
``__cuda_array_interface__``, and last through DLPack (by torch or CuPy, whichever is loaded). No library but
NumPy is imported here, because a library whose array is given is loaded already. No memory is ever copied,
because results must be written into the caller's memory.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from muster.communicators.arithmetic import ARITHMETIC, NumpyArray
from muster.communicators.array_library import loaded_library
from muster.errors import ArrayError

Array = Any
"""An array of the backend's kind, or its description."""

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
"""Names of dtypes by NumPy's characters; the one of bfloat16 is from ml_dtypes, which CuPy uses."""

_SIZES = {name: each.storage.itemsize for name, each in ARITHMETIC.items()}


class Description:
    """The facts about an array that a communicator needs. Holds the array, and so its memory.

    Attributes:
        array: the array; a new one if numbers were given.
        size: its number of elements.
        dtype: by NumPy's name, for example "float32" or "bfloat16".
        itemsize: bytes per element.
        device: the index of its GPU, or ``HOST`` or ``SOME_GPU``.
        address: the address of its first element on a GPU; 0 for arrays on the host.
        flat: on the host, a one-dimensional NumPy array over the same memory; None on a GPU.
        is_made: whether it was made of numbers, so that the caller would not see a result in it.
        stream: address of the stream on which the work that fills it is queued, if its interface names one.
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
        """Its size in bytes."""
        return self.size * self.itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        array = self.array
        return tuple(array.shape if hasattr(array, "shape") else array.__cuda_array_interface__["shape"])

    def new(self, shape: tuple[int, ...]) -> Description:
        """Makes a new array of the same dtype with this array's library, or one that shares its device."""
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
    """Describes an array, or makes one of numbers and describes it; returns a description unchanged.

    Args:
        x: an array of any kind, or numbers.
        name: its name in messages.

    Raises:
        ArrayError: ``x`` is neither an array nor numbers, or is not C-contiguous, or is masked.
    """
    describer = describers.get(type(x))
    if describer is None:
        describer = describers[type(x)] = _describer_of(type(x), x)
    return describer(x, name)


def check_apart(whole: Description, part: Description, offset: int | None = 0) -> None:
    """Checks that two arrays share no memory, or that one is exactly the part of the other at ``offset``.

    Args:
        whole: the larger one.
        part: the other one; may be as large.
        offset: where in ``whole``, in elements, ``part`` may begin; None: they must not overlap at all.

    Raises:
        ArrayError: the arrays overlap in another way.
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


def kind_of(x: Any) -> str:
    """The full name of an array's type: "numpy.ndarray"."""
    kind = type(x)
    root = _root_of(kind)
    return kind.__name__ if root == "builtins" else f"{root}.{kind.__name__}"


def as_bytes(array: NumpyArray) -> memoryview:
    """The memory of a flat contiguous array."""
    return array.view(np.uint8).data


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
    # NumPy would make an array of one Python object if it knew none of the interfaces.
    if hasattr(x, "__dlpack__") and not (hasattr(x, "__array__") or hasattr(x, "__array_interface__")):
        return _of_dlpack
    return _of_numbers


def _of_numpy(array: NumpyArray, name: str, made: type[Description] = Description) -> Description:
    kind = array.dtype
    dtype = _BY_CHARACTER.get(kind.char) if kind.isnative else None
    if not array.flags.c_contiguous:
        raise _scattered(array, name, array.shape)
    if hasattr(array, "mask"):
        raise ArrayError(
            f"{name} is a masked array, whose mask would be lost.", remedy="Give array.filled(...)."
        )
    flat = array.reshape(-1) if type(array) is np.ndarray else array.view(np.ndarray).reshape(-1)
    if dtype == "bfloat16":
        flat = flat.view(np.uint16)
    return made(array, array.size, dtype or str(kind), kind.itemsize, HOST, 0, flat)


def _of_numbers(x: Any, name: str) -> Description:
    try:
        numbers = np.asarray(x)
    except ValueError as error:
        raise ArrayError(f"{name} cannot become an array: {error}.") from error
    if numbers.dtype.kind in "OUS":
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
            f"{name} is a lazy conjugate view: its memory holds the numbers before conjugation.",
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
