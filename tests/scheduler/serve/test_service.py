"""The servicer between a real gRPC channel and a scripted machine: limits, slow peers, lost streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from muster.scheduler.access import Access
from muster.scheduler.audit.logs import Recorder
from muster.scheduler.config import load_settings
from muster.scheduler.core import events
from muster.scheduler.core.events import Decision
from muster.scheduler.errors import UnauthenticatedError
from muster.scheduler.jobs.driver import Note
from muster.scheduler.jobs.jobs import Jobs
from muster.scheduler.jobs.stream import OutgoingStream
from muster.scheduler.serve.host_stream import HostStreams
from muster.scheduler.serve.server import keep_in_force
from muster.scheduler.serve.service import Service
from muster.scheduler.serve.sessions import Limits, Sessions
from muster.wire import messages
from muster.wire.v1 import rendezvous_pb2 as pb
from tests.scheduler.fakes import FakeJob
from tests.scheduler.processes import join
from tests.waiting import go

SESSION = "/rendezvous.v1.Rendezvous/Session"


class Rig:
    """A service in this process with one scripted job, and channels to it."""

    def __init__(
        self, job: FakeJob, sessions: Sessions, jobs: Jobs, access: Access, recorder: Recorder
    ) -> None:
        self.job = job
        self.sessions = sessions
        self.jobs = jobs
        self.access = access
        self.recorder = recorder

    def call(self, channel: grpc.aio.Channel) -> Any:
        return channel.stream_stream(
            SESSION,
            request_serializer=pb.WorkerMessage.SerializeToString,
            response_deserializer=pb.SchedulerMessage.FromString,
        )()


@asynccontextmanager
async def served(
    script: Callable[[events.Event], Decision], limits: Limits | None = None
) -> AsyncIterator[tuple[Rig, grpc.aio.Channel]]:
    job, recorder = FakeJob(script), Recorder()
    jobs = Jobs(
        load_settings({"MS_WORKER_NUM": "2"}),
        asyncio.get_running_loop(),
        recorder.note,
        new_machine=lambda job_id, settings: job,
        recover_machine=lambda job_id, settings, records, now: job,
    )
    await jobs.open()
    access = Access(tls=False)
    sessions = Sessions(jobs, access, recorder, limits or Limits())
    service = Service(sessions, "default")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((service.handler(), HostStreams(sessions).handler()))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Rig(job, sessions, jobs, access, recorder), channel
    finally:
        await jobs.close()
        await server.stop(0)


def welcome(event: events.Event) -> Decision:
    if isinstance(event, events.Joined):
        return Decision(messages=((event.session, messages.Welcome(1, 5, 60)),))
    return Decision()


def test_too_many_streams_from_one_host() -> None:
    async def test() -> None:
        async with served(welcome, Limits(sessions_per_host=1)) as (rig, channel):
            first = rig.call(channel)
            await first.write(join("node-0"))
            assert (await first.read()).WhichOneof("body") == "welcome"
            second = rig.call(channel)
            assert await second.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "127.0.0.1 already holds 1 streams (MS_MAX_STREAMS_PER_HOST=1)" in await second.details()
            first.cancel()
            await rig.sessions.idle.wait()
            third = rig.call(channel)
            await third.write(join("node-0"))
            assert (await third.read()).WhichOneof("body") == "welcome"
            third.cancel()
            assert rig.recorder.refusals["limit"] == 1

    go(test())


def test_too_many_streams_in_all() -> None:
    async def test() -> None:
        async with served(welcome, Limits(sessions=0)) as (rig, channel):
            assert await rig.call(channel).code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    go(test())


def test_a_stream_without_join_is_ended() -> None:
    async def test() -> None:
        async with served(welcome, Limits(join_timeout_s=0.05)) as (rig, channel):
            call = rig.call(channel)
            await call.wait_for_connection()
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "sent no Join" in await call.details()
            await rig.sessions.idle.wait()
            assert rig.job.events() == []

    go(test())


def test_a_worker_that_does_not_read_is_dropped_and_reported_lost() -> None:
    async def test() -> None:
        lost: asyncio.Future[events.SessionLost] = asyncio.get_running_loop().create_future()

        def script(event: events.Event) -> Decision:
            if isinstance(event, events.SessionLost):
                lost.set_result(event)
            if isinstance(event, events.Heard):
                return Decision(messages=((1, messages.Waiting(1, 2, "x" * 500_000)),))
            return welcome(event)

        async with served(script) as (rig, channel):
            call = rig.call(channel)
            await call.write(join("node-0"))
            await call.read()
            session = rig.sessions.all[1]
            for _ in range(60):  # far more than flow control and the session's queue hold
                await call.write(pb.WorkerMessage(heartbeat=pb.Heartbeat()))
            await session.dropped.wait()
            assert "does not read" in (await lost).detail
            call.cancel()
            await rig.sessions.idle.wait()

    go(test())


@pytest.mark.parametrize("how", ["cancel", "half-close", "malformed"])
def test_every_end_without_goodbye_is_reported_once(how: str) -> None:
    async def test() -> None:
        async with served(welcome) as (rig, channel):
            call = rig.call(channel)
            await call.write(join("node-0"))
            await call.read()
            if how == "cancel":
                call.cancel()
            elif how == "half-close":
                await call.done_writing()
            else:
                await call.write(pb.WorkerMessage())
            await rig.sessions.idle.wait()
            driver = rig.jobs.get("default")
            await driver.submit(events.Tick())
            assert [type(event) for event in rig.job.events()] == [
                events.Joined,
                events.SessionLost,
                events.Tick,
            ]
            assert driver.sessions == {}

    go(test())


def test_a_revoked_stream_without_a_place_is_dropped_too() -> None:
    async def test() -> None:
        async with served(welcome) as (rig, channel):
            call = rig.call(channel)
            await call.write(join("node-0"))
            await call.read()
            rig.access.revoked = lambda caller: "it was revoked"  # type: ignore[method-assign]
            await rig.sessions.expel_revoked()
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            assert await call.details() == "it was revoked"
            assert events.Expel("node-0", "it was revoked") in rig.job.events()

    go(test())


@pytest.mark.parametrize("delay", range(8))
def test_a_stream_whose_first_message_is_cut_off_ends_too(delay: int) -> None:
    """The first message is cut off while it is written, so many turns of the loop after its Join."""

    async def test() -> None:
        async def drop(session: OutgoingStream) -> None:
            for _ in range(delay):
                await asyncio.sleep(0)
            session.drop(UnauthenticatedError("it was revoked"))

        dropping = []

        def script(event: events.Event) -> Decision:
            if isinstance(event, events.Joined):
                dropping.append(asyncio.ensure_future(drop(rig.sessions.all[event.session])))
            return welcome(event)

        async with served(script) as (rig, channel):
            call = rig.call(channel)
            await call.write(join("node-0"))
            with pytest.raises(grpc.aio.AioRpcError, match="it was revoked"):
                while await call.read() is not grpc.aio.EOF:
                    pass

    go(test())


class Unchanged:
    """Certificates whose files do not change: what is in force goes on ending all the same."""

    def poll(self) -> None:
        return

    def log_change(self, change: object) -> None:
        assert change is None


def test_a_certificate_that_ends_while_its_stream_lives_is_told_once() -> None:
    async def test() -> None:
        async with served(welcome) as (rig, channel):
            call = rig.call(channel)
            await call.write(join("node-0"))
            await call.read()
            notes: list[Note] = []
            told = asyncio.get_running_loop().create_future()

            def record(note: Note) -> None:
                notes.append(note)
                told.set_result(None)

            rig.recorder.note = record  # type: ignore[method-assign]
            rig.sessions.report_expired()
            assert notes == []
            rig.access.expired = lambda caller: True  # type: ignore[method-assign]
            following = asyncio.ensure_future(keep_in_force(Unchanged(), None, rig.sessions))  # type: ignore[arg-type]
            await asyncio.wait({told, following}, return_when=asyncio.FIRST_COMPLETED)
            following.cancel()
            rig.sessions.report_expired()
            [only] = notes
            assert (only.kind, only.job_id, only.session) == ("expired", "default", rig.sessions.all[1])
            call.cancel()

    go(test())


def test_a_goodbye_is_no_loss() -> None:
    async def test() -> None:
        def script(event: events.Event) -> Decision:
            if isinstance(event, events.LeftCleanly):
                return Decision(messages=((event.session, messages.Ended(True, "Goodbye.")),))
            return welcome(event)

        async with served(script) as (rig, channel):
            call = rig.call(channel)
            await call.write(join("node-0"))
            await call.write(pb.WorkerMessage(leave=pb.Leave(generation=1, finished=True)))
            assert [(await call.read()).WhichOneof("body") for _ in range(2)] == ["welcome", "ended"]
            assert await call.code() is grpc.StatusCode.OK
            await rig.sessions.idle.wait()
            await rig.jobs.get("default").submit(events.Tick())
            assert [type(event) for event in rig.job.events()] == [
                events.Joined,
                events.LeftCleanly,
                events.Tick,
            ]

    go(test())


def test_a_fault_in_the_machine_tells_callers_nothing_but_that() -> None:
    async def test() -> None:
        def script(event: events.Event) -> Decision:
            raise RuntimeError("the secret inside")

        async with served(script) as (rig, channel):
            call = rig.call(channel)
            await call.write(join("node-0"))
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert "secret" not in await call.details()
            with pytest.raises(Exception, match="fault in the scheduler"):
                await rig.jobs.own_job_over
            late = rig.call(channel)
            await late.write(join("node-1"))
            assert await late.code() is grpc.StatusCode.UNAVAILABLE

    go(test())
