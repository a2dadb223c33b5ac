"""Parameters as one rank holds them, and how their gradients are summed, in buckets by who sums them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from muster.worker.communicators.base import Work
from muster.worker.errors import WorkerError
from muster.worker.parallel.fabric import Fabric
from muster.worker.parallel.planning.buckets import Holding, PlannedBucket


class HeldParameter:
    """A parameter's local part.

    Attributes:
        parameter: what the optimizer trains: the local part, or with a divided update this rank's flat share.
        whole: the local part that is computed with; shares memory with ``parameter`` unless that is a share.
    """

    def __init__(self, name: str, holding: Holding, local: Any, fabric: Fabric) -> None:
        self.name, self.holding = name, holding
        self.whole = local
        self.held: Any = None
        self.factor: float = 1
        if holding.sharded:
            self.parameter = torch.nn.Parameter(self._share(local, fabric))
        else:
            self.parameter = torch.nn.Parameter(local)
            self.whole = self.parameter.detach()

    def _share(self, local: Any, fabric: Fabric) -> Any:
        holding = self.holding
        start = fabric.index(holding.dims) * holding.shard
        padded = torch.zeros(holding.shard * holding.ranks, dtype=local.dtype, device=local.device)
        padded[: holding.numel] = local.reshape(-1)
        return padded[start : start + holding.shard].clone()

    def load(self, local: Any, fabric: Fabric) -> None:
        """Takes other values of the local part."""
        self.parameter.copy_(self._share(local, fabric) if self.holding.sharded else local)

    def hold(self, grad: Any) -> None:
        """Adds a gradient that is not summed over ranks yet."""
        self.held = grad if self.held is None else self.held + grad

    def deliver(self, grad: Any) -> None:
        """Adds a finished gradient to what the optimizer sees."""
        if self.factor != 1:
            grad = grad * self.factor
        if self.parameter.grad is None:
            self.parameter.grad = grad
        else:
            self.parameter.grad += grad


class _Bucket:
    def __init__(self, planned: PlannedBucket, members: Sequence[HeldParameter]) -> None:
        self.dims, self.sharded, self.members = planned.dims, planned.sharded, list(members)
        self.waiting = len(self.members)
        self.work: Work | None = None
        self.flat: Any = None
        self.out: Any = None

    def pack(self, fabric: Fabric) -> None:
        """Puts the held gradients into one flat tensor, in the order that the collective wants."""
        first = self.members[0].whole
        dtype = fabric.wire_dtype(first.dtype)
        if not self.sharded:
            self.flat = torch.cat([self._gradient(each).reshape(-1).to(dtype) for each in self.members])
            return
        ranks = self.members[0].holding.ranks
        rows = []
        for each in self.members:
            padded = torch.zeros(ranks * each.holding.shard, dtype=dtype, device=first.device)
            padded[: each.holding.numel] = self._gradient(each).reshape(-1)
            rows.append(padded.view(ranks, -1))
        self.flat = torch.cat(rows, 1).view(-1)
        self.out = torch.empty(self.flat.numel() // ranks, dtype=dtype, device=first.device)

    def _gradient(self, each: HeldParameter) -> Any:
        grad, each.held = each.held, None
        return torch.zeros_like(each.whole) if grad is None else grad

    def deliver(self) -> None:
        """Hands the sums on to the parameters."""
        flat = self.out if self.sharded else self.flat
        sizes = [each.holding.shard for each in self.members]
        for each, part in zip(self.members, flat.split(sizes), strict=True):
            each.deliver(part.to(each.parameter.dtype).view(each.parameter.shape))
        self.flat = self.out = self.work = None
        self.waiting = len(self.members)


class Gradients:
    """Sums gradients while the backward pass goes on, and delivers them when it is over.

    A parameter is used as a fresh leaf in each forward pass, so what reaches it is one pass's gradient,
    whatever the optimizer's ``grad`` holds. All ranks start the buckets in the same order.
    """

    def __init__(
        self, held: dict[str, HeldParameter], planned: Sequence[PlannedBucket], fabric: Fabric
    ) -> None:
        self.held, self._fabric = held, fabric
        self._buckets = [_Bucket(each, [held[name] for name in each.nodes]) for each in planned]
        self._bucket_of = {each.name: bucket for bucket in self._buckets for each in bucket.members}
        self.synchronize = True
        self._in_backward = False
        self._task = -1
        self._launched = 0
        self._ready: set[str] = set()

    def gather(self) -> None:
        """Brings the parameters whose update was divided up to date on all ranks."""
        for bucket in self._buckets:
            if not bucket.sharded:
                continue
            flat = torch.cat([each.parameter.detach() for each in bucket.members])
            rows = self._fabric.gather_stacked(flat, bucket.dims)
            for each, part in zip(
                bucket.members, rows.split([m.holding.shard for m in bucket.members], 1), strict=True
            ):
                holding = each.holding
                each.whole = part.reshape(-1)[: holding.numel].view(holding.shape)

    def leaf(self, name: str) -> Any:
        """A parameter's local part as a leaf of one forward pass."""
        held = self.held[name]
        whole = held.whole.detach()
        if not torch.is_grad_enabled():
            return whole
        whole = whole.requires_grad_()
        whole.register_post_accumulate_grad_hook(self._hook(held))
        return whole

    def _hook(self, held: HeldParameter) -> Callable[[Any], None]:
        def ready(leaf: Any) -> None:
            grad, leaf.grad = leaf.grad, None
            task = torch._C._current_graph_task_id()
            if self._in_backward and task != self._task:
                raise WorkerError(
                    "the backward pass before this one broke off: ranks may have sent different collectives",
                    remedy="Let its error end the process, or call forget_backward() on all ranks.",
                )
            if not self._in_backward:
                self._in_backward, self._task = True, task
                Variable._execution_engine.queue_callback(self._finish)
            bucket = self._bucket_of.get(held.name)
            if bucket is None:
                held.deliver(grad)
                return
            held.hold(grad)
            if held.name not in self._ready:
                self._ready.add(held.name)
                bucket.waiting -= 1
            if self.synchronize:
                self._launch_ready()

        return ready

    def _launch_ready(self) -> None:
        while self._launched < len(self._buckets) and self._buckets[self._launched].waiting <= 0:
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        with torch.no_grad():
            bucket.pack(self._fabric)
            if bucket.sharded:
                bucket.work = self._fabric.start_reduce_scatter(bucket.flat, bucket.out, bucket.dims)
            else:
                bucket.work = self._fabric.start_all_reduce(bucket.flat, bucket.dims)

    def _finish(self) -> None:
        self._in_backward = False
        self._ready.clear()
        if self.synchronize:
            while self._launched < len(self._buckets):
                self._launch()
            with torch.no_grad():
                for bucket in self._buckets:
                    if bucket.work is not None:
                        bucket.work.wait()
                    bucket.deliver()
            self._launched = 0
        for bucket in self._buckets:
            bucket.waiting = len(bucket.members)

    def forget(self) -> None:
        """Drops what a backward pass that broke off has left."""
        for each in self.held.values():
            each.held = None
            each.parameter.grad = None
        for bucket in self._buckets:
            bucket.waiting, bucket.work, bucket.flat, bucket.out = len(bucket.members), None, None, None
        self._launched, self._in_backward = 0, False
        self._ready.clear()
