"""Runs collectives on torch tensors: on a side stream (GPU) or in the communicator's thread (CPU)."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from muster.communicators.base import Communicator
from muster.communicators.reduce_ops import ReduceOp
from muster.communicators.work import Work
from muster.errors import ArrayError
from muster.torch.device_waits import DeviceWaits
from muster.training.carrier import Carrier

FROZEN = " (frozen)"
"""The mark after the name of a parameter that requires no gradient."""


def array_of(communicator: Communicator, tensor: Any) -> Any:
    """Returns the tensor as an array that the communicator takes; the array shares its memory.

    Raises:
        ArrayError: the tensor is on a device, or of a dtype, that this communicator does not take.
    """
    if communicator.on_device:
        if not tensor.is_cuda:
            raise ArrayError(
                "the module is on the CPU, and the backend is NCCL",
                remedy='Move it with module.cuda(), or use muster.init("tcp").',
            )
        return tensor
    if tensor.is_cuda:
        raise ArrayError(
            f'the module is on {tensor.device}, and the backend is "{communicator.name}"',
            remedy='Use muster.init("nccl").',
        )
    if tensor.dtype is torch.bfloat16:
        return tensor
    try:
        return tensor.detach().numpy()
    except TypeError as error:
        raise ArrayError(
            f'the backend "{communicator.name}" does not take {tensor.dtype}: {error}'
        ) from error


def bytes_of(tensor: Any) -> Any:
    """Returns a dense tensor's memory as a 1-dim uint8 tensor.

    So a tensor that is only moved may have a dtype with which the communicator cannot compute, such as bool.
    """
    flat = tensor.detach().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element counts as dense in any stride


class TensorLibrary:
    """Tensors on one device; see :class:`muster.training.carrier.Library`."""

    in_background = False

    def __init__(self, device: Any) -> None:
        self._device = device

    def numbers(self, values: Sequence[int], dtype: str) -> Any:
        """See :class:`Library`."""
        if dtype == "uint8" and values:
            return torch.frombuffer(bytearray(values), dtype=torch.uint8).to(self._device)
        return torch.tensor(list(values), dtype=getattr(torch, dtype), device=self._device)

    def empty(self, size: int, like: Any) -> Any:
        """See :class:`Library`."""
        return torch.empty(size, dtype=like.dtype, device=self._device)

    def packed(self, arrays: Sequence[Any]) -> Any:
        """See :class:`Library`."""
        return torch.cat([tensor.reshape(-1) for tensor in arrays])

    def to_bytes(self, array: Any) -> bytes:
        """See :class:`Library`."""
        raw: bytes = array.cpu().numpy().tobytes()
        return raw

    def sent(self, communicator: Communicator, flat: Any) -> Any:
        """See :class:`Library`."""
        return array_of(communicator, flat if flat.dtype == torch.int64 else bytes_of(flat))


def broadcast_tensors(communicator: Communicator, tensors: Sequence[Any], source: int) -> None:
    """Overwrites tensors of all ranks with those of rank ``source``, in few collectives."""
    if not tensors:
        return
    carrier = Carrier(communicator, TensorLibrary(tensors[0].device))
    with torch.no_grad():
        for number, part in carrier.broadcast(dict(enumerate(tensors)), source):
            tensors[number].copy_(part)


def memory_bytes(device: Any) -> float:
    """Returns the memory of a device, in bytes; infinite for the CPU."""
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else math.inf


class CopiesAside:
    """Copies of tensors, which can be taken again and put back, at little cost to the host.

    If torch is given several dtypes at once, it copies one tensor after the other, with hundreds of launches
    for a ResNet. So there is a list for each dtype. It is made once, because making it costs as much as the
    copies.

    Args:
        tensors: the tensors, which must stay the same objects.
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        groups: dict[Any, tuple[list[Any], list[Any]]] = {}
        for tensor in tensors:
            live, kept = groups.setdefault(tensor.dtype, ([], []))
            live.append(tensor)
            kept.append(tensor.clone())
        self._groups = list(groups.values())
        self._places: list[tuple[int, Any, Any]] | None = None
        self._found: dict[tuple[int, int, Any], Any] = {}

    def take(self) -> None:
        """Copies the tensors again."""
        for live, kept in self._groups:
            torch._foreach_copy_(kept, live)

    def copy_of(self, view: Any) -> Any:
        """Returns the copy of a 1-dim view of one of the tensors, in memory order; None: there is none."""
        key = view.data_ptr(), view.numel(), view.dtype
        if key not in self._found:
            self._found[key] = self._find(view)
        return self._found[key]

    def _find(self, view: Any) -> Any:
        if self._places is None:
            pairs = [pair for live, kept in self._groups for pair in zip(live, kept, strict=True)]
            self._places = sorted(
                ((live.data_ptr(), live, kept) for live, kept in pairs), key=lambda place: place[0]
            )
        number = bisect.bisect_right(self._places, view.data_ptr(), key=lambda place: place[0]) - 1
        if number < 0 or not view.is_contiguous():
            return None
        place, live, kept = self._places[number]
        offset, rest = divmod(view.data_ptr() - place, view.element_size())
        dense = live.stride() == kept.stride() and live.dtype == view.dtype and not rest
        if not dense or offset + view.numel() > live.numel():
            return None
        return kept.as_strided(view.shape, view.stride(), kept.storage_offset() + offset)

    def put_back(self) -> None:
        """Overwrites the tensors with the copies."""
        for live, kept in self._groups:
            torch._foreach_copy_(live, kept)


def check_same_tensors(communicator: Communicator, device: Any, named: Iterable[tuple[str, Any]]) -> None:
    """Compares names, shapes and dtypes of all ranks' parameters and buffers. The host waits.

    Raises:
        ArrayError: tensors differ; raised on all ranks, with the name of the first one that differs.
    """
    text = "\n".join(f"{name}\t{_kind(tensor)}" for name, tensor in named)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    digests = gather_numbers(communicator, device, digest)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        texts = [broadcast_text(communicator, device, text, rank) for rank in (0, others[0])]
        ranks = f"ranks {', '.join(map(str, others))}" if len(others) > 1 else f"rank {others[0]}"
        raise ArrayError(
            f"the module on {ranks} differs from rank 0's: {_first_difference(others[0], *texts)}",
            remedy="Build the same module on all ranks.",
        )


def _kind(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _first_difference(rank: int, text: str, other_text: str) -> str:
    """Returns the first tensor in which a rank's module differs from rank 0's; texts have one per line."""
    first, other = (dict(line.split("\t") for line in each.splitlines()) for each in (text, other_text))
    differ = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    if not differ:
        return f"rank {rank} has them in another order"
    name = differ[0]
    more = f" ({len(differ) - 1} more differ)" if len(differ) > 1 else ""
    bare = name.removesuffix(FROZEN)
    frozen_on = [
        r for r, each in ((0, first), (rank, other)) if f"{bare}{FROZEN}" in each and bare not in each
    ]
    if len(frozen_on) == 1 and bare in (other if frozen_on == [0] else first):
        return f"{bare} is frozen on rank {frozen_on[0]} and not on rank {rank - frozen_on[0]}"
    if name not in other:
        return f"rank {rank} has no {name}{more}"
    if name not in first:
        return f"rank {rank} has {name}, and rank 0 has none{more}"
    return f"{name} is {other[name]} on rank {rank} and {first[name]} on rank 0{more}"


def broadcast_text(communicator: Communicator, device: Any, mine: str, source: int) -> str:
    """Returns the text of rank ``source``, on all ranks. The host waits."""
    raw = mine.encode()
    length = gather_numbers(communicator, device, len(raw))[source]
    return Carrier(communicator, TensorLibrary(device)).broadcast_text(raw, length, source)


def gather_numbers(communicator: Communicator, device: Any, number: int) -> list[int]:
    """Returns every rank's number (below 2**63), on all ranks. The host waits."""
    return [row[0] for row in gather_rows(communicator, device, [number])]


def gather_rows(communicator: Communicator, device: Any, row: list[int]) -> list[list[int]]:
    """Returns every rank's row of numbers (below 2**63, the same count on each). The host waits."""
    return Carrier(communicator, TensorLibrary(device)).gather(row)


class CommStream:
    """Runs the collectives of gradients: on a side stream on a GPU, in the communicator's thread on a CPU."""

    def __init__(self, communicator: Communicator, device: Any) -> None:
        self.communicator = communicator
        self.device = device
        self._works: list[Work] = []
        self.in_order = device.type == "cuda"
        """Whether later work on the side stream sees the result of :meth:`reduce`, without :meth:`join`."""
        self._stream = torch.cuda.Stream(device, priority=-1) if self.in_order else None
        self.waits = DeviceWaits(device)
        if self.in_order:
            communicator.measure_waits(self.waits.take)

    @contextlib.contextmanager
    def on_side_stream(self, *, awaited: Any | None = None) -> Iterator[None]:
        """Context in which work runs in parallel with the current stream, after its present work.

        Args:
            awaited: a tensor for whose result later work on the current stream waits.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
        if awaited is not None:
            with self.waits.within_step(awaited):
                torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def reduce(self, flat: Any, op: ReduceOp, *, buffers: Sequence[Any] = ()) -> None:
        """Reduces ``flat`` over all ranks and overwrites ``buffers`` (dense) with rank 0's; in place."""
        communicator = self.communicator
        arrays = [array_of(communicator, bytes_of(buffer)) for buffer in buffers]
        array = array_of(communicator, torch.view_as_real(flat) if flat.is_complex() else flat)
        if self._stream is None:
            self._works.append(communicator.all_reduce(array, array, op, async_op=True))
            self._works += [communicator.broadcast(each, 0, async_op=True) for each in arrays]
            return
        with communicator.group() if arrays and communicator.on_device else contextlib.nullcontext():
            communicator.all_reduce(array, array, op)
            for each in arrays:
                communicator.broadcast(each, 0)

    def all_gather(self, mine: Any) -> Any:
        """Returns every rank's ``mine``, as rows by rank; later work on the current stream sees them."""
        communicator = self.communicator
        rows = torch.empty(communicator.world_size, mine.numel(), dtype=mine.dtype, device=mine.device)
        with self.on_side_stream(awaited=mine):
            communicator.all_gather(array_of(communicator, mine), array_of(communicator, rows.view(-1)))
        return rows

    def all_reduce(self, mine: Any, op: ReduceOp) -> Any:
        """Reduces ``mine`` over all ranks, in place; later work on the current stream sees the result."""
        array = array_of(self.communicator, mine)
        with self.on_side_stream(awaited=mine):
            self.communicator.all_reduce(array, array, op)
        return mine

    def join(self) -> None:
        """Makes the current stream (GPU) or the caller (CPU) wait for all reductions."""
        if self._stream is not None:
            with self.waits.measuring(capturing=self.capturing()):
                torch.cuda.current_stream(self.device).wait_stream(self._stream)
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self._stream is not None and bool(torch.cuda.is_current_stream_capturing())
