"""The journal in etcd: one fenced transaction for a batch, and what follows from answers that are lost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import pytest

from muster.scheduler.core import records
from muster.scheduler.core.ledger import Ledger
from muster.scheduler.errors import DeposedError
from muster.scheduler.etcd import journal as module
from muster.scheduler.etcd import leadership
from muster.scheduler.etcd.api import EtcdFullError, EtcdRefusedError
from muster.scheduler.etcd.journal import COMPACT_RECORDS, EtcdJournal, EtcdJournalDamagedError
from tests.scheduler.etcd.store import Direct
from tests.scheduler.etcd.test_leadership import Rig
from tests.scheduler.fakes import candidate, placed
from tests.waiting import go, until

JOB = "resnet"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_S", "RENEW_S", "WATCH_S"):
        monkeypatch.setattr(leadership, name, 0.001)
    monkeypatch.setattr(module, "RETRY_S", 0.001)


async def leader(rig: Rig, name: str = "one") -> tuple[EtcdJournal, Direct]:
    """A process that leads, with its journal, read."""
    claim, api = rig.process(name)
    await claim.campaign()
    journal = EtcdJournal(claim)
    await journal.load()
    api.asked.clear()
    return journal, api


async def what_stands(rig: Rig) -> Sequence[records.Record]:
    """What the next leader reads."""
    rig.clock.now += 10
    claim, _ = rig.process("reader")
    await claim.campaign()
    return (await EtcdJournal(claim).load()).get(JOB, ())


def test_what_is_noted_beside_the_records_is_there_for_the_next_leader() -> None:
    async def test() -> None:
        rig = Rig()
        journal, _ = await leader(rig)
        await journal.note("audit/one", "1 ab")
        await journal.note("audit/one", "2 cd")
        rig.clock.now += 10
        claim, _ = rig.process("next")
        await claim.campaign()
        after = EtcdJournal(claim)
        assert await after.load() == {}
        assert await after.notes() == {"audit/one": "2 cd"}
        with pytest.raises(DeposedError):
            await journal.note("audit/one", "3 ef")

    go(test())


BATCHES = ((records.JobOpened(JOB, 1, 1), records.Admitted(candidate())), (records.GenerationEnded(1, "x"),))


def test_each_batch_is_one_value_and_the_next_leader_reads_them_all_in_order() -> None:
    async def test() -> None:
        rig = Rig()
        journal, api = await leader(rig)
        for batch in BATCHES:
            await journal.append(JOB, batch)
        assert len(api.asked) == 2
        assert [len(each.success) for each in api.asked] == [2, 2]  # with the head
        assert list(await what_stands(rig)) == [record for batch in BATCHES for record in batch]

    go(test())


def test_a_deposed_leader_can_commit_nothing_and_say_nothing() -> None:
    async def test() -> None:
        rig = Rig()
        old, _ = await leader(rig, "old")
        await old.append(JOB, BATCHES[0])
        rig.clock.now += 10
        new, _ = await leader(rig, "new")
        for late in (BATCHES[1], ()):  # a record, and a final word without one
            with pytest.raises(DeposedError, match="new does"):
                await old.append(JOB, late)
        with pytest.raises(DeposedError):
            await old.forget(JOB)
        await new.append(JOB, BATCHES[1])
        assert list(await what_stands(rig)) == [*BATCHES[0], *BATCHES[1]]

    go(test())


def test_the_token_and_not_the_name_is_what_counts() -> None:
    async def test() -> None:
        rig = Rig()
        old, _ = await leader(rig, "same")
        rig.clock.now += 10
        await leader(rig, "same")
        with pytest.raises(DeposedError):
            await old.append(JOB, BATCHES[0])

    go(test())


@pytest.mark.parametrize("how", ["lost", "refused"])
def test_a_batch_whose_answer_does_not_come_is_written_once(how: str) -> None:
    async def test() -> None:
        rig = Rig()
        journal, api = await leader(rig)
        for batch in BATCHES:
            setattr(api, how, 3)
            await journal.append(JOB, batch)
        assert len(api.asked) == 8
        assert api.asked[0] == api.asked[1] == api.asked[3]
        assert list(await what_stands(rig)) == [record for batch in BATCHES for record in batch]

    go(test())


@pytest.mark.parametrize("how", ["", "lost"])
@pytest.mark.parametrize("length", [3, 2 * COMPACT_RECORDS])
def test_what_finds_no_space_is_written_once_when_there_is_some(how: str, length: int) -> None:
    """Snapshots as well, and where the answer to an earlier try was lost."""

    async def test() -> None:
        rig = Rig()
        journal, api = await leader(rig)
        written = history(length + 1) if length > 3 else [record for batch in BATCHES for record in batch]
        transact = api.transact

        async def carried_out_unheard(request: Any) -> Any:
            api.transact = transact  # type: ignore[method-assign]
            api.lost = 1
            try:
                return await transact(request)
            finally:
                rig.store.is_full = lambda: True

        for record in written:
            if how:
                api.transact = carried_out_unheard  # type: ignore[method-assign]
            else:
                rig.store.is_full = lambda: True
            with pytest.raises(EtcdFullError, match="space exceeded"):
                await journal.append(JOB, [record])
            rig.store.is_full = lambda: False
            await journal.append(JOB, [record])
        wanted, got = Ledger(), Ledger()
        for record in written:
            wanted.apply(record)
        found = await what_stands(rig)
        for record in found:
            got.apply(record)
        assert got == wanted
        assert len(found) <= COMPACT_RECORDS

    go(test())


def test_a_snapshot_that_was_written_unheard_when_space_ran_out_is_not_taken_for_anothers() -> None:
    async def test() -> None:
        rig = Rig()
        journal, api = await leader(rig)
        written = history(COMPACT_RECORDS)
        for record in written[:-1]:
            await journal.append(JOB, [record])
        transact, begun = api.transact, len(api.asked)

        async def full_after_the_snapshot(request: Any) -> Any:
            api.lost = int(len(api.asked) == begun + 1)
            try:
                return await transact(request)
            finally:
                full = len(api.asked) > begun + 1
                rig.store.is_full = lambda: full

        api.transact = full_after_the_snapshot  # type: ignore[method-assign]
        await journal.append(JOB, written[-1:])
        api.transact = transact  # type: ignore[method-assign]
        assert len(rig.store.pairs) == 4  # it was written
        more = records.Admitted(candidate("late"))
        with pytest.raises(EtcdFullError):
            await journal.append(JOB, [more])
        rig.store.is_full = lambda: False
        await journal.append(JOB, [more])
        assert (await what_stands(rig))[1:] == [more]

    go(test())


@pytest.mark.parametrize("way", ["write", "speak", "read"])
def test_who_is_refused_alone_gives_the_lead_up(way: str) -> None:
    async def test() -> None:
        rig = Rig()
        journal, api = await leader(rig)
        remedy = "Give it its role."

        async def refuse(_: Any) -> Any:
            raise EtcdRefusedError(
                "etcd at a:2379 refuses: permission denied.", code="PERMISSION_DENIED", remedy=remedy
            )

        api.transact = api.read = refuse  # type: ignore[method-assign, assignment]
        with pytest.raises(DeposedError, match=r"permission denied\. Give it its role\.") as raised:
            if way == "read":
                await journal.load()
            else:
                await journal.append(JOB, BATCHES[0] if way == "write" else ())
        assert raised.value.exit_code == 75

    go(test())


def test_who_leads_no_more_does_not_wait_for_space() -> None:
    async def test() -> None:
        rig = Rig()
        claim, _ = rig.process("one")
        await claim.campaign()
        journal = EtcdJournal(claim)
        rig.store.is_full = lambda: True
        claim.depose("its lease has ended")
        with pytest.raises(DeposedError, match="its lease has ended"):
            await journal.append(JOB, BATCHES[0])

    go(test())


def test_a_lost_answer_and_another_leader_meanwhile_is_no_success() -> None:
    async def test() -> None:
        rig = Rig()
        old, api = await leader(rig, "old")
        api.refused = 1_000_000
        writing = asyncio.ensure_future(old.append(JOB, BATCHES[0]))
        await until(lambda: api.refused < 1_000_000)
        rig.clock.now += 10
        new, _ = await leader(rig, "new")
        await new.append(JOB, BATCHES[0])  # the very same records
        api.refused = 0
        with pytest.raises(DeposedError):
            await writing

    go(test())


def test_the_fence_of_a_word_without_records_is_read_from_a_quorum() -> None:
    """etcd answers a transaction without any read from one member's memory, which may be behind."""

    async def test() -> None:
        rig = Rig()
        journal, api = await leader(rig)
        await journal.append(JOB, ())
        (asked,) = api.asked
        assert asked.compare
        assert not asked.success
        assert any(each.WhichOneof("request") == "request_range" for each in asked.failure)

    go(test())


def noise(size: int) -> str:
    return os.urandom(size // 2).hex()


def test_a_batch_above_the_limit_is_split_and_counts_only_when_it_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 1000)

    async def test() -> None:
        rig = Rig()
        journal, api = await leader(rig)
        large = records.GenerationEnded(1, noise(8000))
        await journal.append(JOB, BATCHES[0])
        await journal.append(JOB, [large])
        assert all(
            len(op.request_put.value) <= 1000
            for asked in api.asked
            for op in asked.success
            if op.HasField("request_put")
        )
        assert len(api.asked) > 5

        async def dies_before_the_last(request: Any, real: Any = api.transact) -> Any:
            if any(op.request_put.value.startswith(b"p") for op in request.success):
                raise KeyboardInterrupt
            return await real(request)

        api.transact = dies_before_the_last  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            await journal.append(JOB, [records.GenerationEnded(1, noise(8000))])
        assert list(await what_stands(rig)) == [*BATCHES[0], large]

    go(test())


def history(length: int) -> list[records.Record]:
    formed = records.GenerationFormed(1, (placed(0, "node-a"),), -1, (), "formed")
    made: list[records.Record] = [
        records.JobOpened(JOB, 1, 1),
        records.Admitted(formed.members[0].candidate),
        formed,
    ]
    made.append(records.GroupEstablished(1))
    for number in range((length - 4) // 2):
        newcomer = candidate(f"w{number + 1}")
        made += [records.Admitted(newcomer), records.Removed(newcomer.node_id, newcomer.incarnation, "left")]
    return made


def test_after_many_records_a_snapshot_stands_in_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        rig = Rig()
        journal, _ = await leader(rig)
        written = history(COMPACT_RECORDS)
        for record in written[:-1]:
            await journal.append(JOB, [record])
        assert len(rig.store.pairs) == COMPACT_RECORDS + 2  # with the leader's two and the head
        await journal.append(JOB, written[-1:])
        assert len(rig.store.pairs) == 4
        more = records.Admitted(candidate("late"))
        await journal.append(JOB, [more])
        found = await what_stands(rig)
        assert len(found) == 2
        wanted, got = Ledger(), Ledger()
        for record in [*written, more]:
            wanted.apply(record)
        for record in found:
            got.apply(record)
        assert got == wanted

    go(test())


@pytest.mark.parametrize("what", ["batch", "forget"])
def test_a_copy_that_comes_late_changes_nothing(what: str) -> None:
    """etcd may carry out a request long after its sender gave it up, and after what it wrote is deleted."""

    async def test() -> None:
        rig = Rig()
        journal, api = await leader(rig)
        await journal.append(JOB, BATCHES[0])
        copy = api.asked[-1]
        await journal.forget(JOB)
        if what == "forget":
            copy = api.asked[-1]
        await journal.append(JOB, BATCHES[1])
        assert not rig.store.transact(copy).succeeded
        assert list(await what_stands(rig)) == list(BATCHES[1])

    go(test())


def test_what_is_missing_or_foreign_shows() -> None:
    async def test() -> None:
        rig = Rig()
        journal, _ = await leader(rig)
        for _ in range(3):
            await journal.append(JOB, BATCHES[0])
        keys = sorted(key for key in rig.store.pairs if b"/jobs/" in key)
        kept = rig.store.pairs.pop(keys[1])
        with pytest.raises(EtcdJournalDamagedError, match="batch 2 is missing"):
            await what_stands(rig)
        rig.store.pairs[keys[1]] = kept
        first = rig.store.pairs.pop(keys[0])
        with pytest.raises(EtcdJournalDamagedError, match="batch 1 is missing"):
            await what_stands(rig)
        first.value = b"foreign"
        rig.store.pairs[keys[0]] = first
        with pytest.raises(EtcdJournalDamagedError, match="batch 1: it is of another version"):
            await what_stands(rig)

    go(test())


def test_who_is_deposed_while_it_reads_does_not_call_the_journal_damaged() -> None:
    async def test() -> None:
        rig = Rig()
        journal, _ = await leader(rig)
        await journal.append(JOB, BATCHES[0])
        await journal.append(JOB, BATCHES[1])
        rig.clock.now += 10
        slow, api = rig.process("slow")
        await slow.campaign()

        async def reads_late(request: Any, real: Any = api.read) -> Any:
            reply = await real(request)
            if b"/heads/" in request.key:
                rig.clock.now += 10
                other, _ = await leader(rig, "other")
                await other.forget(JOB)
            return reply

        api.read = reads_late  # type: ignore[method-assign]
        with pytest.raises(DeposedError, match="other does"):
            await EtcdJournal(slow).load()

    go(test())


def test_a_forgotten_job_begins_again_and_others_stay() -> None:
    async def test() -> None:
        rig = Rig()
        journal, _ = await leader(rig)
        await journal.append(JOB, BATCHES[0])
        await journal.append(f"{JOB}-2", BATCHES[0])
        await journal.forget(JOB)
        await journal.append(JOB, BATCHES[1])
        assert list(await what_stands(rig)) == list(BATCHES[1])

    go(test())
