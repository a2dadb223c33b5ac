"""The CPU as a host and a GPU: which tensors would lie on which, and what CUDA refuses while it captures.

Both lie in the same memory here, so a tensor is followed by its storage. What is made from Python's or
NumPy's data, or by a factory without ``device``, lies on the host; ``to(device)`` and ``device=`` take it to
the GPU. A tensor that was there before counts as the GPU's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COPY = (
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned."
    " Please use tensor.pin_memory() or allocate the tensor with pin_memory=True."
)
NOT_PERMITTED = "operation not permitted when stream is capturing"
_MIXED = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
_GENERATOR = "Attempt to increase offset for a CUDA generator not in capture mode."

_FROM_DATA = {"tensor", "as_tensor", "asarray"}
_FACTORIES = {
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "zeros",
}
_READS = {"tolist", "numpy", "__array__", "__dlpack__", "cpu"}
_SYNCHRONISING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_here = threading.local()  # ranks are threads, and modes are of a thread


class Machine:
    """A host with a GPU, for this thread; a context manager."""

    def __init__(self) -> None:
        self._capturing = False
        self._on_host: dict[int, Any] = {}  # storages by their address, held so that none comes again
        self._modes = contextlib.ExitStack()

    def __enter__(self) -> Machine:
        self._before = getattr(_here, "machine", None)
        _here.machine = self
        self._modes.enter_context(_Operations(self))
        self._modes.enter_context(_Functions(self))
        return self

    def __exit__(self, *exception: object) -> None:
        _here.machine = self._before
        self._modes.close()

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Between the begin and the end of a capture."""
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False

    def refuse(self, reason: str, *, unless: bool = False) -> None:
        """Raises what CUDA does, if this is within a capture."""
        if self._capturing and not unless:
            raise RuntimeError(reason)

    def on_host(self, tensor: Any) -> bool:
        """Whether it would lie in the host's memory, unpinned."""
        return isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata in self._on_host

    def put(self, tensors: Any, *, host: bool) -> Any:
        """Says where these lie; returns them."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if host:
                    self._on_host[storage._cdata] = storage
                else:
                    self._on_host.pop(storage._cdata, None)
        return tensors


class _Operations(TorchDispatchMode):  # type: ignore[misc]
    """What torch calls by itself too, in the backward pass and in the optimizer."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        machine = self._machine
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        host = [each for each in tensors if machine.on_host(each)]
        alone = len(host) == len(tensors)
        if function._overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
            chosen = [each for each in args[1] if each is not None]
            waits = any(each.dtype in (torch.bool, torch.uint8) for each in chosen)
        else:
            waits = not _SYNCHRONISING.isdisjoint(function.tags)
        machine.refuse(NOT_PERMITTED, unless=not waits or (bool(tensors) and alone))
        machine.refuse(_GENERATOR, unless=_is_registered(kwargs.get("generator")))
        if function is torch.ops.aten.copy_.default:
            machine.refuse(COPY, unless=len(host) in (0, len(tensors)))
        elif any(each.dim() for each in host):  # a lone number is passed to the kernel
            indexes = function._overloadpacket is torch.ops.aten.index
            machine.refuse(COPY if indexes else _MIXED, unless=alone)
        result = function(*args, **kwargs)
        if function is torch.ops.aten.lift_fresh.default or (tensors and alone):
            machine.put(result, host=True)
        return result


class _Functions(TorchFunctionMode):  # type: ignore[misc]
    """What shows only where it is called: on one device moving and reading are no operations."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        machine, name = self._machine, getattr(function, "__name__", "")
        first: Any = args[0] if args else None
        here = isinstance(first, torch.Tensor)
        if name in _READS and here:
            machine.refuse(NOT_PERMITTED, unless=machine.on_host(first))
            result = function(*args, **kwargs)
            return machine.put(result.clone(), host=True) if name == "cpu" else result
        if name == "pin_memory" and here:
            return machine.put(first.clone(), host=False)
        if name in _FROM_DATA or name == "new_tensor":
            data = args[-1] if name == "new_tensor" else first
            if name in _FROM_DATA and kwargs.get("device") is None:
                return function(*args, **kwargs)
            given = isinstance(data, torch.Tensor) and not machine.on_host(data)
            machine.refuse(COPY, unless=given)
            result = function(*args, **kwargs)
            return result if given else machine.put(result.clone(), host=False)
        if name == "to" and here and machine.on_host(first) and _names_device(args[1:], kwargs):
            machine.refuse(COPY)
            return machine.put(function(*args, **kwargs).clone(), host=False)
        result = function(*args, **kwargs)
        if name in _FACTORIES and not here and kwargs.get("device") is None:
            machine.put(result, host=True)
        return result


def _names_device(args: Any, kwargs: Any) -> bool:
    return any(isinstance(each, torch.device | str) for each in (*args, kwargs.get("device")))


def _is_registered(generator: Any) -> bool:
    """By its seed, as torch hands on another object of the same generator."""
    seeds = [each.initial_seed() for each in getattr(_here, "registered", ())]
    return generator is None or generator.initial_seed() in seeds


def register(generator: Any) -> None:
    """Lets this thread's captures draw from a generator."""
    _here.registered = [*getattr(_here, "registered", ()), generator]


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """As between the begin and the end of a capture, in this thread's machine, if need be in a new one."""
    machine = getattr(_here, "machine", None)
    with contextlib.ExitStack() as stack:
        if machine is None:
            machine = stack.enter_context(Machine())
        stack.enter_context(machine.capture())
        yield


def synchronise(*args: Any, **kwargs: Any) -> None:
    """In the place of what waits for the GPU."""
    machine = getattr(_here, "machine", None)
    if machine is not None:
        machine.refuse(NOT_PERMITTED)
