"""Shape, dtype and kind of whatever array a collective is given, and new arrays of that kind.

Some arrays tell what they are through ``__cuda_array_interface__`` or DLPack only. No memory is ever copied
here: results must land in the caller's.
"""

from __future__ import annotations

import importlib
from typing import Any

from muster.worker.communicators.base import Array
from muster.worker.communicators.nccl.streams import loaded_library
from muster.worker.errors import ArrayError


def readable(x: Any, backend: str, name: str = "x") -> Array:
    """``x`` if its shape and dtype can be told, an array over the same memory, or its numbers as an array.

    Args:
        x: an array of any kind, or numbers.
        backend: of the communicator that is to take it.
        name: its name in messages.

    Raises:
        ArrayError: this backend takes no such array, or it is none.
    """
    if _tells_all(x):
        return x
    import numpy as np

    if _is_foreign(x):
        if backend != "nccl":
            raise ArrayError(
                f'{name} is a {kind_of(x)}, and the backend "{backend}" takes NumPy arrays.',
                remedy="Give numpy.from_dlpack(x) if it is on the CPU; arrays on a GPU need NCCL.",
            )
        return x if hasattr(x, "__cuda_array_interface__") else _through_dlpack(x, name)
    try:
        numbers = np.asarray(x)
    except ValueError as error:
        raise ArrayError(f"{name} cannot become an array: {error}.") from error
    if numbers.dtype == object:
        raise ArrayError(f"{name} is a {kind_of(x)}, neither an array nor numbers.")
    return numbers


def writable(x: Any, backend: str) -> Array:
    """``x`` as :func:`readable` reads it where it can be filled, as an ``out`` must: numbers cannot.

    Raises:
        ArrayError: it is no array, or none for this backend.
    """
    if not is_array(x):
        raise ArrayError(f"out is a {kind_of(x)}, which cannot be filled.", remedy="Give an array.")
    return readable(x, backend, "out")


def is_array(x: Any) -> bool:
    """Whether a result can land in it; what else :func:`readable` takes becomes a new array."""
    return _tells_all(x) or _is_foreign(x)


def shape_of(x: Array) -> tuple[int, ...]:
    """The shape."""
    return tuple(x.shape if hasattr(x, "shape") else x.__cuda_array_interface__["shape"])


def dtype_of(x: Array) -> str:
    """The dtype by NumPy's name, "float32" say, of whatever library it is."""
    return str(_dtype(x)).removeprefix("torch.")


def new_like(x: Array, shape: tuple[int, ...]) -> Array:
    """A new array of x's dtype, and of its library, or one that shares its device."""
    root = type(x).__module__.partition(".")[0]
    if root == "torch":
        return x.new_empty(shape)
    if root != "cupy" and not hasattr(x, "__cuda_array_interface__"):
        import numpy as np

        return np.empty(shape, x.dtype)
    library: Any = importlib.import_module("cupy" if root == "cupy" else loaded_library())
    if library.__name__ == "torch":
        return library.empty(shape, dtype=getattr(library, dtype_of(x)), device="cuda")
    return library.empty(shape, _dtype(x))


def kind_of(x: Any) -> str:
    """The type in words: "numpy.ndarray"."""
    kind = type(x)
    root = kind.__module__.partition(".")[0]
    return kind.__name__ if root == "builtins" else f"{root}.{kind.__name__}"


def _dtype(x: Array) -> Any:
    if hasattr(x, "dtype"):
        return x.dtype
    import numpy as np

    return np.dtype(x.__cuda_array_interface__["typestr"])


def _tells_all(x: Any) -> bool:
    # NumPy's scalars, what a.mean() returns say, have shape and dtype too, but are numbers.
    scalar = hasattr(x, "__array_interface__") and not hasattr(x, "__setitem__")
    return hasattr(x, "shape") and hasattr(x, "dtype") and not scalar


def _is_foreign(x: Any) -> bool:
    """Whether it is an array that NumPy would take for an object, because it knows no such interface."""
    if hasattr(x, "__cuda_array_interface__"):
        return True
    return hasattr(x, "__dlpack__") and not (hasattr(x, "__array__") or hasattr(x, "__array_interface__"))


def _through_dlpack(x: Any, name: str) -> Array:
    library = importlib.import_module(loaded_library())
    try:
        return library.from_dlpack(x)
    except Exception as error:
        raise ArrayError(f"{name}, a {kind_of(x)}, cannot be read through DLPack: {error}.") from error
