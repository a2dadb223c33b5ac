"""What the transcripts cannot show: recovery's refusals, secrets, sizes, several unique ids."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muster.scheduler.core import events as e
from muster.scheduler.core import records as r
from muster.scheduler.core.events import Decision
from muster.scheduler.core.machine import Machine, RecoveryError
from muster.version import __version__
from muster.wire import messages as m
from muster.wire.messages import series_of
from muster.wire.rank_table import RankTable, RankTableEntry

SETTINGS = e.Settings(2, 0, 0, 30.0, 5.0, 1.0)


def join(session: int, node_id: str, worker_num: int = 2, incarnation: int = 1) -> e.Joined:
    host = m.Host(f"id-{node_id}", f"host-{node_id}", "10.0.0.1")
    return e.Joined(session, m.Candidate(node_id, incarnation, host, m.Device(), worker_num, 0, "tcp"))


def history(job: Machine, *events: e.Event) -> list[r.Record]:
    return [record for event in events for record in job.step(event, 0.0).records]


def test_records_of_another_job_are_refused() -> None:
    records = history(Machine("red", SETTINGS), join(1, "a"))
    with pytest.raises(RecoveryError, match="those of job red, not of job blue"):
        Machine.recover("blue", SETTINGS, records, 0.0)


def test_records_of_another_size_are_refused_naming_both() -> None:
    records = history(Machine("red", SETTINGS), join(1, "a"))
    with pytest.raises(RecoveryError, match="MS_WORKER_NUM=2, the scheduler has 3"):
        Machine.recover("red", replace(SETTINGS, worker_num=3), records, 0.0)
    Machine.recover("red", replace(SETTINGS, worker_num=0), records, 0.0)


def test_records_that_are_no_history_are_refused() -> None:
    with pytest.raises(RecoveryError, match="contradict"):
        Machine.recover("red", SETTINGS, [r.Removed("nobody", 1, "left")], 0.0)
    records = history(Machine("red", SETTINGS), join(1, "a"))
    with pytest.raises(RecoveryError, match="begin with its opening"):
        Machine.recover("red", SETTINGS, records[1:], 0.0)


def test_nothing_recovered_is_a_new_job() -> None:
    job = Machine.recover("red", SETTINGS, [], 3.0)
    assert job.view(3.0).state == "forming"
    assert job.deadline() == 13.0


def test_an_ended_job_stays_ended() -> None:
    job = Machine("red", replace(SETTINGS, worker_num=1))
    records = history(job, join(1, "a", 1), e.BuiltReported(1, 1), e.LeftCleanly(1, 1, True, ""))
    assert job.outcome is not None and job.outcome.ok
    again = Machine.recover("red", replace(SETTINGS, worker_num=1), records, 5.0)
    assert again.outcome == job.outcome
    assert again.deadline() is None


def test_no_unique_id_is_in_a_record_a_view_or_a_reason() -> None:
    job = Machine("red", SETTINGS)
    decisions = [job.step(event, 0.0) for event in (join(1, "a"), join(2, "b"))]
    decisions.append(job.step(e.UniqueIdsPublished(1, 1, (b"S3CRET",)), 0.0))
    assert any(isinstance(message, m.UniqueIds) for _, message in decisions[-1].messages)
    assert "S3CRET" not in repr(decisions) + repr(job.view(0.0))
    assert not decisions[-1].records


def test_a_rank_table_of_another_size_than_worker_num_is_refused() -> None:
    table = RankTable((RankTableEntry(0, "a", 0),))
    with pytest.raises(ValueError, match="MS_WORKER_NUM is 2, but the rank table has 1 entries"):
        Machine("red", replace(SETTINGS, rank_table=table))


def test_who_has_no_device_is_told_so_where_a_rank_table_asks_for_one() -> None:
    table = RankTable((RankTableEntry(0, "host-a", 0), RankTableEntry(1, "host-a", 1)))
    job = Machine("red", replace(SETTINGS, rank_table=table))
    [refused] = [told for _, told in job.step(join(1, "a"), 0.0).messages if isinstance(told, m.Refused)]
    assert refused.code is m.RefusalCode.NOT_IN_RANK_TABLE
    assert "no device: DEVICE_ID is not set" in refused.sentence


def test_large_worlds_take_several_unique_ids() -> None:
    job = Machine("red", replace(SETTINGS, worker_num=5, ranks_per_unique_id=2))
    decisions = [job.step(join(number, str(number), 5), 0.0) for number in range(5)]
    assignments = [told for _, told in decisions[-1].messages if isinstance(told, m.Assignment)]
    assert {assignment.unique_id_count for assignment in assignments} == {3}


def test_a_thousand_joins_cost_few_messages() -> None:
    number = 1000
    job = Machine("red", replace(SETTINGS, worker_num=number))
    sent = [len(job.step(join(n, str(n), number), 0.0).messages) for n in range(number)]
    assert sum(sent[:-1]) < 4 * number
    assert sent[-1] == number + 1


def test_the_deadline_is_never_in_the_past_after_a_tick_on_time() -> None:
    job = Machine("red", replace(SETTINGS, spares=1))
    now = 0.0
    for event in (e.Tick(), join(1, "a"), join(2, "b")):
        job.step(event, now)
    for _ in range(20):
        due = job.deadline()
        if due is None:
            break
        assert due >= now
        job.step(e.Tick(), due)
        assert job.deadline() is None or job.deadline() != due
        now = due
    assert job.outcome is not None and not job.outcome.ok


def test_losses_that_come_together_make_one_generation_that_names_them_all() -> None:
    job = Machine("red", replace(SETTINGS, worker_num=4, worker_min=1))
    history(job, *(join(number, str(number), 4) for number in range(4)))
    first = job.step(e.SessionLost(1, "killed"), 1.0, more=True)
    assert [type(record) for record in first.records] == [r.Removed]
    last = job.step(e.SessionLost(2, "killed"), 1.0)
    told = {session: message for session, message in last.messages if isinstance(message, m.Assignment)}
    assert sorted(told) == [0, 3]
    assert {message.generation for message in told.values()} == {2}
    assert [len(message.lost) for message in told.values()] == [2, 2]


def reasons(*events: e.Joined) -> str:
    job = Machine("red", replace(SETTINGS, worker_num=3))
    return " ".join(job.step(event, 0.0).reason for event in events)


def with_facts(event: e.Joined, model: str = "", **facts: str) -> e.Joined:
    device = event.candidate.device.replaced(model=model)
    pairs = tuple(sorted((key.replace("soft_", "~"), value) for key, value in facts.items()))
    return event.replaced(candidate=event.candidate.replaced(device=device, facts=pairs))


def test_a_fact_that_differs_is_refused_and_a_soft_one_is_warned_of_once() -> None:
    first = with_facts(join(1, "a", 3), "H200", nccl="2.28.9", soft_driver="580.1")
    said = reasons(
        first,
        with_facts(join(2, "b", 3), "H100", nccl="2.28.9", soft_driver="570.2"),
        with_facts(join(3, "c", 3), "H200", nccl="2.28.9", soft_driver="570.2"),
    )
    assert (
        said.count("Warning: Node b on host host-b has driver 570.2, but node a on host host-a has 580.1.")
        == 1
    )
    assert "Node b on host host-b has GPU model H100, but node a on host host-a has H200." in said
    assert "node c on host host-c has driver" not in said
    assert "Generation 1 is formed with 3 members" in said
    assert "has nccl=2.27.0, but node a" in reasons(first, with_facts(join(2, "b", 3), "H200", nccl="2.27.0"))


def changed(change: tuple[int, int]) -> str:
    """A version whose minor number differs from this one's by so much, and a patch number."""
    series = series_of(__version__)
    assert series is not None
    return f"{series[0]}.{series[1] + change[0]}.{change[1]}"


@pytest.mark.parametrize(
    ("change", "words"),
    [((1, 0), "upgrade the scheduler first"), ((-2, 0), "Upgrade the worker"), ((-1, 0), ""), ((0, 3), "")],
)
def test_workers_of_this_minor_version_and_the_one_before_are_admitted(
    change: tuple[int, int], words: str
) -> None:
    said = reasons(with_facts(join(1, "a", 3), muster=changed(change)))
    assert words in said and ("is refused" in said) == bool(words), said


def test_patch_releases_train_together_with_a_warning_and_minor_versions_do_not() -> None:
    first = with_facts(join(1, "a", 3), muster=changed((0, 0)))
    said = reasons(first, with_facts(join(2, "b", 3), muster=changed((0, 1))), join(3, "c", 3))
    assert f"Node b on host host-b has muster {changed((0, 1))}, but node a" in said
    assert "node a on host host-a has muster=" in reasons(
        first, with_facts(join(2, "b", 3), muster=changed((-1, 0)))
    )


def test_two_machines_with_one_name_are_warned_of() -> None:
    twin = join(2, "b", 3)
    twin = twin.replaced(candidate=twin.candidate.replaced(host=m.Host("id-other", "host-a", "10.0.0.2")))
    assert "Warning: several machines are named host-a" in reasons(join(1, "a", 3), twin)
    assert "Warning" not in reasons(join(1, "a", 3), join(2, "b", 3))


def with_label(event: e.Joined, label: str) -> e.Joined:
    host = m.Host("id-h", "h", "10.0.0.1", label)
    return event.replaced(candidate=event.candidate.replaced(host=host))


def test_two_labels_of_one_host_are_worth_one_warning() -> None:
    said = reasons(
        with_label(join(1, "a", 3), "r2"),
        with_label(join(2, "b", 3), ""),
        with_label(join(3, "c", 3), "r1"),
    )
    assert said.count("Warning") == 1
    assert "Warning: workers of host h came with MS_TOPOLOGY (unset) and r2; give all the same." in said
    one = reasons(with_label(join(1, "a", 3), "r1"), with_label(join(2, "b", 3), "r1"), join(3, "c", 3))
    assert "Warning" not in one


def test_a_host_with_two_labels_has_the_same_ranks_after_a_restart() -> None:
    settings = replace(SETTINGS, worker_num=3, worker_min=2)
    job = Machine("red", settings)
    labels = ("b", "a", "b")
    joins = [with_label(join(n, f"w{n}", 3), label) for n, label in enumerate(labels)]
    records = history(job, *joins, *(e.BuiltReported(n, 1) for n in range(3)))
    again = Machine.recover("red", settings, records, 0.0)
    for number, event in enumerate(joins):  # under new streams
        rank = job.job.ledger.rank_of(event.candidate.node_id)
        again.step(event.replaced(session=number + 3, held_generation=1, held_rank=rank, built=True), 0.0)
    for each, gone in ((job, 0), (again, 3)):
        each.step(e.SessionLost(gone, "killed"), 1.0)
    after = [[(w.candidate.node_id, w.rank) for w in each.view(1.0).workers] for each in (job, again)]
    assert after[0] == after[1] == [("w1", 0), ("w2", 1)]


STANDS = "Generation 1 stands with 2 members."


def running(settings: e.Settings = SETTINGS) -> tuple[Machine, list[r.Record]]:
    job = Machine("red", settings)
    return job, history(job, join(1, "a"), join(2, "b"), e.BuiltReported(1, 1), e.BuiltReported(2, 1))


@pytest.mark.parametrize(
    "event",
    [
        join(3, "c"),
        join(3, "c", 7),
        join(3, "a", incarnation=9),
        e.DrainRequested("nobody", "maintenance"),
    ],
)
def test_what_is_refused_is_said_but_is_not_the_reason_of_a_running_job(event: e.Event) -> None:
    job, _ = running()
    decision = job.step(event, 1.0)
    assert decision.reason and decision.reason != STANDS
    assert job.view(1.0).reason == STANDS


def test_what_is_refused_is_not_the_reason_of_a_job_that_forms_stalls_or_waits() -> None:
    job = Machine("red", SETTINGS)
    history(job, join(1, "a"), join(2, "b", 7))
    assert job.view(0.0).reason == "1 of 2 workers is in: a; missing: 1 worker."
    job, _ = running(replace(SETTINGS, node_timeout_s=100.0))
    job.step(e.Heard(1, 1, 4, 5, 1.0, ()), 0.0)
    job.step(e.Tick(), 60.0)
    stalled = job.view(60.0).reason
    assert stalled and stalled != STANDS
    job.step(join(3, "c"), 61.0)
    assert job.view(61.0).reason == stalled
    job.step(e.Heard(1, 1, 4, 5, 1.0, ()), 62.0)
    job.step(e.SessionLost(1, "killed"), 62.0)
    suspended = job.view(62.0).reason
    job.step(join(4, "c", 7), 63.0)
    assert job.view(63.0).reason == suspended
    assert "Generation 1 is over" in suspended


def test_a_running_job_says_that_it_stands_whoever_comes_goes_or_restarts() -> None:
    job, records = running(replace(SETTINGS, spares=1))
    spare = join(3, "s")
    job.step(spare.replaced(candidate=spare.candidate.replaced(spare=True)), 1.0)
    assert job.view(1.0).reason == STANDS
    job.step(e.SessionLost(3, "killed"), 1.0)
    assert job.view(1.0).reason == STANDS
    assert Machine.recover("red", SETTINGS, records, 1.0).view(1.0).reason == STANDS


def test_a_stream_that_asks_twice_while_it_is_unclear_who_comes_back_gets_one_answer() -> None:
    settings = replace(SETTINGS, worker_num=1)
    records = history(Machine("red", settings), join(1, "a", 1))
    job = Machine.recover("red", settings, records, 0.0)
    asks: list[e.Event] = [join(2, "b", 1), join(3, "c", 1), join(3, "c", 1), join(4, "a", 1)]
    asks.append(e.SessionLost(4, "reset"))
    answers = [told for i, ask in enumerate(asks) for told in job.step(ask, 1.0 + i).messages]
    assert [type(message) for session, message in answers if session == 3] == [m.Refused]


def loss_after(silent_s: float) -> tuple[Machine, Decision]:
    """A job that runs, whose member b was last heard at 0 and loses its stream after so long."""
    job, _ = running(replace(SETTINGS, worker_min=1))
    return job, job.step(e.SessionLost(2, "reset"), silent_s)


def is_removed(decision: Decision) -> bool:
    return any(isinstance(record, r.Removed) for record in decision.records)


def test_a_worker_whose_stream_ends_while_it_is_heard_is_lost_at_once() -> None:
    _, decision = loss_after(2.0)
    assert is_removed(decision)
    assert decision.reason.startswith("Rank 1 (node b on host host-b) is lost: its stream ended (reset).")


def test_a_worker_whose_hosts_stream_broke_keeps_its_place_until_node_timeout() -> None:
    job, _ = running(replace(SETTINGS, worker_min=1))
    decision = job.step(e.SessionLost(2, "its host's stream ended", may_return=True), 1.0)
    assert not is_removed(decision)
    assert "it has 4.0 s to come back" in decision.reason
    back = job.step(e.Joined(5, join(5, "b").candidate, held_generation=1, held_rank=1, built=True), 2.0)
    assert not is_removed(back)
    job.step(e.SessionLost(5, "its host's stream ended", may_return=True), 2.5)
    job.step(e.Heard(1, 1, 0, 0, 0.0), 6.0)
    assert is_removed(job.step(e.Tick(), 7.0))


def test_a_worker_whose_stream_ends_in_a_pause_keeps_its_place_until_node_timeout() -> None:
    job, decision = loss_after(3.0)
    assert not is_removed(decision)
    assert decision.reason == (
        "Rank 1 (node b on host host-b) was not heard for 3.0 s when its stream ended (reset); "
        "it has 2.0 s to come back."
    )
    back = job.step(e.Joined(5, join(5, "b").candidate, held_generation=1, held_rank=1, built=True), 4.9)
    assert any(session == 5 and isinstance(message, m.Welcome) for session, message in back.messages)
    assert not is_removed(back)
    assert not is_removed(job.step(e.Heard(1, 1, 0, 0, 0.0), 4.9)) and not is_removed(job.step(e.Tick(), 5.1))


def test_a_worker_that_does_not_come_back_from_its_pause_is_lost_when_its_silence_is_too_long() -> None:
    job, _ = loss_after(3.0)
    job.step(e.Heard(1, 1, 0, 0, 0.0), 4.0)
    deadline = job.deadline()
    assert deadline is not None and deadline <= 5.0
    assert not is_removed(job.step(e.Tick(), 4.9))
    decision = job.step(e.Tick(), 5.0)
    assert is_removed(decision) and "(node b on host host-b) is lost: not heard for 5.0 s" in decision.reason


def test_a_stream_that_ends_when_its_worker_is_overdue_is_put_down_to_the_silence() -> None:
    _, decision = loss_after(5.5)
    assert is_removed(decision)
    assert "is lost: not heard for 5.5 s, until its stream ended (reset)." in decision.reason


def test_silence_does_not_count_while_the_event_loop_is_late() -> None:
    job, _ = running(replace(SETTINGS, worker_min=1))
    for second in range(1, 6):  # busy, 0.3 s in each
        job.step(e.ProcessPaused(0.3), float(second))
    assert not is_removed(job.step(e.Tick(), 6.4))
    assert is_removed(job.step(e.Tick(), 6.5))


def test_late_turns_of_the_event_loop_add_up_until_streams_may_have_broken() -> None:
    def loss_after(*late: float) -> bool:
        job, _ = running(replace(SETTINGS, worker_min=1))
        for at in late:
            job.step(e.ProcessPaused(0.9), at)
        job.step(e.Heard(2, 1, 0, 0, 0.0), 9.0)  # read just before its stream's end, which is as old
        return is_removed(job.step(e.SessionLost(2, "ping timeout"), 9.0))

    assert not loss_after(7.0, 8.0, 9.0)
    assert loss_after(3.0, 6.0, 9.0)  # each long over when the next came


def test_silence_does_not_count_while_what_a_worker_sent_is_unread() -> None:
    job, _ = running(replace(SETTINGS, worker_min=1))
    job.step(e.Heard(1, 1, 0, 0, 0.0), 4.0)
    assert (job.overdue(4.9), job.overdue(5.0)) == ((), (2,))
    decision = job.step(e.ReceiveBacklog((2,)), 5.0)
    assert decision.reason.startswith("The scheduler is behind: what 1 worker sent is not read yet;")
    assert job.overdue(5.0) == () and not is_removed(job.step(e.Tick(), 5.0))
    # Its own side may have given the stream up meanwhile.
    assert not is_removed(job.step(e.SessionLost(1, "reset"), 9.9))
    assert not is_removed(job.step(e.Joined(5, join(5, "a").candidate, held_generation=1), 9.9))
    decision = job.step(e.Tick(), 10.0)
    assert is_removed(decision) and "(node b on host host-b) is lost: not heard for 5.0 s" in decision.reason


def test_a_stream_may_have_broken_until_it_is_looked_again_whether_the_scheduler_is_behind() -> None:
    """Workers that were not heard since they were placed may be silent for longer: a look comes later."""
    job = Machine("red", SETTINGS)
    history(job, join(1, "a"), join(2, "b"))
    behind_at = next(at / 4 for at in range(100) if job.overdue(at / 4))
    assert behind_at > SETTINGS.node_timeout_s
    job.step(e.ReceiveBacklog((1, 2)), behind_at)
    look_at = next(behind_at + at / 4 for at in range(100) if job.overdue(behind_at + at / 4))
    for session in (1, 2):  # the end of a flood: what waited is read in one go, with the stream's end
        job.step(e.Heard(session, 1, 0, 0, 0.0), look_at)
        assert not is_removed(job.step(e.SessionLost(session, "ping timeout"), look_at))


def test_a_stream_that_ends_unheard_while_the_scheduler_is_behind_leaves_time_to_come_back() -> None:
    """Its last words may be lost with the stream, and its next ones wait where those did."""
    job, _ = running(replace(SETTINGS, worker_min=1))
    job.step(e.ReceiveBacklog((1, 2)), 5.0)
    job.step(e.Heard(1, 1, 0, 0, 0.0), 9.9)
    decision = job.step(e.SessionLost(2, "ping timeout"), 9.9)
    assert "it may come back" in decision.reason and not is_removed(decision)
    assert not is_removed(job.step(e.Tick(), 10.0))
    job.step(e.Heard(1, 1, 0, 0, 0.0), 14.8)
    assert not is_removed(job.step(e.Tick(), 14.8))
    assert is_removed(job.step(e.Tick(), 14.9))  # dead after all: that time, and no more


def test_ends_of_streams_keep_nobody_who_does_not_speak() -> None:
    """A stream ends once: for another end a worker has to join again."""
    job, _ = running(replace(SETTINGS, worker_min=1))
    job.step(e.ReceiveBacklog((1, 2)), 5.0)
    job.step(e.SessionLost(2, "reset"), 6.0)
    for at in (7.0, 8.0, 9.0, 10.0):
        job.step(e.Heard(1, 1, 0, 0, 0.0), at)
        job.step(e.SessionLost(2, "reset"), at)
        job.step(e.SessionLost(77, "reset"), at)
        job.step(e.ReceiveBacklog((2,)), at)
    assert not is_removed(job.step(e.Tick(), 10.9))
    assert is_removed(job.step(e.Tick(), 11.0))


def test_what_was_due_while_the_scheduler_stood_still_gets_that_time_again() -> None:
    job = Machine("red", SETTINGS)
    history(job, join(1, "a"))
    job.step(e.ProcessPaused(29.0), 29.0)
    assert job.step(e.Tick(), 31.0).records == ()  # MS_TOPO_TIMEOUT, 30 s, has not run meanwhile
    job, _ = running(replace(SETTINGS, node_timeout_s=20.0, stall_timeout_s=10.0))
    job.step(e.Heard(1, 1, 4, 5, 1.0, ()), 0.0)
    job.step(e.PeerSuspected(1, 1, 1, "reset"), 0.0)
    job.step(e.ProcessPaused(25.0), 25.0)
    decision = job.step(e.Tick(), 26.0)
    assert decision.records == () and "No progress" not in decision.reason


def test_while_nothing_can_be_written_no_silence_counts_and_no_wait_runs_out() -> None:
    job = Machine("red", SETTINGS)
    history(job, join(1, "a"))
    job.step(e.HeldUp(300.0), 300.0)
    assert job.step(e.Tick(), 302.0).records == ()  # MS_TOPO_TIMEOUT, 30 s, has not run meanwhile
    job, _ = running(replace(SETTINGS, worker_min=1))
    job.step(e.HeldUp(300.0), 300.0)
    assert not is_removed(job.step(e.Tick(), 304.9))
    assert is_removed(job.step(e.Tick(), 305.0))


def test_a_stream_that_ended_while_nothing_could_be_written_was_that_of_one_that_died() -> None:
    job, _ = running(replace(SETTINGS, worker_min=1))
    job.step(e.HeldUp(300.0), 300.0)
    assert is_removed(job.step(e.SessionLost(2, "reset"), 300.0))


def test_what_the_scheduler_did_not_read_costs_the_group_no_time_to_be_built() -> None:
    job = Machine("red", SETTINGS)
    history(job, join(1, "a"), join(2, "b"))
    for behind_at in (15.0, 20.0, 25.0):
        job.step(e.ReceiveBacklog((1, 2)), behind_at)
        job.step(e.Heard(1, 1, 0, 0, 0.0), behind_at)
    due = job.deadline()
    assert due is not None and due <= 30.0
    for session in (1, 2):
        job.step(e.Heard(session, 1, 0, 0, 0.0), 29.0)
    assert not job.step(e.Tick(), 31.0).records
    for session in (1, 2):
        job.step(e.Heard(session, 1, 0, 0, 0.0), 44.0)
    assert not job.step(e.Tick(), 44.9).records
    [ended] = job.step(e.Tick(), 45.0).records
    assert isinstance(ended, r.JobEnded) and "was not built in time" in ended.reason


def test_a_group_formed_again_late_has_half_of_the_time_and_all_together_twice() -> None:
    """Else a cut or a hang that is found late, before a group has ever stood, ends the job."""
    job = Machine("red", replace(SETTINGS, worker_num=6, worker_min=2, node_timeout_s=1000.0))
    history(job, *(join(number, node_id, 6) for number, node_id in enumerate("abcdef", 1)))
    for session, lost_at in ((6, 29.0), (5, 43.0), (4, 55.0), (3, 59.0)):
        assert not job.step(e.Tick(), lost_at).records
        job.step(e.Heard(session, 1, 0, 0, 0.0), lost_at)
        lost, formed = job.step(e.SessionLost(session, "reset"), lost_at).records
        assert isinstance(lost, r.Removed) and isinstance(formed, r.GenerationFormed)
    [ended] = job.step(e.Tick(), 60.0).records
    assert isinstance(ended, r.JobEnded) and "was not built in time" in ended.reason


@pytest.mark.parametrize("heard", [True, False], ids=["heartbeat first", "built before its next heartbeat"])
def test_a_member_that_comes_late_to_build_gives_all_their_time(heard: bool) -> None:
    """One that was busy alone, with an evaluation, is waited for; the others build when it has come."""
    job = three(2, node_timeout_s=1000.0)
    job.step(e.SessionLost(3, "reset"), 1.0)
    job.step(e.Heard(1, 2, 4, 5, 1.0, (), 2), 2.0)  # a has come, b evaluates
    job.step(e.Heard(2, 2, 4, 5, 1.0, (), 1), 30.5)
    if heard:
        job.step(e.Heard(2, 2, 4, 5, 1.0, (), 2), 30.9)
    assert not job.step(e.BuiltReported(2, 2), 31.1).records
    assert not job.step(e.Tick(), 32.0).records
    [established] = job.step(e.BuiltReported(1, 2), 33.0).records
    assert isinstance(established, r.GroupEstablished)


def test_a_launch_is_named_by_its_first_admission_whoever_comes_later_and_after_a_restart() -> None:
    """So that replacements know which checkpoints are of their own launch."""

    def launches(job: Machine, session: int, node_id: str, incarnation: int) -> set[int]:
        messages = job.step(join(session, node_id, incarnation=incarnation), 1.0).messages
        return {message.launch for _, message in messages if isinstance(message, m.Assignment)}

    job = Machine("red", SETTINGS)
    records = history(job, join(1, "a", incarnation=71))
    decision = job.step(join(2, "b", incarnation=72), 0.0)
    assert {x.launch for _, x in decision.messages if isinstance(x, m.Assignment)} == {71}
    records += decision.records
    lost = [job.step(e.SessionLost(session, "reset"), 0.5) for session in (1, 2)]
    records += [record for each in lost for record in each.records]
    recovered = Machine.recover("red", SETTINGS, records, 0.7)
    for each in (job, recovered):
        assert launches(each, 3, "a", 73) | launches(each, 4, "b", 74) == {71}


def test_a_suspension_leaves_it_to_the_worker_to_say_how_long_it_waits() -> None:
    job = Machine("red", SETTINGS)
    history(job, join(1, "a"), join(2, "b"), e.BuiltReported(1, 1), e.BuiltReported(2, 1))
    decision = job.step(e.SessionLost(2, "reset"), 0.0)
    (suspended,) = (message for _, message in decision.messages if isinstance(message, m.Suspended))
    assert suspended.wait_s == 30.0
    assert suspended.reason.endswith("1 member left (a), MS_WORKER_MIN is 2.")
    assert decision.reason.endswith("MS_WORKER_MIN is 2; waiting up to 30 s for more.")


def suspended() -> list[r.Record]:
    """What a job of two that must be two has written down when one of them has died."""
    job, records = running()
    return records + list(job.step(e.SessionLost(2, "reset"), 0.0).records)


def test_a_lower_worker_min_at_a_restart_is_journaled_and_frees_a_suspended_job() -> None:
    lower = replace(SETTINGS, worker_min=1)
    records = suspended()
    job = Machine.recover("red", lower, records, 5.0)
    assert job.deadline() == 0.0  # at once
    decision = job.step(e.Tick(), 5.0)
    assert decision.reason.startswith(
        "MS_WORKER_MIN is 1 from now on; it was 2. Generation 2 is formed with 1"
    )
    assert decision.records[0] == r.JobOpened("red", 2, 1)
    assert job.view(5.0).worker_min == 1
    same = join(3, "b", incarnation=2).candidate.replaced(worker_min=1)
    other = join(4, "b", incarnation=3).candidate.replaced(worker_min=2)
    answers = [job.step(e.Joined(session, each), 6.0) for session, each in ((4, other), (3, same))]
    (refused,) = (message for _, message in answers[0].messages)
    assert isinstance(refused, m.Refused) and "the job has MS_WORKER_MIN=1" in refused.sentence
    assert any(isinstance(record, r.Admitted) for record in answers[1].records)
    again = Machine.recover("red", lower, [*records, *decision.records], 7.0)
    assert again.view(7.0).worker_min == 1
    assert not again.step(e.Tick(), 7.0).records


def test_a_worker_min_that_the_workers_said_stays() -> None:
    settings = replace(SETTINGS, worker_num=0)
    event = join(1, "a", 3)
    said = event.replaced(candidate=event.candidate.replaced(worker_min=2))
    records = history(Machine("red", settings), said)
    assert Machine.recover("red", settings, records, 1.0).view(1.0).worker_min == 2


def test_a_recovered_job_has_a_reason_at_once() -> None:
    assert Machine.recover("red", SETTINGS, suspended(), 5.0).view(5.0).reason == (
        "Generation 1 is over: rank 1 (node b on host host-b) is lost: its stream ended (reset). "
        "1 member left (a), MS_WORKER_MIN is 2; waiting up to 30 s for more."
    )
    first, both = (
        history(Machine("red", SETTINGS), join(1, "a")),
        history(Machine("red", SETTINGS), join(1, "a"), join(2, "b")),
    )
    assert Machine.recover("red", SETTINGS, first, 5.0).view(5.0).reason == (
        "1 of 2 workers is in: a; missing: 1 worker."
    )
    assert Machine.recover("red", SETTINGS, both, 5.0).view(5.0).reason == (
        "Generation 1 is formed with 2 members: all 2 workers are in."
    )


ELASTIC = e.Settings(2, 1, 0, 30.0, 5.0, 1.0)


def switching(settings: e.Settings = ELASTIC) -> Machine:
    """A job of member a; b is to arrive after step 7: generation 3 is formed, and a still runs in 2."""
    job = Machine("red", settings)
    history(job, join(1, "a"), join(2, "b"), e.BuiltReported(1, 1), e.BuiltReported(2, 1))
    history(job, e.LeftCleanly(2, 1, False, "gives up"), e.BuiltReported(1, 2))
    history(job, join(3, "b", incarnation=2), e.QuiescedReported(1, 2, 7))
    return job


def formed_by(job: Machine, event: e.Event) -> r.GenerationFormed:
    (record,) = [each for each in job.step(event, 0.0).records if isinstance(each, r.GenerationFormed)]
    return record


def test_a_newcomer_that_goes_before_it_came_breaks_no_step() -> None:
    record = formed_by(switching(), e.LeftCleanly(3, 3, False, "gives up"))
    assert [member.candidate.node_id for member in record.members] == ["a"]
    assert (record.generation, record.switch_after_step) == (4, 7)


def test_a_member_that_is_lost_before_a_switch_breaks_its_step() -> None:
    record = formed_by(switching(), e.SessionLost(1, "reset"))
    assert [member.candidate.node_id for member in record.members] == ["b"]
    assert record.switch_after_step == -1


def leaving() -> Machine:
    """A job of a and b, which is to leave after step 7: generation 2 is formed, and both still run in 1."""
    job = Machine("red", ELASTIC)
    history(job, join(1, "a"), join(2, "b"), e.BuiltReported(1, 1), e.BuiltReported(2, 1))
    history(job, e.DrainRequested("b", "maintenance"))
    history(job, e.QuiescedReported(1, 1, 7), e.QuiescedReported(2, 1, 7))
    return job


def test_who_leaves_and_is_lost_before_the_switch_breaks_its_last_step() -> None:
    assert formed_by(leaving(), e.SessionLost(2, "reset")).switch_after_step == -1


def test_who_left_with_an_earlier_generation_breaks_no_step_when_it_is_lost() -> None:
    """Its goodbye was not heard, say; the others train without it already."""
    job = leaving()
    history(job, e.BuiltReported(1, 2), join(3, "c"), e.QuiescedReported(1, 2, 9))
    [gone] = job.step(e.SessionLost(2, "reset"), 0.0).records
    assert isinstance(gone, r.Removed)
    assert gone.node_id == "b"


def test_who_leaves_breaks_nothing_where_all_have_given_the_step_up() -> None:
    job = leaving()
    assert formed_by(job, e.PeerSuspected(1, 1, 1, "connection reset")).switch_after_step == -1
    [gone] = job.step(e.SessionLost(2, "reset"), 0.0).records
    assert isinstance(gone, r.Removed)


def test_what_fails_among_those_who_switched_too_early_breaks_no_step() -> None:
    """Only a failure in the generation that stands shows that its last step cannot be finished."""
    job = switching()
    formed_by(job, e.LeftCleanly(3, 3, False, "gives up"))
    late = e.PeerSuspected(1, 3, 1, "connection reset")  # a was about to build generation 3 with the newcomer
    assert not job.step(late, 0.0).records
    assert formed_by(job, e.PeerSuspected(1, 2, 0, "connection reset")).switch_after_step == -1


def three(worker_min: int, node_timeout_s: float = 5.0) -> Machine:
    """A job of members a, b and c that stands."""
    job = Machine("red", e.Settings(3, worker_min, 0, 30.0, node_timeout_s, 1.0))
    history(job, *[join(number, node, 3) for number, node in enumerate("abc", 1)])
    history(job, *[e.BuiltReported(number, 1) for number in (1, 2, 3)])
    return job


def losses_told(job: Machine, event: e.Event) -> dict[int, m.FirstLoss | None]:
    """Whom each session hears of as the first loss, with what follows from the event."""
    kinds = (m.Assignment, m.Suspended, m.Ended)
    messages = job.step(event, 0.0).messages
    return {session: message.first_loss for session, message in messages if isinstance(message, kinds)}


@pytest.mark.parametrize("worker_min", [0, 2])
def test_all_hear_who_was_the_first_to_go_and_how(worker_min: int) -> None:
    job = three(worker_min)
    raised = e.LeftCleanly(2, 1, False, "ValueError: no data", exit_code=1)
    first = m.FirstLoss("b", 1, "rank 1 (node b on host host-b) left: ValueError: no data", 1)
    assert losses_told(job, raised) == {1: first, 2: first, 3: first}
    late = e.LeftCleanly(1, 1, False, "MembershipChanged", consequence=True, exit_code=1)
    assert losses_told(job, late)[1] == first
    assert losses_told(job, e.SessionLost(3, "reset")) == {}


def test_who_goes_because_of_others_is_not_the_first_even_if_it_is_heard_first() -> None:
    job = three(2)
    assert losses_told(job, e.LeftCleanly(1, 1, False, "PeerLostError", consequence=True)) == {
        1: None,
        2: None,
        3: None,
    }
    [first] = set(losses_told(job, e.SessionLost(2, "reset")).values())
    assert first is not None and first.node_id == "b"


def test_who_leaves_as_asked_from_a_suspended_job_is_not_lost_to_those_that_finish() -> None:
    """It may have finished as well: its goodbye is on the way when it is let go."""
    job = three(3)
    history(job, e.LeaveRequested(1, 1, "SIGTERM"))
    history(job, *[e.QuiescedReported(number, 1, 5) for number in (1, 2, 3)])
    assert job.view(0.0).state == "suspended"
    history(job, e.LeaveRequested(2, 1, "SIGTERM"))
    finish(job, 3)
    assert job.outcome == r.JobEnded(True, "All members have completed the training.")


def finish(job: Machine, session: int, now: float = 0.0) -> Decision:
    return job.step(e.LeftCleanly(session, 1, True, ""), now)


EARLY = "rank 1 (node b on host host-b) has finished, while others still wait: it had fewer batches"


def test_a_group_formed_because_a_member_finished_early_says_so() -> None:
    job = three(1)
    finish(job, 2)
    job.step(e.PeerSuspected(1, 1, 0, "all_reduce failed in NCCL"), 0.0)
    for session in (1, 3):
        job.step(e.Heard(session, 1, 0, 0, 1.0), 4.0)
    [record] = [each for each in job.step(e.Tick(), 5.0).records if isinstance(each, r.GenerationFormed)]
    assert EARLY in record.reason


def test_who_cannot_say_on_whom_a_collective_failed_is_answered_who_has_finished() -> None:
    job = three(1)
    failed = e.PeerSuspected(1, 1, -1, "all_reduce failed in NCCL")
    assert not job.step(failed, 0.0).messages
    answers = finish(job, 2).messages, job.step(failed, 0.0).messages  # whichever is heard first
    for answer in [told for messages in answers for session, told in messages if session == 1]:
        assert isinstance(answer, m.Waiting) and answer.finished_ranks == (1,)
        assert answer.sentence.startswith(EARLY.replace("rank", "Rank"))
    assert [len(messages) for messages in answers] == [2, 1]
    assert not job.step(e.Tick(), 4.9).records, "the generation stands"


def test_a_stall_report_names_who_has_finished() -> None:
    job = three(1)
    for session in (1, 3):
        job.step(e.Heard(session, 1, 4, 5, 1.0), 0.0)
    finish(job, 2)
    for session in (1, 3):
        job.step(e.Heard(session, 1, 4, 5, 1.0), 59.0)
    assert EARLY in job.step(e.Tick(), 61.0).reason


def test_a_leave_is_no_loss_and_a_group_that_goes_on_forgets_the_last_one() -> None:
    job = three(1)
    history(job, e.LeaveRequested(1, 1, "SIGTERM"))
    assert set(losses_told(job, e.LeftCleanly(1, 1, False, "asked to leave")).values()) == {None}
    [first] = set(losses_told(job, e.SessionLost(2, "reset")).values())
    assert first is not None and first.node_id == "b"
    generation = job.view(0.0).generation
    history(job, e.BuiltReported(3, generation))
    assert job.view(0.0).state == "running"
    [second] = set(losses_told(job, e.LeftCleanly(3, generation, False, "KeyError: 1")).values())
    assert second is not None and second.node_id == "c"


# ---------------------------------------------------------------- how often workers are heard


def many(number: int, **settings: float) -> Machine:
    """A job of so many workers, which all are in."""
    job = Machine("red", replace(SETTINGS, worker_num=number, worker_min=1, **settings))  # type: ignore[arg-type]
    for session in range(1, number + 1):
        job.step(join(session, f"n{session}", number), 0.0)
    assert job.view(0.0).state == "building"
    return job


@pytest.mark.parametrize(
    ("number", "per_s", "node_timeout_s", "member_s", "waiting_s"),
    [
        (2, 1000.0, 30.0, 1.0, 10.0),  # a third of the node timeout while they wait, then once a second
        (20, 10.0, 30.0, 2.0, 10.0),  # all members together so many times a second
        (90, 10.0, 30.0, 6.0, 10.0),  # a fifth of the node timeout at most
        (90, 10.0, 4.0, 1.0, 4.0 / 3),
        (2, 1000.0, 2.0, 1.0, 1.0),
    ],
)
def test_workers_hear_how_often_they_are_to_be_heard(
    number: int, per_s: float, node_timeout_s: float, member_s: float, waiting_s: float
) -> None:
    job = Machine(
        "red", replace(SETTINGS, worker_num=number, node_timeout_s=node_timeout_s, heartbeats_per_s=per_s)
    )
    decision = job.step(join(1, "a", number), 0.0)
    [welcome] = [message for _, message in decision.messages if isinstance(message, m.Welcome)]
    assert welcome.heartbeat_interval_s == pytest.approx(member_s)
    assert welcome.waiting_interval_s == pytest.approx(waiting_s)


def test_who_is_heard_less_often_is_waited_for_that_much_longer() -> None:
    """A pause of the node timeout may begin just before a heartbeat."""
    job = many(4, node_timeout_s=6.0, heartbeats_per_s=4 / 1.2)  # members every 1.2 s, others every 2 s
    job.step(e.Heard(1, 1, 0, 0, 0.0), 1.0)
    assert job.overdue(7.2) == ()
    assert job.overdue(7.4) == (1,)  # heard as a member since 1.0; the others not since 0.0, without a place
    assert job.overdue(7.5) == (1, 2, 3, 4)
    assert job.deadline() == pytest.approx(7.3)


def test_a_stream_that_ends_within_two_heartbeats_is_that_of_a_killed_worker_however_rare_they_are() -> None:
    job = many(4, node_timeout_s=6.0, heartbeats_per_s=4 / 1.2)
    assert is_removed(job.step(e.SessionLost(4, "reset"), 3.9))  # without a place, every 2 s
    for session in (1, 2, 3):
        job.step(e.Heard(session, 2, 0, 0, 0.0), 4.0)
    assert not is_removed(job.step(e.SessionLost(3, "reset"), 6.5))
    assert is_removed(job.step(e.SessionLost(2, "reset"), 6.3))
