"""What the page makes of a scheduler's stream: pure, with the time handed in."""

from __future__ import annotations

import math

import pytest

from muster.web import plots, words
from muster.web.model import Followed, ObservedJob, trouble, who_waits
from muster.web.series import POINTS_KEPT, Point, Series
from muster.wire.v1 import rendezvous_pb2 as rendezvous_pb
from muster.wire.v1 import watch_pb2 as pb


def line(**changes: object) -> pb.JobLine:
    reason = "Generation 1 stands with 3 members."
    fields = {
        "job_id": "j",
        "state": "running",
        "generation": 1,
        "members": 3,
        "worker_num": 3,
        "reason": reason,
    }
    return pb.JobLine(**(fields | changes))  # type: ignore[arg-type]


def job(calls: list[tuple[int, int, bool]], *, step: int = 10) -> ObservedJob:
    """A job of ranks that were last seen in these collectives: (call, sequence, done)."""
    made = ObservedJob(line())
    seats = [pb.Seat(node_id=str(i), rank=i, state="member", host_id="h") for i in range(len(calls))]
    made.take(pb.WatchReply(roster=pb.Roster(number=1, seats=seats)), 0.0)
    columns = pb.Progress(
        roster=1,
        job=line(step=step, furthest=step),
        step=[step] * len(calls),
        silent_s=[0.1] * len(calls),
        samples_per_s=[1.0] * len(calls),
        loss=[math.nan] * len(calls),
        call=[call for call, _, _ in calls],
        sequence=[sequence for _, sequence, _ in calls],
        done=[done for _, _, done in calls],
        calls=[
            rendezvous_pb.Collective(name="all_reduce", group=group, dtype="float32", size_bytes=4000)
            for group in ("world", "pairs")
        ],
    )
    made.take(pb.WatchReply(progress=columns), 0.0)
    return made


# ---------------------------------------------------------------- standstill


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        (
            [(1, 8, False), (1, 8, False), (1, 7, True)],
            ["ranks 0 to 1 wait in collective 8 of group world (all_reduce of 4,000 B float32) for rank 2, "
             "last seen at collective 7."],
        ),
        (
            [(1, 8, False), (0, 0, False), (1, 8, False)],
            ["ranks 0, 2 wait in collective 8 of group world (all_reduce of 4,000 B float32) for rank 1, "
             "not seen in any."],
        ),
        (
            [(2, 3, False), (1, 8, True), (1, 8, True)],
            ["rank 0 waits in collective 3 of group pairs (all_reduce of 4,000 B float32)."],
        ),
        ([(1, 8, True), (1, 8, True)], []),
    ],
)  # fmt: skip
def test_who_waits_for_whom(calls: list[tuple[int, int, bool]], told: list[str]) -> None:
    assert list(who_waits(job(calls).workers())) == told


def test_a_job_stands_still_when_no_step_ends_for_long() -> None:
    made = job([(1, 1, False)])
    for second in range(1, 20):
        made.take_line(line(step=second, furthest=second), float(second))
    assert made.stands_still_s(19.5) == 0.0
    assert made.stands_still_s(30.0) == 11.0
    made.take_line(line(step=19, furthest=19, state="suspended"), 31.0)
    assert made.stands_still_s(60.0) == 0.0


def test_workers_tell_where_their_time_goes_and_who_holds_the_others_up() -> None:
    made = job([(0, 0, False)] * 2)
    assert made.workers()[1].straggler is None
    columns = pb.Progress()
    columns.CopyFrom(made.progress)
    columns.computed_s[:], columns.waited_s[:], columns.data_s[:] = [0.25, 1.0], [0.75, 0.0], [0.0, 0.0]
    slow, once = (
        rendezvous_pb.Straggler(node_id=made.roster.seats[1].node_id, rank=1, kind=kind)
        for kind in ("computing", "one-off")
    )
    columns.stragglers.extend([slow])
    made.take(pb.WatchReply(progress=columns), 10.0)
    assert [worker.computed_s for worker in made.workers()] == [0.25, 1.0]
    assert [worker.straggler for worker in made.workers()] == [None, slow]
    columns.stragglers[0].CopyFrom(once)
    made.take(pb.WatchReply(progress=columns), 10.1)
    assert [worker.straggler for worker in made.workers()] == [None, None]


def test_what_workers_keep_of_their_state_stands_at_their_seats() -> None:
    made = job([(0, 0, False)] * 2)
    columns = pb.Progress()
    columns.CopyFrom(made.progress)
    snapshot = rendezvous_pb.SnapshotReport(
        agreed=120, taken=-1, age_s=12, size_bytes=10**9, seconds=0.8, partners=[0]
    )
    columns.seat_copies.add(seat=1, snapshot=snapshot)
    columns.seat_copies.add(seat=0, snapshot=rendezvous_pb.SnapshotReport(agreed=-1, taken=3))
    made.take(pb.WatchReply(progress=columns), 1.0)
    first, second = made.workers()
    assert first.snapshot is None, "none is complete yet"
    assert second.snapshot == snapshot and second.checkpoint is None
    assert words.snapshot(snapshot) == "step 120, 12 s ago, at rank 0, 1 GB in 0.8 s"
    assert words.snapshot(snapshot, short=True) == "step 120, 12 s ago, at rank 0"


def test_the_copies_of_a_job_in_words() -> None:
    written = rendezvous_pb.CheckpointReport(step=100, age_s=180, size_bytes=2_000_000, seconds=2.1)
    copies = rendezvous_pb.JobCopies(
        snapshot_step=120, snapshot_age_s=12, snapshot_bytes=1500, snapshot_seconds=0.8
    )
    assert words.job_snapshot(copies) == "step 120, 12 s ago, 1.5 kB in 0.8 s"
    assert words.checkpoint(written) == "step 100, 3 min ago, 2 MB in 2.1 s"


# ---------------------------------------------------------------- jobs in words


def test_what_is_wrong_in_words() -> None:
    assert trouble(line()) == ""
    assert trouble(line(missing=1)) == "1 of 3 workers is missing."
    assert trouble(line(state="suspended", reason="Too few.")) == "Too few."
    assert trouble(line(reason="No progress for 60 s: all ranks are in step 3.")).startswith("No progress")


def test_generations_are_told_from_first_to_last() -> None:
    made = job([(0, 0, False)])
    events = [
        pb.Happening(number=1, time=10, kind="formed", generation=1, count=3, text="all are in"),
        pb.Happening(number=2, time=11, kind="stands", generation=1),
        pb.Happening(number=3, time=20, kind="formed", generation=2, count=2, text="rank 2 is lost"),
        pb.Happening(number=4, time=21, kind="stands", generation=2),
        pb.Happening(number=5, time=30, kind="ended", code="ok", text="All members have completed."),
    ]
    made.take(pb.WatchReply(happenings=pb.Happenings(happenings=events)), 30.0)
    found = made.generations()
    assert [(g.number, g.members, g.formed, g.stood, g.over) for g in found] == [
        (1, 3, 10, 11, 20),
        (2, 2, 20, 21, 30),
    ]
    assert found[1].why_over == "All members have completed."
    drawn = plots.bars(found, 30.0)
    assert [bar.state for bar in drawn] == ["building", "stood"] * 2
    assert drawn[0].x == 0.0 and sum(bar.width for bar in drawn) == pytest.approx(1000, abs=1)


def test_a_scheduler_that_is_away_is_told_since_when_and_what_was_known_stays() -> None:
    known = Followed("here")
    known.take(pb.WatchReply(overview=pb.Overview(jobs=[line()], started=1.0, version="1")), 5.0)
    known.lose("gone", 6.0)
    known.lose("still gone", 9.0)
    assert (known.absent_since, known.why_absent) == (6.0, "still gone")
    assert known.jobs["j"].line.members == 3
    known.take(pb.WatchReply(overview=pb.Overview(jobs=[], started=8.0, version="1")), 10.0)
    assert known.absent_since is None and known.jobs["j"].gone


@pytest.mark.parametrize("own_stream_first", [False, True])
def test_a_scheduler_that_was_started_again_is_believed_whichever_stream_is_back_first(
    own_stream_first: bool,
) -> None:
    known = Followed("here")

    def overview(started: float) -> None:
        known.take(pb.WatchReply(overview=pb.Overview(jobs=[line()], started=started, version="1")), started)

    def own(step: int) -> None:
        known.jobs["j"].begin()
        roster = pb.Roster(number=1, seats=[pb.Seat(node_id="0", rank=0, state="member")])
        known.take_of("j", pb.WatchReply(roster=roster), 1.0)
        assert [worker.step for worker in known.jobs["j"].workers()] == [0]  # not the figures of before
        columns = pb.Progress(roster=1, job=line(), step=[step])
        columns.silent_s[:] = columns.samples_per_s[:] = columns.loss[:] = [0.0]
        columns.call[:] = columns.sequence[:] = [0]
        columns.done[:] = [False]
        known.take_of("j", pb.WatchReply(progress=columns), 1.0)

    overview(1.0)
    own(7)
    if own_stream_first:
        own(9)
        overview(8.0)
    else:
        overview(8.0)
        own(9)
    assert [worker.step for worker in known.jobs["j"].workers()] == [9]


# ---------------------------------------------------------------- figures over time


def test_a_series_is_bounded_and_keeps_all_of_the_time() -> None:
    series = Series()
    for second in range(20_000):
        series.take(Point(float(second), second, 1.0))
        assert len(series.points) < POINTS_KEPT
    assert series.points[0].time_s == 0.0 and series.points[-1].time_s > 19_800
    apart = [b.time_s - a.time_s for a, b in zip(series.points, series.points[1:], strict=False)]
    assert max(apart) < 200


def test_what_was_before_is_put_in_front() -> None:
    series = Series([Point(10.0, 10, 1.0)])
    series.prepend([Point(5.0, 5, 1.0), Point(11.0, 11, 1.0)])
    assert [point.time_s for point in series.points] == [5.0, 10.0]


def test_step_times_are_those_of_steps_that_ended() -> None:
    series = Series(
        [Point(0.0, 0, 1.0), Point(1.0, 0, 1.0), Point(4.0, 2, 1.0), Point(5.0, 1, 1.0), Point(6.0, 2, 1.0)]
    )
    assert series.step_times() == [(4.0, 2.0), (6.0, 1.0)]


@pytest.mark.parametrize("values", [(1.7e308, -1.7e308), (0.0, 5e-324), (1.0, 1.0000000000000002)])
def test_no_value_that_a_worker_reports_keeps_a_plot_from_being_drawn(values: tuple[float, float]) -> None:
    plot = plots.plot("Loss", [(0.0, 1.0), *((1.0 + at, value) for at, value in enumerate(values))])
    assert plot.summary


def test_a_clock_that_is_put_back_holds_no_figures_up() -> None:
    series = Series()
    for second in (1e6, 1e6 + 1, 10.0, 11.0):
        series.take(Point(second, 1, 1.0))
    assert [point.time_s for point in series.points] == [10.0, 11.0]


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (3.0, 3.0), (0.0, 0.0), (-2.0, 5.0), (1e-5, 3e-5), (99, 101)]
)
def test_ticks_are_round_and_enclose_the_values(low: float, high: float) -> None:
    ticks = plots.nice_ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 2 <= len(ticks) <= 7
    assert all(float(f"{tick:.4g}") == tick for tick in ticks)


def test_a_plot_holds_all_of_the_line_whatever_the_values() -> None:
    plot = plots.plot("Loss", [(float(i), math.inf if i == 7 else 1 / (i + 1)) for i in range(2000)])
    pairs = [tuple(map(float, pair.split())) for pair in plot.path[1:].split("L")]
    assert len(pairs) <= plots.DRAWN + 2
    assert all(0 <= x <= plots.WIDTH and 0 <= y <= plots.HEIGHT for x, y in pairs)
    assert "from 1 to 0.0005" in plot.summary
    assert plots.plot("Loss", []).path == "" and plots.plot("Loss", [(1.0, math.nan)]).path == ""


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.04, "0.0 s"),
        (12, "12 s"),
        (60, "1 min"),
        (185, "3 min 5 s"),
        (7800, "2 h 10 min"),
        (9e4, "1 d 1 h"),
    ],
)
def test_durations_in_words(seconds: float, told: str) -> None:
    assert words.duration(seconds) == told


@pytest.mark.parametrize(
    ("value", "told"), [(None, "–"), (12345, "12,345"), (12.3456, "12.35"), (0.1, "0.1"), (math.nan, "nan")]
)
def test_numbers_in_words(value: float | None, told: str) -> None:
    assert words.number(value) == told


# ---------------------------------------------------------------- time and numbers


def test_the_script_s_own_numbers_have_plots_on_which_changes_of_members_are_marked() -> None:
    made = ObservedJob(line())
    for second in range(11):
        made.take_line(line(step=second + 1, numbers={"accuracy": second / 10, "<b>": 1.0}), 100.0 + second)
    made.events.append(pb.Happening(kind="formed", generation=1, count=3, text="all in", time=100.0))
    made.events.append(pb.Happening(kind="formed", generation=2, count=2, text="rank 2 is lost", time=105.0))
    made.events.append(pb.Happening(kind="formed", generation=3, count=3, text="too late", time=999.0))
    drawn = {each.title: each for each in plots.plots(made.series, made.generations())}
    assert [*drawn][4:] == ["<b>", "accuracy"]
    assert drawn["accuracy"].latest == "1" and drawn["accuracy"].path
    [mark] = drawn["accuracy"].marks
    assert mark.at == (plots.LEFT + plots.WIDTH - plots.RIGHT) / 2
    assert mark.text.endswith(": generation 2, 2 members: rank 2 is lost")


def test_shares_of_the_time_lie_side_by_side_and_fill_the_bar() -> None:
    spent = {"suspended": 1.0, "training": 2.0, "checkpoints": 0.01, "of a newer scheduler": 5.0}
    found = plots.shares(spent)
    assert [(each.cause, each.percent) for each in found] == [
        ("training", "66 %"),
        ("checkpoints", "< 1 %"),
        ("suspended", "33 %"),
    ]
    assert found[0].x == 0.0 and found[-1].x + found[-1].width == pytest.approx(1000, abs=0.2)
    assert plots.shares({}) == []
