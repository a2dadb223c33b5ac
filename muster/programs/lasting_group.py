"""A torch process group that outlives generations: it passes operations on to a generation's inner group."""

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
"""The methods that start an operation; if one has two names, each version of torch calls its own."""


class LastingProcessGroup(NamedProcessGroup):
    """One group of ranks, which stays as long as its world size is the same.

    Torch registers it under the group's name, and modules, optimizers and device meshes refer to it. Until
    :meth:`connect` is called it *rehearses*: it computes results by itself, as if all ranks gave the same
    inputs as this one.

    Args:
        rank: this process's rank within the group.
        size: the group's world size.
        name: the group's name in torch.
    """

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size, name)
        self._lasting_rank, self._lasting_size = rank, size
        self.device_types: list[Any] = []
        """The devices on which its tensors may be, as in torch's groups."""
        self._inner: Any = None
        self._apart = False
        self._fewer: FewerRanks | None = None
        self._broken: Exception | None = None
        self._callbacks = callbacks_of(f"lasting/{name}")
        self._under_way: weakref.WeakSet[ApartWork] = weakref.WeakSet()
        self._lock = threading.Lock()

    # ------------------------------------------------------------ generations

    def connect(self, inner: Any, there: Sequence[int] | None = None) -> None:
        """Connects it to a generation's inner group, to which operations go from now on.

        Args:
            inner: the generation's group.
            there: the ranks of this group that are in ``inner``, in order; None for all.
        """
        lacks = there is not None and len(there) < self._lasting_size
        with self._lock:
            self._inner, self._broken = inner, None
            self._fewer = FewerRanks(there, self._lasting_size) if there is not None and lacks else None
            self._apart = _is_gloo(inner)

    def break_off(self, reason: str) -> None:
        """Fails all operations in progress, and all that are called before the next :meth:`connect`.

        Callers that wait go on at once. The inner group is aborted in another thread, which nobody waits for.
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
        """Returns the group to rehearsal, as before the first :meth:`connect`."""
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
        except (RuntimeError, WorkerError) as error:  # DDP cannot go on after a hook that raises
            return self._over_at_once(name, args, error)
        with self._lock:
            self._under_way.add(work)
            broken = self._broken
        if broken is not None:  # broken off while the operation began
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
        """Returns the backend of the inner group, which answers torch's queries.

        Raises:
            CommunicatorAbortedError: the group is broken off.
        """
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
        """See torch; :meth:`break_off` does not end it before its timeout."""
        if self._broken is not None:
            raise self._broken.with_traceback(None)
        if self._inner is not None:
            self._inner.monitored_barrier(*args, **kwargs)

    def set_timeout(self, timeout: Any) -> None:
        """Changes the timeout of operations that are called from now on."""
        if self._inner is not None:
            self._inner.set_timeout(timeout)

    def abort(self) -> None:
        """Fails all operations in progress; the group is unusable until the next :meth:`connect`."""
        self.break_off("The process group was aborted.")

    def shutdown(self) -> None:
        """Ends the inner group after the operations that were called before."""
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
    """Whether its collectives on CPUs are Gloo's, which an abort does not end."""
    try:
        return "gloo" in inner._get_backend(torch.device("cpu")).name().lower()
    except RuntimeError:
        return False


def _keep_for_ever(inner: Any) -> None:
    """Keeps the group's C++ destructor from running, because it would wait for collectives that never end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))


def _abort(inner: Any) -> None:
    try:
        inner.abort()
    except Exception:  # nobody waits for its collectives, which fail with the connections or never
        return
