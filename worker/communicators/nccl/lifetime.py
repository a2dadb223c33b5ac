"""How an NCCL communicator ends: by an abort from any thread, at any moment, or closed in good order.

No other thread may be inside the communicator when NCCL aborts it, each may be freed once, and CUDA graphs
that hold its collectives must be given up first. So every call into NCCL says that it is inside, and whatever
comes after the end raises the reason for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from muster.worker.communicators.base import Communicator, Membership
from muster.worker.communicators.nccl import bootstrap as handles
from muster.worker.communicators.nccl.reduction import Operations
from muster.worker.errors import CommunicatorAbortedError, CommunicatorError

_log = logging.getLogger("muster.worker")
_LEAVE_WAIT_S = 0.2
_DESTROY_WAIT_S = 2.0
_POLL_S = 20e-6


class NcclLifetime(Communicator):
    """The part of :class:`~muster.worker.communicators.nccl.communicator.NcclCommunicator` that ends it.

    Args:
        nccl: the bindings.
        comm: NCCL's communicator on which collectives run.
        root: the one that it was split off, if it is freed with it.
        membership: who takes part.
        timeout_s: how long closing may take.
    """

    def __init__(
        self, nccl: Any, comm: Any, root: Any | None, membership: Membership, *, timeout_s: float
    ) -> None:
        self._nccl = nccl
        self._comm = comm
        self._root = root
        self._operations = Operations(nccl, comm, self._call)
        self.membership = membership
        self.timeout_s = timeout_s
        self._alive = [each for each in (comm, root) if each is not None]
        self._error: Exception | None = None
        self._closed = self._closing = False
        self._destroyed = threading.Event()
        self._inside = False
        self._grouped = False
        self._ending = threading.Lock()
        self._endings: list[threading.Thread] = []
        self._children: list[NcclLifetime] = []
        self._before_end: dict[int, Callable[[], None]] = {}

    def before_end(self, release: Callable[[], None]) -> Callable[[], None]:
        """Registers what must be released before an abort or close: CUDA graphs that hold collectives.

        Returns:
            A function that takes the registration back.
        """
        key = id(release)
        self._before_end[key] = release
        return lambda: self._before_end.pop(key, None) and None

    def check(self) -> None:
        """Raises what ended this communicator, or what NCCL reports of it."""
        state = int(self._call(self._nccl.comm_get_async_error, (self._comm,)))
        if state not in (0, handles.IN_PROGRESS):
            raise CommunicatorError(
                f"NCCL failed on rank {self.rank}: {self._nccl.get_error_string(state)}",
                remedy="Run with NCCL_DEBUG=WARN to see why.",
            )

    def abort(self, error: Exception) -> None:
        """Makes blocked and later calls raise ``error``, and running kernels end. From any thread.

        NCCL frees what it holds in the background (half a second); meanwhile one may build another.
        """
        with self._ending:
            if self._error is None:
                self._error = error
            if self._ended:
                return
            self._closed = True
            closing = self._closing
        for child in self._children:
            child.abort(error)
        if closing:
            # NCCL is to free each communicator once. Only where destroying it hangs, on a peer that died
            # before it destroyed its own, is it aborted amid that: the abort ends the wait and frees nothing.
            self._destroyed.wait(_DESTROY_WAIT_S)
        else:
            self._await_outside()
        with self._ending:
            alive, self._alive = self._alive, []
        if closing and alive:
            _log.warning("closing the communicator of %r hangs and is given up: %s", self._group_name, error)
        # At the same time: NCCL's abort waits for graphs that hold its kernels, and giving up a graph
        # waits for its kernels, which only the abort ends.
        self._endings += handles.abort_in_background(self._nccl, alive)
        self._release()

    def close(self) -> None:
        """Releases everything after outstanding work is done, or at the deadline; idempotent."""
        with self._ending:
            if self._closed:
                return
            self._closed = self._closing = True
            self._error = CommunicatorAbortedError(
                f"the communicator of group {self._group_name!r} is closed",
                remedy="Make a new one; a closed one cannot be used.",
            )
        late = CommunicatorAbortedError(f"it was not destroyed within {self.timeout_s:g} s")
        deadline = threading.Timer(self.timeout_s, self.abort, [late])
        deadline.daemon = True
        deadline.start()
        try:
            for child in self._children:
                child.close()
            self._release()
            self._destroy()
        finally:
            deadline.cancel()
            self._closing = False
            self._destroyed.set()

    def await_ended(self, timeout_s: float) -> bool:
        """After :meth:`abort`: waits until NCCL has freed everything; False where the deadline came first."""
        deadline = time.monotonic() + timeout_s
        for thread in self._endings:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._endings)

    # ------------------------------------------------------------ the end, in parts

    @property
    def _ended(self) -> bool:
        """Whether it was aborted, or closed to the end."""
        return self._closed and not self._closing

    @property
    def _group_name(self) -> str:
        return self.membership.group

    def _release(self) -> None:
        for release in list(self._before_end.values()):
            try:
                release()
            except Exception as error:  # what follows must end all the same
                _log.warning("what group %r held was not released: %s", self._group_name, error)
        self._before_end.clear()

    def _destroy(self) -> None:
        """Lets NCCL free what it holds; what an abort takes meanwhile is freed there."""
        if self._alive:
            self._operations.destroy()
        while alive := self._alive:
            with contextlib.suppress(self._nccl.NCCLError):
                self._nccl.comm_destroy(alive[0])
            with self._ending:
                self._alive = self._alive[1:]

    def _await_outside(self) -> None:
        """Waits for another thread to leave NCCL, but not for one that only the abort can free."""
        end = time.monotonic() + _LEAVE_WAIT_S
        while self._inside and time.monotonic() < end:
            time.sleep(_POLL_S)

    # ------------------------------------------------------------ calls into NCCL

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._error is not None:
            raise self._error.with_traceback(None)
        self._inside = True
        try:
            return function(*args)
        except Exception as error:
            self._fail(error)
        finally:
            self._inside = self._grouped

    def _fail(self, error: Exception) -> NoReturn:
        if self._error is not None:
            raise self._error.with_traceback(None) from None
        raise CommunicatorError(
            f"NCCL refused a call on rank {self.rank} of {self.world_size}"
            f" (group {self._group_name!r}): {error}",
            remedy="Run with NCCL_DEBUG=WARN to see why.",
        ) from error
