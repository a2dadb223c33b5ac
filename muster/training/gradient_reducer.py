"""Data-parallel gradients for arrays: flat buckets, reduced while the backward pass still runs.

Works on NumPy and CuPy arrays alike, through the module to which the arrays belong.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Protocol

from muster.communicators.arrays import Array
from muster.communicators.base import Communicator
from muster.communicators.reduce_ops import ReduceOp
from muster.communicators.work import Work
from muster.errors import ArrayError, WorkerError
from muster.training.buckets import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_FIRST_BYTES,
    Bucket,
    ParameterSpec,
    Slot,
    plan_buckets,
)
from muster.training.carrier import Carrier, NumpyLibrary, array_module, on_host


class GradientError(WorkerError):
    """The gradients of a step do not match the parameters, on this rank or on another."""


class HasCommunicator(Protocol):
    """The part of a session that the reducer uses: the present generation's communicator."""

    @property
    def communicator(self) -> Communicator:
        """The world's communicator."""


class GradientReducer:
    """Averages (or sums) gradients over ranks, overlapping communication with the backward pass.

    ::

        reducer = GradientReducer(session, parameters)
        reducer.broadcast_parameters()
        ...
        reducer.ready("w2", gradient_of_w2)  # as the backward pass comes to it
        reducer.ready("w1", gradient_of_w1)
        gradients = reducer.finish()         # {"w1": ..., "w2": ...}, the same on all ranks

    A bucket is full when all its gradients are ready; buckets are started in the order of the plan, which is
    the same on all ranks. The reducer follows the session to its present generation: after
    ``session.rejoin()`` it drops the gradients of the broken step by itself.

    Args:
        session: the session whose communicator is used.
        parameters: the parameters, by name, in the order of the forward pass; C-contiguous, floating point.
            Gradients are expected in the opposite order. In another order, communication only overlaps less.
        bucket_bytes: cap of a bucket, in bytes.
        first_bytes: cap of the first bucket, in bytes; small, so that communication starts early.
        gradients_mean: whether to divide by the number of ranks; False: sum.

    Raises:
        ArrayError: a parameter is not a contiguous floating-point array of NumPy or CuPy.
    """

    def __init__(
        self,
        session: HasCommunicator,
        parameters: Mapping[str, Array],
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        first_bytes: int = DEFAULT_FIRST_BYTES,
        gradients_mean: bool = True,
    ) -> None:
        self._session = session
        self._parameters = dict(parameters)
        self._xp = array_module(self._parameters)
        specs = [_spec(name, array) for name, array in self._parameters.items()]
        plan = plan_buckets(reversed(specs), bucket_bytes=bucket_bytes, first_bytes=first_bytes)
        self._buckets = [_FlatBucket(self._xp, bucket, self._parameters) for bucket in plan]
        self._bucket_of = {slot.name: bucket for bucket in self._buckets for slot in bucket.slots}
        self._op = ReduceOp.MEAN if gradients_mean else ReduceOp.SUM
        self._communicator: Communicator | None = None
        self._agreed: Communicator | None = None
        self._started = 0
        self._accumulating = False

    def broadcast_parameters(self, source: int = 0) -> None:
        """Overwrites the parameters of all ranks with those of ``source``.

        Raises:
            GradientError: the parameters differ between ranks in name, dtype or shape.
        """
        communicator = self._enter()
        self._agree(communicator)
        self._carrier(communicator).overwrite(self._parameters, source)

    @contextlib.contextmanager
    def no_sync(self, more: bool = True) -> Iterator[None]:
        """Context in which ``ready`` only adds gradients up; they are reduced with those given afterwards.

        Args:
            more: whether more pieces of the batch follow; False makes this do nothing, for the last piece.
        """
        self._accumulating, before = more or self._accumulating, self._accumulating
        try:
            yield
        finally:
            self._accumulating = before

    def ready(self, name: str, gradient: Array) -> None:
        """Takes one gradient; when that fills a bucket, its all_reduce starts in the background.

        The gradient is copied, so it may be reused at once.

        Raises:
            GradientError: there is no such parameter, the gradient has another shape or dtype, or it was
                given twice in one step.
        """
        communicator = self._enter()
        bucket = self._bucket_of.get(name)
        if bucket is None:
            raise GradientError(
                f"There is no parameter {name!r} to give a gradient to.", remedy=self._known()
            )
        bucket.put(name, gradient, final=not self._accumulating)
        if not self._accumulating:
            self._start_full(communicator)

    def finish(self) -> dict[str, Array]:
        """Waits for all reductions and ends the step.

        Returns:
            Reduced gradients by parameter name, as views that the next step overwrites.

        Raises:
            GradientError: a gradient is missing on this rank or (on CPUs) on another one; the same step then
                fails on all ranks that notice.
            CommunicatorError: a collective failed.
            MembershipChanged: a collective was cut off by a change of members.
        """
        if self._accumulating:
            raise GradientError("finish() was called within no_sync().", remedy="Call it after the block.")
        communicator = self._enter()
        try:
            self._start_rest(communicator)
            for bucket in self._buckets:
                bucket.wait()
            self._check_complete(communicator)
            return {name: self._bucket_of[name].views[name] for name in self._parameters}
        finally:
            self.reset()

    def reduce(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Calls ``ready`` for all gradients, then ``finish``."""
        for name in reversed(list(gradients)):
            self.ready(name, gradients[name])
        return self.finish()

    def reset(self) -> None:
        """Drops the step's gradients, and waits until no collective uses the buffers any more."""
        for bucket in self._buckets:
            bucket.reset()
        self._started = 0

    def _enter(self) -> Communicator:
        communicator = self._session.communicator
        if communicator is not self._communicator:
            self.reset()
            self._communicator = communicator
        return communicator

    def _start_full(self, communicator: Communicator) -> None:
        while self._started < len(self._buckets) and self._buckets[self._started].is_full:
            self._agree(communicator)
            self._buckets[self._started].start(communicator, self._op)
            self._started += 1

    def _start_rest(self, communicator: Communicator) -> None:
        """Starts the buckets that lack gradients, so that no other rank waits for this one."""
        missing = self._missing()
        if missing and not on_host(self._xp):  # on a device, reading a flag would stall the stream
            raise _missing_error(communicator.rank, missing)
        self._agree(communicator)
        for bucket in self._buckets[self._started :]:
            bucket.start(communicator, self._op)
        self._started = len(self._buckets)

    def _check_complete(self, communicator: Communicator) -> None:
        if not on_host(self._xp) or not any(bucket.lacks_any() for bucket in self._buckets):
            return
        reports = self._carrier(communicator).gather_texts(json.dumps(self._missing()))
        for rank, report in enumerate(reports):
            if json.loads(report):
                raise _missing_error(rank, json.loads(report))

    def _missing(self) -> list[str]:
        return [name for name in self._parameters if name not in self._bucket_of[name].present]

    def _agree(self, communicator: Communicator) -> None:
        """Checks, once per communicator, that all ranks have the same bucket plan."""
        if self._agreed is communicator:
            return
        plan = [
            [b.dtype, [[s.name, list(self._parameters[s.name].shape)] for s in b.slots]]
            for b in self._buckets
        ]
        mine = json.dumps([self._op.value, plan])
        digest = hashlib.blake2b(mine.encode(), digest_size=16).hexdigest()
        carrier = self._carrier(communicator)
        if len(set(carrier.gather_texts(digest, length=32))) > 1:
            raise _disagreement(carrier.gather_texts(mine))
        self._agreed = communicator

    def _carrier(self, communicator: Communicator) -> Carrier:
        return Carrier(communicator, NumpyLibrary(self._xp))

    def _known(self) -> str:
        return f"The parameters are: {', '.join(list(self._parameters)[:20])}."


class _FlatBucket:
    """A flat buffer of gradients. Its last element counts the ranks that lack a gradient."""

    def __init__(self, xp: Any, plan: Bucket, parameters: Mapping[str, Array]) -> None:
        self.dtype = plan.dtype
        self.slots: tuple[Slot, ...] = plan.slots
        self._buffer = xp.zeros(plan.size + 1, dtype=plan.dtype)
        self.views = {
            slot.name: self._buffer[slot.offset : slot.offset + slot.size].reshape(
                parameters[slot.name].shape
            )
            for slot in plan.slots
        }
        self.present: set[str] = set()
        self._final: set[str] = set()
        self._work: Work | None = None

    @property
    def is_full(self) -> bool:
        return len(self._final) == len(self.slots)

    def put(self, name: str, gradient: Array, *, final: bool) -> None:
        view = self.views[name]
        if gradient.shape != view.shape or gradient.dtype != view.dtype:
            raise GradientError(
                f"The gradient of {name!r} is {gradient.dtype}{list(gradient.shape)}, "
                f"its parameter {view.dtype}{list(view.shape)}."
            )
        if self._work is not None or name in self._final:
            raise GradientError(
                f"The gradient of {name!r} was given twice in one step.",
                remedy="Call finish() after each step; add gradients up within no_sync().",
            )
        if name in self.present:
            view += gradient
        else:
            view[...] = gradient
        self.present.add(name)
        if final:
            self._final.add(name)

    def start(self, communicator: Communicator, op: ReduceOp) -> None:
        for name in self.views.keys() - self.present:
            self.views[name][...] = 0
        self._buffer[-1] = 1 if len(self.present) < len(self.slots) else 0
        self._work = communicator.all_reduce(self._buffer, self._buffer, op, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()

    def lacks_any(self) -> bool:
        return bool(self._buffer[-1] > 0)

    def reset(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            with contextlib.suppress(WorkerError):
                work.wait()
        self.present.clear()
        self._final.clear()


def _spec(name: str, array: Array) -> ParameterSpec:
    if array.dtype.kind != "f":
        raise ArrayError(
            f"Parameter {name!r} has dtype {array.dtype}.", remedy="Parameters must be floating point."
        )
    if not array.flags.c_contiguous:
        raise ArrayError(f"Parameter {name!r} is not C-contiguous.", remedy="Make it so: array.copy().")
    return ParameterSpec(name, prod(array.shape), str(array.dtype), array.dtype.itemsize)


def _missing_error(rank: int, names: list[str]) -> GradientError:
    return GradientError(
        f"Rank {rank} gave no gradient for {', '.join(map(repr, names[:10]))} in this step.",
        remedy="Every rank must give a gradient for every parameter; give zeros where there is none.",
    )


def _disagreement(plans: list[str]) -> GradientError:
    """Returns the error that says which rank differs from rank 0, and in what."""
    decoded = [json.loads(plan) for plan in plans]
    rank = next(r for r, plan in enumerate(decoded) if plan != decoded[0])

    def described(plan: Any) -> set[str]:
        return {f"{name!r} {dtype}{shape}" for dtype, slots in plan[1] for name, shape in slots}

    first, other = described(decoded[0]), described(decoded[rank])
    differences = [
        *(f"rank 0 has {item}" for item in sorted(first - other)[:5]),
        *(f"rank {rank} has {item}" for item in sorted(other - first)[:5]),
    ]
    what = ", ".join(differences) or "order, bucket sizes or gradients_mean differ"
    return GradientError(
        f"Rank {rank} has other parameters than rank 0: {what}.",
        remedy="Build the same model with the same settings on every rank.",
    )
