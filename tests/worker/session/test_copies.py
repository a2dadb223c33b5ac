"""What heartbeats say of a worker's snapshots and of its last checkpoint."""

from __future__ import annotations

from muster.wire import messages
from muster.worker.session import events
from muster.worker.session.copies import Copies
from tests.worker.session.machine import Machine

REPORT = messages.SnapshotReport(1, -1, 10, complete=True, size_bytes=4096, seconds=0.5, partners=(1,))


def test_who_takes_none_says_nothing() -> None:
    assert (Copies().snapshot(1.0), Copies().checkpoint(1.0)) == (None, None)


def test_the_age_counts_from_when_the_newest_was_taken() -> None:
    copies = Copies()
    copies.note_snapshot(REPORT, 100.0)
    assert copies.snapshot(100.0) == REPORT.replaced(age_s=0.5)
    copies.note_snapshot(REPORT.replaced(agreed=10, taken=-1, complete=False), 104.0)  # the same one counts
    copies.note_snapshot(REPORT.replaced(agreed=10, taken=20, complete=False), 105.0)  # another is under way
    aged = copies.snapshot(110.0)
    assert aged is not None and aged.age_s == 10.5
    copies.note_snapshot(REPORT.replaced(agreed=10, taken=20), 111.0)
    aged = copies.snapshot(112.0)
    assert aged is not None and aged.age_s == 1.5


def test_one_that_is_not_complete_has_no_age() -> None:
    copies = Copies()
    copies.note_snapshot(REPORT.replaced(complete=False), 100.0)
    assert copies.snapshot(110.0) == REPORT.replaced(complete=False)


def test_heartbeats_carry_both() -> None:
    w = Machine().running()
    w.feed(events.SnapshotChanged(REPORT))
    w.feed(events.CheckpointWritten(7, 1000, 2.0))
    w.tick_at_deadline()
    beat = w.message(messages.Heartbeat)
    assert beat.snapshot is not None and beat.snapshot.replaced(age_s=0.0) == REPORT
    assert beat.checkpoint is not None and beat.checkpoint.replaced(age_s=0.0) == messages.CheckpointReport(
        7, 0.0, 1000, 2.0
    )


def test_the_schedulers_word_is_handed_on() -> None:
    w = Machine().running()
    word = messages.SnapshotWord(1, 10, 11)
    w.hear(word)
    assert w.notice(events.SnapshotWordCame).word == word
