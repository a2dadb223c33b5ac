"""A worker's side of the uplink: opens streams by the uplink, or directly if no uplink answers."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from array import array
from collections.abc import Iterator, Mapping
from queue import SimpleQueue

from muster.forking import not_for_children
from muster.wire.threads import start_thread
from muster.worker.config import Settings
from muster.worker.session.events import Timing
from muster.worker.session.streams import Dial, Stream
from muster.worker.uplink.attempt import Attempt
from muster.worker.uplink.door import OUTER, inherited
from muster.worker.uplink.frames import (
    HEAD,
    MAX_FROM_UPLINK_BYTES,
    UplinkFrameKind,
    decode_end,
    frame,
    request_of,
)

log = logging.getLogger("muster.worker")

FIRST_ANSWER_S = 10.0
"""How long an uplink that has just been started may take to answer, in seconds."""

LATER_ANSWER_S = 1.0
"""The same for a worker's later streams, in seconds: members must come back within MS_NODE_TIMEOUT."""

PAUSE_S = 0.5
"""The longest pause between two attempts, in seconds, before jitter; attempts also wait for the uplink."""

MOVED_S = 0.5
"""How long the worker waits for a frame that is still being written before it gives up its note that it
continues on another stream, in seconds.
"""


def dial_by_uplink(env: Mapping[str, str], direct: Dial, settings: Settings) -> Dial:
    """Returns a function that opens streams by the uplink of this process's launcher, or else directly.

    If the uplink is dead or paused, the worker connects directly, and tries the uplink again for its next
    stream. If the uplink recovers before the direct connection is established, the worker uses the uplink.

    Args:
        env: the process's environment.
        direct: opens the worker's own stream.
        settings: this worker's settings. An uplink counts as paused after a silence of a quarter of
            MS_NODE_TIMEOUT.
    """
    door = inherited(env, OUTER)
    if door is None:
        return direct
    door.close()
    hung_s = min(max(0.75, settings.node_timeout_s / 4), 5.0)
    return _Dialing({OUTER: env[OUTER]}, direct, request_of(settings), hung_s).dial


def timing_by_uplink() -> Timing:
    """Returns deadlines for a worker with an uplink; while that is paused, the worker notices no recovery."""
    return Timing(retry_last_s=PAUSE_S)


class _Dialing:
    """Decides how this worker's next stream is opened."""

    def __init__(self, env: Mapping[str, str], direct: Dial, request: bytes, hung_s: float) -> None:
        self._env = env
        self._direct = direct
        self._request = request
        self._hung_s = hung_s
        self._answer_s = FIRST_ANSWER_S
        self._hung = False

    def dial(self, outbox: SimpleQueue[bytes | None]) -> Stream:
        """See :data:`muster.worker.session.streams.Dial`."""
        hung, self._hung = self._hung, False
        answer_s, self._answer_s = self._answer_s, LATER_ANSWER_S
        end = self._handed_in()
        if end is None:
            log.debug("no uplink is there; connecting directly")
            return self._direct(outbox)
        if not hung and _is_alive(end, answer_s):
            return self._stream_on(end, outbox)
        log.debug("the uplink does not answer; connecting directly, unless it does first")
        attempt = Attempt(self._direct, outbox)
        if attempt.loses_to(end):
            attempt.give_up()
            return self._stream_on(end, outbox)
        end.close()
        return attempt.result()

    def _handed_in(self) -> socket.socket | None:
        """Passes a stream to the uplink; returns None if there is no uplink."""
        door = inherited(self._env, OUTER)
        if door is None:
            return None
        own, theirs = socket.socketpair()
        with door, theirs:
            flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
            ends = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [theirs.fileno()]))
            try:
                door.sendmsg([self._request], [ends], flags)  # socket.send_fds would ignore the flags.
            except OSError:
                own.close()
                return None
        return own

    def _stream_on(self, end: socket.socket, outbox: SimpleQueue[bytes | None]) -> Stream:
        out = end.dup()  # Each thread closes what it uses itself.
        for each in (end, out):
            not_for_children(each)
        whole = threading.Lock()  # A frame is written as a whole.
        # Acquired by the reader, which then closes ``end``, or by an earlier call of close().
        taken = threading.Lock()
        # Nothing may follow the note MOVED, because a later heartbeat would revoke it.
        moved = threading.Event()

        def send() -> None:
            with out, contextlib.suppress(OSError):
                for data in iter(outbox.get, None):
                    with whole:
                        if moved.is_set():
                            return
                        out.sendall(frame(UplinkFrameKind.MESSAGE, data))

        def say_moved() -> None:
            """Tells the uplink that the worker now uses another stream; a paused uplink reads this later."""
            if whole.acquire(timeout=MOVED_S):
                with contextlib.suppress(OSError):
                    end.send(frame(UplinkFrameKind.MOVED), socket.MSG_DONTWAIT)
                moved.set()
                whole.release()

        def replies() -> Iterator[bytes]:
            if not taken.acquire(blocking=False):
                return
            with end:
                while True:
                    try:
                        kind, content = _next_frame(end, self._hung_s)
                    except TimeoutError:
                        self._hung = True
                        say_moved()
                        raise
                    if kind == UplinkFrameKind.END:
                        error = decode_end(content)
                        if error is not None:
                            raise error
                        return
                    if kind == UplinkFrameKind.MESSAGE:
                        yield content

        def close() -> None:
            # First, because the sender closes ``out`` when it sees its end.
            with contextlib.suppress(OSError):
                out.shutdown(socket.SHUT_RDWR)
            outbox.put(None)
            if taken.acquire(blocking=False):
                end.close()

        start_thread(send, name="muster-send")
        return replies(), close


def _is_alive(end: socket.socket, limit_s: float) -> bool:
    """Whether the uplink accepts this stream within the time limit."""
    try:
        return _next_frame(end, limit_s) == (UplinkFrameKind.ALIVE, b"")
    except OSError:
        return False


def _next_frame(end: socket.socket, limit_s: float) -> tuple[int, bytes]:
    """Reads a frame from the uplink.

    Raises:
        TimeoutError: nothing has arrived within the time.
        ConnectionError: the other end has closed the connection.
    """
    length, kind = HEAD.unpack(_exactly(end, HEAD.size, limit_s))
    if length > MAX_FROM_UPLINK_BYTES:
        raise ConnectionError(f"the host's uplink sent a frame of {length} bytes")
    return kind, _exactly(end, length, limit_s)


def _exactly(end: socket.socket, length: int, limit_s: float) -> bytes:
    data = bytearray(length)
    view, got = memoryview(data), 0
    waits = select.poll()
    waits.register(end, select.POLLIN)
    while got < length:
        began_s = time.monotonic()
        if not waits.poll(1000 * limit_s) and time.monotonic() - began_s >= limit_s:
            raise TimeoutError(f"the host's uplink has given no sign of life for {limit_s:g} s")
        count = end.recv_into(view[got:])
        if not count:
            raise ConnectionError("the host's uplink is gone")
        got += count
    return bytes(data)
