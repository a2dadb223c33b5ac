"""``muster.DataParallel``: data-parallel training of a torch module, on GPUs (NCCL) and CPUs alike."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import Variable

from muster.communicators.base import Communicator
from muster.communicators.reduce_ops import ReduceOp
from muster.errors import SettingsError, WorkerError
from muster.torch.backward_pass import BackwardPass
from muster.torch.buckets import GradientBucket, make_buckets
from muster.torch.flat_buffers import FlatBuffers, flat_buffers
from muster.torch.functional_call import let_functional_call_know
from muster.torch.master_weights import MasterWeights
from muster.torch.pass_counter import RankNumbers, UnfinishedPasses
from muster.torch.sparse_gradients import SparseGradients
from muster.torch.sync_batch_norm import adopt
from muster.torch.transfer import (
    FROZEN,
    CommStream,
    array_of,
    broadcast_tensors,
    check_same_tensors,
    gather_numbers,
    gather_rows,
)
from muster.torch.wrapper import ModuleWrapper, communicator_of
from muster.training.buckets import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BYTES
from muster.training.frameworks import warn_if_data_is_not_divided

_DTYPES = {None: None, "bf16": torch.bfloat16}
DEFAULT_LAST_BYTES = 4 * 2**20
DEFAULT_IN_PLACE_BYTES = 2**20


class DataParallel(ModuleWrapper):
    """Wraps a module so that every backward pass leaves gradients averaged over all ranks.

    ::

        model = muster.DataParallel(module)
        loss_function(model(images), labels).backward()   # gradients are averaged when this returns
        optimizer.step()

    Gradients are reduced in flat buckets while the backward pass still runs; afterwards each
    ``parameter.grad`` is a view into its bucket, except large gradients on a CPU. A parameter without a
    gradient on this rank counts as having a gradient of zero. If no rank has a gradient, ``grad`` stays None.
    Buffers (BatchNorm statistics) equal those of rank 0 after every training step.

    ``state_dict``, the names of parameters and the signature of ``forward`` are those of the bare module. A
    parameter has only one wrapper: a later wrapper takes the place of an earlier one. A hook of yours on a
    parameter sees this rank's own gradient. Parameters that all ranks unfreeze later are averaged from then
    on.

    ``Embedding`` and ``EmbeddingBag`` layers with ``sparse=True`` have sparse gradients, whose rows are
    exchanged after the buckets. ``copy.deepcopy`` copies the module into a wrapper of its own; a pickle can
    be loaded in any job. ``torch.optim.swa_utils.AveragedModel(model)`` averages the model; with master
    weights it needs ``use_buffers=True``.

    ``torch.nn.SyncBatchNorm`` layers normalise with the statistics of all ranks' samples, also if ranks have
    different numbers of samples, and in captured steps. All ranks must use the same layers in the same order.

    A rank that leaves a training pass unfinished (the script catches an error, or skips a batch) and goes on
    with the next one would be out of step with the others. The ranks count unfinished passes and compare the
    counts with each reduction: on a CPU in the same backward pass; on a GPU, where the host does not wait, at
    the beginning of a later step. So a forward pass in training mode without a backward pass belongs under
    ``torch.no_grad()``.

    Accelerate, Transformers and Lightning divide the data among the processes that they know. Within the
    training loop of one of them, the wrapper warns if it knows fewer processes than there are ranks
    (``muster.errors.DataNotDividedWarning``).

    Args:
        module: the module, on one device. Its parameters need not be the same on all ranks: those of rank 0
            are taken.
        session: the session whose communicator is used; None: that of ``muster.init()``.
        communicator: a communicator to use instead of a session's.
        gradients_mean: average over ranks; False: sum. If gradients are not cleared before the next pass,
            sums of earlier passes are summed again, so accumulate in :meth:`no_sync`.
        parameter_broadcast: take parameters and buffers from rank 0 now.
        broadcast_buffers: keep buffers equal to those of rank 0.
        forward_sync_buffers: torch 2.15's name for ``broadcast_buffers``, which it overrides if given.
        elastic: send nothing now, because other members may train already; all ranks call :meth:`join` later.
        weights: "bf16": compute with bfloat16 weights (except in normalisation layers) and keep float32
            master weights, which ``parameters()`` then gives to the optimizer. Faster than autocast. All
            parameters must be float32 and require gradients. A parameter that no rank used counts as having a
            gradient of zero, so that weight decay and momentum go on. None: compute with the parameters.
        compression: "bf16": communicate gradients as bfloat16, except complex ones; None: in their own dtype.
        bucket_bytes: size cap of a bucket, in bytes.
        first_bytes: size cap of the first bucket, in bytes.
        last_bytes: size cap of the final bucket, in bytes, so that little communication remains after the
            backward pass.
        in_place_bytes: on a CPU, gradients of at least this size, in bytes, are reduced in place, one by one,
            because copying costs more; not with compression or master weights.

    Attributes:
        updates_last: set by a captured step: only the last of its graphs changes parameters, and
            ``before_update`` is called before that one.
        before_update: called before parameters change; a state that copies them during the step makes the
            stream wait here.

    Raises:
        ArrayError: parameters are on several devices, have a dtype that the backend does not take, or differ
            from another rank's. In the backward pass: a gradient is sparse and no layer announces that, or a
            parameter or buffer was converted since. In the forward pass: ranks have unfrozen different
            parameters.
        SettingsError: ``compression`` or ``weights`` has no such value, these parameters cannot have masters,
            or FSDP or tensor parallelism shards them. In the backward pass: the module was moved since, away
            from its masters.
        CollectiveMismatchError: a rank went on after an unfinished training pass; raised on all ranks, in the
            forward or backward pass.
        WorkerError: no parameter requires a gradient. In the backward pass: the previous one broke off. In
            the forward pass: a later wrapper has some of the parameters, or the module has new ones since.
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
        forward_sync_buffers: bool | None = None,
        elastic: bool = False,
        weights: str | None = None,
        compression: str | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        first_bytes: int = DEFAULT_FIRST_BYTES,
        last_bytes: int = DEFAULT_LAST_BYTES,
        in_place_bytes: int = DEFAULT_IN_PLACE_BYTES,
    ) -> None:
        super().__init__(module)
        if forward_sync_buffers is not None:
            broadcast_buffers = forward_sync_buffers
        self._settings = {
            "gradients_mean": gradients_mean,
            "broadcast_buffers": broadcast_buffers,
            "weights": weights,
            "compression": compression,
            "bucket_bytes": bucket_bytes,
            "first_bytes": first_bytes,
            "last_bytes": last_bytes,
            "in_place_bytes": in_place_bytes,
        }
        wire_dtype = _dtype_of("compression", compression)
        weights_dtype = _dtype_of("weights", weights)
        self.communicator = communicator or communicator_of(session)
        self._comm_stream = CommStream(self.communicator, self.device)
        self._op = ReduceOp.MEAN if gradients_mean else ReduceOp.SUM
        self._wire_dtype = wire_dtype
        for dtype in {self._wire_dtype or p.dtype for _, p in self._named}:  # refuses a dtype now, not later
            array_of(self.communicator, torch.empty(1, dtype=dtype, device=self.device))
        self._caps: dict[str, Any] = {
            "bucket_bytes": bucket_bytes,
            "first_bytes": first_bytes,
            "last_bytes": last_bytes,
            "in_place_bytes": None
            if self.device.type == "cuda" or weights or compression
            else in_place_bytes,
        }
        self._joined = not elastic
        self.before_update: Callable[[], None] = _nothing
        self.updates_last = False
        if not elastic:
            self._begin_alike(parameter_broadcast, broadcast_buffers)
        self._follow_structure()
        self._flat_buffers: list[FlatBuffers] = flat_buffers(module) if broadcast_buffers else []
        self._settled = weights is not None  # masters cannot move any more
        self._before_the_first_pass()
        self._sparse = SparseGradients(module)
        if weights is not None and self._sparse.parameters:
            raise SettingsError('weights="bf16" keeps masters, which sparse gradients cannot train')
        self._index()
        if weights is not None:
            self._masters = MasterWeights(module, self.buckets, weights_dtype)
        self._hook(self._ready)  # after the masters: a hook fixes the gradient's dtype
        self._show_signature()
        self._made = frozenset(vars(self)) | {"_made"}

    def _before_the_first_pass(self) -> None:
        """Sets the attributes that forward and backward passes change."""
        self._synchronize = True
        self._scale: Any = None
        self._task = -1  # the last pass's number
        self._whole = False
        self.backward_pass: BackwardPass | None = None
        self._passes = UnfinishedPasses()
        self._apart: WorkerError | None = None
        self._ran = False
        self._asks_frameworks = True

    def _begin_alike(self, parameter_broadcast: bool, broadcast_buffers: bool) -> None:
        """Compares the ranks' modules, and takes rank 0's values if wanted.

        The ranks must agree on the frozen parameters only here. Later, a newcomer may have frozen parameters
        that the others have unfrozen since.
        """
        follow = parameter_broadcast or broadcast_buffers
        sent = [*self._named_and_frozen(), *(self.module.named_buffers() if follow else ())]
        check_same_tensors(self.communicator, self.device, sent)
        if parameter_broadcast:
            self.broadcast_parameters()

    # ------------------------------------------------------------ what users call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self.check_step()
        self.refresh_weights()
        trains = self.module.training and torch.is_grad_enabled()
        if not compiling and trains:
            self._follow_thawed()
        if self._asks_frameworks and trains and not compiling:
            self._asks_frameworks = False
            warn_if_data_is_not_divided(self.communicator.world_size)
        if compiling or not (trains and self._synchronize and self._joined):
            return self.module(*args, **kwargs)
        try:
            output = self.module(*args, **kwargs)
        except BaseException:
            self._passes.broke_off()
            raise
        self._passes.follow(output)
        return output

    def check_step(self, *, begins: bool = False) -> None:
        """Checks that the module is the one that was wrapped, and that all ranks are in the same step.

        Args:
            begins: whether a training step, perhaps a captured one, begins here. Forward passes that still
                lack their backward pass then count as unfinished.

        Raises:
            WorkerError: parameters have been added or replaced, or a later wrapper has some of them.
            CollectiveMismatchError: a rank went on after a training pass that it did not finish.
        """
        if self._apart is not None:
            raise self._apart
        self._check_wrapped()
        self._whole = True
        if begins:
            self._follow_thawed()
            self._numbers.set(self._passes.settle())
        if self._read_later and not self._comm_stream.capturing():
            self._compare_numbers()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes only accumulate; the first pass after it reduces the sum."""
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    @contextlib.contextmanager
    def uneven_batch(self, samples: int) -> Iterator[None]:
        """Context of one backward pass in which ranks have different numbers of samples, possibly none.

        Gradients (of losses that are means over the rank's samples) are weighted by the number of samples,
        so that the average is over all samples; so are those that were accumulated before in
        :meth:`no_sync`. A rank without samples does nothing inside. Every rank must enter.

        Args:
            samples: number of this rank's samples, >= 0.

        Raises:
            SettingsError: ``samples`` is negative; or a rank has none, and a SyncBatchNorm layer needs all.
        """
        if samples < 0:
            raise SettingsError(f"a batch has at least 0 samples, not {samples}")
        counts = gather_numbers(self.communicator, self.device, samples)
        if 0 in counts and self._shares_statistics and self.module.training:
            empty = ", ".join(str(rank) for rank, count in enumerate(counts) if not count)
            raise SettingsError(
                f"no samples on rank {empty}, and a SyncBatchNorm layer needs all ranks: drop the incomplete"
                " batch, or give each rank at least one sample."
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
    def comm_stream(self) -> CommStream | None:
        """The stream for layers that compute with all ranks; None at world size 1 or before joining."""
        return self._comm_stream if self._joined and self.communicator.world_size > 1 else None

    @property
    def share(self) -> Any | None:
        """Weight of this rank's gradients in :meth:`uneven_batch`, 0-dim float64; None outside it."""
        return self._scale

    @property
    def uneven(self) -> bool:
        """Whether an :meth:`uneven_batch` context is active."""
        return self._scale is not None

    def clip_grad_norm_(self, max_norm: float) -> Any:
        """Scales the averaged gradients down to a norm of at most ``max_norm``.

        Returns:
            The norm before, a 0-dim tensor; the host does not wait for it.
        """
        return torch.nn.utils.clip_grad_norm_(list(self.parameters()), max_norm, foreach=True)

    capture_obstacle: str | None = None

    def captured_generators(self) -> list[Any]:
        """See :class:`CapturedModel`."""
        return []

    def before_replay(self) -> None:
        """See :class:`CapturedModel`."""
        self._comm_stream.waits.replayed()

    def held_by_graphs(self) -> list[Any]:
        """See :class:`CapturedModel`."""
        return [self.buckets, self._numbers]

    def flat_buffers(self) -> list[Any]:
        """The flat tensors in which the module's buffers lie, if they are kept equal to rank 0's."""
        return [each.flat for each in self._flat_buffers]

    def broadcast_parameters(self, source: int = 0) -> None:
        """Overwrites all ranks' parameters and buffers with those of rank ``source``."""
        tensors = [parameter.detach() for parameter in self.parameters()]
        tensors += [buffer for buffer in self.module.buffers() if buffer.numel()]
        broadcast_tensors(self.communicator, tensors, source)

    def rebind(self, communicator: Communicator, *, source: int | None = None) -> None:
        """Switches to another generation's communicator; drops gradients, as a pass may have broken off.

        Args:
            communicator: the new generation's communicator.
            source: take parameters and buffers from this rank; None: they are the same already.
        """
        changed, self.communicator = communicator is not self.communicator, communicator
        self._comm_stream = CommStream(communicator, self.device)
        self._joined = True
        if changed:  # a captured graph's tensors stay where they are
            self._follow_world()
        self.forget_backward()
        if source is not None:
            self.broadcast_parameters(source)

    def forget_backward(self) -> None:
        """Drops a backward pass that broke off, and all gradients, because its all_reduces are void.

        All ranks must call it, when no collective of that pass is running.
        """
        for bucket in self.buckets:
            bucket.forget()
        self.backward_pass = None
        self._passes.forget()
        self._numbers.forget()
        self._apart = None
        self.zero_grad()

    def join(self, communicator: Communicator, source: int) -> None:
        """Joins a generation that may have newcomers: compares modules, agrees on buckets; all ranks call it.

        Parameters and buffers are left to ``TorchTrainingState``, which sends them. All ranks average a
        parameter that any rank trains, because newcomers may still have frozen what others have unfrozen.

        Args:
            communicator: the generation's communicator.
            source: the rank whose assignment of gradients to buckets all ranks take.
        """
        self.rebind(communicator)
        check_same_tensors(self.communicator, self.device, self._wrapped.items())
        mine = {id(parameter) for _, parameter in self._named}
        flags = [int(id(parameter) in mine) for parameter in self._wrapped.values()]
        anywhere = map(any, zip(*gather_rows(communicator, self.device, flags), strict=True))
        self._take_in([each for each, trains in zip(self._wrapped.values(), anywhere, strict=True) if trains])
        order = [int(self._settled), *self.bucket_order()]
        announced = torch.tensor(order, dtype=torch.int64, device=self.device)
        broadcast_tensors(communicator, [announced], source)
        theirs_settled, *theirs = announced.tolist()
        self.follow_order(theirs)
        self._settled = bool(theirs_settled)

    def bucket_order(self) -> list[int]:
        """Parameter numbers in bucket order, and those with sparse gradients, which are in no bucket."""
        return list(self._built)

    def follow_order(self, order: list[int]) -> None:
        """Rebuilds the buckets in this order of parameters.

        With more than two ranks, the rounding of an all_reduce's sums depends on the order. Nothing changes
        if there are master weights, or if ``order`` has another number of parameters.
        """
        if self._masters is None and sorted(order) == list(range(len(self._named))):
            if order != self.bucket_order():
                self._build(order)
            self._settled = True

    # ------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        """The module, the wrapper's settings and attributes that users have set; no communicator."""
        torchs = vars(torch.nn.Module()).keys() - {"_parameters", "_buffers", "_modules"}
        return {
            "module": self.module,
            "masters": {name: view.clone() for name, view in self._master_views().items()},
            "settings": self._settings,
            "joined": self._joined,
            "order": self.bucket_order() if self._settled else None,
            "trained": [name for name, _ in self._named],
            "others": {k: v for k, v in vars(self).items() if k not in self._made or k in torchs},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Wraps the module again as it was, in the job of this process.

        Raises:
            NotInitializedError: this process is in no job.
        """
        self._restore(state, communicator_of(None))

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """A copy of the module in a wrapper of its own, over the same communicator; sends nothing."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made._restore(copy.deepcopy(self.__getstate__(), memo), self.communicator)
        return made

    def _restore(self, state: dict[str, Any], communicator: Communicator) -> None:
        module = state["module"]
        for name, parameter in module.named_parameters():
            if name in state["masters"]:
                parameter.data = state["masters"][name]
        DataParallel.__init__(self, module, communicator=communicator, elastic=True, **state["settings"])
        self._take_in([self._wrapped[name] for name in state["trained"]])
        self._joined = state["joined"]
        if state["order"] is not None:
            self.follow_order(state["order"])
        self.__dict__.update(state["others"])

    # ------------------------------------------------------------ the backward pass

    def _follow_structure(self) -> None:
        self._shares_statistics = adopt(self.module, self)

    def _index(self) -> None:
        """Numbers the parameters, and makes buckets in the order in which backward probably finishes them."""
        self._indices = {id(parameter): index for index, (_, parameter) in enumerate(self._named)}
        self._build(list(reversed(range(len(self._named)))))

    def _build(self, order: list[int]) -> None:
        self._built = order
        self.buckets: list[GradientBucket] = make_buckets(
            [self._named[index] for index in order if self._named[index][1] not in self._sparse],
            wire_dtype=self._wire_dtype,
            device=self.device,
            ranks=self.communicator.world_size,
            **self._caps,
        )
        self._bucket_of = {
            id(parameter): number
            for number, bucket in enumerate(self.buckets)
            for parameter in bucket.parameters
        }
        self.backward_pass = None
        self._follow_world()

    def _follow_world(self) -> None:
        """Resizes the last bucket's tail to the world size: one number per rank."""
        last = self.buckets[-1]
        if len(last.numbers) != self.communicator.world_size:
            last.allocate(self.communicator.world_size)
        numbers: RankNumbers | None = getattr(self, "_numbers", None)
        if numbers is None or not numbers.serve(self.communicator, last.numbers):
            self._numbers = RankNumbers(self.communicator, last.numbers)
        self._read_later = False

    def _follow_thawed(self) -> None:
        """Starts to average parameters that were unfrozen since, which must be the same on all ranks."""
        if self._thawed():
            trained = [p for _, p in self._named] + [p for p in self._without_hook if p.requires_grad]
            if self._take_in(trained) and self._joined:
                check_same_tensors(self.communicator, self.device, self._named_and_frozen())
            self._hook_what_trains()

    def _named_and_frozen(self) -> list[tuple[str, Any]]:
        """All parameters by name: first those whose gradients are averaged, then the others, with a mark."""
        named = {name for name, _ in self._named}
        others = [(name + FROZEN, each) for name, each in self._wrapped.items() if name not in named]
        return [*self._named, *others]

    def _take_in(self, trained: list[Any]) -> bool:
        """Averages these parameters' gradients from now on; returns whether any of them is new."""
        wanted = {id(parameter) for parameter in trained}
        if wanted <= self._indices.keys():
            return False
        self._named = [(name, each) for name, each in self._wrapped.items() if id(each) in wanted]
        self._index()
        self._settled = False
        self._claim(trained)
        return True

    def _ready(self, parameter: Any) -> None:
        """Handles a complete gradient, within the backward pass."""
        if not self._synchronize:
            return
        if self.backward_pass is None:
            self.backward_pass = self._begin()
        self.backward_pass.add(parameter)

    def _begin(self) -> BackwardPass:
        """Begins a backward pass, at its first gradient."""
        if not self._joined:
            raise WorkerError(
                "this DataParallel was made with elastic=True, and nothing has joined it to the others yet",
                remedy="Train in an ElasticLoop with a TorchTrainingState, or leave elastic out.",
            )
        if self._masters is not None:
            self._masters.check_in_place()
        self._follow_thawed()
        if not self._whole:  # the forward pass was compiled, or bypassed this wrapper
            self.check_step()
        # Autograd numbers its tasks. A lower number than that of the last pass shows that the last pass was
        # part of this one, and was reduced too early. Averaging twice does no harm.
        before, self._task = self._task, torch._C._current_graph_task_id()
        exact = self._op is ReduceOp.MEAN and self._masters is None and self._scale is None
        if self._task < before and not exact:
            raise WorkerError(
                "a backward pass was started within another one, which sums, master weights and uneven"
                " batches do not support",
                remedy="Use torch.utils.checkpoint with use_reentrant=False.",
            )
        self._ran = True
        Variable._execution_engine.queue_callback(self._finish)
        return self._new_pass()

    def _new_pass(self) -> BackwardPass:
        return BackwardPass(
            self.buckets,
            self._bucket_of,
            self._comm_stream,
            self._op,
            scale=self._scale,
            sparse=self._sparse,
            passes=self._passes,
            numbers=self._numbers,
            module=self.module,
            flat_buffers=self._flat_buffers,
        )

    def _finish(self) -> None:
        """Ends a backward pass; on a rank without samples, runs in place of a backward pass."""
        if self.backward_pass is None:
            self.backward_pass = self._new_pass()
        self.backward_pass.finish()
        ended, self.backward_pass = self.backward_pass, None
        self._whole = False
        self._numbers.take(self.buckets[-1].numbers)
        self._read_later = self._read_later or self.device.type != "cpu" or self._comm_stream.capturing()
        if not self._read_later:
            self._compare_numbers()
        for bucket in self.buckets:
            if not self._comm_stream.in_order:
                bucket.unpack()
            bucket.finish(capturing=self._comm_stream.capturing())
        if not self._settled and not self._comm_stream.capturing():
            self._reorder([self._indices[each] for each in ended.seen])

    def _compare_numbers(self) -> None:
        try:
            self._numbers.check()
        except WorkerError as error:
            self._apart = error  # a script that also catches this must not go on
            raise

    def _reorder(self, seen: list[int]) -> None:
        """Rebuilds the buckets in the order in which rank 0's gradients became ready."""
        self._settled = True
        planned = list(reversed(range(len(self._named))))
        known = set(seen)
        seen = seen + [index for index in planned if index not in known]
        order = torch.tensor(seen, dtype=torch.int64, device=self.device)
        broadcast_tensors(self.communicator, [order], 0)
        if order.tolist() != planned:
            self._build(order.tolist())


def _dtype_of(name: str, value: str | None) -> Any:
    """Returns the dtype that a setting asks for; None: the parameters' own."""
    if value not in _DTYPES:
        raise SettingsError(f'{name} is None or "bf16", not {value!r}')
    return _DTYPES[value]


def _nothing() -> None:
    return None


let_functional_call_know()
