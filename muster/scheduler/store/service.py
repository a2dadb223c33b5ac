"""The gRPC servicer of the store: admits members of a generation, and transfers operations and answers.

It shares the scheduler's event loop with heartbeats, so it must not occupy the loop for long, even if all
members send many messages. It handles one message of each stream at a time. All other tasks get a turn
between two messages, and every few milliseconds within one. For the same reason, operations on all keys and
long answers take several turns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from muster.scheduler.access import Access, Caller
from muster.scheduler.audit.logs import Recorder
from muster.scheduler.core import records
from muster.scheduler.errors import (
    LimitError,
    MalformedError,
    NotPermittedError,
    RequestError,
    SchedulerError,
    StoppingError,
    TooSlowError,
    UnauthenticatedError,
    end_call,
)
from muster.scheduler.jobs.driver import JobDriver
from muster.scheduler.jobs.jobs import Jobs
from muster.scheduler.store import wire
from muster.scheduler.store.key_value_store import (
    VALUE_BYTES,
    Answer,
    EndedError,
    KeyValueStore,
    Member,
    MemoryBudget,
    QuotaError,
    Quotas,
    Returned,
)

SERVICE = "rendezvous.v1.Store"
REPLY_BYTES = 1 << 20
"""Answers are gathered into messages of about this size."""

REVOCATION_LOOK_S = 1.0
TURN_S = 0.005
"""How long the operations of one message may take before all others have a turn, in seconds."""

GONE_KEPT = 8
"""Number of members that are gone whose state is kept, so that they can reconnect and repeat operations."""

REASONS_KEPT = 16
FAREWELL_S = 5.0
"""How long a closing stream may take to deliver its last answers, in seconds."""

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationOverError(RequestError):
    """The namespace no longer exists, because its generation is over; the message says why."""

    grpc_code = "FAILED_PRECONDITION"
    refusal = "generation_over"


class NamespaceLostError(GenerationOverError):
    """The namespace's content is lost.

    Its generation stays established until the members ask for another one.
    """

    grpc_code = "DATA_LOSS"
    refusal = "store_lost"


class NotBackError(RequestError):
    """The member's own session does not exist (yet, or any more); trying again may help."""

    grpc_code = "UNAVAILABLE"
    refusal = "not_back"


@dataclass(frozen=True)
class StoreLimits:
    """Limits on what callers may hold."""

    open_timeout_s: float = 10.0
    waiting_bytes: int = 64 << 20
    """The most bytes of answers that may wait to be read by one member."""

    quotas: Quotas = field(default_factory=Quotas)
    budget_bytes: int = 512 << 20


@dataclass
class _Link:
    """One member's stream, with the answers that wait to be sent."""

    member: Member
    waiting: deque[Answer] = field(default_factory=deque, repr=False)
    waiting_bytes: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    closed: SchedulerError | None = None
    dropped: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    def close(self, error: SchedulerError) -> None:
        """Ends the stream; answers that wait to be sent have ``FAREWELL_S`` seconds to be delivered."""
        self.closed = self.closed or error
        self.wake.set()
        asyncio.get_running_loop().call_later(FAREWELL_S, self.dropped.set)

    def drop(self, error: SchedulerError) -> None:
        """Ends the stream immediately, because writing to a member that does not read may block for ever."""
        self.close(error)
        self.waiting.clear()
        self.dropped.set()


@dataclass
class _Served:
    """A namespace, its members' streams, the timer of its waits, and the scheduled turn of its operations."""

    store: KeyValueStore
    links: dict[Member, _Link] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    turn: asyncio.Handle | None = None


@dataclass
class _OfJob:
    """A job's namespaces, by generation."""

    driver: JobDriver
    served: dict[int, _Served] = field(default_factory=dict)
    over: dict[int, str] = field(default_factory=dict)
    """Why the latest generations ended, by generation."""


class StoreService:
    """Serves ``rendezvous.v1.Store`` on bytes, so that nothing is parsed before the caller is known.

    Args:
        jobs: the scheduler's jobs.
        access: authenticates and authorises callers.
        recorder: records refusals.
        limits: limits on what callers may hold.
    """

    def __init__(
        self, jobs: Jobs, access: Access, recorder: Recorder, limits: StoreLimits | None = None
    ) -> None:
        self._jobs = jobs
        self._access = access
        self._recorder = recorder
        self._limits = limits or StoreLimits()
        self._budget = MemoryBudget(self._limits.budget_bytes)
        self._of_jobs: dict[str, _OfJob] = {}

    def handler(self) -> grpc.GenericRpcHandler:
        """The service's handlers for a server."""
        opened: Any = grpc.stream_stream_rpc_method_handler(self.open)
        return grpc.method_handlers_generic_handler(SERVICE, {"Open": opened})

    def close(self) -> None:
        """Ends all streams. The members reconnect later, or to another scheduler."""
        for of_job in self._of_jobs.values():
            for served in of_job.served.values():
                for link in served.links.values():
                    link.close(StoppingError("The scheduler is stopping."))

    # ------------------------------------------------------------ one stream

    async def open(self, _requests: object, context: Context) -> None:
        """Serves one member's stream from its first message to its end."""
        caller = None
        try:
            caller = self._access.authenticate(context)
            opening = await self._first(context)
            self._access.allow(caller, roles=("worker",), job=opening.job_id, node=opening.node_id)
            served = self._admit(caller, opening)
        except Exception as error:
            await self._turn_away(context, caller, error)
            raise
        link = self._link(served, (opening.node_id, opening.incarnation))
        try:
            reason = await self._converse(served, link, caller, context)
        finally:
            if served.links.get(link.member) is link:
                del served.links[link.member]
                served.store.drop_looks(link.member)
        if reason is not None:
            await self._turn_away(context, caller, reason)

    async def _converse(
        self, served: _Served, link: _Link, caller: Caller, context: Context
    ) -> BaseException | None:
        """Reads and writes until one of the two ends.

        Returns the reason; None if the member has closed the stream.
        """
        replay = served.store.wants_replay(link.member)
        await context.write(wire.encode_opened(replay=replay, seen=served.store.number))
        reader = asyncio.ensure_future(self._read(served, link, caller, context))
        writer = asyncio.ensure_future(self._write(served, link, context))
        dropped = asyncio.ensure_future(link.dropped.wait())
        try:
            await asyncio.wait({reader, writer, dropped}, return_when=asyncio.FIRST_COMPLETED)
            return _error_of(reader) or _error_of(writer) or link.closed
        finally:
            for task in (reader, writer, dropped):
                task.cancel()
            await asyncio.gather(reader, writer, dropped, return_exceptions=True)

    async def _first(self, context: Context) -> wire.Opening:
        try:
            data = await asyncio.wait_for(context.read(), self._limits.open_timeout_s)
        except TimeoutError:
            raise TooSlowError("The caller opened a store's stream and sent nothing.") from None
        if data is grpc.aio.EOF:
            raise MalformedError("The caller opened a store's stream and closed it.")
        return wire.opening(wire.parse(data))

    def _link(self, served: _Served, member: Member) -> _Link:
        """Registers a member's stream, which replaces its previous one."""
        before = served.links.get(member)
        if before is not None:
            before.drop(NotBackError("A newer stream of this member has taken its place."))
        link = served.links[member] = _Link(member)
        return link

    async def _turn_away(self, context: Context, caller: Caller | None, error: BaseException) -> None:
        if isinstance(error, GenerationOverError | NotBackError | StoppingError):
            await end_call(context, error)  # These are ordinary ends of a stream, not refusals to record.
        await self._recorder.turn_away("Store", context, caller, error)

    async def _read(self, served: _Served, link: _Link, caller: Caller, context: Context) -> None:
        store, loop = served.store, asyncio.get_running_loop()
        returned, looked_at = Returned(), loop.time()
        while (data := await context.read()) is not grpc.aio.EOF:
            request, now = wire.parse(data), loop.time()
            if now - looked_at >= REVOCATION_LOOK_S:
                looked_at = now
                self._refuse_revoked(caller)
            try:
                if request.HasField("replay") and store.wants_replay(link.member):
                    is_last = wire.add_replay(returned, request.replay)
                    store.check_returned(returned)
                    if is_last:
                        store.hand_in(link.member, returned, now)
                        returned = Returned()
                if request.answered_below:
                    store.confirm(link.member, request.answered_below)
                turn_ends = now + TURN_S
                for operation in wire.operations(request):
                    store.execute(link.member, operation, now)
                    self._take_turns(served)
                    if loop.time() > turn_ends:
                        await asyncio.sleep(0)
                        turn_ends = loop.time() + TURN_S
                for operation_id in request.cancelled:
                    store.cancel(link.member, operation_id)
            except QuotaError as error:
                raise LimitError(str(error)) from None
            except EndedError as error:
                self._end(served, str(error))
                raise _end_of(served.store) from None
            self._arm(served)

    def _refuse_revoked(self, caller: Caller) -> None:
        reason = self._access.revoked(caller)
        if reason is not None:
            raise UnauthenticatedError(reason)

    async def _write(self, served: _Served, link: _Link, context: Context) -> None:
        while True:
            await link.wake.wait()
            link.wake.clear()
            while link.waiting:
                if len(link.waiting[0].values) > self._limits.quotas.turn_keys:
                    await self._write_long(served, link, context)
                    continue
                answers, size = [], 0
                while link.waiting and size < REPLY_BYTES:
                    if len(link.waiting[0].values) > self._limits.quotas.turn_keys:
                        break
                    answer = link.waiting.popleft()
                    answers.append(answer)
                    size += _size(answer)
                link.waiting_bytes -= size
                await context.write(wire.encode_answers(answers, served.store.number))
            if link.closed is not None:  # after the answers to what has been carried out
                return

    async def _write_long(self, served: _Served, link: _Link, context: Context) -> None:
        """Writes one long answer, and encodes it in several turns."""
        answer, step = link.waiting.popleft(), self._limits.quotas.turn_keys
        link.waiting_bytes -= _size(answer)
        parts = []
        for at in range(0, len(answer.values), step):
            parts.append(wire.encode_values(answer.values[at : at + step]))
            await asyncio.sleep(0)
        await context.write(wire.encode_long(answer, parts, served.store.number))

    # ------------------------------------------------------------ namespaces

    def _admit(self, caller: Caller, opening: wire.Opening) -> _Served:
        driver = self._jobs.get(opening.job_id)
        of_job = self._of_jobs.get(opening.job_id)
        if of_job is not None and of_job.driver is not driver:  # An ended job has started again.
            of_job = None
        if of_job is not None and opening.generation in of_job.over:
            raise GenerationOverError(of_job.over[opening.generation])
        check_member(driver, caller, opening)
        if of_job is None:
            of_job = self._of_jobs[opening.job_id] = _OfJob(driver)
            driver.watch_records(lambda record: self._observe(opening.job_id, driver, record))
        served = of_job.served.get(opening.generation)
        if served is None:
            served = of_job.served[opening.generation] = self._serve(driver, opening.generation)
        if served.store.ended:
            raise _end_of(served.store)
        if not opening.generation:  # Any session of the job may open namespace 0, so its members change.
            served.store.forget_gone({*served.links, *_in_session(driver)}, GONE_KEPT)
        if served.store.restoring:
            try:
                served.store.excuse(_present(driver), asyncio.get_running_loop().time())
                self._arm(served)
            except EndedError as error:
                self._end(served, str(error))
                raise _end_of(served.store) from None
        return served

    def _serve(self, driver: JobDriver, generation: int) -> _Served:
        links: dict[Member, _Link] = {}

        def answer(member: Member, answer: Answer) -> None:
            link = links.get(member)
            if link is None or link.closed is not None:  # The member repeats the operation if it reconnects.
                return
            link.waiting.append(answer)
            link.waiting_bytes += _size(answer)
            if link.waiting_bytes > self._limits.waiting_bytes:
                link.drop(TooSlowError("The member does not read the store's answers."))
            link.wake.set()

        awaited = _present(driver) if generation and not driver.formed_here else ()
        store = KeyValueStore(answer, members=awaited, quotas=self._limits.quotas, budget=self._budget)
        return _Served(store, links)

    def _observe(self, job_id: str, driver: JobDriver, record: records.Record) -> None:
        """Handles a record of the job: ends namespaces of old generations, and notices removed members."""
        of_job = self._of_jobs.get(job_id)
        if of_job is None or of_job.driver is not driver:
            return
        if isinstance(record, records.Removed):
            self._excuse(of_job)
        if not isinstance(record, records.GenerationFormed | records.GenerationEnded | records.JobEnded):
            return
        ended = isinstance(record, records.JobEnded)
        for generation, served in list(of_job.served.items()):
            if ended or generation:
                reason = f"Generation {generation} is over: {record.reason.rstrip('.')}."
                of_job.over[generation] = reason
                self._end(served, reason)
                del of_job.served[generation]
        for generation in list(of_job.over)[:-REASONS_KEPT]:
            del of_job.over[generation]
        if ended:
            del self._of_jobs[job_id]

    def _excuse(self, of_job: _OfJob) -> None:
        for served in list(of_job.served.values()):
            if served.store.restoring:
                try:
                    served.store.excuse(_present(of_job.driver), asyncio.get_running_loop().time())
                    self._arm(served)
                except EndedError as error:
                    self._end(served, str(error))

    def _end(self, served: _Served, reason: str) -> None:
        served.store.end(reason)
        if served.timer is not None:
            served.timer.cancel()
        if served.turn is not None:
            served.turn.cancel()
        for link in list(served.links.values()):
            link.close(_end_of(served.store))

    def _take_turns(self, served: _Served) -> None:
        """Schedules the next turn of an operation on all keys, so that other tasks run in between."""
        if served.turn is None and served.store.looking:
            served.turn = asyncio.get_running_loop().call_soon(self._turn, served)

    def _turn(self, served: _Served) -> None:
        served.turn = None
        served.store.turn()
        self._take_turns(served)

    def _arm(self, served: _Served) -> None:
        self._take_turns(served)
        if served.timer is not None:
            served.timer.cancel()
            served.timer = None
        due = served.store.deadline()
        if due is not None:
            served.timer = asyncio.get_running_loop().call_at(due, self._expire, served)

    def _expire(self, served: _Served) -> None:
        served.store.expire(asyncio.get_running_loop().time())
        self._arm(served)

    def sizes(self) -> Mapping[str, int]:
        """The numbers of bytes in all namespaces, of open streams, and of members whose state is kept."""
        served = [each for of_job in self._of_jobs.values() for each in of_job.served.values()]
        return {
            "bytes": self._budget.used_bytes,
            "streams": sum(len(each.links) for each in served),
            "members": sum(each.store.members for each in served),
        }


def check_member(driver: JobDriver, caller: Caller, opening: wire.Opening) -> None:
    """Checks that the caller is the process with the member's session, and uses that session's certificate.

    Raises:
        NotPermittedError: the certificate is not that of the session, or the caller is not a member.
        GenerationOverError: the generation is over.
        NotBackError: the member has no session, or this scheduler does not know the generation yet.
    """
    if opening.generation:
        formed = driver.formed
        newest = formed.generation if formed is not None else 0
        # The journal of a restarted scheduler may be older than this generation.
        if opening.generation > newest and not driver.formed_here:
            raise NotBackError(f"Generation {opening.generation} is not known to this scheduler.")
        if driver.generation_over or formed is None or opening.generation < newest:
            over = driver.generation_over or "a newer one has formed"
            raise GenerationOverError(f"Generation {opening.generation} is over: {over}.")
        member = next((m for m in formed.members if m.candidate.node_id == opening.node_id), None)
        is_member = member is not None and member.candidate.incarnation == opening.incarnation
        if opening.generation > newest or not is_member:
            raise NotPermittedError(
                f"This process is no member of generation {opening.generation}.",
                remedy="The store of a generation is for its members alone.",
            )
    for session in driver.sessions.values():
        candidate = session.candidate
        if (
            candidate is not None
            and (candidate.node_id, candidate.incarnation) == (opening.node_id, opening.incarnation)
            and not session.over
        ):
            if _identity(session.caller) != _identity(caller):
                raise NotPermittedError("The certificate is not that of the member's session.")
            return
    raise NotBackError("This member has no session with this scheduler.")


def _end_of(store: KeyValueStore) -> GenerationOverError:
    return (NamespaceLostError if store.lost else GenerationOverError)(store.ended)


def _present(driver: JobDriver) -> list[Member]:
    """The members of the newest generation that are neither lost nor finished."""
    workers = [worker.candidate for worker in driver.view().workers if worker.rank >= 0]
    return [(candidate.node_id, candidate.incarnation) for candidate in workers]


def _in_session(driver: JobDriver) -> Iterator[Member]:
    """The workers whose sessions are open."""
    for session in driver.sessions.values():
        if session.candidate is not None and not session.over:
            yield session.candidate.node_id, session.candidate.incarnation


def _identity(caller: Caller) -> object:
    """The part of a certificate that identifies its holder and stays the same when it is renewed."""
    return caller.certificate.identity if caller.certificate is not None else None


def _size(answer: Answer) -> int:
    return 64 + (answer.size_bytes or sum(map(len, answer.values)) + VALUE_BYTES * len(answer.values))


def _error_of(task: asyncio.Future[None]) -> BaseException | None:
    if not task.done() or task.cancelled():
        return None
    with contextlib.suppress(asyncio.CancelledError):
        return task.exception()
    return None
