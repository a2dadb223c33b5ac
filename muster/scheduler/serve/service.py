"""The gRPC servicer for workers and operators: authenticates, decodes, queues events and streams replies.

It makes no decisions about a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence

import grpc
import grpc.aio

from muster.scheduler import __version__
from muster.scheduler.access import Caller
from muster.scheduler.core import events
from muster.scheduler.core.views import JobView
from muster.scheduler.errors import (
    MalformedError,
    NotFoundError,
    NotPermittedError,
    SchedulerError,
    TooSlowError,
    begin_stream,
    end_call,
)
from muster.scheduler.jobs.driver import JobDriver
from muster.scheduler.jobs.stream import OutgoingStream
from muster.scheduler.serve.sessions import LARGE_MESSAGE_BYTES, Context, Sessions, decoded
from muster.scheduler.serve.status import encode_jobs, encode_stacks, encode_status
from muster.wire import messages, unary_calls

SERVICE = "rendezvous.v1.Rendezvous"
CLOCKS_DIFFER_S = 60.0
"""How far an operator's clock may be behind, in seconds. A drain whose time is past by less than this happens
immediately.
"""

STATUS_ROLES = ("worker", "scheduler", "operator")


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
                "Admit": grpc.unary_unary_rpc_method_handler(self.admit),
                "Stacks": grpc.unary_unary_rpc_method_handler(self.stacks),
                "Jobs": grpc.unary_unary_rpc_method_handler(self.jobs),
                "ProcessEnded": grpc.unary_unary_rpc_method_handler(self.process_ended),
            },
        )

    # ------------------------------------------------------------ unary

    async def status(self, data: bytes, context: Context) -> bytes:
        """Answers Status."""

        async def answer(caller: Caller) -> bytes:
            job_id = decoded(unary_calls.decode_status_request, data) or self._own_job
            self._access.allow(caller, roles=STATUS_ROLES, job=job_id)
            view = self._jobs.get(job_id).view()
            uptime_s = time.monotonic() - self._started
            return encode_status(view, uptime_s=uptime_s, version=__version__, leader=self._leader)

        return await self._answer("Status", context, answer)

    async def jobs(self, data: bytes, context: Context) -> bytes:
        """Answers Jobs with the jobs that the caller may see."""

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
            order = decoded(unary_calls.decode_drain_request, data)
            job_id = order.job_id or self._own_job
            self._access.allow(caller, roles=("operator",), job=job_id)
            return unary_calls.encode_drain_reply(await self._drain(self._jobs.get(job_id), order, caller))

        return await self._answer("Drain", context, answer)

    async def _drain(self, driver: JobDriver, order: messages.DrainOrder, caller: Caller) -> str:
        """Carries out an operator's order to drain, plan, preview or cancel; returns the answer as text."""
        nodes, hosts, now_s = order.node_ids, order.hosts, time.time()
        if order.cancel:
            done = await driver.submit(events.DrainCalledOff(nodes, hosts))
            self._recorder.drained(driver.job_id, ", ".join(nodes), caller, done, ", ".join(hosts))
            return done
        _check_drained(driver.view(), nodes, hosts)
        if order.preview:
            return driver.job.weigh_drain(nodes, hosts)
        if len(nodes) == 1 and not hosts and not order.at_s:
            done = await driver.submit(events.DrainRequested(nodes[0], order.reason))
            done = done or f"Node {nodes[0]} of job {driver.job_id} is asked to leave."
            self._recorder.drained(driver.job_id, nodes[0], caller, order.reason)
            return done
        if order.at_s and order.at_s < now_s - CLOCKS_DIFFER_S:
            raise MalformedError(
                f"The time is over: by the scheduler's clock {now_s - order.at_s:.0f} s ago."
            )
        done = await driver.submit(events.DrainAsked(nodes, hosts, order.reason, now_s, order.at_s))
        text = done if order.at_s else order.reason
        self._recorder.drained(driver.job_id, ", ".join(nodes), caller, text, ", ".join(hosts))
        return done or "They are asked to leave."

    async def admit(self, data: bytes, context: Context) -> bytes:
        """Answers Admit once the change is durable."""

        async def answer(caller: Caller) -> bytes:
            named, name = decoded(unary_calls.decode_admit_request, data)
            job_id = named or self._own_job
            self._access.allow(caller, roles=("operator",), job=job_id)
            driver = self._jobs.get(job_id)
            _check_refused(driver.view(), name)
            done = await driver.submit(events.AdmitAsked(name))
            self._recorder.admitted(job_id, name, caller, done)
            return unary_calls.encode_admit_reply(done)

        return await self._answer("Admit", context, answer)

    async def stacks(self, data: bytes, context: Context) -> bytes:
        """Answers Stacks once all workers in question have sent their stacks, or after a timeout."""

        async def answer(caller: Caller) -> bytes:
            named, node_id = decoded(unary_calls.decode_stacks_request, data)
            job_id = named or self._own_job
            self._access.allow(caller, roles=("operator",), job=job_id)
            driver = self._jobs.get(job_id)
            if node_id and all(w.candidate.node_id != node_id for w in driver.view().workers):
                raise NotFoundError(f"There is no node {node_id!r} in job {job_id!r}.")
            self._recorder.stacks_asked(job_id, node_id, caller)
            return encode_stacks(await driver.ask_stacks(node_id))

        return await self._answer("Stacks", context, answer)

    async def process_ended(self, data: bytes, context: Context) -> bytes:
        """Answers ProcessEnded once the decision that follows from it is durable."""

        async def answer(caller: Caller) -> bytes:
            named, node_id, incarnation, detail = decoded(unary_calls.decode_process_ended_request, data)
            job_id = named or self._own_job
            self._access.allow(caller, roles=("worker",), job=job_id, node=node_id)
            driver = self._jobs.get(job_id)
            done = await driver.submit(events.ProcessEnded(node_id, incarnation, detail))
            who = (node_id, incarnation)
            places = ((w.candidate.node_id, w.candidate.incarnation) for w in driver.view().workers)
            gone = who not in places
            if gone and done:
                self._recorder.lost(job_id, node_id, caller, detail)
            return unary_calls.encode_process_ended_reply(gone=gone)

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
            # This may wait for a peer that does not read. The stream is counted until the peer is gone.
            if session.closed is not None:
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
        finally:  # This also runs when gRPC cancels the call because its connection broke.
            for task in tasks:
                task.cancel()
            self._sessions.report_loss(session, detail)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, session: OutgoingStream, context: Context) -> None:
        while await session.has_next():
            large = session.next_size() >= LARGE_MESSAGE_BYTES
            # While a large message waits for its turn here, a newer generation may replace it.
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


def _check_refused(view: JobView, name: str) -> None:
    """Checks that a refused GPU with this name exists.

    Raises:
        NotFoundError: no refused GPU has this name.
    """
    refused = view.refused_gpus
    if not any(name in each.names() for each in refused):
        known = ", ".join(sorted({each.host_name for each in refused})[:16])
        of = f"those that are refused are of {known}" if known else "no GPU is refused"
        raise NotFoundError(f"Job {view.job_id!r} refuses no GPU of a host or node {name!r}: {of}.")


def _check_drained(view: JobView, node_ids: Sequence[str], hosts: Sequence[str]) -> None:
    """Checks that all named nodes and hosts exist, because an unknown name is probably a typo.

    Raises:
        NotFoundError: a node or host does not exist.
    """
    there = [worker.candidate for worker in view.workers]
    known = {each.node_id for each in there}
    places = {name for each in there for name in (each.host.name, each.host.id, each.host.address)}
    for node_id in node_ids:
        if node_id not in known:
            raise NotFoundError(f"There is no node {node_id!r} in job {view.job_id!r}.")
    for host in hosts:
        if host not in places:
            names = ", ".join(sorted({each.host.name for each in there})[:16]) or "none"
            raise NotFoundError(
                f"Job {view.job_id!r} has no worker on a host {host!r}; its hosts are {names}."
            )
