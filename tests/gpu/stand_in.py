"""CuPy and NCCL on the CPU, as far as one rank needs them, so that the contract's functions run on both."""

from __future__ import annotations

import contextlib
import ctypes
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from muster.communicators.nccl.reduction import ITEM_SIZES, TYPE_NAMES

_MEAN, _FACTOR = 4, 9


class FakeEvent:
    done = True

    def __init__(self, **options: Any) -> None:
        pass

    def record(self, stream: Any) -> None:
        self.stream = stream


class FakeStream:
    ptr = 88

    def __init__(self, **options: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass


class HostArray:
    """A NumPy array that looks like one of CuPy on GPU 0."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values, self.dtype, self.flags = values, values.dtype, values.flags
        self.size, self.shape = values.size, values.shape
        self.data = SimpleNamespace(ptr=values.ctypes.data, device_id=0)

    def __getitem__(self, key: slice) -> HostArray:
        return HostArray(self.values[key])


HostArray.__module__ = "cupy.stand_in"


class OnGpu:
    """A tensor of torch, as far as it is asked, with three elements on GPU 0."""

    is_cuda, shape = True, (3,)

    def __init__(self, dtype: Any = "torch.float32", layout: Any = "strided") -> None:
        self.dtype, self.layout = dtype, layout

    def is_contiguous(self) -> bool:
        return True

    def is_conj(self) -> bool:
        return False

    def element_size(self) -> int:
        return int(getattr(self.dtype, "itemsize", 4))

    def data_ptr(self) -> int:
        return 4096

    def numel(self) -> int:
        return 3

    def get_device(self) -> int:
        return 0


OnGpu.__module__ = "torch.stand_in"


def fake_cupy(current: Any) -> ModuleType:
    """A module in CuPy's place, whose current stream is ``current``."""
    fake: Any = ModuleType("cupy")
    fake.int32 = "i4"
    fake.zeros = lambda count, dtype: HostArray(np.zeros(count, dtype))
    fake.empty = lambda shape, dtype: HostArray(np.empty(shape, dtype))
    fake.from_dlpack = lambda array: HostArray(array.__dlpack__())
    fake.cuda = SimpleNamespace(
        get_current_stream=lambda: current,
        Device=lambda index: contextlib.nullcontext(),
        Stream=FakeStream,
        ExternalStream=lambda address: SimpleNamespace(ptr=address),
        Event=FakeEvent,
    )
    module: ModuleType = fake
    return module


class OneRankNccl:
    """NCCL among one rank, moving memory of the CPU, with its flaw: scaling may stop before the end."""

    class NCCLError(Exception):
        pass

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.factor = 1.0

    def all_reduce(
        self, send: int, recv: int, count: int, dtype: int, op: int, comm: Any, stream: int
    ) -> None:
        item = ITEM_SIZES[dtype]
        if op < _MEAN:
            ctypes.memmove(recv, send, count * item)
            return
        blocks = max(1, min(32, -(-count * item // (16 << 10))))
        pack = 16 // item
        done = min(count, blocks * (-(-(count // blocks) // pack) * pack)) if blocks > 1 else count
        kind = np.dtype(TYPE_NAMES[dtype])
        source = np.frombuffer(ctypes.string_at(send, done * item), kind)
        scaled = source * kind.type(self.factor if op == _FACTOR else 1)
        ctypes.memmove(recv, scaled.tobytes(), done * item)

    reduce_scatter = all_reduce

    def reduce(self, send: int, recv: int, count: int, dtype: int, op: int, root: int, *others: Any) -> None:
        self.all_reduce(send, recv, count, dtype, op, *others)

    def all_gather(self, send: int, recv: int, count: int, dtype: int, comm: Any, stream: int) -> None:
        ctypes.memmove(recv, send, count * ITEM_SIZES[dtype])

    def broadcast(self, send: int, recv: int, count: int, dtype: int, *others: Any) -> None:
        ctypes.memmove(recv, send, count * ITEM_SIZES[dtype])

    def send(self, pointer: int, count: int, dtype: int, peer: int, comm: Any, stream: int) -> None:
        self._exchange(1, pointer, count * ITEM_SIZES[dtype])

    def recv(self, pointer: int, count: int, dtype: int, peer: int, comm: Any, stream: int) -> None:
        self._exchange(0, pointer, count * ITEM_SIZES[dtype])

    def _exchange(self, place: int, pointer: int, length: int) -> None:
        """To oneself: the second of a pair moves the bytes."""
        if not self.sent:
            self.sent = [pointer]
            return
        pair = (pointer, self.sent.pop()) if place == 0 else (self.sent.pop(), pointer)
        ctypes.memmove(*pair, length)

    def red_op_create_pre_mul_sum(self, scalar: int, dtype: int, residence: int, comm: Any) -> int:
        name = TYPE_NAMES[dtype]
        self.factor = float(np.frombuffer(ctypes.string_at(scalar, ITEM_SIZES[dtype]), name)[0])
        return _FACTOR

    def comm_get_async_error(self, comm: Any) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None  # group_start, group_end, red_op_destroy, comm_destroy
