"""Sharded parameters (ZeRO-3): gathered for each use in the forward and backward pass, then freed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from muster.communicators.work import Work
from muster.errors import WorkerError
from muster.parallel.mesh_communicator import MeshCommunicator
from muster.parallel.planning.buckets import ParameterShard


class _Shared(Protocol):
    """A parameter of which each rank trains a flat shard."""

    name: str
    shard: ParameterShard
    parameter: Any


class _Arrival(torch.autograd.Function):  # type: ignore[misc]
    """The use of a gathered parameter in a forward pass; it passes the gradient to a callback."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, whole: Any, arrived: Callable[[Any], None]) -> Any:
        """Returns the parameter. ``anchor`` requires a gradient, so that backward runs, but gets none."""
        ctx.arrived = arrived
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Any) -> Any:
        """Passes the gradient to the callback."""
        ctx.arrived(grad)
        return None, None, None


class _Bucket:
    """Parameters that one collective gathers."""

    def __init__(self, members: Sequence[_Shared], mesh_communicator: MeshCommunicator) -> None:
        self.members = list(members)
        self.again: dict[str, Any] = {}
        """Parameters that were gathered for the backward pass and not yet freed."""
        self.here: dict[str, Any] = {}
        """Parameters that were gathered for the forward pass and not yet taken."""
        self._mesh_communicator = mesh_communicator
        self._sent: Any = None
        self._rows: Any = None
        self._work: Work | None = None
        self._mark: Any = None

    def start(self) -> None:
        """Starts the all_gather on the side stream; its memory is allocated on the current stream."""
        if self._rows is not None:
            return
        first = self.members[0].shard
        with torch.no_grad():
            shares = [each.parameter.detach().reshape(-1) for each in self.members]
            self._sent = shares[0] if len(shares) == 1 else torch.cat(shares)
            self._rows = self._sent.new_empty((first.ranks, self._sent.numel()))
            with self._mesh_communicator.on_side_stream():
                self._work = self._mesh_communicator.start_all_gather(self._sent, self._rows, first.dims)
                self._mark = self._mesh_communicator.mark()

    def finish(self) -> dict[str, Any]:
        """Waits for the all_gather, and returns the whole local parts by name."""
        self.start()
        rows = self._waited()
        found = {}
        with torch.no_grad():
            for each, part in zip(
                self.members, rows.split([m.shard.own_numel for m in self.members], 1), strict=True
            ):
                found[each.name] = part.reshape(-1)[: each.shard.numel].view(each.shard.shape)
        return found

    def forget(self) -> None:
        """Waits for a running all_gather, and drops all results; the next collective raises its error."""
        if self._rows is not None:
            with contextlib.suppress(WorkerError):
                self._waited()
        self.again.clear()
        self.here.clear()

    def _waited(self) -> Any:
        rows, work, mark, sent = self._rows, self._work, self._mark, self._sent
        self._sent = self._rows = self._work = self._mark = None
        assert work is not None
        work.wait()
        self._mesh_communicator.wait_for(mark)
        del sent  # the collective has read it until now
        return rows


@dataclass(slots=True)
class _Whole:
    """A gathered parameter in memory; ``views`` holds weak references to the tensors that use its memory."""

    name: str
    version: int
    views: list[Any] = field(default_factory=list)

    def is_there(self) -> bool:
        return any(view() is not None for view in self.views)


@dataclass(frozen=True, slots=True)
class _Again:
    """What autograd saves in place of a view of a parameter."""

    name: str
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Regathered:
    """Gathers buckets of parameters before they are used, in the forward pass and again in the backward pass.

    While one bucket is in use, the next one is gathered. Autograd does not save gathered parameters: they are
    gathered again when the backward pass reads them, and freed when they have their gradient.

    Args:
        buckets: the parameters of each bucket.
        mesh_communicator: gathers the shards of the ranks.
    """

    def __init__(self, buckets: Sequence[Sequence[_Shared]], mesh_communicator: MeshCommunicator) -> None:
        self._buckets = [_Bucket(members, mesh_communicator) for members in buckets]
        self._of = {each.name: bucket for bucket in self._buckets for each in bucket.members}
        self._held = {each.name: each for bucket in self._buckets for each in bucket.members}
        self._order: list[_Bucket] = []
        self._read: dict[int, _Bucket] = {}  # what the backward pass reads, in reverse order of its last use
        self._whole: dict[int, _Whole] = {}  # by address

    def __contains__(self, name: str) -> bool:
        """Whether a parameter is gathered here."""
        return name in self._of

    def __bool__(self) -> bool:
        """Whether any parameter is gathered here."""
        return bool(self._of)

    # ------------------------------------------------------------ the forward pass

    def begin(self, order: Sequence[str]) -> None:
        """Begins a forward pass that reads parameters in this order."""
        for bucket in self._buckets:
            if not bucket.again:
                bucket.forget()
        self._order = list({id(self._of[name]): self._of[name] for name in order}.values())
        self._read, self._whole = {}, {}

    def take(self, name: str, arrived: Callable[[Any], None]) -> Any:
        """Returns a whole parameter for a forward pass; the caller drops it after its last use.

        Args:
            name: the parameter's node.
            arrived: called with the parameter's gradient.
        """
        bucket = self._of[name]
        if name not in bucket.here:
            bucket.here = bucket.finish()
            for following in self._after(bucket, self._order):
                following.start()
        whole = bucket.here.pop(name)
        if torch.is_grad_enabled():
            anchor = torch.empty(0, device=whole.device, requires_grad=True)
            whole = _Arrival.apply(anchor, whole, arrived)
            version = self._held[name].parameter._version
            self._whole[_address(whole)] = _Whole(name, version, [weakref.ref(whole)])
        whole.regathered = True
        return whole

    def see(self, result: Any) -> None:
        """Notes a tensor if it is a view of a gathered parameter."""
        if isinstance(result, torch.Tensor):
            found = self._whole.get(_address(result))
            if found is not None and found.is_there():
                found.views.append(weakref.ref(result))

    def saving(self) -> Any:
        """Returns a context for a forward pass in which autograd saves no gathered parameters."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def will_read(self, given: Sequence[str], names: Sequence[str]) -> None:
        """Notes that the backward pass will read these parameters in this order, before those noted so far.

        Args:
            given: parameters that a recomputed layer shares with others; it reads those noted already.
            names: parameters that only the layer reads, and gathers again.
        """
        read = [name for name in given if id(self._of[name]) in self._read]
        for name in reversed((*read, *names)):
            self._note(self._of[name])

    def _note(self, bucket: _Bucket) -> None:
        self._read.pop(id(bucket), None)
        self._read[id(bucket)] = bucket

    def _pack(self, tensor: Any) -> Any:
        found = self._whole.get(_address(tensor)) if tensor.numel() else None
        if found is None or not found.is_there():
            return tensor
        held = self._held[found.name]
        if tensor.dtype != held.parameter.dtype:
            return tensor
        self._note(self._of[found.name])
        return _Again(
            found.name, found.version, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        )

    # ------------------------------------------------------------ the backward pass

    def _unpack(self, packed: Any) -> Any:
        if not isinstance(packed, _Again):
            return packed
        if self._held[packed.name].parameter._version != packed.version:
            raise WorkerError(
                f"{packed.name} was changed after a forward pass, and its backward pass would use the new"
                " values",
                remedy="Call backward() before the optimizer's step.",
            )
        return self._again(packed.name).as_strided(packed.size, packed.stride, packed.offset)

    def take_again(self, name: str) -> Any:
        """Returns a whole parameter for the recomputation of a layer, detached from its gradient."""
        whole: Any = self._again(name).detach().requires_grad_()
        whole.regathered = True
        return whole

    def _again(self, name: str) -> Any:
        """Returns a parameter that is gathered for the backward pass; gathers its bucket if necessary."""
        bucket = self._of[name]
        if name not in bucket.again:
            bucket.again |= bucket.finish()
            for following in self._after(bucket, list(reversed(self._read.values()))):
                if not following.again:
                    following.start()
        return bucket.again[name]

    def give_back(self, name: str) -> None:
        """Frees a parameter that has its gradient, and is not read any more."""
        self._of[name].again.pop(name, None)

    def forget(self) -> None:
        """Frees everything after a backward pass that has finished or raised an error."""
        for bucket in self._buckets:
            bucket.forget()

    # ------------------------------------------------------------ beside training

    def wholes(self) -> Iterator[tuple[str, Any]]:
        """Yields each parameter whole, bucket by bucket. All ranks must iterate to the end."""
        for bucket in self._buckets:
            yield from bucket.finish().items()

    @staticmethod
    def _after(bucket: _Bucket, order: Sequence[_Bucket]) -> Sequence[_Bucket]:
        """Returns the bucket that comes next in this order, if there is one."""
        places = [number for number, each in enumerate(order) if each is bucket]
        return order[places[0] + 1 : places[0] + 2] if places else ()


def _address(tensor: Any) -> int:
    address: int = tensor.untyped_storage().data_ptr()
    return address
