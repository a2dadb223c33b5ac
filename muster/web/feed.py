"""Follows a scheduler: a thread for each stream, which hands what it reads to the event loop."""

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
"""Seconds before a scheduler that is away is asked again."""

REFUSED_S, REFUSED_MOST_S = 5.0, 300.0
"""Seconds before one that has refused a job that it has is asked again: at first, and at most; it doubles."""

UNTRUSTED_S = 1.0
"""Likewise at first, where a certificate did not count: each time is a failed handshake at the scheduler."""

Connect = Callable[[str], SchedulerClient]
"""Makes a connection on which a job, or "" for all, is asked about."""


class Feed:
    """Keeps what is known of a scheduler up to date.

    Args:
        connect: see :data:`Connect`; it may raise what :class:`SchedulerClient` does.
        known: what is known; changed in the event loop alone.
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
        """Follows all jobs, in short."""
        self._follow("")

    def close(self) -> None:
        """Ends all streams."""
        for stream in self._streams.values():
            stream.stop()

    def watch(self, job_id: str) -> None:
        """Adds a viewer of a job, which is followed from the first one on."""
        self._viewers[job_id] = self._viewers.get(job_id, 0) + 1
        if job_id not in self._streams:
            self._follow(job_id)
        for stream in self._streams.values():
            if stream.refusals and stream.job_id in (job_id, ""):
                stream.go_on()

    def leave(self, job_id: str) -> None:
        """Removes a viewer; with the last, the job's stream ends."""
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
        except RuntimeError:  # the loop is closed
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
        elif news is None:  # a new stream begins: it sends everything from the start
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
            if self._is_listed(stream.job_id):  # else it is asked again when there is such a job
                self._ask_again(stream, REFUSED_S)
        elif isinstance(news, CertificateError):
            stream.refusals += 1
            self._ask_again(stream, UNTRUSTED_S)
        self._changed()

    def _ask_again(self, stream: _Stream, first_s: float) -> None:
        after_s = min(first_s * 2 ** min(stream.refusals - 1, 10), REFUSED_MOST_S)
        self._loop.call_later(after_s, stream.go_on)

    def _is_listed(self, job_id: str) -> bool:
        """Whether the scheduler has the job, for all that is known; it has that of no name, which is all."""
        job = self._known.jobs.get(job_id)
        return not job_id or (job is not None and not job.gone)


class _Stream:
    """One stream of a scheduler, opened again for as long as it is wanted; once refused, when it shall go on.

    Attributes:
        refusals: how often in a row it was refused; the event loop's alone.
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
        """Whether nobody wants it any more."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Ends it; callable from any thread."""
        self._stop.set()
        self._wake.set()
        with self._lock:
            if self._client is not None:
                self._client.close()

    def go_on(self) -> None:
        """Asks at once; callable from any thread."""
        self._wake.set()

    def run(self) -> None:
        """Reads until it is stopped."""
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
            except OSError as error:  # such as too few descriptors
                self._post(self, UnreachableError(f"The scheduler cannot be asked: {error.strerror}."))
            except ValueError:  # gRPC's word for a channel that was closed
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
