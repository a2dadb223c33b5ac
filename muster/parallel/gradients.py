"""The local parameters of a rank, and the summation of their gradients, in buckets by the ranks that sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from muster.communicators.work import Work
from muster.errors import SettingsError, WorkerError
from muster.parallel.mesh_communicator import MeshCommunicator
from muster.parallel.planning.buckets import ParameterShard, PlannedBucket
from muster.parallel.regathered import Regathered
from muster.torch.flat import is_dense


class PartialGradient(torch.Tensor):  # type: ignore[misc]  # torch has no types here
    """A gradient of which this rank has only a part: its norm cannot be computed here.

    ``torch.nn.utils.clip_grad_norm_`` would take the norm of the part for that of the whole gradient, and
    each rank would scale by another factor. Results of all other functions are ordinary tensors.
    """

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a function of torch with this gradient.

        Raises:
            SettingsError: the function is a norm.
        """
        if function in _NORMS:
            raise SettingsError(
                "this rank has only a part of the gradient, and would compute the norm of that part: call"
                " model.clip_grad_norm_(max_norm), which returns the norm of the whole gradient (for the"
                " norm of the part: parameter.grad.clone())"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return result.as_subclass(cls) if function in _THE_SAME else result


_NORMS = {
    *(torch.linalg.vector_norm, torch.linalg.matrix_norm, torch.linalg.norm),
    *(torch.norm, torch.Tensor.norm, torch._foreach_norm),
}
_THE_SAME = {torch.Tensor.detach, torch.Tensor.data.__get__}
"""Functions that old programs call before they compute the norm; their results stay partial gradients."""


class HeldParameter:
    """A parameter's local part, with its gradient.

    Args:
        partial: whether other ranks' gradients of it have other values.

    Attributes:
        parameter: what the optimizer trains: the local part, or its flat shard if the update is sharded.
        gathered: the whole local part, if ``parameter`` is only a shard of it.
        factor: the factor that its gradient is multiplied by.
    """

    def __init__(
        self,
        name: str,
        shard: ParameterShard,
        parameter: torch.nn.Parameter,
        mesh_communicator: MeshCommunicator,
        factor: float,
        *,
        partial: bool,
    ) -> None:
        self.name, self.shard, self.factor = name, shard, factor
        self._partial = partial
        self.parameter = parameter
        self.held: Any = None
        self._mark: Any = None  # a grad of zeros, which shows the optimizer that a gradient is held
        self._version = -1  # of the parameter's grad since keep(); -1: nothing is held
        self.gathered: Any = None
        self._mesh_communicator = mesh_communicator

    @property
    def whole(self) -> Any:
        """The local part; if only the update is sharded, as the last :meth:`Gradients.gather` returned it."""
        return self.gathered if self.shard.sharded else self.parameter.detach()

    def load(self, local: Any) -> None:
        """Copies new values of the local part into the parameter."""
        self.parameter.copy_(share_of(self.shard, local, self._mesh_communicator))

    def no_gradient(self) -> Any:
        """Returns zeros of the shape of the local part's gradient."""
        if self.shard.sharded:
            return self.parameter.new_zeros(self.shard.shape)
        return torch.zeros_like(self.parameter)

    def hold(self, grad: Any) -> None:
        """Accumulates a gradient that is not yet summed over ranks."""
        held = self.take()
        self.held = grad if held is None else held + grad

    def keep(self) -> None:
        """Sets a grad of None to zeros while a gradient is held, so that ``zero_grad()`` is noticed."""
        if self.held is None or not self.parameter.requires_grad:
            return
        if self.parameter.grad is None:
            zeros = self.parameter.new_zeros(()).expand(self.parameter.shape)
            self.parameter.grad = self._mark = self._shown(zeros)
        self._version = self.parameter.grad._version

    def take(self) -> Any:
        """Removes and returns the held gradient; None: there is none, or ``zero_grad()`` has cleared it."""
        shown, version = self.parameter.grad, self._version
        if version >= 0 and (shown is None or (shown._version != version and not shown.any())):
            self.held = None
        held, self.held, self._version = self.held, None, -1
        return held

    def deliver(self, grad: Any) -> None:
        """Adds a summed gradient to the parameter's ``grad``, unless the parameter is frozen by now."""
        if not self.parameter.requires_grad:
            return
        if self.factor != 1:
            grad = grad * self.factor
        if self.parameter.grad is None or self.parameter.grad is self._mark:
            self.parameter.grad, self._mark = self._shown(grad), None
        else:
            self.parameter.grad += grad

    def _shown(self, grad: Any) -> Any:
        return grad.as_subclass(PartialGradient) if self._partial else grad


def share_of(shard: ParameterShard, local: Any, mesh_communicator: MeshCommunicator) -> Any:
    """Returns what a rank trains of its local part: all of it, or its flat shard of a sharded update."""
    if not shard.sharded:
        return local
    start = mesh_communicator.index(shard.dims) * shard.own_numel
    padded = torch.zeros(shard.own_numel * shard.ranks, dtype=local.dtype, device=local.device)
    padded[: shard.numel] = local.reshape(-1)
    return padded[start : start + shard.own_numel].clone().view(shard.own_shape)


class _MeshBucket:
    def __init__(self, planned: PlannedBucket, members: Sequence[HeldParameter]) -> None:
        self.dims, self.sharded, self.members = planned.dims, planned.sharded, list(members)
        self.regathered = planned.regathered
        self.waiting = len(self.members)
        self.work: Work | None = None
        self.mark: Any = None
        self.is_sent = False
        self.flat: Any = None
        self.out: Any = None
        self.views: list[Any] = []
        self.arrived: list[bool] = []
        self.counts: Any = None
        self.packed: list[Any] = []

    def pack(self, mesh_communicator: MeshCommunicator) -> None:
        """Copies the held gradients into one flat tensor, in the order that the collective needs.

        After the gradients it holds a 1 or 0 for each: whether this rank has one. So all ranks learn which
        gradients no rank has.
        """
        first = self.members[0].parameter
        dtype = mesh_communicator.wire_dtype(first.dtype)
        held = [each.take() for each in self.members]
        self.arrived = [grad is not None for grad in held]
        # Kept until delivery, as another stream may still read them.
        self.packed = [grad for grad in held if grad is not None]
        gradients = [
            each.no_gradient() if grad is None else grad
            for each, grad in zip(self.members, held, strict=True)
        ]
        counts = torch.ones(
            len(held), dtype=dtype, device=first.device
        )  # made on the device: a CUDA graph cannot hold copies from the host
        for number, arrived in enumerate(self.arrived):
            if not arrived:
                counts[number].zero_()
        if not self.sharded:
            sizes = [each.shard.numel for each in self.members]
            self.flat = torch.empty(sum(sizes) + len(sizes), dtype=dtype, device=first.device)
            *flats, self.counts = self.flat.split([*sizes, len(sizes)])
            parts = zip(self.members, flats, strict=True)
            self.views = [_laid_out_like(each.parameter, part) for each, part in parts]
            torch._foreach_copy_([*self.views, self.counts], [*gradients, counts])
            return
        ranks = self.members[0].shard.ranks
        sizes = [each.shard.own_numel for each in self.members]
        rows = torch.empty((ranks, sum(sizes) + len(sizes)), dtype=dtype, device=first.device)
        *columns, of_counts = rows.split([*sizes, len(sizes)], 1)
        for each, grad, column in zip(self.members, gradients, columns, strict=True):
            _deal(grad.reshape(-1), column, each.shard.own_numel)
        of_counts.copy_(counts.expand(ranks, -1))
        self.flat = rows.view(-1)
        self.out = torch.empty(self.flat.numel() // ranks, dtype=dtype, device=first.device)
        *flats, self.counts = self.out.split([*sizes, len(sizes)])
        self.views = [part.view(each.parameter.shape) for each, part in zip(self.members, flats, strict=True)]

    def deliver(self) -> None:
        """Adds the sums to the parameters' gradients, except those for which no rank had a gradient."""
        found = self.arrived
        if not all(found) and not (self.counts.is_cuda and torch.cuda.is_current_stream_capturing()):
            found = [count > 0 for count in self.counts.tolist()]
        for each, part, counts in zip(self.members, self.views, found, strict=True):
            if counts:
                each.deliver(part.to(each.parameter.dtype))
        self.flat = self.out = self.work = self.counts = self.mark = None
        self.packed, self.views = [], []
        self.waiting = len(self.members)


def _deal(flat: Any, rows: Any, length: int) -> None:
    """Writes a flat tensor into rows of this length, one after the other, and fills the rest with zeros."""
    full, rest = divmod(flat.numel(), max(1, length))
    rows[:full].copy_(flat[: full * length].view(full, length))
    if rest:
        rows[full, :rest].copy_(flat[full * length :])
        rows[full, rest:].zero_()
    rows[full + (rest > 0) :].zero_()


def _laid_out_like(parameter: Any, flat: Any) -> Any:
    """Returns the flat tensor in the parameter's shape and memory format, which fused optimizers require."""
    if not is_dense(parameter):
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride())


class Gradients:
    """Sums gradients over ranks during the backward pass, and adds them to the parameters at its end.

    Each forward pass uses a parameter through a new leaf, so that the leaf's gradient is that of one pass,
    whatever the parameter's ``grad`` holds. All ranks start the buckets in the same order. They do so during
    the backward pass, or after it if it may belong to several forward passes: their gradients arrive one by
    one.
    """

    def __init__(
        self,
        held: dict[str, HeldParameter],
        planned: Sequence[PlannedBucket],
        mesh_communicator: MeshCommunicator,
    ) -> None:
        self.held, self._mesh_communicator = held, mesh_communicator
        self._buckets = [_MeshBucket(each, [held[name] for name in each.nodes]) for each in planned]
        self._bucket_of = {each.name: bucket for bucket in self._buckets for each in bucket.members}
        self.regathered = Regathered(
            [bucket.members for bucket in self._buckets if bucket.regathered], mesh_communicator
        )
        self.synchronize = True
        self._in_backward = False
        self._task = -1
        self._launched = 0
        self._ready: set[str] = set()
        self._pass = 0
        self._open: set[int] = set()  # forward passes that no backward pass has reached yet
        self._reached: set[int] = set()

    def begin(self, order: Sequence[str] = ()) -> None:
        """Begins a forward pass, which gets its parameters from :meth:`leaf` and :meth:`gathered`.

        Args:
            order: the parameters to gather, in the order in which the pass reads them.
        """
        self.regathered.begin(order)
        self._pass += 1
        if torch.is_grad_enabled():
            self._open.add(self._pass)

    def gather(self) -> None:
        """Gathers the updated parameters on all ranks, if only their update is sharded."""
        for bucket in self._buckets:
            if not bucket.sharded or bucket.regathered:
                continue
            flat = torch.cat([each.parameter.detach().view(-1) for each in bucket.members])
            rows = self._mesh_communicator.gather_stacked(flat, bucket.dims)
            for each, part in zip(
                bucket.members, rows.split([m.shard.own_numel for m in bucket.members], 1), strict=True
            ):
                shard = each.shard
                each.gathered = part.reshape(-1)[: shard.numel].view(shard.shape)

    def leaf(self, name: str) -> Any:
        """Returns a parameter's local part as a leaf of one forward pass."""
        held = self.held[name]
        whole = held.whole.detach()
        if not torch.is_grad_enabled():
            return whole
        arrived = self._arrival(held)

        def ready(leaf: Any) -> None:
            grad, leaf.grad = leaf.grad, None
            arrived(grad)

        whole = whole.requires_grad_()
        whole.register_post_accumulate_grad_hook(ready)
        return whole

    def gathered(self, name: str) -> Any:
        """Gathers and returns a parameter's local part for one forward pass."""
        return self.regathered.take(name, self._arrival(self.held[name]))

    def gathered_again(self, name: str) -> Any:
        """Does the same in the backward pass, for a layer that is recomputed."""
        return self.regathered.take_again(name)

    def _arrival(self, held: HeldParameter) -> Callable[[Any], None]:
        of_pass = self._pass

        def arrived(grad: Any) -> None:
            task = torch._C._current_graph_task_id()
            if self._in_backward and task != self._task:
                raise WorkerError(
                    "the previous backward pass failed: ranks may have started different collectives",
                    remedy="Let its error end the process, or call forget_backward() on all ranks.",
                )
            if not self._in_backward:
                self._in_backward, self._task = True, task
                Variable._execution_engine.queue_callback(self._finish)
            self._reached.add(of_pass)
            bucket = self._bucket_of.get(held.name)
            if bucket is not None and bucket.is_sent:
                raise WorkerError(
                    f"{held.name} got a second gradient after the first one was sent",
                    remedy="Add up the losses of several forward passes, and call backward() once.",
                )
            if bucket is None:
                held.deliver(grad)
                return
            if bucket.regathered:
                self.regathered.give_back(held.name)
            held.hold(grad)
            if held.name not in self._ready:
                self._ready.add(held.name)
                bucket.waiting -= 1
            if self.synchronize and len(self._open) <= 1:
                self._launch_ready()

        return arrived

    def _launch_ready(self) -> None:
        while self._launched < len(self._buckets) and self._buckets[self._launched].waiting <= 0:
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        bucket.is_sent = True
        with torch.no_grad(), self._mesh_communicator.on_side_stream():  # the backward pass continues
            bucket.pack(self._mesh_communicator)
            if bucket.sharded:
                bucket.work = self._mesh_communicator.start_reduce_scatter(
                    bucket.flat, bucket.out, bucket.dims
                )
            else:
                bucket.work = self._mesh_communicator.start_all_reduce(bucket.flat, bucket.dims)
            bucket.mark = self._mesh_communicator.mark()
        if bucket.regathered:  # keeps the whole gradients of two buckets at most in memory
            self._deliver([each for each in self._buckets[: self._launched - 1] if each.regathered])

    def _deliver(self, buckets: Sequence[_MeshBucket]) -> None:
        with torch.no_grad():
            for bucket in buckets:
                if bucket.work is not None:
                    bucket.work.wait()
                    self._mesh_communicator.wait_for(bucket.mark)
                    bucket.deliver()

    def _finish(self) -> None:
        self._in_backward = False
        self._ready.clear()
        self._open -= self._reached
        self._reached.clear()
        self.regathered.forget()
        if self.synchronize:
            while self._launched < len(self._buckets):
                self._launch()
            self._mesh_communicator.join()
            self._deliver(self._buckets)
            self._launched = 0
        else:
            for each in self.held.values():
                each.keep()
        for bucket in self._buckets:
            bucket.waiting, bucket.is_sent = len(bucket.members), False

    def forget(self) -> None:
        """Drops all gradients, and the remains of a backward pass that raised an error."""
        self.regathered.forget()
        for each in self.held.values():
            each.take()
            each.parameter.grad = None
        for bucket in self._buckets:
            bucket.waiting, bucket.work, bucket.flat, bucket.out = len(bucket.members), None, None, None
            bucket.is_sent = False
            bucket.packed.clear()
        self._launched, self._in_backward = 0, False
        self._ready.clear()
        self._open.clear()
        self._reached.clear()
