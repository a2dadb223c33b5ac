"""Streams and events of the library whose arrays are communicated: torch or CuPy.

NCCL takes a stream's address. Only the array library knows which stream to use, because each library has its
own current stream.
"""

from __future__ import annotations

import abc
import functools
import importlib
from collections.abc import Callable
from typing import Any

from muster.communicators.array_library import loaded_library
from muster.errors import CommunicatorError

LEGACY_STREAM, THREAD_STREAM = 1, 2
"""CUDA's handles of a device's default stream (whose address may also be 0) and of a thread's."""


class CudaLibrary(abc.ABC):
    """The operations of torch or CuPy on one device that the communicator needs."""

    name: str
    current: Callable[[], int]
    """Address of the caller's current stream. A bound callable instead of a method, for the hot path."""

    @abc.abstractmethod
    def new_stream(self) -> tuple[Any, int]:
        """Returns a new stream that does not wait for the default stream, and its address."""

    @abc.abstractmethod
    def follow(self, stream: Any) -> None:
        """Makes ``stream`` wait for the work on the current stream."""

    @abc.abstractmethod
    def follow_exported(self, address: int) -> None:
        """Makes the current stream wait for the work on the stream with this address, of any library."""

    @abc.abstractmethod
    def mark(self, stream: Any | None = None) -> Any:
        """Records an event on ``stream`` (None: the current one) and returns it."""

    @abc.abstractmethod
    def wait(self, event: Any) -> None:
        """Makes the current stream wait for ``event``."""

    @abc.abstractmethod
    def happened(self, event: Any) -> bool:
        """Whether ``event`` has completed. Never blocks."""

    @abc.abstractmethod
    def idle(self) -> bool:
        """Whether all work on the current stream has completed. Never blocks."""

    @abc.abstractmethod
    def capturing(self) -> bool:
        """Whether a CUDA graph is being recorded on the current stream."""

    @abc.abstractmethod
    def scratch(self) -> tuple[Any, int]:
        """Returns an int32 zero on the device, and its address."""


class _TorchCuda(CudaLibrary):
    """torch's streams."""

    name = "torch"

    def __init__(self, device: int) -> None:
        self._torch = torch = importlib.import_module("torch")
        self._device = torch.device("cuda", device)
        self.current = functools.partial(torch._C._cuda_getCurrentRawStream, device)

    def new_stream(self) -> tuple[Any, int]:
        stream = self._torch.cuda.Stream(self._device)
        return stream, stream.cuda_stream

    def follow(self, stream: Any) -> None:
        stream.wait_stream(self._torch.cuda.current_stream(self._device))

    def follow_exported(self, address: int) -> None:
        if address == self.current() or (address == LEGACY_STREAM and self.current() == 0):
            return
        if address == THREAD_STREAM:  # torch knows no such stream
            self._torch.cuda.synchronize(self._device)
            return
        cuda = self._torch.cuda
        legacy = address == LEGACY_STREAM
        exported = cuda.default_stream(self._device) if legacy else cuda.ExternalStream(address, self._device)
        cuda.current_stream(self._device).wait_stream(exported)

    def mark(self, stream: Any | None = None) -> Any:
        event = self._torch.cuda.Event()
        event.record(self._torch.cuda.current_stream(self._device) if stream is None else stream)
        return event

    def wait(self, event: Any) -> None:
        self._torch.cuda.current_stream(self._device).wait_event(event)

    def happened(self, event: Any) -> bool:
        return bool(event.query())

    def idle(self) -> bool:
        return bool(self._torch.cuda.current_stream(self._device).query())

    def capturing(self) -> bool:
        return bool(self._torch.cuda.is_current_stream_capturing())

    def scratch(self) -> tuple[Any, int]:
        zero = self._torch.zeros(1, dtype=self._torch.int32, device=self._device)
        return zero, zero.data_ptr()


class _CupyCuda(CudaLibrary):
    """CuPy's streams."""

    name = "cupy"

    def __init__(self, device: int) -> None:
        self._cupy = cupy = importlib.import_module("cupy")
        self._device = device
        get_current_stream = cupy.cuda.get_current_stream
        self.current = lambda: get_current_stream().ptr

    def new_stream(self) -> tuple[Any, int]:
        with self._cupy.cuda.Device(self._device):
            stream = self._cupy.cuda.Stream(non_blocking=True)
        return stream, stream.ptr

    def follow(self, stream: Any) -> None:
        stream.wait_event(self.mark())

    def follow_exported(self, address: int) -> None:
        if address != self.current():
            self.wait(self.mark(self._cupy.cuda.ExternalStream(address)))

    def mark(self, stream: Any | None = None) -> Any:
        with self._cupy.cuda.Device(self._device):
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(self._cupy.cuda.get_current_stream() if stream is None else stream)
        return event

    def wait(self, event: Any) -> None:
        self._cupy.cuda.get_current_stream().wait_event(event)

    def happened(self, event: Any) -> bool:
        return bool(event.done)

    def idle(self) -> bool:
        return bool(self._cupy.cuda.get_current_stream().done)

    def capturing(self) -> bool:
        return bool(self._cupy.cuda.get_current_stream().is_capturing())

    def scratch(self) -> tuple[Any, int]:
        with self._cupy.cuda.Device(self._device):
            zero = self._cupy.zeros(1, dtype=self._cupy.int32)
        return zero, zero.data.ptr


def use_device(index: int) -> int:
    """Makes device ``index`` (-1: the current one) current in this thread; returns its index.

    Raises:
        CommunicatorError: neither torch nor CuPy is installed, or there is no such GPU.
    """
    library = loaded_library()
    module = importlib.import_module(library)
    try:
        if library == "torch":
            if index >= 0:
                module.cuda.set_device(index)
            return int(module.cuda.current_device())
        if index >= 0:
            module.cuda.Device(index).use()
        module.cuda.runtime.free(0)  # NCCL needs a context; CuPy would make one only with the first array
        return int(module.cuda.runtime.getDevice())
    except Exception as error:
        raise CommunicatorError(
            f"GPU {index} cannot be used on this host: {error}",
            remedy="Check nvidia-smi, CUDA_VISIBLE_DEVICES and DEVICE_ID.",
        ) from error


def device_model(index: int) -> str:
    """Returns the GPU's name, as the driver reports it."""
    library = loaded_library()
    module = importlib.import_module(library)
    if library == "torch":
        return str(module.cuda.get_device_name(index))
    name = module.cuda.runtime.getDeviceProperties(index)["name"]
    return name.decode() if isinstance(name, bytes) else str(name)


def library_of(name: str, device: int) -> CudaLibrary:
    """Returns the adapter of library ``name`` for ``device``."""
    return _TorchCuda(device) if name == "torch" else _CupyCuda(device)
