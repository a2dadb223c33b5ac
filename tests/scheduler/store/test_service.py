"""The store's service and its client over real gRPC: who is let in, what breaks and comes back."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio
import pytest

from muster.certs.pki.identity import Identity
from muster.programs.link import StoreEndedError, StoreLink, StoreLostError
from muster.scheduler.access import Caller
from muster.scheduler.core import records
from muster.scheduler.store.key_value_store import Quotas
from muster.scheduler.store.service import GONE_KEPT, StoreLimits
from muster.wire.v1 import store_pb2 as pb
from tests.scheduler.store.rig import OPEN, Rig, served
from tests.waiting import LIMIT_S, go

SET, GET, ADD, WAIT = pb.STORE_KIND_SET, pb.STORE_KIND_GET, pb.STORE_KIND_ADD, pb.STORE_KIND_WAIT
SECRET = b"the-value-that-nobody-may-see"


async def ask(
    link: StoreLink, kind: pb.StoreKind, key: bytes, *values: bytes, amount: int = 0
) -> pb.StoreAnswer:
    return await link.submit(kind, [key], values, amount=amount)


async def refusal(link: StoreLink) -> str:
    with pytest.raises(StoreEndedError) as error:
        await ask(link, GET, b"k")
    return str(error.value)


def test_members_share_keys_and_wait_for_one_another() -> None:
    async def test() -> None:
        async with served("a", "b") as rig:
            first, second = rig.link("a"), rig.link("b")
            waiting = first.submit(WAIT, [b"k"])
            await ask(second, SET, b"k", b"v")
            assert list((await waiting).values) == [b"v"]
            assert (await first.submit(WAIT, [b"no"], timeout_s=0.01)).status == pb.STORE_STATUS_TIMEOUT

    go(test())


def test_the_end_of_the_generation_ends_all_that_wait_with_its_reason() -> None:
    async def test() -> None:
        async with served("a", "b") as rig:
            links = [rig.link(node) for node in ("a", "b")]
            waits = [link.submit(WAIT, [b"never"]) for link in links for _ in range(3)]
            for link in links:
                await ask(link, SET, b"k", b"v")  # they wait
            rig.jobs.form(2, "a")
            for wait in waits:
                with pytest.raises(StoreEndedError, match="Generation 1 is over: the members changed"):
                    await wait
            assert list((await ask(rig.link("a", 2), GET, b"k")).values) == []  # no old keys
            rig.jobs.suspend(2, "too few are left")
            assert "too few are left" in await refusal(rig.link("a", 2))
            rig.jobs.end("nobody is left")
            assert "nobody is left" in await refusal(rig.link("a", 2))
            assert rig.service.sizes() == {"bytes": 0, "streams": 0, "members": 0}

    go(test())


@pytest.mark.parametrize(
    ("node_id", "generation", "incarnation", "words"),
    [
        ("a", 1, 7, "Generation 1 is over"),
        ("a", 3, 7, "no member of generation 3"),
        ("stranger", 2, 7, "no member of generation 2"),
        ("a", 2, 8, "no member of generation 2"),
    ],
)
def test_nobody_but_the_members_of_the_generation(
    node_id: str, generation: int, incarnation: int, words: str
) -> None:
    async def test() -> None:
        async with served("a", "b") as rig:
            rig.jobs.form(2, "a", "b")
            assert words in await refusal(rig.link(node_id, generation, incarnation))
            assert list((await ask(rig.link("b", 2), GET, b"k")).values) == []

    go(test())


class Certificate:
    """What a caller's certificate says."""

    def __init__(self, node: str | None) -> None:
        self.identity = Identity("default", "worker", node)


def test_a_member_s_session_and_store_are_of_one_certificate() -> None:
    async def test() -> None:
        async with served("a") as rig:
            rig.jobs.driver.sessions[1].caller = Caller("127.0.0.1:1", Certificate("a"))  # type: ignore[arg-type]
            assert "not that of the member's session" in await refusal(rig.link("a"))

    go(test())


def test_a_member_whose_session_is_not_back_is_let_in_when_it_is() -> None:
    async def test() -> None:
        async with served("a") as rig:
            session = rig.jobs.driver.sessions.pop(1)
            asked = asyncio.ensure_future(ask(rig.link("a"), SET, b"k", b"v"))
            await asyncio.wait({asked}, timeout=0.2)
            assert not asked.done()
            rig.jobs.driver.sessions[1] = session
            await asked

    go(test())


def test_agents_have_a_namespace_before_a_generation_and_across_them() -> None:
    async def test() -> None:
        async with served("a", "b") as rig:
            agents = rig.link("a", 0)
            await ask(agents, SET, b"closed", b"1")
            rig.jobs.form(2, "a", "b")
            assert list((await ask(rig.link("b", 0), GET, b"closed")).values) == [b"1"]

    go(test())


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"\xff\xff", "INVALID_ARGUMENT"),
        (pb.StoreRequest().SerializeToString(), "INVALID_ARGUMENT"),
        (pb.StoreRequest(open=pb.StoreOpen(job_id="default")).SerializeToString(), "INVALID_ARGUMENT"),
    ],
)
def test_what_is_no_opening_is_refused(message: bytes, code: str) -> None:
    async def test() -> None:
        async with served("a") as rig, grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
            call: Any = channel.stream_stream(OPEN)()
            await call.write(message)
            assert (await call.code()).name == code
            assert rig.recorder.refusals["malformed"] == 1

    go(test())


def _opened(*operations: pb.StoreOperation) -> list[bytes]:
    opening = pb.StoreOpen(job_id="default", node_id="a", incarnation=7, generation=1)
    return [
        pb.StoreRequest(open=opening).SerializeToString(),
        pb.StoreRequest(operations=operations).SerializeToString(),
    ]


@pytest.mark.parametrize(
    "operation",
    [
        pb.StoreOperation(id=1, kind=99, keys=[b"k"]),  # type: ignore[arg-type]
        pb.StoreOperation(id=0, kind=GET, keys=[b"k"]),
        pb.StoreOperation(id=1, kind=GET),
        pb.StoreOperation(id=1, kind=SET, keys=[b"k"]),
        pb.StoreOperation(id=1, kind=WAIT, keys=[b"k"], timeout_s=float("nan")),
        pb.StoreOperation(id=1, kind=pb.STORE_KIND_MULTI_SET, keys=[b"k", b"l"], values=[b"v"]),
    ],
)
def test_a_malformed_operation_ends_the_stream_and_harms_nobody(operation: pb.StoreOperation) -> None:
    async def test() -> None:
        async with served("a", "b") as rig, grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
            call: Any = channel.stream_stream(OPEN)()
            for message in _opened(operation):
                await call.write(message)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            await ask(rig.link("b"), SET, b"k", b"v")

    go(test())


def test_values_and_keys_stand_in_no_log_no_status_and_no_refusal(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        caplog.set_level("DEBUG")
        async with served("a", limits=StoreLimits(quotas=Quotas(waits=1))) as rig:
            link = rig.link("a")
            await ask(link, SET, SECRET, SECRET)
            refused = await ask(link, ADD, SECRET, amount=1)
            assert SECRET.decode() not in refused.sentence
            assert SECRET.decode() not in repr(rig.jobs.driver.view())
            rig.jobs.suspend(1, "over")
            assert SECRET.decode() not in await refusal(rig.link("a"))
        assert SECRET.decode() not in caplog.text

    go(test())


def test_a_broken_stream_is_opened_again_and_changes_are_carried_out_once() -> None:
    async def test() -> None:
        async with served("a", "b") as rig:
            link, other = rig.link("a"), rig.link("b")
            for turns in range(20):
                asked = [link.submit(ADD, [b"n"], amount=1) for _ in range(10)]
                for _ in range(turns):
                    await asyncio.sleep(0)
                rig.service.close()  # all streams, as if the network had broken
                await asyncio.gather(*asked)
            assert list((await ask(other, GET, b"n")).values) == [b"200"]

    go(test())


async def restarted(rig: Rig, *node_ids: str) -> None:
    await rig.stop()
    rig.jobs.restart(1, *node_ids)
    await rig.serve()


def test_a_scheduler_that_was_started_again_has_the_store_as_it_was() -> None:
    async def test() -> None:
        async with served("a", "b") as rig:
            first, second = rig.link("a"), rig.link("b")
            for link in (first, second, first):
                await ask(link, ADD, b"n", amount=7)
            waiting = first.submit(WAIT, [b"later"])
            await ask(second, pb.STORE_KIND_QUEUE_PUSH, b"q", b"1")
            await ask(first, GET, b"n")  # the wait is there
            await restarted(rig, "a", "b")
            assert list((await ask(second, GET, b"n")).values) == [b"21"]
            assert (await ask(first, pb.STORE_KIND_QUEUE_LEN, b"q")).amount == 1
            await ask(second, SET, b"later", b"v")
            assert list((await waiting).values) == [b"v"]

    go(test())


def test_a_change_that_nobody_hands_in_loses_the_store_and_not_the_generation() -> None:
    """So the members ask for another generation; one that was over says otherwise."""

    async def test() -> None:
        async with served("a", "b") as rig:
            first, second = rig.link("a"), rig.link("b")
            await ask(second, ADD, b"n", amount=7)
            await ask(first, ADD, b"n", amount=7)
            await second.close()  # with what it knows of its change
            await restarted(rig, "a", "b")
            assert "cannot be restored" in await refusal(rig.link("b"))
            assert "cannot be restored" in await refusal(first)
            assert "cannot be restored" in await refusal(rig.link("a"))
            assert type(first.error) is StoreLostError
            rig.jobs.suspend(1, "a member left")
            late = rig.link("a")
            assert "a member left" in await refusal(late)
            assert type(late.error) is StoreEndedError

    go(test())


def test_what_nobody_asked_for_is_not_kept_and_too_much_of_it_is_refused() -> None:
    effects = [pb.StoreEffect(number=1, kind=pb.StoreEffect.KIND_SET, key=b"k", value=bytes(1000))]
    replay = pb.StoreRequest(replay=pb.StoreReplay(effects=effects)).SerializeToString()

    async def hand_in(rig: Rig, count: int) -> int:
        own = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}", own) as channel:
            call: Any = channel.stream_stream(OPEN)()
            try:
                for message in [*_opened()[:1], *[replay] * count]:
                    await call.write(message)
                await call.done_writing()
                while await call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError:
                pass
            return rig.recorder.refusals["limit"]

    async def test() -> None:
        async with served("a", "b", limits=StoreLimits(quotas=Quotas(size_bytes=5000))) as rig:
            assert await hand_in(rig, 10) == 0
            await restarted(rig, "a", "b")
            assert await hand_in(rig, 10) == 1

    go(test())


@pytest.mark.parametrize("counts", [{"count": 2**63}, {"seen": 2**64 - 1}])
def test_a_count_beyond_all_bounds_is_refused_and_is_nobodys_number(counts: dict[str, int]) -> None:
    last = pb.StoreRequest(replay=pb.StoreReplay(last=True, **counts)).SerializeToString()  # type: ignore[arg-type]

    async def test() -> None:
        async with served("a") as rig:
            await restarted(rig, "a")
            async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
                call: Any = channel.stream_stream(OPEN)()
                for message in (_opened()[0], last):
                    await call.write(message)
                with pytest.raises(grpc.aio.AioRpcError, match="2\\*\\*63"):
                    while await call.read() is not grpc.aio.EOF:
                        pass
            assert (await ask(rig.link("a"), ADD, b"n", amount=1)).number == 1

    go(test())


def test_a_message_of_endless_work_lets_others_have_their_turns() -> None:
    """A megabyte holds a hundred thousand operations; each may look at every key."""
    looks = [pb.StoreOperation(id=number, kind=pb.STORE_KIND_NUM_KEYS) for number in range(1, 2001)]

    async def test() -> None:
        async with served("a", "b") as rig:
            other = rig.link("b")
            keys = [b"%d" % number for number in range(5000)]
            await other.submit(pb.STORE_KIND_MULTI_SET, keys, [b""] * len(keys))
            async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
                call: Any = channel.stream_stream(OPEN)()
                for message in _opened(*looks):
                    await call.write(message)
                assert await call.read() is not grpc.aio.EOF
                answered = 0
                while not answered:
                    await ask(other, GET, b"none")
                    answered += len(pb.StoreReply.FromString(await call.read()).answers)
                assert answered < len(looks)  # the other was answered while they ran
                call.cancel()

    go(test())


class Conversation:
    """A member's stream without a network, so that only what is done on the loop decides who comes first."""

    def __init__(self, rig: Rig, node_id: str) -> None:
        self._requests: asyncio.Queue[bytes] = asyncio.Queue()
        self.replies: asyncio.Queue[pb.StoreReply] = asyncio.Queue()
        self.say(open=pb.StoreOpen(job_id="default", node_id=node_id, incarnation=7, generation=1))
        self.task = asyncio.ensure_future(rig.service.open(None, self))  # type: ignore[arg-type]

    def say(self, **fields: Any) -> None:
        self._requests.put_nowait(pb.StoreRequest(**fields).SerializeToString())

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def read(self) -> bytes:
        return await self._requests.get()

    async def write(self, data: bytes) -> None:
        self.replies.put_nowait(pb.StoreReply.FromString(data))


@pytest.mark.parametrize(("kind", "turns"), [(pb.STORE_KIND_LIST_KEYS, 400), (pb.STORE_KIND_NUM_KEYS, 200)])
def test_others_are_answered_amid_one_question_about_all_keys(kind: pb.StoreKind, turns: int) -> None:
    """Of 10 keys at a time: they are looked at, and a list of them is encoded."""
    keys = [b"k%d" % number for number in range(2000)]

    async def test() -> None:
        async with served("a", "b", limits=StoreLimits(quotas=Quotas(turn_keys=10))) as rig:
            asker, other = Conversation(rig, "a"), Conversation(rig, "b")
            for each in (asker, other):
                assert (await each.replies.get()).HasField("opened")
            await ask_all(
                other, pb.StoreOperation(id=1, kind=pb.STORE_KIND_MULTI_SET, keys=keys, values=keys)
            )
            asker.say(operations=[pb.StoreOperation(id=1, kind=kind, keys=[b"k"])])
            answered = 1
            while asker.replies.empty():
                answered += 1
                await ask_all(other, pb.StoreOperation(id=answered, kind=GET, keys=[b"k1"]))
            [answer] = asker.replies.get_nowait().answers
            assert (answer.id, answer.amount) == (1, len(keys))
            assert list(answer.values) == (keys if kind == pb.STORE_KIND_LIST_KEYS else [])
            assert answered > turns / 4  # a question and its answer take three turns of the loop
            for each in (asker, other):
                each.task.cancel()
            await asyncio.gather(asker.task, other.task, return_exceptions=True)

    go(test())


def test_what_was_asked_before_a_member_was_lost_is_answered_without_another_word() -> None:
    """After a restart all is put together when the last member that is waited for is gone."""
    keys = [b"k%d" % number for number in range(30)]
    effects = [pb.StoreEffect(number=1, kind=pb.StoreEffect.KIND_SET, key=key) for key in keys]

    async def test() -> None:
        async with served("a", "b", limits=StoreLimits(quotas=Quotas(turn_keys=10))) as rig:
            await restarted(rig, "a", "b")
            asker = Conversation(rig, "a")
            assert (await asker.replies.get()).opened.replay
            looks = pb.StoreOperation(id=1, kind=pb.STORE_KIND_LIST_KEYS)
            waits = pb.StoreOperation(id=2, kind=WAIT, keys=[b"none"], timeout_s=0.01)
            asker.say(replay=pb.StoreReplay(effects=effects, count=1, seen=1, last=True))
            asker.say(operations=[looks, waits])
            await asyncio.sleep(0)
            rig.jobs.machine.members.pop()
            rig.jobs.driver.observe(records.Removed("b", 7, "it has finished", finished=True), 0.0)
            answers: dict[int, pb.StoreAnswer] = {}
            while len(answers) < 2:
                answers.update({answer.id: answer for answer in (await asker.replies.get()).answers})
            assert sorted(answers[1].values) == sorted(keys)
            assert answers[2].status == pb.STORE_STATUS_TIMEOUT
            asker.task.cancel()
            await asyncio.gather(asker.task, return_exceptions=True)

    go(test())


async def ask_all(by: Conversation, operation: pb.StoreOperation) -> None:
    by.say(operations=[operation])
    assert [answer.id for answer in (await by.replies.get()).answers] == [operation.id]


def test_an_answer_that_waits_for_its_turn_when_the_generation_ends_is_still_sent() -> None:
    async def test() -> None:
        async with served("a", "b") as rig:
            asker = Conversation(rig, "a")
            assert (await asker.replies.get()).HasField("opened")
            await ask_all(asker, pb.StoreOperation(id=1, kind=GET, keys=[b"k"]))
            asker.say(operations=[pb.StoreOperation(id=2, kind=SET, keys=[b"k"], values=[b"v"])])
            await asyncio.sleep(0)  # the value is set, and the answer is sent in the next turn of the loop
            rig.jobs.suspend(1, "too few are left")
            await asyncio.gather(asker.task, return_exceptions=True)
            assert [answer.id for answer in asker.replies.get_nowait().answers] == [2]

    go(test())


def test_agents_that_come_and_go_are_not_kept_for_ever() -> None:
    async def test() -> None:
        async with served("a") as rig:
            for number in range(3 * GONE_KEPT):
                rig.jobs.form(1, f"node-{number}")
                link = rig.link(f"node-{number}", 0)
                await ask(link, SET, b"k", b"v")
                await link.close()
            rig.jobs.form(1, "last")
            rig.jobs.form(1, "b")
            await ask(rig.link("b", 0), GET, b"k")
            assert rig.service.sizes()["members"] <= GONE_KEPT + 2

    go(test())


def test_a_member_that_does_not_read_is_dropped_with_what_waits_for_it() -> None:
    asks = [_opened(pb.StoreOperation(id=number, kind=GET, keys=[b"k"]))[1] for number in range(1, 101)]

    async def test() -> None:
        async with served("a", "b", limits=StoreLimits(waiting_bytes=4 << 20)) as rig:
            other = rig.link("b")
            await ask(other, SET, b"k", bytes(700_000))
            async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
                call: Any = channel.stream_stream(OPEN)()
                with contextlib.suppress(grpc.aio.AioRpcError):  # it may be dropped while they run
                    for message in [_opened()[0], *asks]:
                        await call.write(message)
                while rig.recorder.refusals["too_slow"] == 0 or rig.service.sizes()["streams"] > 1:
                    assert not (await ask(other, GET, b"none")).values  # the others go on

    go(test())


def test_members_ahead_of_the_journal_have_their_store_when_their_generation_is_adopted() -> None:
    async def test() -> None:
        async with served("a", "b") as rig:
            rig.jobs.form(3, "a", "b")
            first, second = rig.link("a", 3), rig.link("b", 3)
            await ask(second, SET, b"k", b"v")
            await restarted(rig, "a", "b")  # the journal ends with generation 1
            asked = asyncio.ensure_future(ask(first, GET, b"k"))
            await asyncio.wait({asked}, timeout=0.3)
            assert not asked.done()
            rig.jobs.form(3, "a", "b", here=False)
            assert list((await asked).values) == [b"v"]

    go(test())


def test_a_member_that_does_not_return_keeps_the_store_waiting_until_the_generation_ends() -> None:
    async def test() -> None:
        async with served("a", "b") as rig:
            first, second = rig.link("a"), rig.link("b")
            await ask(second, SET, b"k", b"v")
            await second.close()
            await restarted(rig, "a", "b")
            asked = asyncio.ensure_future(ask(first, GET, b"k"))
            await asyncio.wait({asked}, timeout=0.3)
            assert not asked.done()
            rig.jobs.form(2, "a")
            with pytest.raises(StoreEndedError, match="Generation 1 is over"):
                await asked

    go(test())


def test_a_certificate_that_is_revoked_ends_its_stream() -> None:
    async def test() -> None:
        async with served("a") as rig:
            link = rig.link("a")
            await ask(link, SET, b"k", b"v")

            rig.access.revoked = lambda caller: "it was revoked"  # type: ignore[method-assign]
            looked = asyncio.get_running_loop().time() + LIMIT_S
            with pytest.raises(StoreEndedError, match="it was revoked"):
                while asyncio.get_running_loop().time() < looked:
                    await ask(link, GET, b"k")
                    await asyncio.sleep(0.05)

    go(test())


def test_who_breaks_a_bound_is_refused_and_the_others_go_on() -> None:
    async def test() -> None:
        limits = StoreLimits(quotas=Quotas(keys=10))
        async with served("a", "b", limits=limits) as rig:
            flood, other = rig.link("a"), rig.link("b")
            answers = await asyncio.gather(*(ask(flood, SET, b"%d" % i, b"v") for i in range(200)))
            assert sum(answer.status == pb.STORE_STATUS_REFUSED for answer in answers) == 190
            assert "at most 10 keys" in answers[-1].sentence
            assert list((await ask(other, GET, b"0")).values) == [b"v"]

    go(test())
