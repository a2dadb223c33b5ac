"""The gRPC servicer: authenticates, decodes, enqueues and streams replies. It decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from muster.scheduler import __version__, wire
from muster.scheduler.audit.logs import LOG, Recorder
from muster.scheduler.core import events as e
from muster.scheduler.core import messages as m
from muster.scheduler.core import messages as v
from muster.scheduler.errors import (
    LimitError,
    MalformedError,
    NotFoundError,
    NotPermittedError,
    SchedulerError,
    StoppingError,
    TooSlowError,
    UnauthenticatedError,
    status_of,
)
from muster.scheduler.jobs.driver import JobDriver, Note
from muster.scheduler.jobs.jobs import Jobs, UnknownJobError
from muster.scheduler.serve.access import Access, Caller, address_of
from muster.scheduler.serve.stream import Session

SERVICE = "rendezvous.v1.Rendezvous"
LARGE_MESSAGE_BYTES = 16 * 1024
LARGE_WRITES_AT_ONCE = 64  # bounds the memory in which gRPC copies a large world's assignments
STATUS_ROLES = ("worker", "scheduler", "operator")
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class Limits:
    """How much callers may hold; per host counts all streams from one address."""

    sessions: int = 20_000
    sessions_per_host: int = 4_096  # MS_MAX_STREAMS_PER_HOST
    join_timeout_s: float = 10.0
    farewell_timeout_s: float = 5.0


class Service:
    """Serves ``rendezvous.v1.Rendezvous`` on bytes, so that nothing is parsed before the caller is known."""

    def __init__(self, jobs: Jobs, access: Access, recorder: Recorder, own_job: str, limits: Limits) -> None:
        self._jobs = jobs
        self._access = access
        self._recorder = recorder
        self._own_job = own_job
        self._limits = limits
        self._ids = itertools.count(1)
        self._started = time.monotonic()
        self._per_host: Counter[str] = Counter()
        self.sessions: dict[v.SessionId, Session] = {}
        self._large_writes = asyncio.Semaphore(LARGE_WRITES_AT_ONCE)
        self.idle = asyncio.Event()
        self.idle.set()

    def handler(self) -> grpc.GenericRpcHandler:
        """The service's handlers for a server."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Session": grpc.stream_stream_rpc_method_handler(self.session),
                "Status": grpc.unary_unary_rpc_method_handler(self.status),
                "Drain": grpc.unary_unary_rpc_method_handler(self.drain),
            },
        )

    async def expel_revoked(self) -> None:
        """Ends every stream whose certificate is revoked by now; its node loses its place."""
        for session in list(self.sessions.values()):
            reason = self._access.revoked(session.caller)
            if reason is None or session.over:
                continue
            if session.driver is not None and session.candidate is not None:
                with contextlib.suppress(StoppingError):
                    await session.driver.submit(e.Expel(session.candidate.node_id, reason.rstrip(".")))
            if not session.over:  # it had no place to lose yet
                session.drop(UnauthenticatedError(reason))

    def report_expired(self) -> None:
        """Says once of each stream that its certificate has ended; it will not be let in again."""
        for session in self.sessions.values():
            if not session.expiry_reported and self._access.expired(session.caller):
                session.expiry_reported = True
                text = "the certificate has expired; the worker is refused when it connects again"
                self._recorder.note(Note("expired", session.job_id, text, session))

    # ------------------------------------------------------------ unary

    async def status(self, data: bytes, context: Context) -> bytes:
        """Answers Status."""

        async def answer(caller: Caller) -> bytes:
            job_id = wire.decode_status_request(data) or self._own_job
            self._access.allow(caller, roles=STATUS_ROLES, job=job_id)
            view = self._jobs.get(job_id).view()
            return wire.encode_status(view, uptime_s=time.monotonic() - self._started, version=__version__)

        return await self._answer("Status", context, answer)

    async def drain(self, data: bytes, context: Context) -> bytes:
        """Answers Drain."""

        async def answer(caller: Caller) -> bytes:
            named, event = wire.decode_drain_request(data)
            job_id = named or self._own_job
            self._access.allow(caller, roles=("operator",), job=job_id)
            driver = self._jobs.get(job_id)
            if all(w.candidate.node_id != event.node_id for w in driver.view().workers):
                raise NotFoundError(f"There is no node {event.node_id!r} in job {job_id!r}.")
            reason = await driver.submit(event)
            sentence = reason or f"Node {event.node_id} of job {job_id} is asked to leave."
            self._recorder.drained(job_id, event.node_id, caller, event.reason)
            return wire.encode_drain_reply(sentence)

        return await self._answer("Drain", context, answer)

    async def _answer(
        self, call: str, context: Context, answer: Callable[[Caller], Awaitable[bytes]]
    ) -> bytes:
        caller = None
        try:
            caller = self._access.authenticate(context)
            return await answer(caller)
        except Exception as error:
            await self._turn_away(call, context, caller, error)
            raise

    async def _turn_away(self, call: str, context: Context, caller: Caller | None, error: Exception) -> None:
        code, text = status_of(error)
        if isinstance(error, SchedulerError):
            self._recorder.denied(call, caller, address_of(context.peer()), error.refusal, text)
        else:
            LOG.error("fault in %s", call, exc_info=error)
        await context.abort(code, text)

    # ------------------------------------------------------------ the session stream

    async def session(self, _requests: object, context: Context) -> None:
        """Serves one worker's stream from its Join to its end."""
        caller = None
        try:
            caller = self._access.authenticate(context)
            session = self._admit(caller)
        except SchedulerError as error:
            await self._turn_away("Session", context, caller, error)
            raise
        try:
            await self._serve(session, context)
            if session.closed is not None:  # waits for a peer that does not read: it counts until it is gone
                await context.abort(*status_of(session.closed))
        finally:
            self._release(session)

    def _admit(self, caller: Caller) -> Session:
        host = caller.address.rsplit(":", 1)[0]
        if len(self.sessions) >= self._limits.sessions:
            raise LimitError(f"The scheduler already serves {self._limits.sessions} streams.")
        if self._per_host[host] >= self._limits.sessions_per_host:
            limit = self._limits.sessions_per_host
            raise LimitError(f"{host} already holds {limit} streams (MS_MAX_STREAMS_PER_HOST={limit}).")
        session = Session(next(self._ids), caller)
        self._per_host[host] += 1
        self.sessions[session.id] = session
        self.idle.clear()
        return session

    def _release(self, session: Session) -> None:
        host = session.caller.address.rsplit(":", 1)[0]
        self._per_host[host] -= 1
        if not self._per_host[host]:
            del self._per_host[host]
        del self.sessions[session.id]
        if not self.sessions:
            self.idle.set()

    async def _serve(self, session: Session, context: Context) -> None:
        reader = asyncio.ensure_future(self._read(session, context))
        writer = asyncio.ensure_future(self._write(session, context))
        dropped = asyncio.ensure_future(session.dropped.wait())
        tasks = {reader, writer, dropped}
        detail = "no goodbye was said"
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reader.done() and not session.over:
                error = None if reader.cancelled() else reader.exception()
                detail = self._refuse(session, error) if error is not None else detail
                session.close()
            self._report_loss(session, str(session.closed or detail))
            timeout_s = self._limits.farewell_timeout_s
            await asyncio.wait({writer, dropped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also when gRPC cancels the call because its connection broke
            for task in tasks:
                task.cancel()
            self._report_loss(session, detail)
            await asyncio.gather(*tasks, return_exceptions=True)

    def _report_loss(self, session: Session, detail: str) -> None:
        driver, session.driver = session.driver, None
        if driver is not None and session.id in driver.sessions:
            driver.post(e.SessionLost(session.id, detail))

    async def _write(self, session: Session, context: Context) -> None:
        while await session.has_next():
            large = session.next_size() >= LARGE_MESSAGE_BYTES
            # A newer generation may take the place of what waits for its turn here.
            async with self._large_writes if large else contextlib.nullcontext():
                data = await session.next()
                if data is not None:
                    await context.write(data)

    async def _read(self, session: Session, context: Context) -> None:
        try:
            data = await asyncio.wait_for(context.read(), self._limits.join_timeout_s)
        except TimeoutError:
            raise TooSlowError("The caller opened a session and sent no Join.") from None
        if data is grpc.aio.EOF:
            return
        request = wire.decode_worker_message(data, session.id)
        if not isinstance(request, wire.JoinRequest):
            raise MalformedError("The first message of a session must be Join.")
        driver = await self._join(session, request)
        while (data := await context.read()) is not grpc.aio.EOF:
            event = wire.decode_worker_message(data, session.id)
            if isinstance(event, wire.JoinRequest):
                raise MalformedError("A session takes one Join only.")
            await driver.submit(event)

    async def _join(self, session: Session, request: wire.JoinRequest) -> JobDriver:
        candidate = request.event.candidate
        self._access.allow(session.caller, roles=("worker",), job=request.job_id, node=candidate.node_id)
        driver = await self._jobs.for_join(request.job_id, fresh=request.event.held_generation == 0)
        session.job_id, session.candidate, session.driver = request.job_id, candidate, driver
        driver.sessions[session.id] = session
        await driver.submit(request.event)
        return driver

    def _refuse(self, session: Session, error: BaseException) -> str:
        """Ends a session for what its worker sent; the worker gets the sentence in a message of its own."""
        _, text = status_of(error)
        if not isinstance(error, SchedulerError):
            LOG.error("fault in a session with %s", session.caller.address, exc_info=error)
            error = SchedulerError(text)
        elif not isinstance(error, StoppingError):
            self._recorder.denied("Session", session.caller, session.caller.address, error.refusal, text)
        refusal = _REFUSALS.get(type(error))
        if refusal is not None:
            session.send(wire.encode_scheduler_message(m.Refused(refusal, text)))
        session.close(error)
        return text


_REFUSALS: dict[type[SchedulerError], m.RefusalCode] = {
    MalformedError: m.RefusalCode.MALFORMED,
    NotPermittedError: m.RefusalCode.NOT_PERMITTED,
    UnknownJobError: m.RefusalCode.SETTINGS_DIFFER,
}
