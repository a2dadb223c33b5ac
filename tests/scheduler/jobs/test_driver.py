"""The driver: journal before send, one event at a time, slow peers dropped, one timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

import pytest

from muster.scheduler.access import Caller
from muster.scheduler.core import events, records
from muster.scheduler.core.events import Decision
from muster.scheduler.core.views import WorkerView
from muster.scheduler.errors import (
    DeposedError,
    LimitError,
    SchedulerError,
    StoppingError,
    TooSlowError,
)
from muster.scheduler.jobs.driver import DOUBT_S, PULSE_S, STACKS_AT_ONCE, TIME_SAID_EVERY_S, JobDriver, Note
from muster.scheduler.jobs.stream import MAX_WAITING_MESSAGES, OutgoingStream
from muster.wire import messages
from muster.wire.v1 import rendezvous_pb2 as pb
from tests.scheduler.fakes import FakeClock, FakeJob, candidate, placed
from tests.waiting import go, until


class Rig:
    """A driver with a fake machine and clock, and a record of what happened in which order."""

    def __init__(self, script: Callable[[events.Event], Decision]) -> None:
        self.job = FakeJob(script)
        self.clock = FakeClock()
        self.order: list[tuple[records.Record, ...]] = []
        self.notes: list[Note] = []
        self.disk = asyncio.Event()
        self.disk.set()
        self.disk_error: Exception | None = None
        self.unwritable = ""
        self.driver = JobDriver(
            "job",
            self.job,
            self.clock,
            self.make_durable,
            self.notes.append,
            unwritable=lambda: self.unwritable,
        )
        self.task = asyncio.ensure_future(self.driver.run())

    async def make_durable(self, records: Sequence[records.Record]) -> None:
        await self.disk.wait()
        if self.disk_error is not None:
            raise self.disk_error
        self.order.append(tuple(records))

    def session(self, number: int) -> OutgoingStream:
        session = OutgoingStream(number, Caller("127.0.0.1:5"), candidate=candidate(f"node-{number}"))
        self.driver.sessions[number] = session
        return session

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def kind(data: bytes | None) -> str:
    assert data is not None
    return pb.SchedulerMessage.FromString(data).WhichOneof("body") or ""


def reply(
    message: messages.SchedulerMessage, *records: records.Record, reason: str = ""
) -> Callable[[events.Event], Decision]:
    return lambda event: Decision(records, ((1, message),), reason)


def test_records_are_durable_before_any_message_leaves() -> None:
    async def test() -> None:
        rig = Rig(reply(messages.Welcome(1, 5, 60), records.Admitted(candidate())))
        session = rig.session(1)
        rig.disk.clear()
        submitted = asyncio.ensure_future(rig.driver.submit(events.Joined(1, candidate())))
        sent = asyncio.ensure_future(session.next())
        for _ in range(20):
            await asyncio.sleep(0)
        assert rig.job.events() == [events.Joined(1, candidate())]
        assert not sent.done()
        assert not submitted.done()
        rig.disk.set()
        assert kind(await sent) == "welcome"
        await submitted
        assert rig.order == [(records.Admitted(candidate()),)]
        await rig.close()

    go(test())


@pytest.mark.parametrize(
    "last",
    [messages.Refused(messages.RefusalCode.SUPERSEDED, "no"), messages.Ended(True, "goodbye")],
    ids=["refused", "ended"],
)
def test_a_final_word_without_records_leaves_only_if_nobody_else_leads(
    last: messages.SchedulerMessage,
) -> None:
    async def test() -> None:
        rig = Rig(reply(last))
        session = rig.session(1)
        rig.disk_error = DeposedError("Another leads.")
        with pytest.raises(StoppingError):
            await rig.driver.submit(events.Joined(1, candidate()))
        assert await session.next() is None
        with pytest.raises(DeposedError):
            await rig.task

    go(test())


def test_a_disk_that_fails_lets_nothing_out_and_ends_the_streams() -> None:
    async def test() -> None:
        rig = Rig(reply(messages.Welcome(1, 5, 60), records.Admitted(candidate())))
        session = rig.session(1)
        rig.disk_error = SchedulerError("disk full")
        with pytest.raises(StoppingError):
            await rig.driver.submit(events.Joined(1, candidate()))
        assert await session.next() is None
        assert isinstance(session.closed, StoppingError)
        with pytest.raises(SchedulerError, match="disk full"):
            await rig.task
        with pytest.raises(StoppingError):
            await rig.driver.submit(events.Heard(1, 0, 0, 0, 0.0))

    go(test())


def test_workers_hear_each_second_why_nothing_comes_and_the_machine_how_long_that_took() -> None:
    async def test() -> None:
        rig = Rig(reply(messages.Welcome(1, 5, 60), records.Admitted(candidate()), reason="welcome"))
        session = rig.session(1)
        rig.disk.clear()
        rig.unwritable = "its disk is full."
        joining = asyncio.ensure_future(rig.driver.submit(events.Joined(1, candidate())))
        await until(lambda: rig.job.seen)
        waiting = asyncio.ensure_future(rig.driver.submit(events.Heard(1, 0, 0, 0, 0.0)))
        told = []
        for _ in range(600):
            await asyncio.sleep(0)
            rig.clock.advance(PULSE_S)
            while session.next_size():
                told.append(pb.SchedulerMessage.FromString(await session.next() or b"").waiting)
        assert len(told) == 300
        assert all(each.undecided and "its disk is full" in each.sentence for each in told)
        assert all(each.present >= each.needed for each in told)  # nobody is awaited
        assert not joining.done() and len(rig.job.seen) == 1
        assert "its disk is full" in rig.driver.view().reason
        rig.unwritable = ""
        rig.disk.set()
        await joining
        await waiting
        over = pb.SchedulerMessage.FromString(await session.next() or b"").waiting
        assert over.sentence and not over.undecided
        assert kind(await session.next()) == "welcome"
        assert rig.job.events()[1:] == [events.HeldUp(300.0), events.Heard(1, 0, 0, 0, 0.0)]
        assert "its disk is full" not in rig.driver.view().reason
        await rig.close()

    go(test())


def test_a_process_that_stood_still_while_it_wrote_says_that_and_not_that_it_waited() -> None:
    async def test() -> None:
        rig = Rig(reply(messages.Welcome(1, 5, 60), records.Admitted(candidate())))
        rig.session(1)
        rig.disk.clear()
        joining = asyncio.ensure_future(rig.driver.submit(events.Joined(1, candidate())))
        await until(lambda: rig.job.seen)
        rig.clock.advance(PULSE_S)
        rig.clock.advance(8.0)
        rig.disk.set()
        await joining
        await rig.driver.submit(events.Heard(1, 0, 0, 0, 0.0))
        assert rig.job.events()[1:3] == [events.HeldUp(PULSE_S), events.ProcessPaused(8.0)]
        await rig.close()

    go(test())


def test_events_that_wait_together_are_committed_together() -> None:
    async def test() -> None:
        rig = Rig(lambda event: Decision((records.GroupEstablished(event.session),)))  # type: ignore[union-attr]
        await asyncio.gather(*(rig.driver.submit(events.BuiltReported(i, 1)) for i in range(50)))
        assert sum(len(batch) for batch in rig.order) == 50
        assert len(rig.order) <= 2
        assert [event.session for event in rig.job.events()] == list(range(50))  # type: ignore[union-attr]
        await rig.close()

    go(test())


def test_the_timer_follows_the_machines_deadline() -> None:
    async def test() -> None:
        rig = Rig(lambda event: Decision())
        rig.job.due = 110.0
        await rig.driver.submit(events.Heard(1, 0, 0, 0, 0.0))
        assert rig.clock.armed() == [100.0 + PULSE_S]
        rig.job.due = 100.25
        await rig.driver.submit(events.Heard(1, 0, 0, 0, 0.0))
        assert rig.clock.armed() == [100.25]
        rig.job.due = None
        rig.clock.advance(0.25)
        await rig.driver.submit(events.Heard(1, 0, 0, 0, 0.0))
        assert (100.25, events.Tick()) in rig.job.seen
        assert rig.clock.armed() == []
        await rig.close()

    go(test())


def test_the_machine_is_told_first_that_the_process_stood_still() -> None:
    async def test() -> None:
        rig = Rig(lambda event: Decision())
        rig.job.due = 1000.0
        await rig.driver.submit(events.Heard(1, 0, 0, 0, 0.0))
        rig.clock.now += (
            8.0  # no timer has called meanwhile, and the end of a stream is there before any does
        )
        await rig.driver.submit(events.SessionLost(1, "reset"))
        assert rig.job.events()[1:] == [events.ProcessPaused(8.0), events.SessionLost(1, "reset")]
        await rig.close()

    go(test())


def test_a_process_whose_every_turn_is_long_was_away_for_all_of_them() -> None:
    """Else half of the silence would count that it caused itself."""

    async def test() -> None:
        rig = Rig(lambda event: Decision())
        rig.job.due = 1000.0
        await rig.driver.submit(events.Tick())
        for turn_s in (1.0, 1.0, 0.625):
            rig.clock.now += turn_s
            await rig.driver.submit(events.Tick())
        stood = [event.seconds for event in rig.job.events() if isinstance(event, events.ProcessPaused)]
        assert stood == [1.0, 1.0, 0.125]  # the last was merely busy
        await rig.close()

    go(test())


def test_a_process_that_is_called_regularly_has_not_stood_still() -> None:
    async def test() -> None:
        rig = Rig(lambda event: Decision())
        rig.job.due = 1000.0
        for _ in range(20):
            rig.clock.advance(PULSE_S)
            for _ in range(5):
                await asyncio.sleep(0)
        await rig.driver.submit(events.Heard(1, 0, 0, 0, 0.0))
        assert set(rig.job.events()) == {events.Tick(), events.Heard(1, 0, 0, 0, 0.0)}
        await rig.close()

    go(test())


def test_before_a_worker_is_lost_for_silence_it_is_looked_whether_its_words_are_unread() -> None:
    async def test() -> None:
        rig = Rig(lambda event: Decision())
        rig.session(1)
        rig.session(2)
        rig.driver.sessions[2].caller = Caller("[::1]:6")
        asked: list[list[str]] = []

        def unread(peers: Collection[str]) -> list[str]:
            asked.append(sorted(peers))
            return [peer for peer in peers if peer == "[::1]:6"]

        rig.driver.unread = unread
        await rig.driver.submit(events.Tick())
        rig.job.silent = (1, 2, 3)
        await rig.driver.submit(events.Heard(1, 0, 0, 0, 0.0))
        assert asked == []
        await rig.driver.submit(events.Tick())
        assert asked == [["127.0.0.1:5", "[::1]:6"]]
        assert rig.job.events()[2:] == [events.ReceiveBacklog((2,)), events.Tick()]
        await rig.close()

    go(test())


def test_workers_of_a_host_share_a_stream_and_are_behind_together() -> None:
    async def test() -> None:
        rig = Rig(lambda event: Decision())
        for session in (1, 2, 3):
            rig.session(session)
        rig.driver.sessions[3].caller = Caller("127.0.0.1:6")
        rig.driver.unread = lambda peers: [peer for peer in peers if peer == "127.0.0.1:5"]
        rig.job.silent = (1, 2, 3)
        await rig.driver.submit(events.Tick())
        assert rig.job.events() == [events.ReceiveBacklog((1, 2)), events.Tick()]
        await rig.close()

    go(test())


def test_who_counts_as_silent_is_looked_at_twice_before_it_is_lost() -> None:
    """What gRPC has read from the kernel in this moment is not yet here."""

    async def test() -> None:
        rig = Rig(lambda event: Decision())
        looks: list[float] = []
        rig.session(1)
        rig.session(2).caller = Caller("127.0.0.1:6")
        rig.driver.unread = lambda peers: looks.append(rig.clock.now) or []  # type: ignore[func-returns-value]
        await rig.driver.submit(events.Heard(1, 0, 0, 0, 0.0))
        rig.job.due = 100.0
        rig.job.silent = (1,)
        await rig.driver.submit(events.Tick())
        await rig.driver.submit(events.Tick())
        assert events.Tick() not in rig.job.events()
        assert rig.clock.armed() == [100.0 + DOUBT_S]  # and does not spin until then
        rig.clock.now += DOUBT_S
        await rig.driver.submit(events.Tick())
        assert rig.job.events()[1:] == [events.Tick()]
        rig.job.silent = (2,)  # another one
        await rig.driver.submit(events.Tick())
        assert rig.job.events()[1:] == [events.Tick()]
        rig.job.silent = ()  # and that was heard after all
        await rig.driver.submit(events.Tick())
        assert rig.job.events()[1:] == [events.Tick(), events.Tick()]
        assert looks == [100.0, 100.0 + DOUBT_S, 100.0 + DOUBT_S]
        await rig.close()

    go(test())


def test_a_peer_that_does_not_read_is_dropped_and_nobody_else_notices() -> None:
    async def test() -> None:
        rig = Rig(
            lambda event: Decision(
                messages=((1, messages.Waiting(1, 2, "")), (2, messages.Waiting(1, 2, "")))
            )
        )
        slow, good = rig.session(1), rig.session(2)
        for _ in range(MAX_WAITING_MESSAGES + 1):
            await rig.driver.submit(events.Tick())
            assert kind(await good.next()) == "waiting"
        assert isinstance(slow.closed, TooSlowError)
        assert slow.dropped.is_set()
        assert await slow.next() is None
        assert not good.over
        await rig.close()

    go(test())


def test_a_refusal_is_delivered_and_closes_the_stream_with_its_sentence() -> None:
    async def test() -> None:
        rig = Rig(reply(messages.Refused(messages.RefusalCode.JOB_FULL, "4 of 4 workers are in")))
        session = rig.session(1)
        await rig.driver.submit(events.Joined(1, candidate()))
        assert kind(await session.next()) == "refused"
        assert await session.next() is None
        assert str(session.closed) == "4 of 4 workers are in"
        assert 1 not in rig.driver.sessions
        assert [(n.kind, n.code) for n in rig.notes] == [("refused", "job_full")]
        await rig.close()

    go(test())


@pytest.mark.parametrize(
    "last", [messages.Refused(messages.RefusalCode.EXPELLED, "no"), messages.Ended(True, "drained")]
)
def test_a_join_after_the_last_word_on_its_stream_is_not_heard(last: messages.SchedulerMessage) -> None:
    async def test() -> None:
        rig = Rig(reply(last))
        rig.session(1)
        leave, join = events.LeaveRequested(1, 1, "drained"), events.Joined(1, candidate())
        rig.driver.post(leave)
        assert await rig.driver.submit(join) == ""  # comes with the one that ends the stream
        assert await rig.driver.submit(join) == ""  # and when it has ended
        assert rig.job.events() == [leave]
        await rig.close()

    go(test())


@pytest.mark.parametrize("known", [False, True])
def test_of_a_newcomer_whose_stream_has_ended_already_the_join_is_not_heard(known: bool) -> None:
    """It would be admitted and lost at once, and its process be refused when it comes by its next stream.

    One that is in by an earlier stream is heard: its end by this one costs its place.
    """

    async def test() -> None:
        rig = Rig(lambda event: Decision())
        rig.session(1)
        if known:
            rig.job.workers = (WorkerView(candidate(), "lost", -1, -1, 0.0, 0, 0.0),)
        join, lost = events.Joined(1, candidate()), events.SessionLost(1, "ping timeout")
        rig.driver.post(join)
        await rig.driver.submit(lost)
        assert (join in rig.job.events()) is known
        assert lost in rig.job.events()
        await rig.close()

    go(test())


def test_losses_that_come_together_are_concluded_together() -> None:
    async def test() -> None:
        rig = Rig(lambda event: Decision())
        lost = [events.SessionLost(number, "gone") for number in range(3)]
        rig.driver.post(lost[0])
        await asyncio.sleep(0)  # it is taken; the others come while it settles
        rig.driver.post(events.Heard(7, 1, 1, 1, 0.0))
        rig.driver.post(lost[1])
        rig.driver.post(events.Tick())
        await rig.driver.submit(lost[2])
        assert [event for _, event in rig.job.seen if isinstance(event, events.SessionLost)] == lost
        assert rig.job.postponed == [lost[0]]
        await rig.close()

    go(test())


def test_of_a_stream_that_ends_it_is_noted_whether_that_costs_the_place() -> None:
    async def test() -> None:
        removed = {1: (records.Removed("node-1", 1, "gone", False),), 2: ()}
        rig = Rig(lambda event: Decision(removed[getattr(event, "session", 2)]))
        for number in (1, 2):
            rig.session(number)
            await rig.driver.submit(
                events.SessionLost(number, "its host's stream ended", may_return=number == 2)
            )
        assert [(note.kind, note.text) for note in rig.notes] == [
            ("lost", "its host's stream ended"),
            ("lost", "its host's stream ended; its place is kept, if it has one"),
        ]
        await rig.close()

    go(test())


def test_goodbyes_that_come_together_are_concluded_together() -> None:
    """As of all workers of a script that fails: a group of the others is not formed after each."""

    async def test() -> None:
        rig = Rig(lambda event: Decision())
        left = [events.LeftCleanly(number, 1, False, "ValueError") for number in range(3)]
        for event in left[:2]:
            rig.driver.post(event)
        await rig.driver.submit(left[2])
        assert rig.job.postponed == left[:2]
        await rig.close()

    go(test())


def test_a_goodbye_closes_the_stream_well() -> None:
    async def test() -> None:
        rig = Rig(reply(messages.Ended(True, "Goodbye.")))
        session = rig.session(1)
        await rig.driver.submit(events.LeftCleanly(1, 1, True, ""))
        assert kind(await session.next()) == "ended"
        assert await session.next() is None
        assert session.closed is None
        assert [(n.kind, n.text) for n in rig.notes] == [("left", "finished")]
        await rig.close()

    go(test())


def test_a_reason_is_logged_when_it_changes_only() -> None:
    async def test() -> None:
        words = iter(["a", "a", "", "a", "b"])
        rig = Rig(lambda event: Decision(reason=next(words)))
        for _ in range(5):
            await rig.driver.submit(events.PeerSuspected(1, 1, 0, ""))
        assert [n.text for n in rig.notes if n.kind == "decided"] == ["a", "b"]
        await rig.close()

    go(test())


def test_a_report_that_is_due_is_repeated() -> None:
    async def test() -> None:
        rig = Rig(lambda event: Decision(reason="1 of 2 workers is in"))
        for _ in range(3):
            await rig.driver.submit(events.Tick())
        assert len(rig.notes) == 3
        await rig.close()

    go(test())


def test_counters_time_the_formation() -> None:
    async def test() -> None:
        answers: dict[type, records.Record] = {
            events.BuiltReported: records.GroupEstablished(1),
            events.UniqueIdsPublished: records.GenerationFormed(1, (placed(0, "a"),), -1, (), ""),
            events.LeftCleanly: records.JobEnded(True, "done"),
        }
        rig = Rig(lambda event: Decision((answers[type(event)],) if type(event) in answers else ()))
        ended: list[JobDriver] = []
        rig.driver.on_ended = ended.append
        rig.session(1)
        await rig.driver.submit(events.Joined(1, candidate()))
        rig.clock.advance(2.0)
        await rig.driver.submit(events.UniqueIdsPublished(1, 1, (b"x",)))
        rig.clock.advance(0.5)
        await rig.driver.submit(events.BuiltReported(1, 1))
        await rig.driver.submit(events.Heard(1, 1, 0, 0, 0.0))
        counters = rig.driver.counters
        assert (counters.formation_s, counters.build_s, counters.heartbeats) == (2.5, 0.5, 1)
        assert not ended
        await rig.driver.submit(events.LeftCleanly(1, 1, True, ""))
        assert ended == [rig.driver]
        assert rig.driver.ended == records.JobEnded(True, "done")
        await rig.close()

    go(test())


def test_a_generation_that_its_members_held_before_was_not_formed_here() -> None:
    async def test() -> None:
        newest = iter((4, 5))
        rig = Rig(
            lambda event: Decision((records.GenerationFormed(next(newest), (placed(0, "a"),), -1, (), ""),))
        )
        rig.session(1)
        await rig.driver.submit(events.Joined(1, candidate(), held_generation=4))
        assert not rig.driver.formed_here
        await rig.driver.submit(events.Joined(1, candidate(), held_generation=4))
        assert rig.driver.formed_here
        await rig.close()

    go(test())


def test_a_stopped_driver_tells_its_sessions() -> None:
    async def test() -> None:
        rig = Rig(lambda event: Decision())
        session = rig.session(1)
        await rig.driver.submit(events.Tick())
        await rig.close()
        assert await session.next() is None
        assert isinstance(session.closed, StoppingError)
        assert rig.clock.armed() == []

    go(test())


def test_who_asks_for_stacks_gets_what_was_gathered_under_the_ticket() -> None:
    def script(event: events.Event) -> Decision:
        if isinstance(event, events.StacksRequested):
            return Decision(bundles=(events.Bundle(event.ticket, f"of {event.node_id}", 1, ()),))
        return Decision()

    async def test() -> None:
        rig = Rig(script)
        answers = await asyncio.gather(rig.driver.ask_stacks("a"), rig.driver.ask_stacks("b"))
        assert [bundle.sentence for bundle in answers] == ["of a", "of b"]
        await rig.close()

    go(test())


def test_so_many_may_ask_for_stacks_and_a_scheduler_that_stops_says_so() -> None:
    async def test() -> None:
        rig = Rig(lambda event: Decision())
        asking = [asyncio.ensure_future(rig.driver.ask_stacks()) for _ in range(STACKS_AT_ONCE)]
        await until(lambda: len(rig.job.events()) == STACKS_AT_ONCE)
        with pytest.raises(LimitError):
            await rig.driver.ask_stacks()
        await rig.close()
        done = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(each) for each in done] == [StoppingError] * STACKS_AT_ONCE

    go(test())


def test_the_evidence_of_a_hang_is_kept_and_shown() -> None:
    bundle = events.Bundle(0, "Rank 1 does not come.", 1, ())
    kept: list[events.Bundle] = []

    async def test() -> None:
        rig = Rig(lambda event: Decision(bundles=(bundle,)))

        def keep(driver: JobDriver, bundle: events.Bundle) -> None:
            kept.append(bundle)
            driver.evidence = "Evidence: here"

        rig.driver.keep = keep
        assert rig.driver.view().evidence == ""
        await rig.driver.submit(events.Tick())
        assert kept == [bundle] and rig.driver.view().evidence == "Evidence: here"
        await rig.close()

    go(test())


def test_where_the_time_went_is_said_when_a_group_stands_every_ten_minutes_and_at_the_end() -> None:
    async def test() -> None:
        stands: list[tuple[records.Record, ...]] = [(), (records.GroupEstablished(1),)]
        rig = Rig(lambda event: Decision(stands.pop() if stands else ()))
        rig.job.spent = (("training", 5.0),)

        def said() -> list[str]:
            return [note.text for note in rig.notes if note.kind == "time"]

        await rig.driver.submit(events.Tick())
        assert said() == ["training 5.0 s"]
        rig.clock.advance(TIME_SAID_EVERY_S - 1.0)
        await rig.driver.submit(events.Tick())
        assert len(said()) == 1
        rig.clock.advance(1.0)
        await rig.driver.submit(events.Tick())
        assert len(said()) == 2
        rig.job.spent = (("training", 9.0),)
        await rig.close()
        assert said()[2:] == ["training 9.0 s"]

    asyncio.run(test())
