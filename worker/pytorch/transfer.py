"""How torch tensors travel: on a side stream beside the backward pass (GPU), or in the background (CPU)."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from muster.worker.communicators.base import Communicator, ReduceOp, Work
from muster.worker.errors import ArrayError

FROZEN = " (frozen)"
"""Behind the name of a parameter that requires no gradient."""

_CHUNK_BYTES = 64 * 2**20
Key = TypeVar("Key", bound=Hashable)


def array_of(communicator: Communicator, tensor: Any) -> Any:
    """The tensor as an array that the communicator takes; shares its memory.

    Raises:
        ArrayError: the tensor is not where this communicator works, or has a dtype it does not know.
    """
    if communicator.name == "nccl":
        if not tensor.is_cuda:
            raise ArrayError(
                "the module is on the CPU, and the backend is NCCL",
                remedy='Move it with module.cuda(), or use worker.init("tcp").',
            )
        return tensor
    if tensor.is_cuda:
        raise ArrayError(
            f'the module is on {tensor.device}, and the backend is "{communicator.name}"',
            remedy='Use worker.init("nccl").',
        )
    try:
        return tensor.detach().numpy()
    except TypeError as error:
        raise ArrayError(
            f'the backend "{communicator.name}" does not take {tensor.dtype}: {error}'
        ) from error


def bytes_of(tensor: Any) -> Any:
    """A dense tensor's memory as a flat one of uint8.

    What is only moved needs no dtype with which the communicator can compute: bool or complex numbers, say.
    """
    return tensor.detach().view(-1).view(torch.uint8)


def broadcast_tensors(communicator: Communicator, tensors: Sequence[Any], source: int) -> None:
    """Overwrites tensors of all ranks with those of rank ``source``, in few collectives."""
    named = dict(enumerate(tensors))
    for numbers in pieces(named):
        chunk = [named[number] for number in numbers]
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
        communicator.broadcast(array_of(communicator, bytes_of(flat)), source)
        parts = flat.split([tensor.numel() for tensor in chunk])
        with torch.no_grad():
            for tensor, part in zip(chunk, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def pieces(tensors: Mapping[Key, Any]) -> Iterator[list[Key]]:
    """Divides tensors, by their keys, into chunks of one dtype that travel as one."""
    groups: dict[Any, list[Key]] = {}
    for key, tensor in tensors.items():
        groups.setdefault(tensor.dtype, []).append(key)
    for group in groups.values():
        chunk: list[Key] = []
        size = 0
        for key in group:
            chunk.append(key)
            size += tensors[key].numel() * tensors[key].element_size()
            if size >= _CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk


def copy_tensors(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    """Copies tensors over others of the same shapes and dtypes, in one launch for each dtype.

    Given several dtypes at once, torch copies one tensor after the other: hundreds of launches for a ResNet.
    """
    groups: dict[Any, tuple[list[Any], list[Any]]] = {}
    for target, source in zip(targets, sources, strict=True):
        into, out_of = groups.setdefault(target.dtype, ([], []))
        into.append(target)
        out_of.append(source)
    for into, out_of in groups.values():
        torch._foreach_copy_(into, out_of)


def check_same_tensors(communicator: Communicator, device: Any, named: Iterable[tuple[str, Any]]) -> None:
    """Compares names, shapes and dtypes of all ranks' parameters and buffers. The host waits.

    Raises:
        ArrayError: they differ; the same on all ranks, with the first that does.
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
    """In which tensor a rank's module is another than rank 0's; both texts name one per line."""
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
    """The text of rank ``source``, on all ranks. The host waits."""
    length = gather_numbers(communicator, device, len(mine.encode()))[source]
    buffer = torch.zeros(length, dtype=torch.uint8, device=device)
    if communicator.rank == source and length:
        buffer.copy_(torch.frombuffer(bytearray(mine.encode()), dtype=torch.uint8))
    communicator.broadcast(array_of(communicator, buffer), source)
    synchronize = getattr(communicator, "synchronize", None)
    if synchronize is not None:
        synchronize()
    return bytes(buffer.tolist()).decode()


def gather_numbers(communicator: Communicator, device: Any, number: int) -> list[int]:
    """Every rank's number (below 2**63), on all ranks. The host waits."""
    return [row[0] for row in gather_rows(communicator, device, [number])]


def gather_rows(communicator: Communicator, device: Any, row: list[int]) -> list[list[int]]:
    """Every rank's numbers (below 2**63, as many on each), on all ranks. The host waits."""
    send = torch.tensor(row, dtype=torch.int64, device=device)
    recv = torch.zeros(communicator.world_size * len(row), dtype=torch.int64, device=device)
    communicator.all_gather(array_of(communicator, send), array_of(communicator, recv))
    synchronize = getattr(communicator, "synchronize", None)
    if synchronize is not None:  # a plain read would return what an aborted collective left, or hang
        synchronize()
    rows: list[list[int]] = recv.view(communicator.world_size, len(row)).tolist()
    return rows


class Lane:
    """Where gradients are reduced: a stream of its own on a GPU, the communicator's thread on a CPU."""

    def __init__(self, communicator: Communicator, device: Any) -> None:
        self._communicator = communicator
        self._device = device
        self._works: list[Work] = []
        self.in_order = device.type == "cuda"
        """Whether what is called after :meth:`reduce` sees its result."""
        self._stream = torch.cuda.Stream(device, priority=-1) if self.in_order else None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What is called inside runs beside the current stream, after what that has done so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def reduce(self, flat: Any, op: ReduceOp, *, buffers: Sequence[Any] = ()) -> None:
        """Reduces ``flat`` over all ranks and overwrites ``buffers`` (dense) with rank 0's; in place."""
        communicator = self._communicator
        arrays = [array_of(communicator, bytes_of(buffer)) for buffer in buffers]
        array = array_of(communicator, torch.view_as_real(flat) if flat.is_complex() else flat)
        if self._stream is None:
            self._works.append(communicator.all_reduce(array, array, op, async_op=True))
            self._works += [communicator.broadcast(each, 0, async_op=True) for each in arrays]
            return
        group: Any = getattr(communicator, "group", contextlib.nullcontext)
        with group() if arrays else contextlib.nullcontext():
            communicator.all_reduce(array, array, op)
            for each in arrays:
                communicator.broadcast(each, 0)

    def all_gather(self, mine: Any) -> Any:
        """Every rank's ``mine``, flat, as rows by rank; what follows on the current stream sees them."""
        communicator = self._communicator
        rows = torch.empty(communicator.world_size, mine.numel(), dtype=mine.dtype, device=mine.device)
        with self._amid():
            communicator.all_gather(array_of(communicator, mine), array_of(communicator, rows.view(-1)))
        return rows

    def all_reduce(self, mine: Any, op: ReduceOp) -> Any:
        """``mine`` of all ranks, combined in place; what follows on the current stream sees it."""
        array = array_of(self._communicator, mine)
        with self._amid():
            self._communicator.all_reduce(array, array, op)
        return mine

    @contextlib.contextmanager
    def _amid(self) -> Iterator[None]:
        """Like :meth:`aside`, so that all collectives stand in one row, but the current stream waits."""
        with self.aside():
            yield
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def join(self) -> None:
        """Makes the current stream (GPU) or the caller (CPU) wait for all that was reduced."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self._stream is not None and bool(torch.cuda.is_current_stream_capturing())
