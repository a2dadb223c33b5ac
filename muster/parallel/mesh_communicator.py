"""Redistributes tensors between layouts on a mesh of ranks, over Muster's communicators."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from muster.communicators.base import Communicator
from muster.communicators.reduce_ops import ReduceOp
from muster.communicators.work import FINISHED, Work
from muster.errors import GroupError
from muster.parallel.planning.layouts import Mesh, RedistributionStep, coordinates, group_ranks
from muster.torch.device_waits import DeviceWaits
from muster.torch.transfer import array_of, bytes_of


class MeshCommunicator:
    """One communicator for each set of mesh dimensions that a plan needs.

    Args:
        communicator: the communicator of all ranks of the mesh.
        mesh: the number of ranks along each mesh dimension.
        needed: the sets of mesh dimensions along which ranks will communicate; the same on all ranks.

    Raises:
        GroupError: the world size of the communicator is not that of the mesh.
    """

    def __init__(self, communicator: Communicator, mesh: Mesh, needed: Iterable[tuple[int, ...]]) -> None:
        if math.prod(mesh) != communicator.world_size:
            raise GroupError(
                f"The plan is for {math.prod(mesh)} ranks; the job has {communicator.world_size}.",
                remedy="Plan again for this number of ranks.",
            )
        self.mesh = mesh
        self.world = communicator
        self.place = coordinates(communicator.rank, mesh)
        self._groups: dict[tuple[int, ...], Communicator] = {}
        self._stream: Any = None
        self._waits = DeviceWaits(None)
        communicator.measure_waits(self._waits.take)
        self._in_use = False
        for dims in sorted(set(needed)):
            if self._alone(dims):
                continue
            for number, ranks in enumerate(group_ranks(dims, mesh)):
                if len(ranks) == communicator.world_size:
                    self._groups[dims] = communicator
                    continue
                name = f"mesh{'x'.join(map(str, mesh))}.{'-'.join(map(str, dims))}.{number}"
                part = communicator.split(name, ranks)
                if part is not None:
                    self._groups[dims] = part

    def close(self) -> None:
        """Closes the communicators that were made here."""
        for group in self._groups.values():
            if group is not self.world:
                group.close()
        self._groups.clear()

    def size(self, dims: Sequence[int]) -> int:
        """Returns the number of ranks of a group along these mesh dimensions."""
        return math.prod(self.mesh[d] for d in dims)

    def index(self, dims: Sequence[int]) -> int:
        """Returns this rank's number in its group along these mesh dimensions."""
        number = 0
        for d in dims:
            number = number * self.mesh[d] + self.place[d]
        return number

    def _alone(self, dims: Sequence[int]) -> bool:
        """Whether this rank's group is this rank alone: it then has no communicator, and sends nothing."""
        return self.size(dims) == 1

    # ------------------------------------------------------------ beside the current stream

    @contextlib.contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Context in which work runs on a separate GPU stream, after the current stream's work so far.

        The caller must keep the memory that is used there alive until :meth:`join`.
        """
        if not torch.cuda.is_initialized():
            yield
            return
        current = torch.cuda.current_stream()
        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)
        self._stream.wait_stream(current)
        self._in_use = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Makes the current stream wait for the side stream."""
        if self._in_use:
            with self._waits.measuring(capturing=torch.cuda.is_current_stream_capturing()):
                torch.cuda.current_stream().wait_stream(self._stream)
            self._in_use = False

    def mark(self) -> Any:
        """Records the current stream's work so far, for :meth:`wait_for`; returns None without a GPU."""
        return torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None

    def wait_for(self, mark: Any) -> None:
        """Makes the current stream wait for the work that :meth:`mark` recorded on another stream."""
        if mark is None:
            return
        capturing = torch.cuda.is_current_stream_capturing()
        with self._waits.measuring(capturing=capturing) if self._in_use else contextlib.nullcontext():
            torch.cuda.current_stream().wait_event(mark)

    def replayed(self) -> None:
        """Notes the launch of a captured step; the step measures its own waiting times."""
        self._waits.replayed()

    # ------------------------------------------------------------ collectives

    def all_reduce(self, x: Any, dims: tuple[int, ...], op: ReduceOp = ReduceOp.SUM) -> Any:
        """Returns the sum of the ranks' tensors (or another reduction) as a new tensor."""
        out = _plain(x).contiguous().clone()
        if self._alone(dims):
            return out
        group = self._groups[dims]
        wire = self._wire(out)
        with self._waits.within_step(wire):
            group.all_reduce(array_of(group, wire.view(-1)), array_of(group, wire.view(-1)), op)
        return out if wire is out or out.is_complex() else wire.to(out.dtype)

    def all_gather(self, x: Any, dims: tuple[int, ...], dim: int) -> Any:
        """Returns the ranks' tensors, concatenated along ``dim``."""
        stacked = self.gather_stacked(x, dims)
        return stacked.movedim(0, dim).flatten(dim, dim + 1)

    def gather_stacked(self, x: Any, dims: tuple[int, ...]) -> Any:
        """Returns the ranks' tensors, stacked to shape [ranks, ...]."""
        send = _plain(x).contiguous()
        if self._alone(dims):
            return send.clone().unsqueeze(0)
        group = self._groups[dims]
        recv = torch.empty((group.world_size, *send.shape), dtype=send.dtype, device=send.device)
        with self._waits.within_step(send):
            group.all_gather(self._raw(group, send), self._raw(group, recv))
        return recv

    def reduce_scatter(self, x: Any, dims: tuple[int, ...], dim: int) -> Any:
        """Returns this rank's part along ``dim`` of the sum of the ranks' tensors."""
        if self._alone(dims):
            return x.detach().contiguous().clone()
        group = self._groups[dims]
        apart = _plain(x).unflatten(dim, (group.world_size, -1)).movedim(dim, 0).contiguous()
        wire = self._wire(apart)
        out = torch.empty(wire.shape[1:], dtype=wire.dtype, device=wire.device)
        with self._waits.within_step(wire):
            group.reduce_scatter(array_of(group, wire.view(-1)), array_of(group, out.view(-1)), ReduceOp.SUM)
        return torch.view_as_complex(out) if x.is_complex() else out.to(x.dtype)

    def all_to_all(self, x: Any, dims: tuple[int, ...], gathered: int, divided: int) -> Any:
        """Redistributes a tensor that is split along ``gathered`` so that it is split along ``divided``."""
        if self._alone(dims):
            return x.detach().contiguous().clone()
        group = self._groups[dims]
        send = _plain(x).unflatten(divided, (group.world_size, -1)).movedim(divided, 0).contiguous()
        recv = torch.empty_like(send)
        with self._waits.within_step(send):
            group.all_to_all(self._raw(group, send), self._raw(group, recv))
        return recv.movedim(0, gathered).flatten(gathered, gathered + 1)

    def part(self, x: Any, dims: Sequence[int], dim: int) -> Any:
        """Returns this rank's part along ``dim`` of a whole tensor."""
        length = x.shape[dim] // self.size(dims)
        return x.narrow(dim, self.index(dims) * length, length).contiguous()

    def start_all_reduce(self, flat: Any, dims: tuple[int, ...]) -> Work:
        """Starts to sum ``flat`` over the ranks in place; the result is valid after ``wait()``."""
        if self._alone(dims):
            return FINISHED
        group = self._groups[dims]
        array = array_of(group, flat)
        return group.all_reduce(array, array, ReduceOp.SUM, async_op=not flat.is_cuda)

    def start_reduce_scatter(self, flat: Any, out: Any, dims: tuple[int, ...]) -> Work:
        """Starts to write this rank's part of the sum of ``flat`` to ``out``; valid after ``wait()``."""
        if self._alone(dims):
            out.copy_(flat)
            return FINISHED
        group = self._groups[dims]
        return group.reduce_scatter(
            array_of(group, flat), array_of(group, out), ReduceOp.SUM, async_op=not flat.is_cuda
        )

    def start_all_gather(self, flat: Any, rows: Any, dims: tuple[int, ...]) -> Work:
        """Starts to gather the ranks' ``flat`` into the rows of ``rows``; valid after ``wait()``."""
        if self._alone(dims):
            rows.copy_(flat.unsqueeze(0))
            return FINISHED
        group = self._groups[dims]
        send, recv = self._raw(group, flat), self._raw(group, rows)
        return group.all_gather(send, recv, async_op=not flat.is_cuda)

    def wire_dtype(self, dtype: Any) -> Any:
        """Returns the dtype in which sums are communicated: float32 for bfloat16, which NumPy lacks."""
        return torch.float32 if dtype == torch.bfloat16 and not self.world.on_device else dtype

    def _wire(self, x: Any) -> Any:
        if x.is_complex():  # summed as pairs of real numbers, in the same memory: NCCL has no complex dtypes
            return torch.view_as_real(x)
        return x.to(self.wire_dtype(x.dtype))

    def _raw(self, group: Communicator, x: Any) -> Any:
        """Returns the tensor's memory as an array of bytes, for collectives without arithmetic."""
        return array_of(group, bytes_of(x))

    # ------------------------------------------------------------ moves

    def run(self, x: Any, steps: Sequence[RedistributionStep]) -> Any:
        """Applies the steps of a redistribution to a tensor."""
        for step in steps:
            if self.size(step.dims) == 1:
                continue
            if step.kind == "all_reduce":
                x = self.all_reduce(x, step.dims)
            elif step.kind == "all_gather":
                x = self.all_gather(x, step.dims, step.source)
            elif step.kind == "reduce_scatter":
                x = self.reduce_scatter(x, step.dims, step.target)
            elif step.kind == "all_to_all":
                x = self.all_to_all(x, step.dims, step.source, step.target)
            elif step.kind == "slice":
                x = self.part(x, step.dims, step.target)
            else:  # share
                x = x / self.size(step.dims)
        return x


def _plain(x: Any) -> Any:
    """Returns the tensor without its gradient, with conjugation and negation written to memory.

    Torch performs these two lazily: it only sets a bit of the tensor.
    """
    return x.detach().resolve_conj().resolve_neg()


class Move(torch.autograd.Function):  # type: ignore[misc]
    """A redistribution, with that of the gradient as its backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        mesh_communicator: MeshCommunicator,
        there: Sequence[RedistributionStep],
        back: Sequence[RedistributionStep],
    ) -> Any:
        """Redistributes the value."""
        ctx.mesh_communicator, ctx.back = mesh_communicator, back
        return mesh_communicator.run(x, there) if there else x.view_as(x)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Any) -> Any:
        """Redistributes the gradient."""
        return ctx.mesh_communicator.run(grad, ctx.back), None, None, None


class Scale(torch.autograd.Function):  # type: ignore[misc]
    """The identity, with the gradient multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        """Returns x."""
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Multiplies the gradient by the factor."""
        return grad * ctx.factor, None
