"""The gRPC servicer for operators who watch jobs. It limits their number and what they cost.

The state of each watched job is computed once a second, and soon after an event. All watchers get the same
bytes. Nothing is queued for a watcher: a slow one gets the present state when it reads again, and a watcher
that does not read is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from muster.scheduler import __version__
from muster.scheduler.access import Access, Caller
from muster.scheduler.audit.logs import LOG, Recorder
from muster.scheduler.core import events
from muster.scheduler.errors import (
    LimitError,
    MalformedError,
    NotPermittedError,
    RequestError,
    SchedulerError,
    StoppingError,
    TooSlowError,
    UnauthenticatedError,
    begin_stream,
    end_call,
)
from muster.scheduler.jobs.driver import JobDriver
from muster.scheduler.jobs.jobs import Jobs
from muster.scheduler.watch.history import NOBODY, EventHistory
from muster.scheduler.watch.picture import Picture, began_at
from muster.wire import unary_calls
from muster.wire.rules import WireError
from muster.wire.v1 import watch_pb2 as pb

if TYPE_CHECKING:
    from muster.certs.runtime.follower import Follower

SERVICE = "rendezvous.v1.Watching"
ROLES = ("operator",)
LOOK_S = 1.0
FAREWELL_S = 1.0
SOON_S = 0.1
"""How soon after an event a job's state is computed again, in seconds."""

SHARE = 0.02
"""The largest share of the event loop's time that is spent on computing jobs' states."""

Context = grpc.aio.ServicerContext[Any, Any]


class HasEndedError(RequestError):
    """The job is over already."""

    grpc_code = "FAILED_PRECONDITION"
    refusal = "has_ended"


@dataclass(frozen=True)
class WatchLimits:
    """Limits on what watchers may hold.

    Attributes:
        watchers: the most streams at the same time.
        of_one_job: the most streams of callers whose certificates are for the same job, so that there is room
            for callers of other jobs.
        write_timeout_s: how long a watcher may go without reading, in seconds.
    """

    watchers: int = 64
    of_one_job: int = 32
    write_timeout_s: float = 30.0


@dataclass
class _Seen:
    """What a watcher has already received; parts of a job's state by their numbers."""

    overview: bytes = b""
    roster: int = 0
    progress: int = 0
    happening: int = 0
    picture: Picture | None = None


@dataclass
class _Watcher:
    """One stream; ``job_id`` is None if it is for all jobs."""

    caller: Caller
    job_id: str | None
    seen: _Seen = field(default_factory=_Seen)


class WatchService:
    """Serves ``rendezvous.v1.Watching`` on bytes, so that nothing is parsed before the caller is known.

    Args:
        jobs: the scheduler's jobs.
        access: authenticates and authorises callers.
        recorder: records refusals, and reports all recorded events for the watchers.
        own_job: the job to watch if none is named.
        security: the scheduler's certificates; None for plaintext.
        limits: limits on what watchers may hold.
    """

    def __init__(
        self,
        jobs: Jobs,
        access: Access,
        recorder: Recorder,
        own_job: str,
        security: Follower | None = None,
        limits: WatchLimits | None = None,
    ) -> None:
        self._jobs, self._access, self._recorder = jobs, access, recorder
        self._own_job, self._security = own_job, security
        self._limits = limits or WatchLimits()
        self._loop = asyncio.get_running_loop()
        self._history = EventHistory()
        self._started = time.time()
        self._watchers: list[_Watcher] = []
        self._pictures: dict[str, Picture] = {}
        self._changed = asyncio.Event()  # Set and replaced after each computation.
        self._happened = asyncio.Event()
        self._nobody = asyncio.Event()
        self._nobody.set()
        self._closing = False
        self._looking: asyncio.Task[None] | None = None
        jobs.follow(self._job_opened)
        recorder.follow(self._noted)

    def handler(self) -> grpc.GenericRpcHandler:
        """The service's handlers for a server."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Watch": grpc.unary_stream_rpc_method_handler(self.watch),
                "EndJob": grpc.unary_unary_rpc_method_handler(self.end_job),
            },
        )

    async def close(self) -> None:
        """Sends the watchers the last events, and ends their streams."""
        self._closing = True
        self._look()
        self._changed.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._nobody.wait()
        if self._looking is not None:
            self._looking.cancel()

    # ------------------------------------------------------------ calls

    async def watch(self, data: bytes, context: Context) -> None:
        """Serves one watcher until its stream ends."""
        caller = None
        try:
            caller = self._access.authenticate(context)
            watcher = self._admit(data, caller)
        except Exception as error:
            await self._recorder.turn_away("Watch", context, caller, error)
            raise
        try:
            await begin_stream(context)
            await self._serve(watcher, context)
        except SchedulerError as error:
            await end_call(context, error)
        finally:
            self._watchers.remove(watcher)
            self._tend()

    async def end_job(self, data: bytes, context: Context) -> bytes:
        """Answers EndJob."""
        caller = None
        try:
            caller = self._access.authenticate(context)
            named, reason = _decoded(unary_calls.decode_end_job_request, data)
            job_id = named or self._own_job
            self._access.allow(caller, roles=ROLES, job=job_id)
            driver = self._jobs.get(job_id)
            if driver.ended is not None:
                raise HasEndedError(f"Job {job_id!r} has ended already: {driver.ended.reason}")
            self._recorder.job_ended(job_id, caller, reason)
            done = await driver.submit(events.EndRequested(reason))
            return pb.EndJobReply(sentence=done or f"Job {job_id} has ended.").SerializeToString()
        except Exception as error:
            await self._recorder.turn_away("EndJob", context, caller, error)
            raise

    def _admit(self, data: bytes, caller: Caller) -> _Watcher:
        job_id = _decoded(unary_calls.decode_status_request, data) or None  # Both have the same field.
        if job_id is not None:
            self._access.allow(caller, roles=ROLES, job=job_id)
            self._jobs.get(job_id)
        elif caller.certificate is not None:
            # This only checks whether the caller may watch at all. Each job is checked when it is sent.
            self._access.allow(caller, roles=ROLES, job=caller.certificate.identity.job)
        if len(self._watchers) >= self._limits.watchers:
            raise LimitError(f"The scheduler already has {self._limits.watchers} watchers.")
        whose = _job_of(caller)
        if sum(_job_of(each.caller) == whose for each in self._watchers) >= self._limits.of_one_job:
            raise LimitError(f"Operators of job {whose!r} already have {self._limits.of_one_job} watchers.")
        watcher = _Watcher(caller, job_id)
        self._watchers.append(watcher)
        self._tend()
        return watcher

    async def _serve(self, watcher: _Watcher, context: Context) -> None:
        while True:
            changed = self._changed
            for message in self._news(watcher):
                try:
                    async with asyncio.timeout(self._limits.write_timeout_s):
                        await context.write(message)
                except TimeoutError:
                    raise TooSlowError("The watcher does not read.") from None
            if self._closing:
                raise StoppingError("The scheduler is stopping.")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await changed.wait()
            reason = self._access.revoked(watcher.caller)
            if reason is not None or self._access.expired(watcher.caller):
                raise UnauthenticatedError(reason or "The caller's certificate has expired.")

    # ------------------------------------------------------------ what there is to see

    def _news(self, watcher: _Watcher) -> Iterable[bytes]:
        """Yields the messages that a watcher has not seen yet, each with the state when it is yielded."""
        if watcher.job_id is None:
            yield from self._news_of_all(watcher)
            return
        seen, picture = watcher.seen, self._picture(watcher.job_id)
        if picture is not seen.picture:  # The job has started over.
            watcher.seen = seen = _Seen(happening=seen.happening, picture=picture)
        if picture.roster[0] != seen.roster:
            seen.roster, message = picture.roster
            yield message
        if picture.progress[0] != seen.progress and seen.roster == picture.roster[0]:
            seen.progress, message = picture.progress
            yield message
        yield from self._happenings(seen, [watcher.job_id])

    def _news_of_all(self, watcher: _Watcher) -> Iterable[bytes]:
        seen = watcher.seen
        visible = [each.job_id for each in self._jobs.all() if self._may_see(watcher.caller, each.job_id)]
        overview = pb.Overview(
            jobs=[self._picture(job_id).line for job_id in visible],
            started=self._started,
            version=__version__,
            validities=self._validities(),
        )
        message = pb.WatchReply(overview=overview).SerializeToString()
        if message != seen.overview:
            seen.overview = message
            yield message
        if self._may_see_refusals(watcher.caller):
            yield from self._happenings(seen, [NOBODY])

    def _happenings(self, seen: _Seen, jobs: Iterable[str]) -> Iterable[bytes]:
        last = self._history.last
        found = self._history.since(seen.happening, jobs)
        seen.happening = last
        if found:
            yield pb.WatchReply(happenings=pb.Happenings(happenings=found)).SerializeToString()

    def _validities(self) -> list[pb.Validity]:
        expiries = self._security.expiries() if self._security is not None else ()
        return [pb.Validity(what=each.what, not_after=each.not_after.timestamp()) for each in expiries]

    def _may_see(self, caller: Caller, job_id: str) -> bool:
        try:
            self._access.allow(caller, roles=ROLES, job=job_id)
        except NotPermittedError:
            return False
        return True

    def _may_see_refusals(self, caller: Caller) -> bool:
        """Whether a watcher may see refusals without a job, as operators of the scheduler's own job may."""
        return self._may_see(caller, self._own_job)

    def _picture(self, job_id: str) -> Picture:
        """Returns the picture of a job, and computes it if there is none yet.

        Raises:
            NotFoundError: the job no longer exists.
        """
        driver = self._jobs.get(job_id)
        picture = self._pictures.get(job_id)
        if picture is None or picture.driver is not driver:
            picture = self._pictures[job_id] = Picture(driver, began_at(driver))
            picture.look()
        return picture

    # ------------------------------------------------------------ when the state is computed

    def _tend(self) -> None:
        """Starts to compute the jobs' states when somebody watches; drops them when nobody does."""
        if self._watchers:
            self._nobody.clear()
        else:
            self._nobody.set()
        if self._watchers and self._looking is None:
            self._looking = asyncio.ensure_future(self._keep_looking())
        elif not self._watchers and self._looking is not None:
            self._looking.cancel()
            self._looking = None
            self._pictures.clear()

    async def _keep_looking(self) -> None:
        while True:
            self._happened.clear()
            began = time.perf_counter()
            self._look()
            took_s = time.perf_counter() - began
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            # The next events wait a little, so that a thousand joins do not cause a thousand computations.
            rest_s = min(LOOK_S, max(SOON_S, took_s / SHARE))
            await asyncio.sleep(rest_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S - rest_s):
                    await self._happened.wait()

    def _look(self) -> None:
        all_jobs = {driver.job_id for driver in self._jobs.all()}
        named = {watcher.job_id for watcher in self._watchers}
        for job_id in all_jobs if None in named else all_jobs & named:
            try:
                self._picture(job_id).look()
            except Exception:
                LOG.exception("fault while looking at job %s", job_id)
        for job_id in self._pictures.keys() - all_jobs:
            del self._pictures[job_id]

    def _job_opened(self, driver: JobDriver) -> None:
        driver.watch_records(lambda record: self._history.record(driver.job_id, record))
        self._happened.set()

    def _noted(self, kind: str, text: str, code: str, facts: Mapping[str, object]) -> None:
        """Handles an event of the log. Failed handshakes are reported from a thread of their own."""
        if kind == "time":  # A job's state already contains the time by cause.
            return
        if facts.get("call") == "handshake":
            with contextlib.suppress(RuntimeError):  # The event loop may be closed already.
                self._loop.call_soon_threadsafe(self._keep, kind, text, code, facts)
        else:
            self._keep(kind, text, code, facts)

    def _keep(self, kind: str, text: str, code: str, facts: Mapping[str, object]) -> None:
        self._history.note(kind, text, code, facts)
        self._happened.set()


def _job_of(caller: Caller) -> str:
    """The job that a caller's certificate is for; empty without one."""
    return caller.certificate.identity.job if caller.certificate is not None else ""


def _decoded(decode: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return decode(data)
    except WireError as error:
        raise MalformedError(error.message, remedy=error.remedy) from error
