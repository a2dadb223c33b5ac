"""The election: one leads, the next one follows, and one that cannot renew its lease goes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from muster.scheduler.errors import DeposedError, SchedulerSettingsError
from muster.scheduler.etcd import leadership as module
from muster.scheduler.etcd.api import EtcdRefusedError, delete, put
from muster.scheduler.etcd.leadership import (
    LEASE_S,
    REFUSED_S,
    RENEW_S,
    STEP_DOWN_S,
    LaterVersionError,
    Leadership,
)
from muster.version import __version__
from muster.wire.v1 import etcd_pb2 as pb
from tests.scheduler.etcd.store import Direct, Store
from tests.waiting import go, until


class Clock:
    """Time that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now


class Rig:
    """A store, and processes that want to lead."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = Store(self.clock.time)

    def process(self, name: str) -> tuple[Leadership, Direct]:
        api = Direct(self.store)
        return Leadership(api, b"/muster/job", name, self.clock), api


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("RETRY_S", "RENEW_S", "WATCH_S"):
        monkeypatch.setattr(module, pause, 0.001)


def test_one_leads_and_the_next_follows_with_a_higher_token() -> None:
    async def test() -> None:
        rig = Rig()
        (one, _), (other, _) = rig.process("one"), rig.process("other")
        await one.campaign()
        assert one.leads
        waiting = asyncio.ensure_future(other.campaign())
        await until(lambda: other.stood_by)
        assert not waiting.done()
        rig.clock.now += LEASE_S + 0.1
        await waiting
        assert other.leads
        assert other.stood_by
        assert not one.stood_by
        assert other.token > one.token > 0

    go(test())


def test_a_planned_stop_hands_over_at_once() -> None:
    async def test() -> None:
        rig = Rig()
        (one, _), (other, _) = rig.process("one"), rig.process("other")
        await one.campaign()
        await one.resign()
        await other.campaign()
        assert other.leads

    go(test())


def lose_first_answer(api: Direct, to: str) -> None:
    """The first request of that name is carried out, and its answer lost."""
    real = getattr(api, to)

    async def asked(*arguments: Any) -> Any:
        setattr(api, to, real)
        api.lost = 1
        return await real(*arguments)

    setattr(api, to, asked)


@pytest.mark.parametrize("to", ["read", "grant", "transact"])
def test_a_win_whose_answer_was_lost_is_found_out(to: str) -> None:
    async def test() -> None:
        rig = Rig()
        one, api = rig.process("one")
        lose_first_answer(api, to)
        await one.campaign()
        assert one.token == rig.store.pairs[one.key].create_revision
        assert not one.stood_by

    go(test())


def test_a_renewal_keeps_the_lead_and_a_lease_that_ended_ends_it() -> None:
    async def test() -> None:
        rig = Rig()
        one, _ = rig.process("one")
        await one.campaign()
        keeping = asyncio.ensure_future(one.keep())
        for _ in range(5):
            rig.clock.now += LEASE_S - 0.5
            await until(lambda: [*rig.store.leases.values()] == [rig.clock.now + LEASE_S])
        assert one.leads
        rig.clock.now += LEASE_S + 0.5
        await keeping
        assert not one.leads
        assert "lease has ended" in one.deposed.result()
        with pytest.raises(DeposedError):
            raise one.depose("again")

    go(test())


def test_a_leader_whose_key_is_deleted_by_hand_goes_at_once() -> None:
    """Else its workers would stay with it, and the next leader take them for lost."""

    async def test() -> None:
        rig = Rig()
        (one, _), (other, _) = rig.process("one"), rig.process("other")
        await one.campaign()
        keeping = asyncio.ensure_future(one.keep())
        await asyncio.sleep(0.01)
        assert one.leads
        rig.store.transact(pb.TxnRequest(success=[delete(one.key, one.key + b"\0")]))
        await other.campaign()
        await keeping
        assert "its key in etcd is gone" in one.deposed.result()
        assert other.leads

    go(test())


def test_a_leader_waits_while_etcd_elects_its_own_and_steps_down_when_that_takes_too_long() -> None:
    async def test() -> None:
        rig = Rig()
        one, api = rig.process("one")
        await one.campaign()
        keeping = asyncio.ensure_future(one.keep())
        api.refused = 1_000_000
        rig.clock.now += STEP_DOWN_S - 0.1
        await until(lambda: api.refused < 1_000_000 - 1)
        assert one.leads
        rig.clock.now += 0.2
        await keeping
        assert "could not be renewed for" in one.deposed.result()

    go(test())


def test_a_lease_that_ends_before_it_is_used_is_replaced() -> None:
    class Slow(Direct):
        async def transact(self, request: pb.TxnRequest) -> pb.TxnResponse:
            if not self.asked:
                rig.clock.now += LEASE_S + 1
            return await super().transact(request)

    rig = Rig()

    async def test() -> None:
        api = Slow(rig.store)
        one = Leadership(api, b"/muster/job", "one", rig.clock)
        await one.campaign()
        assert one.leads
        assert len(api.asked) == 2

    go(test())


def test_a_leader_whose_renewals_break_down_knows_that_it_leads_no_more() -> None:
    class Faulty(Direct):
        async def keep_alive(self, lease: int) -> int:
            raise ValueError("a fault")

    async def test() -> None:
        rig = Rig()
        one = Leadership(Faulty(rig.store), b"/muster/job", "one", rig.clock)
        await one.campaign()
        with pytest.raises(ValueError, match="a fault"):
            await one.keep()
        assert not one.leads
        assert one.deposed.done()

    go(test())


def test_schedulers_of_other_workers_do_not_stand_by_for_one_another() -> None:
    """Else one of them would lead a job whose workers do not know it, and declare all of them lost."""

    async def test() -> None:
        rig = Rig()

        def process(name: str, *schedulers: str) -> Leadership:
            return Leadership(Direct(rig.store), b"/muster/job", name, rig.clock, schedulers)

        one = process("a:1 (pid 1 on a)", "a:1", "b:1", "c:1")
        await one.campaign()
        with pytest.raises(
            SchedulerSettingsError, match=r"a:1 \(pid 1 on a\) leads .* \(a:1,b:1,c:1\)"
        ) as caught:
            await process("d:1", "d:1", "e:1", "f:1").campaign()
        assert "MS_JOB_ID" in str(caught.value)
        replaced = process("d:1", "d:1", "b:1", "c:1")  # one host is exchanged for another
        waiting = asyncio.ensure_future(replaced.campaign())
        await until(lambda: replaced.stood_by)
        assert not waiting.done()
        rig.clock.now += LEASE_S + 0.1
        await waiting
        assert replaced.leads

    go(test())


def led_before_by(rig: Rig, version: str) -> None:
    """As if a scheduler of that version had led, and has gone."""
    rig.store.transact(pb.TxnRequest(success=[put(VERSION_KEY, version.encode())]))


VERSION_KEY = b"/muster/job/leader/version"


def test_where_a_later_version_has_led_an_earlier_one_does_not() -> None:
    async def test() -> None:
        rig = Rig()
        led_before_by(rig, "99.0.0")
        before = dict(rig.store.pairs)
        with pytest.raises(LaterVersionError, match=r"Muster 99\.0\.0 has led under /muster/job") as caught:
            await rig.process("one")[0].campaign()
        assert __version__ in str(caught.value)
        assert "Run that version or a later one" in str(caught.value)
        assert rig.store.pairs == before

    go(test())


def test_a_later_version_that_leads_ends_an_earlier_one_that_stands_by() -> None:
    async def test() -> None:
        rig = Rig()
        (one, _), (other, _) = rig.process("one"), rig.process("other")
        await other.campaign()
        waiting = asyncio.ensure_future(one.campaign())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        led_before_by(rig, "99.0.0")
        await other.resign()
        with pytest.raises(LaterVersionError):
            await waiting
        assert not one.leads

    go(test())


def test_a_later_version_that_has_led_between_a_look_and_a_try_counts() -> None:
    async def test() -> None:
        rig = Rig()
        one, api = rig.process("one")

        async def late(request: pb.TxnRequest, real: Any = api.transact) -> Any:
            led_before_by(rig, "99.0.0")
            return await real(request)

        api.transact = late  # type: ignore[method-assign]
        with pytest.raises(LaterVersionError):
            await one.campaign()
        assert one.key not in rig.store.pairs

    go(test())


def test_what_an_earlier_version_led_is_taken_over_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        rig = Rig()
        led_before_by(rig, "0.1.5")
        one, api = rig.process("one")
        lose_first_answer(api, "transact")
        await one.campaign()
        assert rig.store.pairs[VERSION_KEY].value.decode() == __version__
        await one.resign()
        await rig.process("other")[0].campaign()

    with caplog.at_level("INFO", "scheduler"):
        go(test())
    assert [line for line in caplog.messages if "in etcd before" in line] == [
        f"Muster 0.1.5 led under /muster/job in etcd before; Muster {__version__} continues"
    ]


class Forbidding(Direct):
    """Gives no lease while it is told so, and counts how often one was asked for."""

    forbids = True
    grants = 0

    async def grant(self, ttl_s: int) -> int:
        self.grants += 1
        if self.forbids:
            raise EtcdRefusedError("etcd at a:2379 refuses: permission denied.", code="PERMISSION_DENIED")
        return await super().grant(ttl_s)


def test_who_is_not_allowed_says_so_at_once_and_ends_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        rig = Rig()
        api = Forbidding(rig.store)
        campaign = asyncio.ensure_future(Leadership(api, b"/muster/job", "one", rig.clock).campaign())
        await until(lambda: api.grants == 3)
        assert caplog.text.count("permission denied. Trying again for") == 1
        rig.clock.now += REFUSED_S - 0.1
        await until(lambda: api.grants == 4)
        assert not campaign.done()
        rig.clock.now += 0.1
        with pytest.raises(EtcdRefusedError, match="permission denied"):
            await campaign

    go(test())


def test_who_is_allowed_again_leads_without_being_started_again() -> None:
    async def test() -> None:
        rig = Rig()
        api = Forbidding(rig.store)
        one = Leadership(api, b"/muster/job", "one", rig.clock)
        campaign = asyncio.ensure_future(one.campaign())
        await until(lambda: api.grants == 2)
        api.forbids = False
        await campaign
        assert one.leads

    go(test())


def test_a_standby_waits_for_space_and_leads_then(caplog: pytest.LogCaptureFixture) -> None:
    """However often it were started, nobody could lead; systemd would give it up."""

    async def test() -> None:
        rig = Rig()
        (one, _), (other, _) = rig.process("one"), rig.process("other")
        await one.campaign()
        waiting = asyncio.ensure_future(other.campaign())
        await until(lambda: other.stood_by)
        rig.store.is_full = lambda: True
        keeping = asyncio.ensure_future(one.keep())  # for which etcd needs no space
        for _ in range(20):
            await asyncio.sleep(0.001)
            rig.clock.now += RENEW_S
        assert one.leads
        keeping.cancel()
        rig.clock.now += LEASE_S + 0.1
        await until(lambda: "Standing by until there is space." in caplog.text)
        assert not waiting.done()
        rig.store.is_full = lambda: False
        await waiting
        assert other.leads

    go(test())
