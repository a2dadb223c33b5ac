"""A direct connection to the scheduler that is attempted while the host's uplink may still answer."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from queue import SimpleQueue

from muster.wire.threads import start_thread
from muster.worker.session.streams import Dial, Stream


class _Claim(SimpleQueue[bytes | None]):
    """A worker's messages, which a stream cannot read before it is decided that this stream is used."""

    def __init__(self, outbox: SimpleQueue[bytes | None]) -> None:
        super().__init__()
        self._outbox = outbox
        self._decided = threading.Event()
        self._mine = False

    def decide(self, *, mine: bool) -> None:
        """Decides that the stream is used, or that it ends without a message."""
        self._mine = mine
        self._decided.set()

    def get(self, block: bool = True, timeout: float | None = None) -> bytes | None:
        """See :class:`queue.SimpleQueue`."""
        self._decided.wait()
        return self._outbox.get() if self._mine else None

    def put(self, item: bytes | None, block: bool = True, timeout: float | None = None) -> None:
        """See :class:`queue.SimpleQueue`."""
        if self._mine:
            self._outbox.put(item)


class Attempt:
    """Opens the worker's own stream on a thread.

    If a firewall drops the worker's packets, this takes seconds, during which the uplink may recover.

    Args:
        direct: opens the stream.
        outbox: the messages to send, on this stream or another.
    """

    def __init__(self, direct: Dial, outbox: SimpleQueue[bytes | None]) -> None:
        self._direct = direct
        self._claim = _Claim(outbox)
        self._lock = threading.Lock()
        self._given_up = False
        self._result: Stream | Exception | None = None
        self._over = os.eventfd(0, os.EFD_CLOEXEC)
        start_thread(self._run, name="muster-direct")

    def loses_to(self, end: socket.socket) -> bool:
        """Waits until the attempt is over or the uplink answers at this end.

        Returns whether the uplink was first.
        """
        waits = select.poll()
        waits.register(end, select.POLLIN)
        waits.register(self._over, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in waits.poll()]
            if self._over in ready:
                return False
            with contextlib.suppress(ConnectionError):
                if end.recv(1, socket.MSG_PEEK):
                    return True
            waits.unregister(end)  # The uplink has closed its end.

    def give_up(self) -> None:
        """Closes the result of this attempt, because another stream is used."""
        with self._lock:
            self._given_up = True
            result = self._result
            os.close(self._over)
        if result is not None:
            self._end(result)

    def result(self) -> Stream:
        """Returns the stream after the attempt has ended; raises the error if it failed."""
        os.close(self._over)
        if self._result is None or isinstance(self._result, Exception):
            raise self._result or ConnectionError("the attempt is not over")
        self._claim.decide(mine=True)
        return self._result

    def _run(self) -> None:
        result: Stream | Exception
        try:
            result = self._direct(self._claim)
        except Exception as error:
            result = error
        with self._lock:
            if not self._given_up:
                self._result = result
                os.eventfd_write(self._over, 1)
                return
        self._end(result)

    def _end(self, result: Stream | Exception) -> None:
        if not isinstance(result, Exception):
            result[1]()
        self._claim.decide(mine=False)
