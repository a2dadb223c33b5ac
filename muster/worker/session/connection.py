"""The connection to the scheduler: consecutive, numbered streams, whose messages become events."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from muster.wire import messages
from muster.wire.codec import WireError, decode_scheduler_message
from muster.wire.threads import start_thread
from muster.worker.session import events
from muster.worker.session.streams import DeniedError, Dial, MessageRejectedError

log = logging.getLogger("muster.worker")

JOIN_TIMEOUT_S = 2.0


class SchedulerConnection:
    """Numbered streams to the scheduler, each read by a thread; messages go to the newest.

    Args:
        dial: opens a stream.

    Attributes:
        post: called with each event, on the streams' threads.
    """

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self.post: Callable[[events.Event], object] = lambda _: None
        self._lock = threading.Lock()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._closers: dict[int, Callable[[], None]] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False

    def send(self, data: bytes) -> None:
        """Sends a message on the newest stream, once that is open."""
        self._outbox.put(data)

    def open(self, number: int) -> None:
        """Begins to open a stream under this number."""
        outbox = self._outbox = SimpleQueue()
        with self._lock:
            if self._closed:
                return
            self._threads = [each for each in self._threads if each.is_alive()]
            self._threads.append(start_thread(partial(self._run, number, outbox), name="muster-stream"))

    def close(self, number: int) -> None:
        """Ends this stream, if it is open."""
        with self._lock:
            end = self._closers.pop(number, None)
        if end is not None:
            end()

    def close_all(self) -> None:
        """Ends all streams for good, and waits for their threads; idempotent."""
        with self._lock:
            self._closed = True
            closers, self._closers = list(self._closers.values()), {}
            threads, self._threads = self._threads, []
        for end in closers:
            end()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_TIMEOUT_S)

    def _run(self, number: int, outbox: SimpleQueue[bytes | None]) -> None:
        try:
            incoming, end = self._dial(outbox)
            with self._lock:
                self._closers[number] = end
                closed = self._closed
            self.post(events.StreamOpened(number))
            if closed:
                end()
            held: messages.Assignment | None = None
            for data in incoming:
                message = decode_scheduler_message(data, held)
                held = message if isinstance(message, messages.Assignment) else held
                self.post(events.Received(number, message))
            self.post(events.StreamLost(number, "it closed the stream"))
        except DeniedError as error:
            self.post(events.StreamDenied(number, str(error), error.by_scheduler))
        except MessageRejectedError as error:
            self.post(events.Received(number, messages.Refused(messages.RefusalCode.MALFORMED, str(error))))
        except (OSError, WireError) as error:
            self.post(events.StreamLost(number, str(getattr(error, "strerror", None) or error)))
        except Exception as error:  # An error in Muster must not leave the worker waiting forever.
            log.exception("fault on the scheduler's stream; connecting again")
            self.post(events.StreamLost(number, f"{type(error).__name__}: {error}"))
        finally:
            self.close(number)
