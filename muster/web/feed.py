"""Follows a scheduler: one thread per stream reads replies and hands them to the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from muster.certs.errors import CertificateError
from muster.scheduler.cli.client import RefusedByScheduler, SchedulerClient, UnreachableError
from muster.scheduler.errors import SchedulerError
from muster.web.model import Followed
from muster.wire.threads import start_thread
from muster.wire.v1 import watch_pb2 as pb

AGAIN_S = 0.5
"""The pause before an unreachable scheduler is asked again, in seconds."""

REFUSED_S, REFUSED_MOST_S = 5.0, 300.0
"""The first and the longest pause, in seconds, before a scheduler that refused to show a job is asked again.
The pause doubles each time.
"""

UNTRUSTED_S = 1.0
"""The first pause after a certificate was not accepted, in seconds. It is longer than the pause for an
unreachable scheduler, because each attempt is a failed handshake at the scheduler.
"""

Connect = Callable[[str], SchedulerClient]
"""Connects to the scheduler for a job id, or for "", which means all jobs."""


class Feed:
    """Keeps the model of a scheduler up to date.

    Args:
        connect: see :data:`Connect`; may raise the errors of :class:`SchedulerClient`.
        known: the model, which is changed only in the event loop.
        changed: called in the event loop after each change.
    """

    def __init__(self, connect: Connect, known: Followed, changed: Callable[[], None]) -> None:
        self._connect = connect
        self._known = known
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, _Stream] = {}
        self._viewers: dict[str, int] = {}

    def open(self) -> None:
        """Starts to follow the summaries of all jobs."""
        self._follow("")

    def close(self) -> None:
        """Ends all streams."""
        for stream in self._streams.values():
            stream.stop()

    def watch(self, job_id: str) -> None:
        """Adds a viewer of a job; the first one starts the job's stream."""
        self._viewers[job_id] = self._viewers.get(job_id, 0) + 1
        if job_id not in self._streams:
            self._follow(job_id)
        for stream in self._streams.values():
            if stream.refusals and stream.job_id in (job_id, ""):
                stream.go_on()

    def leave(self, job_id: str) -> None:
        """Removes a viewer of a job; the last one ends the job's stream."""
        self._viewers[job_id] -= 1
        if not self._viewers[job_id]:
            del self._viewers[job_id]
            self._streams.pop(job_id).stop()

    def _follow(self, job_id: str) -> None:
        stream = _Stream(job_id, self._connect, self._post)
        self._streams[job_id] = stream
        start_thread(stream.run, name=f"watch {job_id or 'all'}")

    def _post(self, stream: _Stream, news: pb.WatchReply | SchedulerError | CertificateError | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._take, stream, news)
        except RuntimeError:  # The event loop is closed.
            stream.stop()

    def _take(self, stream: _Stream, news: pb.WatchReply | SchedulerError | CertificateError | None) -> None:
        if stream.stopped or self._streams.get(stream.job_id) is not stream:
            return
        now, job = time.time(), self._known.jobs.get(stream.job_id)
        if isinstance(news, pb.WatchReply):
            if stream.job_id:
                self._known.take_of(stream.job_id, news, now)
            else:
                waiting = [each for each in self._streams.values() if not self._is_listed(each.job_id)]
                self._known.take(news, now)
                for each in waiting:
                    if each.refusals and self._is_listed(each.job_id):
                        each.go_on()
        elif news is None:  # A new stream has begun, which sends everything from the start.
            stream.refusals = 0
            if job is not None:
                job.begin()
            elif not stream.job_id:
                self._known.refusals.clear()
        elif not stream.job_id:
            self._known.lose(str(news), now)
        elif job is not None and isinstance(news, RefusedByScheduler):
            job.refusal = str(news)
        if isinstance(news, RefusedByScheduler):
            stream.refusals += 1
            if self._is_listed(stream.job_id):  # Otherwise the stream is opened again once the job is listed.
                self._ask_again(stream, REFUSED_S)
        elif isinstance(news, CertificateError):
            stream.refusals += 1
            self._ask_again(stream, UNTRUSTED_S)
        self._changed()

    def _ask_again(self, stream: _Stream, first_s: float) -> None:
        after_s = min(first_s * 2 ** min(stream.refusals - 1, 10), REFUSED_MOST_S)
        self._loop.call_later(after_s, stream.go_on)

    def _is_listed(self, job_id: str) -> bool:
        """Whether the scheduler is known to have the job; True for "", which means all jobs."""
        job = self._known.jobs.get(job_id)
        return not job_id or (job is not None and not job.gone)


class _Stream:
    """One stream of a scheduler, which is opened again until it is stopped.

    After a refusal it is opened again only when :meth:`go_on` is called.

    Attributes:
        job_id: the job; "" for all.
        refusals: the number of refusals in a row; used only in the event loop.
    """

    def __init__(
        self,
        job_id: str,
        connect: Connect,
        post: Callable[[_Stream, pb.WatchReply | SchedulerError | CertificateError | None], None],
    ) -> None:
        self.job_id = job_id
        self._connect = connect
        self._post = post
        self.refusals = 0
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._client: SchedulerClient | None = None

    @property
    def stopped(self) -> bool:
        """Whether the stream was stopped."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Ends the stream; callable from any thread."""
        self._stop.set()
        self._wake.set()
        with self._lock:
            if self._client is not None:
                self._client.close()

    def go_on(self) -> None:
        """Opens the stream again at once; callable from any thread."""
        self._wake.set()

    def run(self) -> None:
        """Reads replies until it is stopped."""
        while not self.stopped:
            self._wake.clear()
            wait_s: float | None = AGAIN_S
            try:
                self._read()
                self._post(self, UnreachableError("The scheduler has ended the stream."))
            except (RefusedByScheduler, CertificateError) as error:
                wait_s = None
                self._post(self, error)
            except SchedulerError as error:
                self._post(self, error)
            except OSError as error:  # For example, no descriptors are left.
                self._post(self, UnreachableError(f"The scheduler cannot be asked: {error.strerror}."))
            except ValueError:  # gRPC raises this for a closed channel.
                pass
            if not self.stopped:
                self._wake.wait(wait_s)

    def _read(self) -> None:
        client = self._connect(self.job_id)
        with client:
            with self._lock:
                if self.stopped:
                    return
                self._client = client
            try:
                first = True
                for reply in client.watch(self.job_id):
                    if first:
                        self._post(self, None)
                    first = False
                    self._post(self, reply)
            finally:
                with self._lock:
                    self._client = None
