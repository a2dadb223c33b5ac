"""A worker's last reports on the copies of its state in peers' memory and on disk."""

from __future__ import annotations

from muster.wire import messages
from muster.worker.session import events


class Copies:
    """The last report on snapshots and the last checkpoint, with their ages."""

    def __init__(self) -> None:
        self._report: messages.SnapshotReport | None = None
        self._complete_at = 0.0
        self._written: events.CheckpointWritten | None = None
        self._written_at = 0.0

    def note_snapshot(self, report: messages.SnapshotReport, now: float) -> None:
        """Records a new report on snapshots."""
        last = self._report
        if last is None or (last.generation, last.newest) != (report.generation, report.newest):
            self._complete_at = now
        self._report = report

    def note_checkpoint(self, written: events.CheckpointWritten, now: float) -> None:
        """Records a checkpoint that has just been written."""
        self._written, self._written_at = written, now

    def snapshot(self, now: float) -> messages.SnapshotReport | None:
        """Returns the report on snapshots for heartbeats; None if this worker takes none."""
        if self._report is None or self._report.newest < 0:
            return self._report
        return self._report.replaced(age_s=now - self._complete_at + self._report.seconds)

    def checkpoint(self, now: float) -> messages.CheckpointReport | None:
        """Returns the report on checkpoints for heartbeats; None if this worker has written none."""
        written = self._written
        if written is None:
            return None
        return messages.CheckpointReport(
            written.step, now - self._written_at, written.size_bytes, written.seconds
        )
