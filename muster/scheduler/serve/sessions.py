"""All open sessions of workers, on their own streams or on a host's stream.

Sessions are counted and authorised here, and their messages are decoded. Nothing is decided about a job: each
message of a worker becomes an event for its job.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc.aio

from muster.scheduler.access import Access, Caller
from muster.scheduler.audit.logs import LOG, Recorder
from muster.scheduler.core import events
from muster.scheduler.errors import (
    LimitError,
    MalformedError,
    NotPermittedError,
    SchedulerError,
    StoppingError,
    UnauthenticatedError,
    status_of,
)
from muster.scheduler.jobs.driver import Note
from muster.scheduler.jobs.jobs import Jobs, UnknownJobError
from muster.scheduler.jobs.stream import EventSink, OutgoingStream
from muster.wire import codec, messages

LARGE_MESSAGE_BYTES = 16 * 1024
LARGE_WRITES_AT_ONCE = 64  # Bounds the memory that gRPC needs to copy a large job's assignments.
Context = grpc.aio.ServicerContext[Any, Any]
DecodedT = TypeVar("DecodedT")


@dataclass(frozen=True)
class Limits:
    """Limits on sessions.

    ``sessions_per_host`` limits the streams from one address, and the workers on one host's stream.
    """

    sessions: int = 20_000
    sessions_per_host: int = 4_096  # MS_MAX_STREAMS_PER_HOST
    join_timeout_s: float = 10.0
    farewell_timeout_s: float = 5.0


class Sessions:
    """The open sessions, by id; ``idle`` is set while there is none.

    Args:
        jobs: the jobs that workers can join.
        access: authenticates and authorises callers.
        recorder: records refusals.
        limits: limits on what callers may hold.
    """

    def __init__(self, jobs: Jobs, access: Access, recorder: Recorder, limits: Limits) -> None:
        self.limits = limits
        self.recorder = recorder
        self.all: dict[int, OutgoingStream] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        self.large_writes = asyncio.Semaphore(LARGE_WRITES_AT_ONCE)
        self.jobs = jobs
        self.access = access
        self._ids = itertools.count(1)
        self._per_host: Counter[str] = Counter()

    # ------------------------------------------------------------ begin and end

    def admit(self, caller: Caller, *, on: OutgoingStream | None = None) -> OutgoingStream:
        """Creates a session and counts it.

        Args:
            caller: the peer's identity according to TLS.
            on: the host's stream that this session shares with others; None if it has a stream of its own.

        Raises:
            LimitError: the limit is reached, in total or for this address.
        """
        host = _host_of(caller)
        if len(self.all) >= self.limits.sessions:
            raise LimitError(f"The scheduler already serves {self.limits.sessions} streams.")
        if self._per_host[host] >= self.limits.sessions_per_host:
            limit = self.limits.sessions_per_host
            raise LimitError(f"{host} already holds {limit} streams (MS_MAX_STREAMS_PER_HOST={limit}).")
        session = OutgoingStream(next(self._ids), caller)
        if on is not None:
            session.wake, session.dropped = on.wake, on.dropped
        self._per_host[host] += 1
        self.all[session.id] = session
        self.idle.clear()
        return session

    def release(self, session: OutgoingStream) -> None:
        """Removes a session from the count. Its job must have been told of its end before."""
        host = _host_of(session.caller)
        self._per_host[host] -= 1
        if not self._per_host[host]:
            del self._per_host[host]
        del self.all[session.id]
        if not self.all:
            self.idle.set()

    @staticmethod
    def loss(
        session: OutgoingStream, detail: str, *, may_return: bool = False
    ) -> tuple[EventSink, events.Event] | None:
        """Returns a session's job and the event that tells it of the session's end; None if the job knows."""
        driver, session.driver = session.driver, None
        if driver is None or not driver.carries(session.id):
            return None
        return driver, events.SessionLost(session.id, detail, may_return)

    def report_loss(self, session: OutgoingStream, detail: str, *, may_return: bool = False) -> None:
        """Reports a session's end to its job, once."""
        loss = self.loss(session, detail, may_return=may_return)
        if loss is not None:
            driver, event = loss
            driver.post(event)

    def refuse(self, session: OutgoingStream, error: BaseException) -> str:
        """Ends a session because of an error in handling its worker's messages; returns the error's text.

        For an error in ``_REFUSALS``, the worker also gets a Refused message with the reason.
        """
        _, text = status_of(error)
        if not isinstance(error, SchedulerError):
            LOG.error("fault in a session with %s", session.caller.address, exc_info=error)
            error = SchedulerError(text)
        elif not isinstance(error, StoppingError):
            self.recorder.denied("Session", session.caller, session.caller.address, error.refusal, text)
        refusal = _REFUSALS.get(type(error))
        if refusal is not None:
            session.send(codec.encode(messages.Refused(refusal, text)))
        session.close(error)
        return text

    # ------------------------------------------------------------ what workers send

    async def join(self, session: OutgoingStream, data: bytes) -> events.Event:
        """Handles a worker's first message; returns the event that must be submitted to its job.

        Raises:
            MalformedError: the message is not a Join.
            NotPermittedError: the certificate does not allow this job, or this node.
            SchedulerError: the job cannot be opened, or its driver has stopped.
        """
        join = decoded(codec.decode_worker_message, data)
        if not isinstance(join, messages.Join):
            raise MalformedError("The first message of a session must be Join.")
        job_id, node_id = join.profile.job_id, join.profile.node_id
        self.access.allow(session.caller, roles=("worker",), job=job_id, node=node_id)
        driver = await self.jobs.for_join(job_id, fresh=join.held_generation == 0)
        session.takes_deltas = join.takes_deltas
        driver.admit(session)
        session.job_id, session.candidate, session.driver = job_id, join.profile, driver
        return event_of(session.id, join)

    @staticmethod
    def event(session: OutgoingStream, data: bytes) -> events.Event:
        """Decodes any later message; returns the event for its job.

        Raises:
            MalformedError: the message breaks the protocol.
        """
        message = decoded(codec.decode_worker_message, data)
        if isinstance(message, messages.Join):
            raise MalformedError("A session takes one Join only.")
        return event_of(session.id, message)

    # ------------------------------------------------------------ certificates that end

    async def expel_revoked(self) -> None:
        """Ends every session whose certificate has been revoked; its node loses its place."""
        # The session that stands for a host's stream has no job; it is ended after its workers' sessions.
        for session in sorted(self.all.values(), key=lambda each: each.driver is None):
            reason = self.access.revoked(session.caller)
            if reason is None or session.over:
                continue
            if session.driver is not None and session.candidate is not None:
                with contextlib.suppress(StoppingError):
                    await session.driver.submit(events.Expel(session.candidate.node_id, reason.rstrip(".")))
            if not session.over:  # It has no place in a job that it could lose.
                session.drop(UnauthenticatedError(reason))

    def report_expired(self) -> None:
        """Logs once for each session that its certificate has expired, so that it cannot reconnect."""
        for session in self.all.values():
            if not session.expiry_reported and self.access.expired(session.caller):
                session.expiry_reported = True
                text = "the certificate has expired; the worker is refused when it connects again"
                self.recorder.note(Note("expired", session.job_id, text, session))


def decoded(decode: Callable[[bytes], DecodedT], data: bytes) -> DecodedT:
    """Decodes a message, and converts the codec's error to the scheduler's own.

    Raises:
        MalformedError: the message breaks the protocol.
    """
    try:
        return decode(data)
    except codec.WireError as error:
        raise MalformedError(error.message, remedy=error.remedy) from error


def event_of(session: events.SessionId, message: messages.WorkerMessage) -> events.Event:
    """Converts a worker's message to an event."""
    if isinstance(message, messages.Join):
        who = message.profile
        return events.Joined(
            session,
            who.candidate(),
            held_generation=message.held_generation,
            held_rank=message.held_rank,
            built=message.built,
            step=message.step,
            probe_address=who.probe_address,
            last_call_s=who.last_call_s,
            held_world_size=message.held_world_size,
            gives_stacks=message.gives_stacks,
            gpu_uuid=who.gpu_uuid,
            gpu_fault=who.gpu_fault,
        )
    return EVENTS[type(message)](session=session, **vars(message))


EVENTS: dict[type[messages.WorkerMessage], Callable[..., events.Event]] = {
    messages.Heartbeat: events.Heard,
    messages.PublishUniqueIds: events.UniqueIdsPublished,
    messages.Built: events.BuiltReported,
    messages.Quiesced: events.QuiescedReported,
    messages.SuspectPeer: events.PeerSuspected,
    messages.Late: events.PeerLate,
    messages.Probed: events.ProbeAnswered,
    messages.Stacks: events.StacksTold,
    messages.RequestLeave: events.LeaveRequested,
    messages.Leave: events.LeftCleanly,
}
"""The events that consist of a worker's message and its session's id, by the message's class."""


def _host_of(caller: Caller) -> str:
    return caller.address.rsplit(":", 1)[0]


_REFUSALS: dict[type[SchedulerError], messages.RefusalCode] = {
    MalformedError: messages.RefusalCode.MALFORMED,
    NotPermittedError: messages.RefusalCode.NOT_PERMITTED,
    UnknownJobError: messages.RefusalCode.SETTINGS_DIFFER,
}
