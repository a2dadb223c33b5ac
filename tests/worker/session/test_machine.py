"""The worker's membership machine, by transcripts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from muster.version import __version__
from muster.wire import messages
from muster.worker.session import events
from tests.worker.session.machine import Machine, assignment, member


class TestJoining:
    def test_the_first_message_on_a_stream_is_join(self) -> None:
        w = Machine()
        assert w.feed(events.Started()).notices == (events.Connect(1),)
        w.feed(events.StreamOpened(1))
        assert w.last.messages == (messages.Join(w.core.profile, takes_deltas=True, gives_stacks=True),)
        assert w.core.phase == "joining"
        w.hear(messages.Welcome(1.0, 5.0, 60.0))
        assert w.core.phase == "waiting"

    def test_the_scheduler_says_how_often_it_wants_to_hear_of_a_worker(self) -> None:
        w = Machine()
        w.feed(events.Started())
        w.feed(events.StreamOpened(1))
        w.hear(messages.Welcome(2.0, 30.0, 60.0, waiting_interval_s=10.0))
        beats = []
        for _ in range(2):  # while it waits for a place
            w.tick_at_deadline()
            beats.append(w.now)
            w.message(messages.Heartbeat)
        assert beats == [110.0, 120.0]
        w.now = 121.0
        w.hear(assignment(1, 0))
        for _ in range(2):  # those of all members are spread over the first interval
            w.tick_at_deadline()
            beats.append(w.now)
            w.message(messages.Heartbeat)
        assert beats[2:] == [122.0, 124.0]
        w.feed(events.StreamLost(1, "cut"))
        w.tick_at_deadline()
        w.feed(events.StreamOpened(2))
        now = w.now
        w.hear(messages.Welcome(2.0, 30.0, 60.0, waiting_interval_s=10.0))
        assert w.core.deadline() == now + 2.0

    @pytest.mark.parametrize("version", ["", "0.1.0", "99.0.0"])
    def test_a_scheduler_of_a_version_that_may_not_meet_this_one_is_left(self, version: str) -> None:
        w = Machine()
        w.feed(events.Started())
        w.feed(events.StreamOpened(1))
        w.hear(messages.Welcome(1.0, 5.0, 60.0, version=version))
        failed = w.notice(events.Failed)
        assert (failed.kind, failed.code) == (
            events.FailureKind.REFUSED,
            messages.RefusalCode.SETTINGS_DIFFER,
        )
        assert (version or "0.1 or older") in failed.sentence and __version__ in failed.sentence

    def test_an_older_stream_is_closed_and_its_messages_are_ignored(self) -> None:
        w = Machine().welcomed()
        w.feed(events.StreamLost(1, "cut"))
        w.tick_at_deadline()
        assert w.feed(events.StreamOpened(1)).notices == (events.Disconnect(1),)
        w.feed(events.StreamOpened(2))
        w.feed(events.Received(1, messages.Refused(messages.RefusalCode.JOB_FULL, "full")))
        assert w.last == events.Effects()

    def test_waiting_is_told_once_for_each_sentence(self) -> None:
        w = Machine().welcomed()
        assert w.hear(messages.Waiting(1, 2, "n1 is missing")).notices == (events.LogLine("n1 is missing"),)
        assert w.hear(messages.Waiting(1, 2, "n1 is missing")).notices == ()

    def test_rank_0_mints_and_publishes_and_all_wait_for_the_ids(self) -> None:
        w = Machine().welcomed()
        w.hear(assignment(1, 0))
        assert w.notice(events.MintUniqueIds) == events.MintUniqueIds(1, 1)
        w.feed(events.UniqueIdsMinted(1, (b"secret",)))
        assert w.last.messages == (messages.PublishUniqueIds(1, (b"secret",)),)
        assert w.hear(messages.UniqueIds(1, (b"secret",))).notices == (
            events.Build(assignment(1, 0), (b"secret",)),
        )
        assert w.core.phase == "building"

    def test_another_rank_mints_nothing(self) -> None:
        w = Machine().welcomed()
        assert w.hear(assignment(1, 1)).notices == ()

    def test_running_needs_every_member(self) -> None:
        w = Machine().welcomed()
        w.hear(assignment(1, 1))
        w.hear(messages.UniqueIds(1, (b"secret",)))
        assert (
            w.hear(messages.GroupBuilt(1)).notices == ()
        )  # before this worker has built: impossible, ignored
        assert w.feed(events.CommunicatorBuilt(1)).messages == (messages.Built(1),)
        assert w.core.phase == "building"
        assert w.hear(messages.GroupBuilt(1)).notices == (events.Running(1),)
        assert w.core.phase == "running"

    def test_an_assignment_with_somebody_else_in_this_place_is_dropped(self) -> None:
        w = Machine().welcomed()
        w.hear(assignment(1, 0, incarnation=99))
        assert w.last.notices == ()
        assert "dropped" in w.last.reason

    def test_too_few_unique_ids_are_dropped(self) -> None:
        w = Machine().welcomed()
        w.hear(assignment(1, 1, unique_id_count=2))
        w.hear(messages.UniqueIds(1, (b"one",)))
        assert w.last.notices == ()
        assert "expected 2" in w.last.reason

    def test_nothing_is_built_before_the_session_asks(self) -> None:
        w = Machine()
        w.feed(events.Started())
        w.reconnected()
        w.hear(assignment(1, 1))
        assert w.hear(messages.UniqueIds(1, (b"secret",))).notices == ()
        w.feed(events.EntryRequested())
        assert w.notice(events.Build).assignment.generation == 1


class TestEndings:
    @pytest.mark.parametrize(
        ("code", "kind"),
        [
            (messages.RefusalCode.SETTINGS_DIFFER, events.FailureKind.REFUSED),
            (messages.RefusalCode.JOB_FULL, events.FailureKind.REFUSED),
            (messages.RefusalCode.NODE_ID_TAKEN, events.FailureKind.REFUSED),
            (messages.RefusalCode.JOB_ENDED, events.FailureKind.REFUSED),
            (messages.RefusalCode.UNSPECIFIED, events.FailureKind.REFUSED),
            (messages.RefusalCode.NOT_PERMITTED, events.FailureKind.SECURITY),
            (messages.RefusalCode.TOPO_TIMEOUT, events.FailureKind.FORMATION_TIMEOUT),
        ],
    )
    def test_a_refusal_carries_the_schedulers_sentence(
        self, code: messages.RefusalCode, kind: events.FailureKind
    ) -> None:
        w = Machine().welcomed()
        w.hear(messages.Refused(code, "the sentence"))
        assert w.notice(events.Failed) == events.Failed(kind, "the sentence", code)
        assert w.notice(events.Disconnect) == events.Disconnect(1)
        assert w.core.phase == "ended"
        assert w.core.deadline() is None

    def test_a_members_job_that_ends_is_not_a_refusal(self) -> None:
        w = Machine().running()
        w.hear(messages.Refused(messages.RefusalCode.JOB_ENDED, "it is over"))
        assert w.notice(events.Failed).kind is events.FailureKind.JOB_ENDED

    def test_a_spare_that_is_not_needed_ends_well(self) -> None:
        w = Machine().welcomed()
        w.hear(messages.Ended(True, "all finished"))
        assert w.notice(events.Failed) == events.Failed(events.FailureKind.JOB_ENDED, "all finished", ok=True)

    @pytest.mark.parametrize("begin", [Machine.welcomed, Machine.running])
    def test_a_leave_as_asked_is_no_end_of_the_job(self, begin: Callable[[Machine], Machine]) -> None:
        w = begin(Machine())
        w.hear(messages.Ended(True, "you leave", leave=True))
        assert w.notice(events.Failed) == events.Failed(events.FailureKind.LEAVE, "you leave")
        assert w.feed(events.Goodbye(False, "left")).notices == (events.Left(heard=False),)

    def test_a_job_that_never_formed_timed_out(self) -> None:
        w = Machine().welcomed()
        w.hear(messages.Ended(False, "n1 is missing"))
        assert w.notice(events.Failed).kind is events.FailureKind.FORMATION_TIMEOUT

    def test_trouble_with_tls_ends_a_worker_without_a_place(self) -> None:
        w = Machine()
        w.feed(events.Started())
        w.feed(events.StreamDenied(1, "unknown authority"))
        assert w.notice(events.Failed) == events.Failed(events.FailureKind.SECURITY, "unknown authority")

    def test_trouble_with_tls_does_not_end_a_member_unless_the_scheduler_says_so(self) -> None:
        w = Machine().running()
        w.feed(events.StreamLost(1, "cut"))
        w.tick_at_deadline()
        w.feed(events.StreamDenied(2, "expired"))
        assert w.core.phase == "reconnecting"
        w.tick_at_deadline()
        w.feed(events.StreamDenied(3, "revoked", by_scheduler=True))
        assert w.notice(events.Failed) == events.Failed(events.FailureKind.SECURITY, "revoked")

    def test_goodbye_waits_for_the_answer(self) -> None:
        w = Machine().running()
        assert w.feed(events.Goodbye(True, "done")).messages == (messages.Leave(1, True, "done"),)
        assert w.core.phase == "leaving"
        w.hear(messages.Ended(True, "bye"))
        assert w.notice(events.Left) == events.Left(heard=True)
        assert w.core.phase == "ended"

    def test_goodbye_has_a_deadline(self) -> None:
        w = Machine(events.Timing(goodbye_timeout_s=0.5)).running()
        w.feed(events.Goodbye(True, "done"))
        w.tick_at_deadline()
        assert w.now == 100.5
        assert w.notice(events.Left) == events.Left(heard=False)

    def test_a_finished_worker_says_goodbye_again_on_a_new_stream(self) -> None:
        w = Machine().running()
        w.feed(events.Goodbye(True, "done"))
        w.feed(events.StreamLost(1, "cut"))
        w.tick_at_deadline()
        w.feed(events.StreamOpened(2))
        assert [type(message) for message in w.last.messages] == [messages.Join, messages.Leave]

    def test_a_failed_worker_does_not_wait_for_a_scheduler_that_is_away(self) -> None:
        w = Machine().running()
        w.feed(events.StreamLost(1, "cut"))
        w.feed(events.Goodbye(False, "crashed"))
        assert w.notice(events.Left) == events.Left(heard=False)

    def test_goodbye_before_the_scheduler_was_ever_reached_ends_at_once(self) -> None:
        w = Machine()
        w.feed(events.Started())
        w.feed(events.Goodbye(False, "interrupted"))
        assert w.notice(events.Left) == events.Left(heard=False)


def absence(w: Machine) -> list[tuple[float, str]]:
    """When the scheduler's silence was reported, in seconds since the start, until the worker gives up."""
    told = []
    while w.core.phase != "ended":
        w.tick_at_deadline()
        for notice in w.last.notices:
            if isinstance(notice, events.Connect):
                w.feed(events.StreamLost(notice.stream, "refused"))
            elif isinstance(notice, events.LogLine):
                told.append((w.now - 100.0, notice.sentence))
    return told


class TestReconnecting:
    def test_an_absence_is_told_ever_more_rarely_with_address_and_deadline(self) -> None:
        w = Machine(events.Timing(topo_timeout_s=1800.0), address="host:6667")
        w.feed(events.Started())
        w.feed(events.StreamLost(1, "refused"))
        told = absence(w)
        assert [at for at, _ in told] == pytest.approx(
            [3, 9, 21, 45, 93, 189, 381, 681, 981, 1281, 1581], abs=0.01
        )
        assert told[0][1] == (
            "the scheduler at host:6667 has not answered for 3 s (refused); trying again, for 1797 s more."
        )
        assert w.notice(events.Failed).sentence == (
            "the scheduler at host:6667 could not be reached within 1800 s: refused"
        )

    def test_each_absence_is_told_of_again(self) -> None:
        w = Machine(address="host:6667").running()
        for _ in range(2):
            w.feed(events.StreamLost(w.stream, "cut"))
            w.now += 10.0
            w.feed(events.DeadlineReached())
            assert w.notice(events.LogLine).sentence == (
                "the scheduler at host:6667 has not answered for 10 s (cut); trying again, training goes on."
            )
            w.reconnected()

    def test_the_pause_grows_with_the_absence_and_has_jitter(self) -> None:
        timing = events.Timing(retry_first_s=0.01, retry_last_s=2.0, retry_share=0.5)
        pauses = []
        w = Machine(timing, jitter=0.5)
        w.feed(events.Started())
        for attempt in range(1, 12):
            w.feed(events.StreamLost(attempt, "refused"))
            deadline = w.core.deadline()
            assert deadline is not None
            pauses.append(deadline - w.now)
            w.tick_at_deadline()
            assert w.notice(events.Connect) == events.Connect(attempt + 1)
        assert pauses[0] == pytest.approx(0.01)
        assert pauses == sorted(pauses)
        assert (
            events.Timing().retry_last_s * 1.5 < 2.0
        )  # whoever was away long is there soon after it is back
        early = Machine(timing, jitter=0.0)
        early.feed(events.Started())
        early.feed(events.StreamLost(1, "refused"))
        assert early.core.deadline() == pytest.approx(100.005)

    def test_a_worker_without_a_place_gives_up_after_the_topology_timeout(self) -> None:
        w = Machine(events.Timing(topo_timeout_s=30.0))
        w.feed(events.Started())
        logged = 0
        while w.core.phase != "ended":
            w.feed(events.StreamLost(w.stream, "connection refused"))
            w.tick_at_deadline()
            logged += sum(isinstance(notice, events.LogLine) for notice in w.last.notices)
        assert w.now == 130.0
        assert logged == 3  # after 3, 9 and 21 s
        failed = w.notice(events.Failed)
        assert failed.kind is events.FailureKind.UNREACHABLE
        assert "30 s" in failed.sentence and "connection refused" in failed.sentence

    def test_training_goes_on_without_the_scheduler(self) -> None:
        w = Machine(events.Timing(topo_timeout_s=30.0, reconnect_timeout_s=20.0)).running()
        w.feed(events.StreamLost(1, "cut"))
        while w.now < 1000.0:
            w.tick_at_deadline()
            assert w.core.phase == "reconnecting"
            w.feed(events.StreamLost(w.stream, "connection refused"))
            assert w.feed(events.StepStarting(int(w.now))).notices == (events.StepGranted(),)

    def test_a_goodbye_that_nobody_hears_ends_with_the_first_deadline(self) -> None:
        w = Machine(events.Timing(reconnect_timeout_s=2.0, goodbye_timeout_s=15.0)).running()
        w.feed(events.StreamLost(w.stream, "reset"))
        w.feed(events.Goodbye(True, "finished"))
        while not any(isinstance(notice, events.Left) for notice in w.last.notices):
            w.tick_at_deadline()
        assert not w.notice(events.Left).heard
        assert w.core.deadline() is None

    def test_a_member_that_is_cut_off_gives_up(self) -> None:
        w = Machine(events.Timing(reconnect_timeout_s=20.0)).running()
        w.feed(events.StreamLost(w.stream, "timed out"))
        w.now += 5.0
        w.feed(events.CollectivesStuck(True))
        since = w.now
        while not any(isinstance(notice, events.Failed) for notice in w.last.notices):
            w.tick_at_deadline()
            assert w.now <= since + 20.0
        assert w.now == since + 20.0
        assert "cut off" in w.notice(events.Failed).sentence

    def test_a_slow_collective_is_no_cut(self) -> None:
        w = Machine(events.Timing(reconnect_timeout_s=20.0)).running()
        w.feed(events.StreamLost(w.stream, "timed out"))
        w.feed(events.CollectivesStuck(True))
        w.feed(events.CollectivesStuck(False))
        for _ in range(100):
            w.tick_at_deadline()
        assert w.core.phase == "reconnecting"

    def test_a_change_of_members_does_not_wait_for_ever(self) -> None:
        w = Machine(events.Timing(reconnect_timeout_s=20.0)).running()
        w.feed(events.StreamLost(1, "cut"))
        w.now = 500.0
        w.feed(events.CommunicatorFailed(1, 0, "reset"))
        while w.core.phase != "ended":
            w.tick_at_deadline()
            w.feed(events.StreamLost(w.stream, "connection refused"))
        assert w.now == 520.0

    def test_of_several_schedulers_the_next_leader_is_waited_for_without_limit(self) -> None:
        w = Machine(events.Timing(reconnect_timeout_s=20.0, waits_without_limit=True)).running()
        w.feed(events.StreamLost(1, "cut"))
        w.feed(events.CommunicatorFailed(1, 0, "reset"))
        said: list[str] = []
        while w.now < 5000.0:
            w.tick_at_deadline()
            said += [notice.sentence for notice in w.last.notices if isinstance(notice, events.LogLine)]
            w.feed(events.StreamLost(w.stream, "connection refused"))
            assert w.core.phase == "reconnecting"
        assert "without limit" in said[-1] and "training goes on" not in said[-1]

    def test_join_tells_the_place_held(self) -> None:
        w = Machine().running(generation=3, rank=1)
        w.feed(events.ProgressReported(41, 10.0))
        w.feed(events.StreamLost(1, "cut"))
        w.tick_at_deadline()
        w.feed(events.StreamOpened(2))
        assert w.message(messages.Join) == messages.Join(
            w.core.profile, 3, 1, True, 41, 2, takes_deltas=True, gives_stacks=True
        )

    def test_the_same_assignment_again_changes_nothing(self) -> None:
        w = Machine().running(generation=3, rank=1)
        w.feed(events.StreamLost(1, "cut"))
        w.tick_at_deadline()
        w.reconnected()
        assert w.hear(assignment(3, 1)) == events.Effects()
        assert w.core.phase == "running"

    def test_rank_0_publishes_the_same_ids_again_while_the_group_forms(self) -> None:
        w = Machine().welcomed()
        w.hear(assignment(1, 0))
        w.feed(events.StreamLost(1, "cut"))
        w.feed(events.UniqueIdsMinted(1, (b"secret",)))
        assert w.last.messages == ()
        w.tick_at_deadline()
        w.reconnected()
        assert w.hear(assignment(1, 0)).messages == (messages.PublishUniqueIds(1, (b"secret",)),)

    def test_heartbeats_tell_how_far_the_training_is(self) -> None:
        w = Machine().running()
        w.feed(events.StepStarting(4))
        w.feed(events.ProgressReported(4, 123.0))
        w.tick_at_deadline()
        assert w.now == 101.0
        assert w.last.messages == (messages.Heartbeat(1, 4, 5, 123.0, entered_generation=1),)
        w.hear(assignment(2, 1))
        w.tick_at_deadline()
        assert w.last.messages == (messages.Heartbeat(2, 4, 5, 123.0, entered_generation=1),)


class TestUnplannedChange:
    def test_a_death_interrupts_at_once_and_the_next_generation_is_entered_when_asked(self) -> None:
        w = Machine().running()
        w.hear(assignment(2, 1, lost=("n2 was killed",)))
        assert w.notice(events.Over) == events.Over(1, "because 2", ("n2 was killed",))
        assert w.feed(events.StepStarting(5)).notices == (events.StepHeld(),)
        assert w.hear(messages.UniqueIds(2, (b"new",))).notices == ()
        w.feed(events.EntryRequested())
        assert w.notice(events.Build).unique_ids == (b"new",)
        w.feed(events.CommunicatorBuilt(1))  # late news of the old generation
        assert w.last.messages == ()
        w.feed(events.CommunicatorBuilt(2))
        w.hear(messages.GroupBuilt(2))
        assert w.core.phase == "running"

    def test_stale_generations_change_nothing(self) -> None:
        w = Machine().running(generation=5)
        for message in (
            assignment(4, 1),
            messages.UniqueIds(4, (b"old",)),
            messages.GroupBuilt(4),
            messages.Suspended(4, "few", 1.0),
            messages.Quiesce(4, "grow"),
        ):
            w.hear(message)
            assert (w.last.messages, w.last.notices) == ((), ())
        assert w.core.phase == "running"

    def test_a_death_while_building_starts_over_with_the_newer_generation(self) -> None:
        w = Machine().welcomed()
        w.hear(assignment(1, 1))
        w.hear(messages.UniqueIds(1, (b"one",)))
        w.hear(assignment(2, 1))
        assert w.notice(events.Over).generation == 1
        w.feed(events.EntryRequested())
        w.hear(messages.UniqueIds(2, (b"two",)))
        assert w.notice(events.Build).unique_ids == (b"two",)

    def test_a_death_before_entering_replaces_the_assignment(self) -> None:
        w = Machine().welcomed()
        w.hear(assignment(1, 1))
        w.hear(assignment(2, 1))
        assert w.hear(messages.UniqueIds(1, (b"old",))).notices == ()
        assert w.hear(messages.UniqueIds(2, (b"new",))).notices == (
            events.Build(assignment(2, 1), (b"new",)),
        )

    def test_a_failed_collective_is_a_hint_and_waits_for_the_verdict(self) -> None:
        w = Machine(events.Timing(verdict_margin_s=2.0)).running()
        w.feed(events.CommunicatorFailed(1, -1, "closed"))
        assert w.last.messages == (messages.SuspectPeer(1, -1, "closed"),)
        while not any(isinstance(notice, events.NoVerdict) for notice in w.last.notices):
            w.tick_at_deadline()
        assert w.now == 107.0  # node time-out 5 s and the margin

    @pytest.mark.parametrize("without_limit", [False, True])  # it is a matter of schedulers that are away
    def test_who_names_a_peer_is_answered_also_by_a_scheduler_that_is_far_behind(
        self, without_limit: bool
    ) -> None:
        timing = events.Timing(
            verdict_margin_s=2.0, reconnect_timeout_s=60.0, waits_without_limit=without_limit
        )
        w = Machine(timing).running()
        w.feed(events.CommunicatorFailed(1, 0, "reset"))
        assert w.last.messages == (messages.SuspectPeer(1, 0, "reset"),)
        while not any(isinstance(notice, events.NoVerdict) for notice in w.last.notices):
            w.tick_at_deadline()
        assert w.now == 160.0

    def test_a_scheduler_that_cannot_decide_is_waited_for_as_long_as_it_says_so(self) -> None:
        w = Machine(events.Timing(verdict_margin_s=2.0, reconnect_timeout_s=60.0)).running()
        w.feed(events.CommunicatorFailed(1, -1, "closed"))
        sentence = "The scheduler's journal cannot be written: its disk is full."
        for second in range(300):
            w.now = 101.0 + second
            w.hear(messages.Waiting(3, 3, sentence, undecided=True))
            assert w.last.notices == (() if second else (events.LogLine(sentence, waits=False),))
            assert not any(
                isinstance(notice, events.NoVerdict) for notice in w.feed(events.DeadlineReached()).notices
            )
        while not any(isinstance(notice, events.NoVerdict) for notice in w.last.notices):
            w.tick_at_deadline()
        assert w.now == 407.0

    def test_who_returns_to_a_scheduler_that_cannot_decide_does_not_take_it_for_away(self) -> None:
        w = Machine(events.Timing(verdict_margin_s=2.0, reconnect_timeout_s=60.0)).running()
        w.feed(events.CommunicatorFailed(1, -1, "closed"))
        w.feed(events.StreamLost(1, "cut"))
        w.tick_at_deadline()
        w.feed(events.StreamOpened(2))
        began = w.now
        for second in range(300):
            w.now = began + second
            w.hear(messages.Waiting(3, 3, "No space.", undecided=True))
        while not any(isinstance(notice, events.Failed) for notice in w.last.notices):
            w.tick_at_deadline()
        assert w.now == began + 299.0 + 60.0

    def test_whoever_cannot_say_on_whom_it_failed_asks_and_learns_who_has_finished(self) -> None:
        w = Machine().running()
        w.feed(events.CommunicatorFailed(1, -1, "connection closed"))
        assert w.last.messages == (messages.SuspectPeer(1, -1, "connection closed"),)
        sentence = "Rank 1 has finished, while others still wait."
        w.hear(messages.Waiting(1, 2, sentence, (1,)))
        assert w.last.notices == (events.LogLine(sentence), events.NoVerdict(1, 1, sentence))

    def test_a_restarted_scheduler_hears_of_a_suspicion_again(self) -> None:
        w = Machine().running()
        w.feed(events.CommunicatorFailed(1, 0, "reset"))
        w.feed(events.StreamLost(w.stream, "cut"))
        w.tick_at_deadline()
        w.feed(events.StreamOpened(w.stream))
        w.hear(messages.Welcome(1.0, 5.0, 60.0))
        assert w.message(messages.SuspectPeer) == messages.SuspectPeer(1, 0, "reset")

    def test_a_failure_before_a_planned_switch_is_told_for_those_who_still_hang(self) -> None:
        w = Machine().running()
        w.feed(events.StepStarting(4))
        w.hear(messages.Quiesce(1, "n3 comes"))
        w.hear(assignment(2, 0, switch_after_step=5))
        w.feed(events.CommunicatorFailed(1, 1, "reset"))
        assert w.message(messages.SuspectPeer) == messages.SuspectPeer(1, 1, "reset")
        assert w.notice(events.Over).generation == 1

    def test_a_step_that_was_broken_off_is_not_begun_in_the_next_generation(self) -> None:
        w = Machine().running()
        w.feed(events.StepStarting(4))
        w.hear(assignment(2, 0))
        w.feed(events.EntryRequested())
        w.hear(messages.UniqueIds(2, (b"two",)))
        w.feed(events.CommunicatorBuilt(2))
        w.hear(messages.GroupBuilt(2))
        w.hear(messages.Quiesce(2, "n3 comes"))
        assert w.message(messages.Quiesced) == messages.Quiesced(2, 4)

    def test_a_newcomer_tells_at_once_that_it_has_begun_a_step_and_so_holds_the_state(self) -> None:
        """Until the next heartbeat its giver would be waited for, or taken for the only one that holds it."""
        w = Machine().welcomed()
        w.hear(assignment(3, 1, state_source_rank=0, newcomer_ranks=(1,)))
        w.entered(3)
        w.feed(events.StepStarting(42))
        beat = w.message(messages.Heartbeat)
        assert (beat.generation, beat.started_step, beat.entered_generation) == (3, 43, 3)
        w.feed(events.StepStarting(43))
        assert w.last.messages == ()

    def test_who_is_no_newcomer_leaves_its_steps_to_the_heartbeats(self) -> None:
        w = Machine().welcomed()
        w.hear(assignment(3, 1, state_source_rank=1, newcomer_ranks=(0,)))
        w.entered(3)
        w.feed(events.StepStarting(42))
        assert w.last.messages == ()

    def test_a_failed_collective_in_a_generation_that_is_over_is_no_news(self) -> None:
        w = Machine().running()
        w.hear(assignment(2, 1))
        assert w.feed(events.CommunicatorFailed(1, 0, "reset")) == events.Effects()

    def test_others_that_did_not_come_in_time_are_waited_for_in_a_next_generation_but_not_twice(self) -> None:
        w = Machine().running()
        w.feed(events.ProgressReported(4, 1.0))
        w.feed(events.CommunicatorFailed(1, -1, "timed out", timed_out=True))
        assert w.message(messages.SuspectPeer) == messages.SuspectPeer(
            1, 1, "timed out"
        )  # itself: it knows of nobody
        w.hear(assignment(2, 1))
        w.feed(events.EntryRequested())
        w.entered(2)
        w.feed(events.CommunicatorFailed(2, -1, "timed out", timed_out=True))
        # In the same step once more: the script's own deadlock, say.
        assert w.last.messages == (messages.SuspectPeer(2, -1, "timed out"),)

    def test_an_error_that_blames_nobody_asks_for_no_next_generation(self) -> None:
        w = Machine().running()
        assert w.feed(events.CommunicatorFailed(1, -1, "a fault")).messages == (
            messages.SuspectPeer(1, -1, "a fault"),
        )
        w.feed(events.StreamLost(w.stream, "cut"))
        w.tick_at_deadline()
        w.feed(events.StreamOpened(w.stream))
        assert messages.SuspectPeer not in [
            type(sent) for sent in w.hear(messages.Welcome(1.0, 5.0, 60.0)).messages
        ]

    def test_a_late_collective_is_told_with_how_far_this_worker_is_and_again_after_a_while(self) -> None:
        w = Machine(events.Timing(late_again_s=10.0)).running()
        told = w.feed(events.PeersLate(12.0)).messages
        assert [type(message) for message in told] == [messages.Heartbeat, messages.Late]
        assert told[1] == messages.Late(1, 12.0)
        w.now += 9.9
        assert w.feed(events.PeersLate(21.9)).messages == ()
        w.now += 0.1
        assert w.feed(events.PeersLate(22.0)).messages[1] == messages.Late(1, 22.0)

    def test_what_is_late_in_a_generation_that_is_over_is_no_news(self) -> None:
        w = Machine().running()
        w.hear(assignment(2, 1))
        assert w.feed(events.PeersLate(12.0)) == events.Effects()

    def test_probes_asked_for_twice_are_made_once_on_a_stream(self) -> None:
        w = Machine().welcomed()
        targets = (("n1", "x:1"),)
        for number, asked in ((7, True), (7, False), (8, True)):
            w.hear(messages.Probe(number, targets))
            assert w.last.notices == ((events.ProbeWanted(number, targets),) if asked else ())

    def test_probes_are_made_and_answered_by_whoever_has_been_welcomed(self) -> None:
        w = Machine().welcomed()
        w.hear(messages.Probe(7, (("n1", "x:1"),)))
        assert w.last.notices == (events.ProbeWanted(7, (("n1", "x:1"),)),)
        told = w.feed(
            events.ProbesDone(7, (("n1", "refused"),), late=False, waits=True, busy="", seconds=3.5)
        ).messages
        assert [type(message) for message in told] == [messages.Heartbeat, messages.Probed]
        assert told[1] == messages.Probed(
            7, (("n1", "refused"),), late=False, waits=True, busy="", seconds=3.5
        )

    def test_stacks_are_taken_and_told_by_whoever_has_been_welcomed(self) -> None:
        w = Machine().welcomed()
        w.hear(messages.StacksWanted(7, 4096))
        assert w.last.notices == (events.TakeStacks(7, 4096),)
        assert w.feed(events.StacksTaken(7, "here")).messages == (messages.Stacks(7, "here"),)

    def test_a_suspension_says_who_saves(self) -> None:
        w = Machine().running()
        w.hear(messages.Suspended(1, "one of two is left.", 30.0, save=True))
        assert w.notice(events.Over).save

    def test_suspension_interrupts_and_keeps_waiting(self) -> None:
        w = Machine().running()
        w.hear(messages.Suspended(1, "one of two is left.", 30.0))
        assert w.notice(events.Over) == events.Over(1, "one of two is left.", ("one of two is left.",))
        assert w.notice(events.LogLine).sentence == "one of two is left. Waiting up to 30 s for workers."
        assert w.core.phase == "suspended"
        w.hear(messages.Suspended(1, "one of two is left.", 30.0))
        assert w.last.notices == ()
        w.hear(assignment(1, 1))
        assert w.core.phase == "suspended"
        w.hear(assignment(2, 1))
        w.feed(events.EntryRequested())
        w.hear(messages.UniqueIds(2, (b"new",)))
        assert w.notice(events.Build).assignment.generation == 2

    def test_who_lost_its_place_may_come_back_under_a_new_incarnation_as_a_newcomer(self) -> None:
        w = Machine().running()
        w.hear(messages.Refused(messages.RefusalCode.SUPERSEDED, "declared dead"))
        assert w.core.phase == "ended"
        w.feed(events.Renewed(77, "10.0.0.1:6000"))
        w.feed(events.StreamOpened(w.stream))
        join = w.message(messages.Join)
        assert (join.profile.incarnation, join.held_generation, join.held_rank) == (77, 0, -1)
        deadline = w.core.deadline()
        assert deadline is not None and deadline > w.now  # old times are forgotten

    def test_who_lost_its_place_looks_for_a_scheduler_as_long_as_for_one_that_is_lost(self) -> None:
        def looks_s(w: Machine) -> float:
            since = w.now
            while w.core.phase != "ended":
                w.feed(events.StreamLost(w.stream, "connection refused"))
                w.tick_at_deadline()
            assert w.notice(events.Failed).kind is events.FailureKind.UNREACHABLE
            return w.now - since

        def renewed() -> Machine:
            w = Machine(events.Timing(topo_timeout_s=1800.0, reconnect_timeout_s=120.0)).welcomed()
            w.hear(messages.Refused(messages.RefusalCode.SUPERSEDED, "declared dead"))
            w.feed(events.Renewed(77, "10.0.0.1:6000"))
            return w

        # The job has ended meanwhile, say, and its scheduler with it.
        assert looks_s(renewed()) == 120.0
        assert looks_s(renewed().reconnected()) == 1800.0  # like any worker that waits


class TestPlannedChange:
    def test_a_worker_before_its_first_step_takes_the_step_that_its_peers_have_begun(self) -> None:
        w = Machine().running()
        w.hear(messages.Quiesce(1, "n2 leaves"))
        assert w.message(messages.Quiesced) == messages.Quiesced(1, 0)
        w.hear(assignment(2, 0, switch_after_step=1))
        assert w.notice(events.ChangePending).after_step == 1
        assert w.feed(events.StepStarting(0)).notices == (events.StepGranted(),)
        w.feed(events.StepStarting(1))
        assert w.notice(events.Over).planned

    def test_leaving_asked_for_before_there_was_a_place_is_said_with_the_first_one(self) -> None:
        w = Machine().welcomed()
        assert w.feed(events.LeaveWanted("SIGTERM")).messages == ()
        w.hear(assignment(1, 1))
        assert w.message(messages.RequestLeave) == messages.RequestLeave(1, "SIGTERM")

    def test_no_step_begins_between_quiesce_and_the_switch(self) -> None:
        w = Machine().running()
        assert w.feed(events.StepStarting(4)).notices == (events.StepGranted(),)
        w.hear(messages.Quiesce(1, "a worker joins"))
        assert w.message(messages.Quiesced) == messages.Quiesced(1, 5)
        assert w.notice(events.ChangePending) == events.ChangePending(1, "a worker joins", -1)
        assert w.feed(events.StepStarting(5)).notices == (events.StepHeld(),)
        w.hear(assignment(2, 1, switch_after_step=6))
        assert w.notice(events.GateChanged) == events.GateChanged()
        assert w.notice(events.ChangePending).after_step == 6
        assert w.feed(events.StepStarting(5)).notices == (events.StepGranted(),)
        w.feed(events.StepStarting(6))
        assert w.last.notices == (events.Over(1, "because 2", planned=True),)

    def test_without_step_boundaries_the_change_interrupts(self) -> None:
        w = Machine().running()
        w.hear(messages.Quiesce(1, "a worker joins"))
        w.hear(assignment(2, 1, switch_after_step=0))
        assert w.notice(events.Over) == events.Over(1, "because 2")

    def test_a_death_before_the_switch_interrupts(self) -> None:
        w = Machine().running()
        w.feed(events.StepStarting(4))
        w.hear(assignment(2, 1, switch_after_step=5))
        w.hear(assignment(3, 1, lost=("n2 was killed",)))
        assert w.notice(events.Over).lost == ("n2 was killed",)

    def test_a_scheduler_that_forgot_its_plan_lets_the_steps_go_on(self) -> None:
        w = Machine().running()
        w.feed(events.StepStarting(4))
        w.hear(messages.Quiesce(1, "a worker joins"))
        w.feed(events.StreamLost(1, "cut"))
        w.tick_at_deadline()
        w.reconnected()
        w.hear(assignment(1, 1))
        assert w.notice(events.GateChanged) == events.GateChanged()
        assert w.feed(events.StepStarting(5)).notices == (events.StepGranted(),)

    def test_a_planned_change_that_is_put_off_lets_the_steps_go_on(self) -> None:
        w = Machine().running()
        w.feed(events.StepStarting(4))
        w.hear(messages.Quiesce(1, "a worker joins"))
        w.hear(assignment(1, 1))
        assert w.last.notices == (events.ChangePutOff(), events.GateChanged())
        assert w.feed(events.StepStarting(5)).notices == (events.StepGranted(),)
        w.hear(messages.Quiesce(1, "n3 leaves"))
        assert w.message(messages.Quiesced) == messages.Quiesced(1, 6)

    def test_rank_0_of_the_next_generation_publishes_while_it_still_trains(self) -> None:
        w = Machine().running()
        w.feed(events.StepStarting(4))
        w.hear(assignment(2, 0, switch_after_step=5))
        assert w.notice(events.MintUniqueIds).generation == 2
        w.feed(events.UniqueIdsMinted(2, (b"new",)))
        assert w.last.messages == (messages.PublishUniqueIds(2, (b"new",)),)
        assert w.hear(assignment(2, 0, switch_after_step=5)).messages == w.last.messages

    def test_a_leave_is_asked_for_once_and_again_after_a_reconnect(self) -> None:
        w = Machine().running()
        assert w.feed(events.LeaveWanted("SIGTERM")).messages == (messages.RequestLeave(1, "SIGTERM"),)
        assert w.feed(events.LeaveWanted("SIGTERM")).messages == ()
        w.feed(events.StreamLost(1, "cut"))
        w.tick_at_deadline()
        w.reconnected()
        assert w.message(messages.RequestLeave) == messages.RequestLeave(1, "SIGTERM")

    def test_a_leaving_worker_finishes_the_step_and_is_dismissed(self) -> None:
        w = Machine().running()
        w.feed(events.StepStarting(4))
        w.hear(assignment(2, -1, switch_after_step=5, state_source_rank=0))
        w.feed(events.StepStarting(5))
        assert w.last.notices == (
            events.Dismissed("because 2"),
            events.Over(1, "because 2", planned=True),
        )

    def test_a_leaving_worker_that_waits_for_a_place_is_dismissed_at_once(self) -> None:
        w = Machine().running()
        w.hear(assignment(2, 1))
        w.feed(events.EntryRequested())
        w.hear(assignment(3, -1, state_source_rank=1))
        assert w.notice(events.Dismissed) == events.Dismissed("because 3")

    def test_a_leaving_worker_is_told_when_nobody_goes_on_with_the_state(self) -> None:
        w = Machine().running()
        w.hear(assignment(2, -1, state_source_rank=-1))
        assert w.notice(events.Dismissed) == events.Dismissed("because 2", alone=True)


def test_secrets_stay_out_of_representations() -> None:
    for value in (
        messages.PublishUniqueIds(1, (b"secret",)),
        messages.UniqueIds(1, (b"secret",)),
        events.UniqueIdsMinted(1, (b"secret",)),
        events.Build(assignment(1, 0), (b"secret",)),
    ):
        assert "secret" not in repr(value)


def test_members_know_where_their_peers_are() -> None:
    assert member(1, "n2", 9).data_address == "10.0.0.1:5001"
