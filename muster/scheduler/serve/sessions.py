"""All open sessions of workers, on streams of their own or a host's, and the gRPC servicer beside them.

It authenticates, decodes, queues and streams replies; it makes no decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from muster.scheduler import __version__
from muster.scheduler.access import Access, Caller
from muster.scheduler.audit.logs import LOG, Recorder
from muster.scheduler.core import events as e
from muster.scheduler.core.views import JobView, WorkerView
from muster.scheduler.errors import (
    LimitError,
    MalformedError,
    NotFoundError,
    NotPermittedError,
    SchedulerError,
    StoppingError,
    TooSlowError,
    UnauthenticatedError,
    begin_stream,
    end_call,
    status_of,
)
from muster.scheduler.jobs.driver import Note
from muster.scheduler.jobs.jobs import Jobs, UnknownJobError
from muster.scheduler.jobs.stream import EventSink, OutgoingStream
from muster.wire import codec
from muster.wire import messages as m
from muster.wire.codec import to_proto
from muster.wire.v1 import rendezvous_pb2 as pb

SERVICE = "rendezvous.v1.Rendezvous"
STATUS_ROLES = ("worker", "scheduler", "operator")
LARGE_MESSAGE_BYTES = 16 * 1024
LARGE_WRITES_AT_ONCE = 64  # bounds the memory in which gRPC copies a large world's assignments
Context = grpc.aio.ServicerContext[Any, Any]
DecodedT = TypeVar("DecodedT")


@dataclass(frozen=True)
class Limits:
    """Limits on sessions; per host counts streams from one address, and workers on a host's stream."""

    sessions: int = 20_000
    sessions_per_host: int = 4_096  # MS_MAX_STREAMS_PER_HOST
    join_timeout_s: float = 10.0
    farewell_timeout_s: float = 5.0


class Sessions:
    """The sessions there are, by id; ``idle`` is set while there is none.

    Args:
        jobs: what the workers join.
        access: says who a caller is, and what that one may do.
        recorder: takes notes of whom is turned away.
        limits: how much callers may hold.
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
        """Counts a new session in.

        Args:
            caller: who the TLS layer says is at the other end.
            on: the stream that this one shares with others; None: it has one of its own.

        Raises:
            LimitError: there are as many as may be, in all or from this address.
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
        """Counts a session out; its job has learned of its end before."""
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
    ) -> tuple[EventSink, e.Event] | None:
        """The event by which a job learns of a session's end, once; None: it knows already."""
        driver, session.driver = session.driver, None
        if driver is None or not driver.carries(session.id):
            return None
        return driver, e.SessionLost(session.id, detail, may_return)

    def report_loss(self, session: OutgoingStream, detail: str, *, may_return: bool = False) -> None:
        """Reports a session's end to its job, once."""
        loss = self.loss(session, detail, may_return=may_return)
        if loss is not None:
            driver, event = loss
            driver.post(event)

    def refuse(self, session: OutgoingStream, error: BaseException) -> str:
        """Ends a session because of a message of its worker, which gets a Refused with the reason."""
        _, text = status_of(error)
        if not isinstance(error, SchedulerError):
            LOG.error("fault in a session with %s", session.caller.address, exc_info=error)
            error = SchedulerError(text)
        elif not isinstance(error, StoppingError):
            self.recorder.denied("Session", session.caller, session.caller.address, error.refusal, text)
        refusal = _REFUSALS.get(type(error))
        if refusal is not None:
            session.send(codec.encode(m.Refused(refusal, text)))
        session.close(error)
        return text

    # ------------------------------------------------------------ what workers send

    async def join(self, session: OutgoingStream, data: bytes) -> e.Event:
        """Takes a worker's first message; returns the event that is still to be submitted to its job.

        Raises:
            MalformedError: it is no Join.
            NotPermittedError: the certificate does not allow this job, or this node.
            SchedulerError: the job cannot be opened, or is carried on no longer.
        """
        join = decoded(codec.decode_worker_message, data)
        if not isinstance(join, m.Join):
            raise MalformedError("The first message of a session must be Join.")
        job_id, node_id = join.profile.job_id, join.profile.node_id
        self.access.allow(session.caller, roles=("worker",), job=job_id, node=node_id)
        driver = await self.jobs.for_join(job_id, fresh=join.held_generation == 0)
        session.takes_deltas = join.takes_deltas
        driver.admit(session)
        session.job_id, session.candidate, session.driver = job_id, join.profile, driver
        return event_of(session.id, join)

    @staticmethod
    def event(session: OutgoingStream, data: bytes) -> e.Event:
        """Takes any later message; returns the event for its job.

        Raises:
            MalformedError: it breaks the protocol.
        """
        message = decoded(codec.decode_worker_message, data)
        if isinstance(message, m.Join):
            raise MalformedError("A session takes one Join only.")
        return event_of(session.id, message)

    # ------------------------------------------------------------ certificates that end

    async def expel_revoked(self) -> None:
        """Ends every session whose certificate is revoked by now; its node loses its place."""
        # A stream that carries several is ended after the sessions on it.
        for session in sorted(self.all.values(), key=lambda each: each.driver is None):
            reason = self.access.revoked(session.caller)
            if reason is None or session.over:
                continue
            if session.driver is not None and session.candidate is not None:
                with contextlib.suppress(StoppingError):
                    await session.driver.submit(e.Expel(session.candidate.node_id, reason.rstrip(".")))
            if not session.over:  # it had no place to lose yet
                session.drop(UnauthenticatedError(reason))

    def report_expired(self) -> None:
        """Says once of each session that its certificate has ended; it will not be let in again."""
        for session in self.all.values():
            if not session.expiry_reported and self.access.expired(session.caller):
                session.expiry_reported = True
                text = "the certificate has expired; the worker is refused when it connects again"
                self.recorder.note(Note("expired", session.job_id, text, session))


def decoded(decode: Callable[[bytes], DecodedT], data: bytes) -> DecodedT:
    """Decodes a message; raises the scheduler's own error.

    Raises:
        MalformedError: the message breaks the protocol.
    """
    try:
        return decode(data)
    except codec.WireError as error:
        raise MalformedError(error.message, remedy=error.remedy) from error


def event_of(session: e.SessionId, message: m.WorkerMessage) -> e.Event:
    """The event for a message that a worker has sent."""
    if isinstance(message, m.Join):
        who = message.profile
        return e.Joined(
            session,
            who.candidate(),
            held_generation=message.held_generation,
            held_rank=message.held_rank,
            built=message.built,
            step=message.step,
            probe_address=who.probe_address,
            last_call_s=who.last_call_s,
            held_world_size=message.held_world_size,
        )
    return EVENTS[type(message)](session=session, **vars(message))


EVENTS: dict[type[m.WorkerMessage], Callable[..., e.Event]] = {
    m.Heartbeat: e.Heard,
    m.PublishUniqueIds: e.UniqueIdsPublished,
    m.Built: e.BuiltReported,
    m.Quiesced: e.QuiescedReported,
    m.SuspectPeer: e.PeerSuspected,
    m.Late: e.PeerLate,
    m.Probed: e.Probed,
    m.RequestLeave: e.LeaveRequested,
    m.Leave: e.LeftCleanly,
}
"""The events that are a worker's message and the number of its stream, by the message's class."""


def _host_of(caller: Caller) -> str:
    return caller.address.rsplit(":", 1)[0]


_REFUSALS: dict[type[SchedulerError], m.RefusalCode] = {
    MalformedError: m.RefusalCode.MALFORMED,
    NotPermittedError: m.RefusalCode.NOT_PERMITTED,
    UnknownJobError: m.RefusalCode.SETTINGS_DIFFER,
}


# ---------------------------------------------------------------- the service


class Service:
    """Serves ``rendezvous.v1.Rendezvous`` on bytes, so that nothing is parsed before the caller is known."""

    def __init__(self, sessions: Sessions, own_job: str, *, leader: str = "") -> None:
        self._sessions = sessions
        self._jobs, self._access, self._recorder = sessions.jobs, sessions.access, sessions.recorder
        self._own_job = own_job
        self._leader = leader
        self._started = time.monotonic()

    def handler(self) -> grpc.GenericRpcHandler:
        """The service's handlers for a server."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Session": grpc.stream_stream_rpc_method_handler(self.session),
                "Status": grpc.unary_unary_rpc_method_handler(self.status),
                "Drain": grpc.unary_unary_rpc_method_handler(self.drain),
                "Jobs": grpc.unary_unary_rpc_method_handler(self.jobs),
                "ProcessEnded": grpc.unary_unary_rpc_method_handler(self.process_ended),
            },
        )

    # ------------------------------------------------------------ unary

    async def status(self, data: bytes, context: Context) -> bytes:
        """Answers Status."""

        async def answer(caller: Caller) -> bytes:
            job_id = decoded(codec.decode_status_request, data) or self._own_job
            self._access.allow(caller, roles=STATUS_ROLES, job=job_id)
            view = self._jobs.get(job_id).view()
            uptime_s = time.monotonic() - self._started
            return encode_status(view, uptime_s=uptime_s, version=__version__, leader=self._leader)

        return await self._answer("Status", context, answer)

    async def jobs(self, data: bytes, context: Context) -> bytes:
        """Answers Jobs, with those that the caller may see."""

        async def answer(caller: Caller) -> bytes:
            views = [driver.view() for driver in self._jobs.all() if self._may_see(caller, driver.job_id)]
            return encode_jobs(views, version=__version__)

        return await self._answer("Jobs", context, answer)

    def _may_see(self, caller: Caller, job_id: str) -> bool:
        try:
            self._access.allow(caller, roles=STATUS_ROLES, job=job_id)
        except NotPermittedError:
            return False
        return True

    async def drain(self, data: bytes, context: Context) -> bytes:
        """Answers Drain."""

        async def answer(caller: Caller) -> bytes:
            named, node_id, reason = decoded(codec.decode_drain_request, data)
            job_id = named or self._own_job
            self._access.allow(caller, roles=("operator",), job=job_id)
            driver = self._jobs.get(job_id)
            if all(w.candidate.node_id != node_id for w in driver.view().workers):
                raise NotFoundError(f"There is no node {node_id!r} in job {job_id!r}.")
            done = await driver.submit(e.DrainRequested(node_id, reason))
            self._recorder.drained(job_id, node_id, caller, reason)
            return codec.encode_drain_reply(done or f"Node {node_id} of job {job_id} is asked to leave.")

        return await self._answer("Drain", context, answer)

    async def process_ended(self, data: bytes, context: Context) -> bytes:
        """Answers ProcessEnded, once what follows is durable."""

        async def answer(caller: Caller) -> bytes:
            named, node_id, incarnation, detail = decoded(codec.decode_process_ended_request, data)
            job_id = named or self._own_job
            self._access.allow(caller, roles=("worker",), job=job_id, node=node_id)
            driver = self._jobs.get(job_id)
            done = await driver.submit(e.ProcessEnded(node_id, incarnation, detail))
            who = (node_id, incarnation)
            places = ((w.candidate.node_id, w.candidate.incarnation) for w in driver.view().workers)
            gone = who not in places
            if gone and done:
                self._recorder.lost(job_id, node_id, caller, detail)
            return codec.encode_process_ended_reply(gone=gone)

        return await self._answer("ProcessEnded", context, answer)

    async def _answer(
        self, call: str, context: Context, answer: Callable[[Caller], Awaitable[bytes]]
    ) -> bytes:
        caller = None
        try:
            caller = self._access.authenticate(context)
            return await answer(caller)
        except Exception as error:
            await self._recorder.turn_away(call, context, caller, error)
            raise

    # ------------------------------------------------------------ the session stream

    async def session(self, _requests: object, context: Context) -> None:
        """Serves one worker's stream from its Join to its end."""
        caller = None
        try:
            caller = self._access.authenticate(context)
            session = self._sessions.admit(caller)
        except SchedulerError as error:
            await self._recorder.turn_away("Session", context, caller, error)
            raise
        try:
            await begin_stream(context)
            await self._serve(session, context)
            if session.closed is not None:  # waits for a peer that does not read: it counts until it is gone
                await end_call(context, session.closed)
        finally:
            self._sessions.release(session)

    async def _serve(self, session: OutgoingStream, context: Context) -> None:
        reader = asyncio.ensure_future(self._read(session, context))
        writer = asyncio.ensure_future(self._write(session, context))
        dropped = asyncio.ensure_future(session.dropped.wait())
        tasks = {reader, writer, dropped}
        detail = "no goodbye was said"
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reader.done() and not session.over:
                error = None if reader.cancelled() else reader.exception()
                detail = self._sessions.refuse(session, error) if error is not None else detail
                session.close()
            self._sessions.report_loss(session, str(session.closed or detail))
            timeout_s = self._sessions.limits.farewell_timeout_s
            await asyncio.wait({writer, dropped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also when gRPC cancels the call because its connection broke
            for task in tasks:
                task.cancel()
            self._sessions.report_loss(session, detail)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, session: OutgoingStream, context: Context) -> None:
        while await session.has_next():
            large = session.next_size() >= LARGE_MESSAGE_BYTES
            # A newer generation may take the place of what waits for its turn here.
            async with self._sessions.large_writes if large else contextlib.nullcontext():
                data = await session.next()
                if data is not None:
                    await context.write(data)

    async def _read(self, session: OutgoingStream, context: Context) -> None:
        try:
            data = await asyncio.wait_for(context.read(), self._sessions.limits.join_timeout_s)
        except TimeoutError:
            raise TooSlowError("The caller opened a session and sent no Join.") from None
        if data is grpc.aio.EOF:
            return
        event = await self._sessions.join(session, data)
        driver = session.driver
        assert driver is not None
        await driver.submit(event)
        while (data := await context.read()) is not grpc.aio.EOF:
            await driver.submit(self._sessions.event(session, data))


# ---------------------------------------------------------------- a job as its machine shows it, on the wire


def encode_status(view: JobView, *, uptime_s: float, version: str, leader: str = "") -> bytes:
    """Encodes a job as a serialized StatusReply."""
    return pb.StatusReply(
        job_id=view.job_id,
        state=view.state,
        generation=view.generation,
        worker_num=view.worker_num,
        worker_min=view.worker_min,
        workers=[_worker_status(worker) for worker in view.workers],
        missing=view.missing,
        reason=view.reason,
        uptime_s=uptime_s,
        version=version,
        leader=leader,
    ).SerializeToString()


def encode_jobs(views: Iterable[JobView], *, version: str) -> bytes:
    """Encodes jobs, in short, as a serialized JobsReply."""
    return pb.JobsReply(jobs=[_summary(view) for view in views], version=version).SerializeToString()


def _summary(view: JobView) -> pb.JobSummary:
    ranked = [worker for worker in view.workers if worker.rank >= 0]
    return pb.JobSummary(
        job_id=view.job_id,
        state=view.state,
        generation=view.generation,
        members=len(ranked),
        worker_num=view.worker_num,
        step=max((worker.step for worker in ranked), default=0),
    )


def _worker_status(worker: WorkerView) -> pb.WorkerStatus:
    candidate = worker.candidate
    return pb.WorkerStatus(
        node_id=candidate.node_id,
        host_name=candidate.host.name,
        host_id=candidate.host.id,
        rank=worker.rank,
        local_rank=worker.local_rank,
        device=to_proto(candidate.device),
        silent_s=worker.silent_s,
        step=worker.step,
        samples_per_s=worker.samples_per_s,
        state=worker.state,
        topology=candidate.host.topology,
        address=candidate.host.address,
        last_collective=to_proto(worker.last_collective),
        pid=worker.pid,
        loss=worker.loss,
    )
