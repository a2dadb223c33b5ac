"""The streams to the scheduler: a thread reads each, and tells what comes as events."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from muster.worker.control import events as e
from muster.worker.control import messages as m
from muster.worker.control.channel import Connector, DeniedError, MalformedError, Stream
from muster.worker.control.wire import WireError, decode

log = logging.getLogger("muster.worker")

JOIN_TIMEOUT_S = 2.0


class Streams:
    """Opens and closes streams as it is told; messages go to the newest.

    Args:
        connector: opens them.
        post: takes the events; called on the streams' threads.
    """

    def __init__(self, connector: Connector, post: Callable[[e.Event], object]) -> None:
        self._connector = connector
        self._post = post
        self._lock = threading.Lock()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._open: dict[int, Stream] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False

    def send(self, data: bytes) -> None:
        """Sends a message on the newest stream, as soon as that is open."""
        self._outbox.put(data)

    def open(self, number: int) -> None:
        """Begins to open a stream under this number."""
        outbox = self._outbox = SimpleQueue()
        with self._lock:
            if self._closed:
                return
            thread = threading.Thread(
                target=self._run, args=(number, outbox), name="muster-stream", daemon=True
            )
            self._threads = [each for each in self._threads if each.is_alive()]
            self._threads.append(thread)
            thread.start()

    def close(self, number: int) -> None:
        """Ends this stream, if it is open."""
        with self._lock:
            stream = self._open.pop(number, None)
        if stream is not None:
            stream.close()

    def close_all(self) -> None:
        """Ends all streams for good, and waits for their threads; idempotent."""
        with self._lock:
            self._closed = True
            streams, self._open = list(self._open.values()), {}
            threads, self._threads = self._threads, []
        for stream in streams:
            stream.close()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_TIMEOUT_S)

    def _run(self, number: int, outbox: SimpleQueue[bytes | None]) -> None:
        try:
            stream = self._connector.open(outbox)
            with self._lock:
                self._open[number] = stream
                closed = self._closed
            self._post(e.StreamOpened(number))
            if closed:
                stream.close()
            for data in stream:
                self._post(e.Received(number, decode(data)))
            self._post(e.StreamLost(number, "it closed the stream"))
        except DeniedError as error:
            self._post(e.StreamDenied(number, str(error), error.by_scheduler))
        except MalformedError as error:
            self._post(e.Received(number, m.Refused(m.RefusalCode.MALFORMED, str(error))))
        except (OSError, WireError) as error:
            self._post(e.StreamLost(number, str(getattr(error, "strerror", None) or error)))
        except Exception as error:  # a fault of ours must not leave the worker waiting for nobody
            log.exception("fault on the scheduler's stream; connecting again")
            self._post(e.StreamLost(number, f"{type(error).__name__}: {error}"))
        finally:
            self.close(number)
