"""How the embedded communicator runs its calls: one at a time, in order, under a deadline, until it fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from muster.worker.communicators import numpy_arrays as arrays
from muster.worker.communicators.base import Membership, Work
from muster.worker.communicators.numpy_arrays import CheckedCommunicator, NumpyArray, as_bytes
from muster.worker.communicators.tcp import rings as rings
from muster.worker.communicators.tcp.endpoint import Endpoint
from muster.worker.communicators.tcp.frames import (
    HAS_FINISHED,
    Call,
    FrameKind,
    Reason,
    blocks_frame,
    group_label,
)
from muster.worker.communicators.tcp.handshake import Lobby
from muster.worker.communicators.tcp.links import Links, farewell_of
from muster.worker.communicators.tcp.transfer import FrameIn, Incoming, Mover, Outgoing
from muster.worker.communicators.work import FINISHED, WorkQueue
from muster.worker.errors import CollectiveTimeoutError, CommunicatorAbortedError, FormationTimeoutError

SMALL_BYTES = 32768
"""A payload up to this size travels with the call itself (all ranks' together: twice as much)."""

NOTHING = memoryview(b"")


class TcpEngine(CheckedCommunicator):
    """Connections, order, deadline, abort and agreement; the collectives themselves stand in a subclass."""

    name = "tcp"

    def __init__(self, membership: Membership, endpoint: Endpoint, *, path: str, timeout_s: float) -> None:
        self.membership = membership
        self.timeout_s = timeout_s
        self._endpoint = endpoint
        self._path = path
        self._mover = Mover()
        self._lobby = Lobby(membership, group_label(membership, path))
        self._links = Links(membership, endpoint, self._lobby, self._mover)
        self._queue = WorkQueue(f"muster-tcp-{membership.group}")
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._sequence = 0
        self._splits = 0
        self._points: dict[int, int] = {}
        self._deadline = 0.0
        self._closed = False

    def bring_up(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Connects to the usual peers and waits until every rank has done so.

        Raises:
            FormationTimeoutError: names the ranks that did not come.
        """
        if self.world_size == 1:
            return
        deadline = time.monotonic() + timeout_s
        self._endpoint.gather(self._lobby)
        self._mover.check_while_waiting(check)
        try:
            self._links.connect(self._links.usual(), deadline, check)
            call = Call("connect").encode()
            self._links.exchange(call, NOTHING, deadline, check)
        except Exception as error:
            known = self._links.explain(error, Call("connect"), timeout_s)
            if isinstance(known, CollectiveTimeoutError):
                known = FormationTimeoutError(known.message, remedy=known.remedy)
            self._tear_down(known)
            raise known from None
        self._mover.check_while_waiting(None)

    def abort(self, error: Exception) -> None:
        """See :meth:`Communicator.abort`."""
        if self._error is None:
            self._error = error
        self._mover.stop()
        self._close_if_failed()

    def close(self) -> None:
        """See :meth:`Communicator.close`."""
        if self._closed:
            return
        self._closed = True
        self._queue.close()
        with self._lock:
            if self._error is None:
                self._error = CommunicatorAbortedError("The communicator was closed.")
                self._links.close(Reason.DONE, HAS_FINISHED if self.finished else "")
            self._mover.close()

    def _issue(self, call: Call, action: Callable[[], None], async_op: bool) -> Work:
        self._check()
        if not async_op and self._queue.idle:
            self._run(call, action)
            return FINISHED
        work = self._queue.put(lambda: self._run(call, action))
        if not async_op:
            work.wait()
        return work

    def _run(self, call: Call, action: Callable[[], None]) -> None:
        try:
            with self._lock:
                self._check()
                self._deadline = time.monotonic() + self.timeout_s
                try:
                    action()
                except Exception as error:
                    if self._error is None:
                        self._error = self._links.explain(error, call, self.timeout_s)
                    raise self._error from None
                except BaseException:
                    self._error = CommunicatorAbortedError(f"{call} was interrupted.")
                    raise
        finally:
            self._close_if_failed()

    def _close_if_failed(self) -> None:
        if self._error is not None and self._lock.acquire(blocking=False):
            try:
                self._links.close(*farewell_of(self._error))
            finally:
                self._lock.release()

    def _tear_down(self, error: Exception) -> None:
        self._error = error
        self._links.close(*farewell_of(error))
        self._mover.close()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)  # it may be raised again and again

    def _collective(
        self,
        call: Call,
        payload: NumpyArray | None,
        small: Callable[[list[NumpyArray]], None],
        large: Callable[[], None],
        async_op: bool,
        nbytes: int = -1,
    ) -> Work:
        """Issues a collective: agreement of all ranks first, data with it if small, else after it."""
        size = nbytes if nbytes >= 0 else (0 if payload is None else payload.nbytes)
        dtype = np.dtype(np.uint8) if payload is None else payload.dtype
        with_data = self._goes_with_call(size)

        def action() -> None:
            if self.world_size == 1:
                small([payload.copy() if payload is not None else np.empty(0, np.uint8)])
                return
            data = NOTHING if payload is None or not with_data else as_bytes(payload)
            parts = self._agree(call, data)
            if with_data:
                dtypes = dtype if payload is not None or not call.dtype else np.dtype(call.dtype)
                small([arrays.from_bytes(part, dtypes) for part in parts])
            else:
                large()

        return self._issue(call, action, async_op)

    def _agree(self, call: Call, payload: memoryview) -> list[memoryview]:
        mine = self._next(call)
        own = memoryview(bytes(payload))
        blocks = self._links.exchange(mine, own, self._deadline, self._check)
        if any(theirs != mine for theirs, _ in blocks):
            raise self._links.mismatch({rank: theirs for rank, (theirs, _) in enumerate(blocks)})
        return [part for _, part in blocks]

    def _next(self, call: Call) -> bytes:
        number = self._sequence
        self._sequence += 1
        return replace(call, sequence=number).encode()

    def _goes_with_call(self, nbytes: int) -> bool:
        return nbytes <= SMALL_BYTES and nbytes * self.world_size <= 2 * SMALL_BYTES

    def _ring(self) -> rings.Ring:
        size = self.world_size
        left = self._links.get((self.rank - 1) % size, self._deadline, self._check)
        right = self._links.get((self.rank + 1) % size, self._deadline, self._check)
        return rings.Ring(self._mover, left, right, self.rank, size, self._deadline)

    def _move(self, out: dict[int, memoryview], into: dict[int, memoryview]) -> None:
        """Sends to some peers and receives from others, all at once."""
        self._links.connect([*out, *into], self._deadline, self._check)
        outgoing = [Outgoing(self._links.get(r, self._deadline, self._check), [v]) for r, v in out.items()]
        incoming = [Incoming(self._links.get(r, self._deadline, self._check), [v]) for r, v in into.items()]
        self._mover.run(outgoing, incoming, self._deadline)

    def _point(self, call: Call, peer: int, source: NumpyArray | None, target: NumpyArray | None) -> None:
        """One half of a point-to-point call: both say what they call, then the data goes."""
        number = self._points.get(peer, 0)
        self._points[peer] = number + 1
        link = self._links.get(peer, self._deadline, self._check)
        mine = replace(call, sequence=number).encode()
        small = source is not None and source.nbytes <= SMALL_BYTES
        payload = as_bytes(source) if small and source is not None else NOTHING
        incoming = FrameIn(link)
        frame = blocks_frame(FrameKind.POINT, [(mine, payload)])
        self._mover.run([Outgoing(link, [memoryview(frame)])], [incoming], self._deadline)
        theirs, data = incoming.blocks[0]
        other = "recv" if call.kind == "send" else "send"
        expected = replace(call, kind=other, root=self.rank, sequence=number)
        if incoming.kind is not FrameKind.POINT or theirs != expected.encode():
            raise self._links.mismatch({self.rank: mine, peer: theirs})
        if target is not None and target.nbytes <= SMALL_BYTES:
            as_bytes(target)[:] = data
        elif target is not None:
            self._move({}, {peer: as_bytes(target)})
        elif source is not None and not small:
            self._move({peer: as_bytes(source)}, {})
