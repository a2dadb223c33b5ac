"""The gradients of one backward pass of a DataParallel, reduced bucket by bucket while the pass runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from muster.communicators.reduce_ops import ReduceOp
from muster.errors import WorkerError
from muster.torch.buckets import GradientBucket
from muster.torch.flat_buffers import FlatBuffers
from muster.torch.pass_counter import RankNumbers, UnfinishedPasses
from muster.torch.sparse_gradients import SparseGradients
from muster.torch.transfer import CommStream


class BackwardPass:
    """Reduces the buckets of one backward pass in order, each as soon as all its gradients are ready.

    An instance is made at the first gradient of its pass.

    Args:
        buckets: all buckets, in the order in which every rank reduces them.
        bucket_of: number of each parameter's bucket, by ``id(parameter)``; sparse gradients have no bucket.
        comm_stream: runs the collectives.
        op: MEAN or SUM.
        scale: 0-dim tensor by which this rank's gradients are multiplied; None: 1.
        sparse: the parameters with sparse gradients, which are reduced after the buckets.
        passes: counts this rank's unfinished training passes; the last bucket carries the count.
        numbers: the counts of all ranks.
        module: the wrapped module; in training mode its buffers are broadcast with the last bucket.
        flat_buffers: the module's buffers, in flat tensors.

    Attributes:
        seen: ``id(parameter)`` of each gradient that is ready, in the order in which they became ready.
        read_aside: tensors that the comm_stream may still read, kept alive while a CUDA graph is captured.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        bucket_of: Mapping[int, int],
        comm_stream: CommStream,
        op: ReduceOp,
        *,
        scale: Any | None,
        sparse: SparseGradients,
        passes: UnfinishedPasses,
        numbers: RankNumbers,
        module: Any,
        flat_buffers: Sequence[FlatBuffers],
    ) -> None:
        self._buckets, self._bucket_of = buckets, bucket_of
        self._comm_stream, self._op, self._scale = comm_stream, op, scale
        self._sparse, self._passes, self._numbers = sparse, passes, numbers
        self._module, self._flat_buffers = module, flat_buffers
        self._waiting = [len(bucket.parameters) for bucket in buckets]
        self._launched = 0
        self._ends = False
        self.seen: dict[int, None] = {}
        self.read_aside: list[Any] = []

    def add(self, parameter: Any) -> None:
        """Notes that a parameter's gradient is complete, and reduces the buckets that this completes.

        Raises:
            WorkerError: this gradient was complete earlier in this pass, or :meth:`finish` has been called.
        """
        if self._ends or id(parameter) in self.seen:
            raise WorkerError(
                "a gradient was computed twice in one backward pass, or the previous pass failed: ranks may"
                " have started different AllReduces",
                remedy="Let an error in a backward pass end the process; checkpoint shared layers with"
                " use_reentrant=False.",
            )
        self.seen[id(parameter)] = None
        if parameter not in self._sparse:
            self._waiting[self._bucket_of[id(parameter)]] -= 1
        while self._launched < len(self._buckets) and self._waiting[self._launched] <= 0:
            if self._launched == len(self._buckets) - 1 and self._passes.waiting:
                break  # only the end shows whether this pass covers all waiting forward passes
            self._launch()

    def finish(self) -> None:
        """Reduces the remaining buckets and the sparse gradients, and waits like :meth:`CommStream.join`."""
        self._ends = True
        while self._launched < len(self._buckets):
            self._launch()
        self._sparse.reduce(self._comm_stream, self._op, self._scale)
        self._comm_stream.join()
        self.read_aside.clear()

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        last = self._launched == len(self._buckets)
        buffers = self._flat_buffers if last and self._module.training else []
        with (
            torch.no_grad(),
            self._comm_stream.on_side_stream(),
        ):  # otherwise backward(create_graph=True) would record all this
            self._keep(bucket.fill(self._scale))
            if last:
                if not self._comm_stream.capturing():
                    self._numbers.set(self._passes.settle())
                self._numbers.put(bucket.numbers)
            for flat in buffers:
                self._keep(flat.gather())
            for gradient in bucket.in_place:
                self._comm_stream.reduce(gradient, self._op)
            self._comm_stream.reduce(bucket.wire, self._op, buffers=[flat.flat for flat in buffers])
            if self._comm_stream.in_order:
                bucket.unpack()

    def _keep(self, tensors: list[Any]) -> None:
        """Keeps alive the tensors that the communication stream reads, so that their memory is not reused."""
        if self._comm_stream.capturing():
            self.read_aside += tensors
        elif self._comm_stream.in_order:
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self._comm_stream.device))
