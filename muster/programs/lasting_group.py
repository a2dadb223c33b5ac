"""A process group of torch that outlives its members: it passes all on to an inner one."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from muster.errors import CommunicatorAbortedError, WorkerError
from muster.programs.fewer_ranks import FewerRanks
from muster.programs.lasting_work import ApartWork, call_apart, callbacks_of, is_on_host, written
from muster.programs.named_group import NamedProcessGroup
from muster.programs.rehearsal import RehearsedBackend, rehearse
from muster.programs.work import GroupWork
from muster.wire.threads import start_thread

OPERATIONS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "_allgather_base",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "gather",
    "scatter",
    "all_to_all_single",
    "alltoall_base",
    "alltoall",
    "barrier",
    "send",
    "recv",
    "recv_anysource",
)
"""The methods that start something; of two names for one, each torch calls the one it has."""


class LastingProcessGroup(NamedProcessGroup):
    """One group of ranks, for as long as they are as many.

    It is what torch has registered under the group's name, and what modules, optimizers and device meshes
    hold. Until :meth:`connect` is called it *rehearses*: it answers by itself, as if all ranks gave what this
    one gives.

    Args:
        rank: of this process within the group.
        size: how many ranks there are.
        name: torch's.
    """

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size, name)
        self._lasting_rank, self._lasting_size = rank, size
        self.device_types: list[Any] = []
        """On which devices its tensors may be, as torch's groups say it."""
        self._inner: Any = None
        self._apart = False
        self._fewer: FewerRanks | None = None
        self._broken: Exception | None = None
        self._callbacks = callbacks_of(f"lasting/{name}")
        self._under_way: weakref.WeakSet[ApartWork] = weakref.WeakSet()
        self._lock = threading.Lock()

    # ------------------------------------------------------------ generations

    def connect(self, inner: Any, there: Sequence[int] | None = None) -> None:
        """Takes the group of this generation; operations go to it from now on.

        Args:
            inner: that.
            there: which of this group's ranks are in it, in order; None: all.
        """
        lacks = there is not None and len(there) < self._lasting_size
        with self._lock:
            self._inner, self._broken = inner, None
            self._fewer = FewerRanks(there, self._lasting_size) if there is not None and lacks else None
            self._apart = _is_gloo(inner)

    def break_off(self, reason: str) -> None:
        """Lets all that is under way fail, and all that is called before the next :meth:`connect`.

        Whoever waits goes on at once; the inner group is ended beside it, and never waited for.
        """
        error = CommunicatorAbortedError(reason)
        with self._lock:
            inner, self._inner, self._broken = self._inner, None, error
            under_way = list(self._under_way)
        for work in under_way:
            work.give_up(error)
        if inner is not None:
            _keep_for_ever(inner)
            start_thread(lambda: _abort(inner), name="muster-abort")

    def rest(self) -> None:
        """Lets it answer by itself again, as before the first :meth:`connect`."""
        with self._lock:
            self._broken = None

    @property
    def is_connected(self) -> bool:
        """Whether it is connected to the other ranks of this generation."""
        return self._inner is not None

    # ------------------------------------------------------------ operations

    def _operate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            inner, broken = self._inner, self._broken
            apart, fewer = self._apart and is_on_host(args), self._fewer
        if broken is not None:
            return self._over_at_once(name, args, broken)
        if inner is None:
            rehearse(name, args, self._lasting_rank, self._lasting_size)
            return self._over_at_once(name, args, None)
        call = getattr(inner, name)
        try:
            if fewer is not None:
                args = fewer.arguments(name, args)
            if not apart:
                return call(*args, **kwargs)
            work = call_apart(call, name, args, kwargs, self._callbacks)
        except (RuntimeError, WorkerError) as error:  # DDP's hooks could not go on after one that raises
            return self._over_at_once(name, args, error)
        with self._lock:
            self._under_way.add(work)
            broken = self._broken
        if broken is not None:  # while it began
            work.give_up(broken)
        return work

    def _over_at_once(self, name: str, args: tuple[Any, ...], error: Exception | None) -> GroupWork:
        work = GroupWork(written(name, args), self._callbacks, ordered=False)
        work.finish(error)
        return work

    # ------------------------------------------------------------ what torch asks

    def getBackendName(self) -> str:  # noqa: N802
        """See torch."""
        return "lasting"

    def name(self) -> str:
        """See torch."""
        return "lasting"

    def getRank(self) -> int:  # noqa: N802
        """See torch."""
        return self._lasting_rank

    def getSize(self) -> int:  # noqa: N802
        """See torch."""
        return self._lasting_size

    @property
    def _device_types(self) -> list[Any]:
        return self.device_types

    def _get_backend(self, device: Any) -> Any:
        """What torch asks a group's backend for, it asks that of this generation's."""
        with self._lock:
            inner, broken = self._inner, self._broken
        if broken is not None:
            raise broken.with_traceback(None)
        return RehearsedBackend() if inner is None else inner._get_backend(device)

    def _start_coalescing(self, device: Any) -> None:
        if self._inner is not None and not self._apart:
            self._inner._start_coalescing(device)

    def _end_coalescing(self, device: Any) -> Any:
        return None if self._inner is None or self._apart else self._inner._end_coalescing(device)

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """See torch; it ends by its own timeout at the latest."""
        if self._broken is not None:
            raise self._broken.with_traceback(None)
        if self._inner is not None:
            self._inner.monitored_barrier(*args, **kwargs)

    def set_timeout(self, timeout: Any) -> None:
        """Changes the deadline of what is called from now on."""
        if self._inner is not None:
            self._inner.set_timeout(timeout)

    def abort(self) -> None:
        """Ends what hangs; the group is unusable then."""
        self.break_off("The process group was aborted.")

    def shutdown(self) -> None:
        """Ends the group after what was called before."""
        if self._inner is not None:
            self._inner.shutdown()


def _passing_on(name: str) -> Any:
    def operation(self: LastingProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return self._operate(name, args, kwargs)

    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = "See torch."
    return operation


for _name in OPERATIONS:
    if hasattr(dist.ProcessGroup, _name):
        setattr(LastingProcessGroup, _name, _passing_on(_name))


def _is_gloo(inner: Any) -> bool:
    """Whether its collectives on CPUs are Gloo's; Muster's and NCCL's end with an abort."""
    try:
        return "gloo" in inner._get_backend(torch.device("cpu")).name().lower()
    except RuntimeError:
        return False


def _keep_for_ever(inner: Any) -> None:
    """Keeps C++ from taking the group apart: that would wait for collectives that never end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))


def _abort(inner: Any) -> None:
    try:
        inner.abort()
    except Exception:  # its collectives fail when the other ends go, or never: nobody waits for them
        return
