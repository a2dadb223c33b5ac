"""``worker.DataParallel``: data-parallel training of a torch module, on GPUs (NCCL) and CPUs alike."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import Variable

from worker.communicators.base import Communicator, ReduceOp
from worker.core.bucket_plan import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BYTES
from worker.errors import ArrayError, SettingsError, WorkerError
from worker.torch_buckets import FlatBuffers, GradientBucket, flat_buffers, make_buckets
from worker.torch_masters import MasterWeights
from worker.torch_transfer import Lane, broadcast_tensors, gather_numbers

_DTYPES = {None: None, "bf16": torch.bfloat16}
DEFAULT_LAST_BYTES = 4 * 2**20


class DataParallel(torch.nn.Module):  # type: ignore[misc]
    """Wraps a module so that every backward pass leaves gradients averaged over all ranks.

    ::

        model = worker.DataParallel(module)
        loss_function(model(images), labels).backward()   # gradients are averaged when this returns
        optimizer.step()

    Gradients travel in flat buckets while the backward pass still runs; afterwards each ``parameter.grad``
    is a view into its bucket. Parameters without a gradient on this rank count as zero; where no rank has
    one, ``grad`` stays None. Buffers (BatchNorm statistics) are rank 0's after every training step.
    ``state_dict`` is the bare module's.

    Args:
        module: on one device; its parameters need not be the same on all ranks, those of rank 0 are taken.
        session: whose communicator to use; None: that of ``worker.init()``.
        communicator: use this one instead of a session's.
        gradients_mean: average over ranks; False: sum.
        parameter_broadcast: take parameters and buffers from rank 0 now.
        broadcast_buffers: keep buffers equal to rank 0's.
        elastic: send nothing now: members may be there already. :meth:`join` follows, on all ranks.
        weights: "bf16": compute with bfloat16 weights (but for normalisation layers) and keep float32
            masters; give ``master_parameters()`` to the optimizer then. Faster than autocast. None: as they
            are.
        compression: "bf16": gradients travel as bfloat16; None: in their own dtype.
        bucket_bytes: cap of a bucket, in bytes.
        first_bytes: cap of the first one.
        last_bytes: so many bytes at the end of the backward pass travel apart from what comes before.

    Raises:
        ArrayError: parameters on several devices, sparse, or different from another rank's.
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
        super().__init__()
        for name, value in (("compression", compression), ("weights", weights)):
            if value not in _DTYPES:
                raise SettingsError(f'{name} is None or "bf16", not {value!r}')
        self.module = module
        self._named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not self._named:
            raise WorkerError("this module has no parameter that requires a gradient")
        self.communicator = communicator or _communicator_of(session)
        self.device = _one_device(module)
        self._lane = Lane(self.communicator, self.device)
        self._op = ReduceOp.MEAN if gradients_mean else ReduceOp.SUM
        self._wire_dtype = _DTYPES[compression]
        self._caps = {"bucket_bytes": bucket_bytes, "first_bytes": first_bytes, "last_bytes": last_bytes}
        self._buffers_follow = broadcast_buffers
        self._masters: MasterWeights | None = None
        if not elastic:
            self._check_same_model()
            if parameter_broadcast:
                self.broadcast_parameters()
        self._flat_buffers: list[FlatBuffers] = flat_buffers(module) if broadcast_buffers else []
        self._synchronize = True
        self._scale: Any = None
        self._unused_in_capture: dict[int, frozenset[int]] = {}
        self._order: list[int] | None = [] if weights is None else None  # masters cannot move any more
        self._indices = {id(parameter): index for index, (_, parameter) in enumerate(self._named)}
        self._build(list(reversed(range(len(self._named)))))
        if weights is not None:
            self._masters = MasterWeights(module, self._buckets, _DTYPES[weights])
        for _, parameter in self._named:  # after the masters: the hook fixes the gradient's dtype
            parameter.register_post_accumulate_grad_hook(self._ready)

    # ------------------------------------------------------------ what users call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        if self._masters is not None:
            self._masters.refresh()
        return self.module(*args, **kwargs)

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
        so that the average is over all samples. A rank with none does nothing inside. Every rank must enter.

        Args:
            samples: how many this rank has, >= 0.
        """
        if samples < 0:
            raise SettingsError(f"a batch has at least 0 samples, not {samples}")
        counts = gather_numbers(self.communicator, self.device, samples)
        total = max(1, sum(counts))
        share = samples * len(counts) / total if self._op is ReduceOp.MEAN else samples / total
        self._scale = torch.tensor(share, device=self.device)
        self._ran = False
        try:
            yield
            if not self._ran:
                self._finish()
        finally:
            self._scale = None

    def clip_grad_norm_(self, max_norm: float) -> Any:
        """Scales the averaged gradients down to a norm of at most ``max_norm``.

        Returns:
            The norm before, a 0-dim tensor; the host does not wait for it.
        """
        parameters = [parameter for _, parameter in self._named]
        parameters = parameters if self._masters is None else self._masters.parameters
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)

    def broadcast_parameters(self, source: int = 0) -> None:
        """Overwrites all ranks' parameters and buffers with those of rank ``source``."""
        masters = self._masters
        held = self.module.parameters() if masters is None else masters.parameters
        tensors = [parameter.detach() for parameter in held]
        tensors += [buffer for buffer in self.module.buffers() if buffer.numel()]
        broadcast_tensors(self.communicator, tensors, source)

    def master_parameters(self) -> list[Any]:
        """With ``weights="bf16"``: the float32 masters, a few flat tensors, for the optimizer."""
        if self._masters is None:
            raise SettingsError('there are no master parameters without weights="bf16"')
        return list(self._masters.parameters)

    def rebind(self, communicator: Communicator, *, source: int | None = None) -> None:
        """Goes on with another generation's communicator; a backward pass that broke off is forgotten.

        Args:
            communicator: the new one.
            source: take parameters and buffers from this rank; None: they are the same already.
        """
        self.communicator = communicator
        self._lane = Lane(communicator, self.device)
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters)
        self._launched = 0
        self._in_backward = False
        if self._order is not None:
            self._order = []
        if source is not None:
            self.broadcast_parameters(source)

    def join(self, communicator: Communicator, source: int) -> None:
        """Enters a generation that may have newcomers; every rank of it calls this.

        Parameters and buffers are not sent: :class:`worker.torch_state.TorchTrainingState` does that.

        Args:
            communicator: the generation's.
            source: the rank that all follow in how gradients are put into buckets.
        """
        self.rebind(communicator)
        self._check_same_model()
        settled = self._order is None
        mine = [self._indices[id(parameter)] for bucket in self._buckets for parameter in bucket.parameters]
        told = torch.tensor([int(settled), *mine], dtype=torch.int64, device=self.device)
        broadcast_tensors(communicator, [told], source)
        theirs_settled, *theirs = told.tolist()
        if theirs != mine:
            self._build(theirs)
        self._order = None if theirs_settled else []

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The bare module's state; in float32 where there are masters."""
        state = self.module.state_dict(*args, **kwargs)
        if self._masters is not None:
            for name, parameter in self._named:
                state[name] = self._masters.views[id(parameter)]
        return state

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads a bare module's state."""
        result = self.module.load_state_dict(state, *args, **kwargs)
        if self._masters is not None:
            with torch.no_grad():
                for name, parameter in self._named:
                    self._masters.views[id(parameter)].copy_(state.get(name, parameter))
        return result

    # ------------------------------------------------------------ the backward pass

    def _build(self, order: list[int]) -> None:
        named = [self._named[index] for index in order]
        self._buckets: list[GradientBucket] = make_buckets(named, wire_dtype=self._wire_dtype, **self._caps)
        self._bucket_of = {
            id(parameter): bucket for bucket in self._buckets for parameter in bucket.parameters
        }
        self._launched = 0
        self._in_backward = False

    def _ready(self, parameter: Any) -> None:
        """Runs when a parameter's gradient is complete, within the backward pass."""
        if not self._synchronize:
            return
        if not self._in_backward:
            self._in_backward = self._ran = True
            Variable._execution_engine.queue_callback(self._finish)
        if self._order is not None:
            self._order.append(self._indices[id(parameter)])
        self._bucket_of[id(parameter)].waiting -= 1
        while self._launched < len(self._buckets) and self._buckets[self._launched].waiting <= 0:
            self._launch(self._buckets[self._launched])

    def _launch(self, bucket: GradientBucket) -> None:
        self._launched += 1
        last = self._launched == len(self._buckets)
        buffers = self._flat_buffers if last and self.module.training else []
        with self._lane.aside():
            bucket.fill(self._scale)
            for flat in buffers:
                flat.gather()
            self._lane.reduce(bucket.wire, self._op, buffers=[flat.flat for flat in buffers])
            if self._lane.in_order:
                bucket.unpack()

    def _finish(self) -> None:
        """Runs when the backward pass is over, or in its stead on a rank without samples."""
        self._in_backward = False
        while self._launched < len(self._buckets):
            self._launch(self._buckets[self._launched])
        self._lane.join()
        self._launched = 0
        for number, bucket in enumerate(self._buckets):
            if not self._lane.in_order:
                bucket.unpack()
            bucket.finish(unused=self._unused(number, bucket))
        if self._order is not None and not self._lane.capturing():
            self._reorder(self._order)

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

    def _check_same_model(self) -> None:
        text = ";".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in self._named)
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        digests = gather_numbers(self.communicator, self.device, digest)
        others = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if others:
            raise ArrayError(
                f"the module's parameters on ranks {others} differ from rank 0's in name, shape or dtype",
                remedy="Build the same module on all ranks.",
            )


def _one_device(module: torch.nn.Module) -> Any:
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices)))
        raise ArrayError(
            f"the module must be on one device, not on {found}", remedy="Call module.to(device)."
        )
    return devices.pop()


def _communicator_of(session: Any) -> Communicator:
    if session is None:
        import worker

        session = worker.process.current()
    communicator: Communicator = session.communicator
    return communicator
