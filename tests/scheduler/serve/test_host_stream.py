"""Many workers on one stream: each as on its own, nothing said twice, and a broken stream accuses nobody."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.scheduler.core import events
from muster.scheduler.core.events import Decision
from muster.scheduler.core.views import WorkerView
from muster.scheduler.errors import NotPermittedError
from muster.scheduler.serve.host_stream import BATCH_BYTES, MAX_ITEMS, MessageBatch
from muster.scheduler.serve.sessions import Limits
from muster.wire import messages
from muster.wire.v1 import host_pb2
from muster.wire.v1 import rendezvous_pb2 as pb
from tests.scheduler.fakes import candidate
from tests.scheduler.processes import join
from tests.scheduler.serve.test_service import Rig, served, welcome
from tests.waiting import go, until

HOST_STREAM = "/rendezvous.v1.HostStream/Open"


def opened(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(
        HOST_STREAM,
        request_serializer=host_pb2.FromHost.SerializeToString,
        response_deserializer=host_pb2.ToHost.FromString,
    )()


def says(number: int, message: pb.WorkerMessage) -> host_pb2.FromWorker:
    return host_pb2.FromWorker(worker=number, message=message.SerializeToString())


def gone(number: int, **fields: Any) -> host_pb2.FromWorker:
    return host_pb2.FromWorker(worker=number, gone=host_pb2.Gone(**fields))


def beat() -> pb.WorkerMessage:
    return pb.WorkerMessage(heartbeat=pb.Heartbeat(step=1))


async def put(call: Any, *items: host_pb2.FromWorker) -> None:
    await call.write(host_pb2.FromHost(items=items))


async def items_of(call: Any, count: int) -> list[host_pb2.ToWorkers]:
    """The next items until they concern so many workers."""
    found: list[host_pb2.ToWorkers] = []
    while sum(len(item.workers) for item in found) < count:
        batch = await call.read()
        assert batch is not grpc.aio.EOF
        found += batch.items
    return found


def body(item: host_pb2.ToWorkers, at: int = 0) -> pb.SchedulerMessage:
    own = item.own[at] if item.own else b""
    return pb.SchedulerMessage.FromString(item.message + own)


async def heard_of(rig: Rig, kind: type, count: int = 1) -> list[Any]:
    """So many events of a kind at least."""

    def found() -> list[Any]:
        return [event for event in rig.job.events() if isinstance(event, kind)]

    await until(lambda: len(found()) >= count)
    return found()


def test_each_worker_of_a_host_is_a_session_of_its_own_and_is_told_what_all_are_told_once() -> None:
    async def test() -> None:
        async with served(welcome) as (rig, channel):
            call = opened(channel)
            await put(call, *(says(i + 1, join(f"node-{i}")) for i in range(3)))
            (item,) = await items_of(call, 3)
            assert list(item.workers) == [1, 2, 3]
            assert body(item).HasField("welcome")
            joined = await heard_of(rig, events.Joined, 3)
            assert len({event.session for event in joined}) == 3
            await put(call, says(2, beat()), says(3, beat()))
            heard = await heard_of(rig, events.Heard, 2)
            assert [event.session for event in heard] == [joined[1].session, joined[2].session]
            call.cancel()

    go(test())


def test_an_assignment_goes_to_a_host_once_with_each_workers_rank() -> None:
    members = tuple(
        messages.Member(
            rank, f"node-{rank}", 1, messages.Host("h", "h", "10.0.0.1"), messages.Device(), rank, 2
        )
        for rank in range(2)
    )

    def script(event: events.Event) -> Decision:
        if isinstance(event, events.Heard):
            told = messages.Assignment(1, 0, members, -1, (), 1, "all are in", -1, ())
            return Decision(messages=tuple((session, told.replaced(rank=session - 2)) for session in (2, 3)))
        return welcome(event)

    async def test() -> None:
        async with served(script) as (_, channel):
            call = opened(channel)
            await put(call, says(1, join("node-0")), says(2, join("node-1")))
            await items_of(call, 2)
            await put(call, says(1, beat()))
            (item,) = await items_of(call, 2)
            assert [body(item, at).assignment.rank for at in range(2)] == [0, 1]
            assert len(body(item).assignment.members) == 2
            call.cancel()

    go(test())


def test_who_has_got_the_generation_before_on_its_stream_is_told_what_has_changed() -> None:
    """On any stream. Those that came later, or take no deltas, get it whole."""
    host = messages.Host("h", "h", "10.0.0.1")
    members = tuple(
        messages.Member(rank, f"node-{rank}", 1, host, messages.Device(), rank, 80) for rank in range(80)
    )
    generation = 0
    sessions: list[int] = []

    def script(event: events.Event) -> Decision:
        if isinstance(event, events.Heard):
            assignment = messages.Assignment(generation, 0, members, -1, (), 1, "all are in", -1, ())
            return Decision(messages=tuple((session, assignment) for session in sessions))
        if isinstance(event, events.Joined):
            sessions.append(event.session)
        return welcome(event)

    async def test() -> None:
        nonlocal generation, members
        async with served(script) as (rig, channel):
            call, direct = opened(channel), rig.call(channel)
            await put(call, says(1, join("node-0", takes_deltas=True)), says(2, join("node-1")))
            await items_of(call, 2)
            await direct.write(join("node-2", takes_deltas=True))
            assert (await direct.read()).HasField("welcome")
            generation = 1
            await put(call, says(1, beat()))
            (item,) = await items_of(call, 2)
            assert not body(item).assignment.base
            assert not (await direct.read()).assignment.base
            await put(call, says(3, join("node-3", takes_deltas=True)))
            await items_of(call, 1)
            generation, members = 2, (members[0].replaced(incarnation=2), *members[1:])
            await put(call, says(1, beat()))
            bases = {
                number: body(item, at).assignment.base
                for item in await items_of(call, 3)
                for at, number in enumerate(item.workers)
            }
            assert bases == {1: 1, 2: 0, 3: 0}
            changed = (await direct.read()).assignment
            assert (changed.base, list(changed.kept), len(changed.members)) == (1, [1, 79], 1)
            call.cancel()
            direct.cancel()

    go(test())


def test_a_worker_that_is_gone_is_lost_after_what_it_has_said_and_the_others_go_on() -> None:
    async def test() -> None:
        async with served(welcome) as (rig, channel):
            call = opened(channel)
            rig.job.workers = (
                WorkerView(candidate("node-0", incarnation=1000), "lost", -1, -1, 0.0, 0, 0.0),
            )
            # In one batch: with the loss before the join, a job would have a member without a stream.
            await put(call, says(1, join("node-0")), says(2, join("node-1")), gone(1), says(2, beat()))
            (lost,) = await heard_of(rig, events.SessionLost)
            await heard_of(rig, events.Heard)
            mine = [event for event in rig.job.events() if getattr(event, "session", None) == lost.session]
            assert [type(event) for event in mine] == [events.Joined, events.SessionLost]
            assert not lost.may_return
            assert lost.detail == "no goodbye was said"
            assert len(rig.sessions.all) == 2  # the stream, and the other worker
            await put(call, gone(2, may_return=True, detail="moved\non"))
            lost = (await heard_of(rig, events.SessionLost, 2))[1]
            assert (lost.may_return, lost.detail) == (True, "moved\\non")
            call.cancel()

    go(test())


def test_the_end_of_the_stream_says_nothing_of_its_workers() -> None:
    async def test() -> None:
        async with served(welcome) as (rig, channel):
            call = opened(channel)
            await put(call, says(1, join("node-0")), says(2, join("node-1")))
            await items_of(call, 2)
            call.cancel()
            lost = await heard_of(rig, events.SessionLost, 2)
            assert [event.may_return for event in lost] == [True, True]
            await rig.sessions.idle.wait()

    go(test())


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        (beat(), grpc.StatusCode.INVALID_ARGUMENT, "first message"),
        (pb.WorkerMessage(), grpc.StatusCode.INVALID_ARGUMENT, "no body"),
    ],
)
def test_a_worker_that_breaks_the_protocol_is_let_go_alone(
    wrong: pb.WorkerMessage, code: grpc.StatusCode, words: str
) -> None:
    async def test() -> None:
        async with served(welcome) as (rig, channel):
            call = opened(channel)
            await put(call, says(1, join("node-0")))
            await items_of(call, 1)
            await put(call, says(2, wrong))
            refused, closed = await items_of(call, 2)
            assert words in body(refused).refused.sentence
            assert list(closed.workers) == [2]
            assert closed.closed.code == code.value[0]
            # What it sends before it has heard that is passed over, as is a number from before.
            await put(call, says(2, join("node-1")), says(1, beat()))
            await heard_of(rig, events.Heard)
            assert len(await heard_of(rig, events.Joined)) == 1
            call.cancel()

    go(test())


def test_a_host_that_has_said_all_hears_all_and_the_end() -> None:
    """What is being written when a host ends its side must not be cut off: the call would never end."""

    async def test() -> None:
        async with served(welcome) as (rig, channel):
            for _ in range(100):
                call = opened(channel)
                await put(call, says(1, beat()))
                await call.done_writing()
                refused, closed = await items_of(call, 2)
                assert refused.message and closed.closed.code
                assert await call.read() is grpc.aio.EOF
                assert await call.code() is grpc.StatusCode.OK
            await rig.sessions.idle.wait()

    go(test())


def test_a_certificate_is_asked_about_each_node() -> None:
    async def test() -> None:
        async with served(welcome) as (rig, channel):

            def allow(caller: object, *, roles: object, job: str, node: str | None = None) -> None:
                if node != "node-0":
                    raise NotPermittedError(f"Not {node}.")

            rig.access.allow = allow  # type: ignore[method-assign]
            call = opened(channel)
            await put(call, says(1, join("node-0")), says(2, join("node-1")))
            items = await items_of(call, 3)
            closed = [item for item in items if item.HasField("closed")]
            assert [list(item.workers) for item in closed] == [[2]]
            assert closed[0].closed.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
            assert [event.candidate.node_id for event in await heard_of(rig, events.Joined)] == ["node-0"]
            call.cancel()

    go(test())


def test_workers_of_a_host_count_as_streams() -> None:
    async def test() -> None:
        async with served(welcome, Limits(sessions_per_host=2)) as (rig, channel):
            call = opened(channel)
            await put(call, says(1, join("node-0")), says(2, join("node-1")))
            items = await items_of(call, 2)
            closed = next(item for item in items if item.HasField("closed"))
            assert list(closed.workers) == [2]
            assert "MS_MAX_STREAMS_PER_HOST=2" in closed.closed.detail
            assert rig.recorder.refusals["limit"] == 1
            call.cancel()

    go(test())


def test_a_worker_of_a_job_that_is_carried_on_no_longer_is_let_go() -> None:
    """Its scheduler may serve others: their workers on the same stream go on."""

    def script(event: events.Event) -> Decision:
        if isinstance(event, events.Heard):
            raise ValueError("a fault")
        return welcome(event)

    async def test() -> None:
        async with served(script) as (_, channel):
            call = opened(channel)
            await put(call, says(1, join("node-0")))
            await items_of(call, 1)
            await put(call, says(1, beat()))
            (closed,) = await items_of(call, 1)
            assert closed.closed.code == grpc.StatusCode.UNAVAILABLE.value[0]
            await put(call, says(2, join("node-1")), says(3, join("node-2")))
            items = await items_of(call, 2)
            assert sorted(number for item in items for number in item.workers) == [2, 3]
            assert {item.closed.code for item in items} == {grpc.StatusCode.UNAVAILABLE.value[0]}
            call.cancel()

    go(test())


def test_a_host_without_workers_is_sent_away() -> None:
    async def test() -> None:
        async with served(welcome, Limits(join_timeout_s=0.05)) as (_, channel):
            call = opened(channel)
            await call.wait_for_connection()
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    go(test())


def test_a_batch_beyond_the_bounds_ends_the_stream() -> None:
    async def test() -> None:
        async with served(welcome) as (_, channel):
            call = opened(channel)
            await put(call, *(gone(i) for i in range(MAX_ITEMS + 1)))
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT

    go(test())


def test_a_host_that_does_not_read_is_dropped_and_its_workers_may_come_back() -> None:
    def script(event: events.Event) -> Decision:
        if isinstance(event, events.Heard):
            return Decision(messages=((event.session, messages.Waiting(1, 2, "x" * 500_000)),))
        return welcome(event)

    async def test() -> None:
        async with served(script) as (rig, channel):
            call = opened(channel)
            await put(call, says(1, join("node-0")), says(2, join("node-1")))
            await items_of(call, 2)
            for _ in range(120):
                await put(call, says(1, beat()))
            lost = await heard_of(rig, events.SessionLost, 2)
            assert all(event.may_return for event in lost)
            call.cancel()
            await rig.sessions.idle.wait()

    go(test())


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from("abc"), st.sampled_from(["", "1", "2"]))))
def test_a_batch_keeps_each_workers_messages_whole_and_in_order(sent: list[tuple[int, str, str]]) -> None:
    batch = MessageBatch()
    for number, message, own in sent:
        batch.add(number, (message.encode(), own.encode()) if own else (message.encode(),))
    got: dict[int, list[str]] = {}
    for item in host_pb2.ToHost.FromString(batch.serialized() or b"").items:
        for at, number in enumerate(item.workers):
            got.setdefault(number, []).append((item.message + (item.own[at] if item.own else b"")).decode())
    want: dict[int, list[str]] = {}
    for number, message, own in sent:
        want.setdefault(number, []).append(message + own)
    assert got == want


def test_what_all_receivers_share_stands_in_a_batch_once() -> None:
    shared = bytes(BATCH_BYTES // 2)
    batch = MessageBatch()
    for number in range(1, 9):
        batch.add(number, (shared, b"%d" % number))
    assert len(batch.serialized() or b"") < len(shared) + 200
