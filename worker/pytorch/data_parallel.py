"""``muster.DataParallel``: data-parallel training of a torch module, on GPUs (NCCL) and CPUs alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import Variable

from muster.worker.communicators.base import Communicator, ReduceOp
from muster.worker.errors import SettingsError, WorkerError
from muster.worker.pytorch.buckets import FlatBuffers, GradientBucket, flat_buffers, make_buckets
from muster.worker.pytorch.passes import RankNumbers, UnfinishedPasses
from muster.worker.pytorch.sync_batch_norm import adopt
from muster.worker.pytorch.transfer import (
    FROZEN,
    Lane,
    array_of,
    broadcast_tensors,
    check_same_tensors,
    gather_numbers,
)
from muster.worker.pytorch.wrapper import MasterWeights, ModuleWrapper
from muster.worker.runtime import current
from muster.worker.training.buckets import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BYTES

_DTYPES = {None: None, "bf16": torch.bfloat16}
DEFAULT_LAST_BYTES = 4 * 2**20


class DataParallel(ModuleWrapper):
    """Wraps a module so that every backward pass leaves gradients averaged over all ranks.

    ::

        model = muster.DataParallel(module)
        loss_function(model(images), labels).backward()   # gradients are averaged when this returns
        optimizer.step()

    Gradients travel in flat buckets while the backward pass still runs; afterwards each ``parameter.grad``
    is a view into its bucket. Parameters without a gradient on this rank count as zero; where no rank has
    one, ``grad`` stays None. Buffers (BatchNorm statistics) are rank 0's after every training step.
    ``state_dict`` is the bare module's. A parameter has one wrapper: a later one takes the earlier one's
    place. A hook of yours on a parameter sees this rank's own gradient.

    ``torch.nn.SyncBatchNorm`` layers normalise with the statistics of all ranks' samples, also where ranks
    have different numbers, and in captured steps. All ranks must use the same ones in the same order.

    A rank that leaves a training pass unfinished (an error that the script catches, a batch that it skips)
    and goes on with the next would be a step apart. The ranks compare that with their gradients: on a CPU in
    that very backward pass; on a GPU without a wait, at the beginning of the next step that finds the result.
    So a forward pass in training mode without a backward pass belongs under ``torch.no_grad()``.

    Args:
        module: on one device; its parameters need not be the same on all ranks, those of rank 0 are taken.
        session: whose communicator to use; None: that of ``muster.init()``.
        communicator: use this one instead of a session's.
        gradients_mean: average over ranks; False: sum. What was summed is summed again if gradients are not
            cleared before the next pass; accumulate in :meth:`no_sync`.
        parameter_broadcast: take parameters and buffers from rank 0 now.
        broadcast_buffers: keep buffers equal to rank 0's.
        elastic: send nothing now: members may be there already. :meth:`join` follows, on all ranks.
        weights: "bf16": compute with bfloat16 weights (but for normalisation layers) and keep float32
            masters, which :meth:`parameters` gives to the optimizer then. Faster than autocast. All
            parameters must be float32 and require gradients; what no rank used counts as having a gradient
            of zero, so that weight decay and momentum go on. None: as they are.
        compression: "bf16": gradients travel as bfloat16, but for complex ones; None: in their own dtype.
        bucket_bytes: cap of a bucket, in bytes.
        first_bytes: cap of the first one.
        last_bytes: so many bytes at the end of the backward pass travel apart from what comes before.

    Raises:
        ArrayError: parameters on several devices, of a dtype that the backend does not take, or different
            from another rank's; in the backward pass: a sparse gradient, or a parameter or buffer that was
            converted since.
        SettingsError: no such compression, these parameters cannot have masters, or FSDP or tensor
            parallelism divides them among ranks; in the backward pass:
            the module was moved since, away from its masters.
        CollectiveMismatchError: in the forward or backward pass, on all ranks: one of them is a step apart.
        WorkerError: nothing to train; in the backward pass: the one before it broke off, or a parameter
            requires a gradient that did not when it was wrapped; in the forward pass: a later wrapper has
            some of the parameters, or the module has got others since.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        session: Any = None,
        *,
        communicator: Communicator | None = None,
        gradients_mean: bool = True,
        parameter_broadcast: bool = True,
        broadcast_buffers: bool = True,
        elastic: bool = False,
        weights: str | None = None,
        compression: str | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        first_bytes: int = DEFAULT_FIRST_BYTES,
        last_bytes: int = DEFAULT_LAST_BYTES,
    ) -> None:
        super().__init__(module)
        for name, value in (("compression", compression), ("weights", weights)):
            if value not in _DTYPES:
                raise SettingsError(f'{name} is None or "bf16", not {value!r}')
        self.communicator = communicator or _communicator_of(session)
        self._lane = Lane(self.communicator, self.device)
        self._op = ReduceOp.MEAN if gradients_mean else ReduceOp.SUM
        self._wire_dtype = _DTYPES[compression]
        for dtype in {self._wire_dtype or p.dtype for _, p in self._named}:  # refused now, not later
            array_of(self.communicator, torch.empty(1, dtype=dtype, device=self.device))
        self._caps = {"bucket_bytes": bucket_bytes, "first_bytes": first_bytes, "last_bytes": last_bytes}
        self._joined = not elastic
        if not elastic:
            # Only here what is frozen counts: members that join later may have frozen something meanwhile.
            frozen = [(name + FROZEN, parameter) for name, parameter in self._frozen]
            follow = parameter_broadcast or broadcast_buffers
            sent = [*self._named, *frozen, *(module.named_buffers() if follow else ())]
            check_same_tensors(self.communicator, self.device, sent)
            if parameter_broadcast:
                self.broadcast_parameters()
        self._follow_structure()
        self._flat_buffers: list[FlatBuffers] = flat_buffers(module) if broadcast_buffers else []
        self._synchronize = True
        self._scale: Any = None
        self._task = -1
        self._whole = False
        self._read_aside: list[Any] = []
        self._unused_in_capture: dict[int, frozenset[int]] = {}
        self._order: list[int] | None = [] if weights is None else None  # masters cannot move any more
        self._passes = UnfinishedPasses()
        self._apart: WorkerError | None = None
        self._indices = {id(parameter): index for index, (_, parameter) in enumerate(self._named)}
        self._build(list(reversed(range(len(self._named)))))
        if weights is not None:
            self._masters = MasterWeights(module, self._buckets, _DTYPES[weights])
        self._hook(self._ready)  # after the masters: a hook fixes the gradient's dtype

    # ------------------------------------------------------------ what users call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self.check_step()
        self.refresh_weights()
        trains = self._synchronize and self._joined and self.module.training and torch.is_grad_enabled()
        if compiling or not trains:
            return self.module(*args, **kwargs)
        try:
            output = self.module(*args, **kwargs)
        except BaseException:
            self._passes.broke_off()
            raise
        self._passes.follow(output)
        return output

    def check_step(self, *, begins: bool = False) -> None:
        """Makes sure that the module is what was wrapped, and that all ranks are in the same step.

        Args:
            begins: a step begins that may be a captured one: no forward pass waits for its backward pass.

        Raises:
            WorkerError: parameters have been added or exchanged, or a later wrapper has some of them.
            CollectiveMismatchError: a rank went on after a training pass that it did not finish.
        """
        if self._apart is not None:
            raise self._apart
        self._check_wrapped()
        self._whole = True
        if begins:
            self._numbers.set(self._passes.settle())
        if self._read_later and not self._lane.capturing():
            self._compare_numbers()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the first one outside reduces the sum."""
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    @contextlib.contextmanager
    def uneven_batch(self, samples: int) -> Iterator[None]:
        """For one backward pass in which ranks have different numbers of samples, possibly none.

        Gradients (of losses that are means over the rank's samples) are weighted by the number of samples,
        so that the average is over all samples; with them, what :meth:`no_sync` has accumulated before. A
        rank with none does nothing inside. Every rank must enter.

        Args:
            samples: how many this rank has, >= 0.
        """
        if samples < 0:
            raise SettingsError(f"a batch has at least 0 samples, not {samples}")
        counts = gather_numbers(self.communicator, self.device, samples)
        if 0 in counts and self._shares_statistics and self.module.training:
            empty = ", ".join(str(rank) for rank, count in enumerate(counts) if not count)
            raise SettingsError(
                f"no samples on rank {empty}, and a SyncBatchNorm layer needs all ranks: drop the samples"
                " that are left over, or divide them so that each rank has one at least."
            )
        total = max(1, sum(counts))
        share = samples * len(counts) / total if self._op is ReduceOp.MEAN else samples / total
        self._scale = torch.tensor(share, dtype=torch.float64, device=self.device)
        self._ran = False
        try:
            yield
            if not self._ran:
                self._finish()
        finally:
            self._scale = None

    @property
    def lane(self) -> Lane | None:
        """Where layers that compute with all ranks reach them; None: nobody else is there, or not yet."""
        return self._lane if self._joined and self.communicator.world_size > 1 else None

    @property
    def share(self) -> Any | None:
        """A 0-dim tensor by which this rank's gradients are multiplied, in :meth:`uneven_batch`; or None."""
        return self._scale

    @property
    def uneven(self) -> bool:
        """Whether this is within :meth:`uneven_batch`."""
        return self._scale is not None

    def clip_grad_norm_(self, max_norm: float) -> Any:
        """Scales the averaged gradients down to a norm of at most ``max_norm``.

        Returns:
            The norm before, a 0-dim tensor; the host does not wait for it.
        """
        return torch.nn.utils.clip_grad_norm_(list(self.parameters()), max_norm, foreach=True)

    def broadcast_parameters(self, source: int = 0) -> None:
        """Overwrites all ranks' parameters and buffers with those of rank ``source``."""
        tensors = [parameter.detach() for parameter in self.parameters()]
        tensors += [buffer for buffer in self.module.buffers() if buffer.numel()]
        broadcast_tensors(self.communicator, tensors, source)

    def rebind(self, communicator: Communicator, *, source: int | None = None) -> None:
        """Goes on with another generation's communicator, without gradients: a pass may have broken off.

        Args:
            communicator: the new one.
            source: take parameters and buffers from this rank; None: they are the same already.
        """
        changed, self.communicator = communicator is not self.communicator, communicator
        self._lane = Lane(communicator, self.device)
        self._joined = True
        if changed:  # what a captured graph holds stays where it is
            self._follow_world()
        self.forget_backward()
        if self._order is not None:
            self._order = []
        if source is not None:
            self.broadcast_parameters(source)

    def forget_backward(self) -> None:
        """Forgets a backward pass that broke off, and all gradients: what came of its AllReduces is void.

        Right if all ranks do so, and the communicator has nothing of it under way.
        """
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters)
        self._launched = 0
        self._in_backward = False
        self._seen.clear()
        self._read_aside.clear()
        self._passes.forget()
        self._numbers.forget()
        self._apart = None
        self.zero_grad()

    def join(self, communicator: Communicator, source: int) -> None:
        """Enters a generation that may have newcomers; every rank of it calls this.

        Parameters and buffers are not sent: ``TorchTrainingState`` does that.

        Args:
            communicator: the generation's.
            source: the rank that all follow in how gradients are put into buckets.
        """
        self.rebind(communicator)
        check_same_tensors(self.communicator, self.device, self._named)
        settled = self._order is None
        told = torch.tensor([int(settled), *self.bucket_order()], dtype=torch.int64, device=self.device)
        broadcast_tensors(communicator, [told], source)
        theirs_settled, *theirs = told.tolist()
        self.follow_order(theirs)
        self._order = None if theirs_settled else []

    def bucket_order(self) -> list[int]:
        """The parameters' numbers in the order in which they lie in buckets."""
        return [self._indices[id(parameter)] for bucket in self._buckets for parameter in bucket.parameters]

    def follow_order(self, order: list[int]) -> None:
        """Puts parameters into buckets in this order, from now on.

        With more than two ranks the sums of an AllReduce depend on it, by rounding. Masters, and another
        number of parameters than these, leave it as it is.
        """
        if self._masters is None and sorted(order) == list(range(len(self._named))):
            if order != self.bucket_order():
                self._build(order)
            self._order = None

    # ------------------------------------------------------------ the backward pass

    def _follow_structure(self) -> None:
        self._shares_statistics = adopt(self.module, self)

    def _build(self, order: list[int]) -> None:
        named = [self._named[index] for index in order]
        self._buckets: list[GradientBucket] = make_buckets(
            named, wire_dtype=self._wire_dtype, ranks=self.communicator.world_size, **self._caps
        )
        self._bucket_of = {
            id(parameter): bucket for bucket in self._buckets for parameter in bucket.parameters
        }
        self._launched = 0
        self._in_backward = False
        self._seen: set[int] = set()
        self._follow_world()

    def _follow_world(self) -> None:
        """Makes room for a number of each rank in the last bucket."""
        last = self._buckets[-1]
        if len(last.numbers) != self.communicator.world_size:
            last.allocate(self.communicator.world_size)
        numbers: RankNumbers | None = getattr(self, "_numbers", None)
        if numbers is None or not numbers.serve(self.communicator, last.numbers):
            self._numbers = RankNumbers(self.communicator, last.numbers)
        self._read_later = False

    def _ready(self, parameter: Any) -> None:
        """Runs when a parameter's gradient is complete, within the backward pass."""
        if not self._synchronize:
            return
        if not self._in_backward:
            self._begin()
        if id(parameter) in self._seen:
            raise WorkerError(
                "a gradient came twice in one backward pass, or the pass before it broke off: the ranks may"
                " have sent different AllReduces",
                remedy="Let an error in a backward pass end the process; checkpoint shared layers with"
                " use_reentrant=False.",
            )
        self._seen.add(id(parameter))
        if self._order is not None:
            self._order.append(self._indices[id(parameter)])
        self._bucket_of[id(parameter)].waiting -= 1
        while self._launched < len(self._buckets) and self._buckets[self._launched].waiting <= 0:
            if self._launched == len(self._buckets) - 1 and self._passes.waiting:
                break  # whether this backward pass goes through it too is known only at the end
            self._launch(self._buckets[self._launched])

    def _begin(self) -> None:
        """At the first gradient of a backward pass."""
        if not self._joined:
            raise WorkerError(
                "this DataParallel was made with elastic=True, and nothing has joined it to the others yet",
                remedy="Train in an ElasticLoop with a TorchTrainingState, or leave elastic out.",
            )
        self._check_unchanged()
        if not self._whole:  # compiled, or called past this wrapper
            self.check_step()
        # Tasks are numbered: an older one that goes on shows that the last pass was part of this one, and
        # was reduced too early. A mean bears to be taken twice.
        before, self._task = self._task, torch._C._current_graph_task_id()
        exact = self._op is ReduceOp.MEAN and self._masters is None and self._scale is None
        if self._task < before and not exact:
            raise WorkerError(
                "a backward pass within a backward pass: sums, masters and uneven batches cannot bear that",
                remedy="Use torch.utils.checkpoint with use_reentrant=False.",
            )
        self._in_backward = self._ran = True
        Variable._execution_engine.queue_callback(self._finish)

    def _launch(self, bucket: GradientBucket) -> None:
        self._launched += 1
        last = self._launched == len(self._buckets)
        buffers = self._flat_buffers if last and self.module.training else []
        with torch.no_grad(), self._lane.aside():  # backward(create_graph=True) would record all this
            self._keep(bucket.fill(self._scale))
            if last:
                if not self._lane.capturing():
                    self._numbers.set(self._passes.settle())
                self._numbers.put(bucket.numbers)
            for flat in buffers:
                self._keep(flat.gather())
            self._lane.reduce(bucket.wire, self._op, buffers=[flat.flat for flat in buffers])
            if self._lane.in_order:
                bucket.unpack()

    def _keep(self, tensors: list[Any]) -> None:
        """Tensors that the lane reads and nobody else needs: their memory must not be reused too early."""
        if self._lane.capturing():
            self._read_aside += tensors
        elif self._lane.in_order:
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self.device))

    def _finish(self) -> None:
        """Runs when the backward pass is over, or in its stead on a rank without samples."""
        self._in_backward = False
        while self._launched < len(self._buckets):
            self._launch(self._buckets[self._launched])
        self._lane.join()
        self._launched = 0
        self._seen.clear()
        self._read_aside.clear()
        self._whole = False
        self._numbers.take(self._buckets[-1].numbers)
        self._read_later = self._read_later or self.device.type != "cpu" or self._lane.capturing()
        if not self._read_later:
            self._compare_numbers()
        for number, bucket in enumerate(self._buckets):
            if not self._lane.in_order:
                bucket.unpack()
            bucket.finish(unused=self._unused(number, bucket))
        if self._order is not None and not self._lane.capturing():
            self._reorder(self._order)

    def _compare_numbers(self) -> None:
        try:
            self._numbers.check()
        except WorkerError as error:
            self._apart = error  # a script that catches this too must not go on
            raise

    def _unused(self, number: int, bucket: GradientBucket) -> frozenset[int]:
        """Which of the bucket's parameters no rank had a gradient for; reads the device only if one lacks."""
        if not bucket.missing:
            return frozenset()
        if self._lane.capturing():  # nothing can be read now: what the steps before the capture showed holds
            return self._unused_in_capture.get(number, frozenset())
        flags = bucket.flags.tolist()
        unused = frozenset(index for index in bucket.missing if flags[index] == 0)
        self._unused_in_capture[number] = unused
        return unused

    def _reorder(self, seen: list[int]) -> None:
        """After the first backward pass: buckets in the order in which rank 0's gradients became ready."""
        self._order = None
        planned = list(reversed(range(len(self._named))))
        known = set(seen)
        seen = seen + [index for index in planned if index not in known]
        order = torch.tensor(seen, dtype=torch.int64, device=self.device)
        broadcast_tensors(self.communicator, [order], 0)
        if order.tolist() != planned:
            self._build(order.tolist())


def _communicator_of(session: Any) -> Communicator:
    if session is None:
        session = current()
    communicator: Communicator = session.communicator
    return communicator
