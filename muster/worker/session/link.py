"""The state of the link to the scheduler: streams, absences and when to try again."""

from __future__ import annotations

from collections.abc import Callable

from muster.worker.session.events import Timing


class Link:
    """State of the stream to the scheduler. Streams are numbered from 1, and only the newest one counts.

    Attributes:
        stream: number of the newest stream.
        open: whether that stream is established.
        settled: whether the scheduler has welcomed this worker on it.
        away_since: since when there is no settled stream; None while there is one.
        retry_at: when to connect next; None during an attempt or while there is a stream.
        detail: why the last attempt failed.
    """

    def __init__(self, timing: Timing, jitter: Callable[[], float]) -> None:
        self._timing = timing
        self._jitter = jitter
        self.stream = 0
        self.open = False
        self.settled = False
        self.away_since: float | None = None
        self.retry_at: float | None = None
        self.report_at: float | None = None
        self._report_interval_s = 0.0
        self.detail = ""

    def start(self, now: float) -> int:
        """Begins an attempt immediately; returns its stream number."""
        self._note_absence(now)
        self.open = self.settled = False
        self.retry_at = None
        self.stream += 1
        return self.stream

    def opened(self, stream: int) -> bool:
        """Records that a stream is established; returns False if it is not the newest."""
        self.open = stream == self.stream and self.retry_at is None
        return self.open

    def welcomed(self) -> None:
        """Records that the scheduler has answered, which ends earlier trouble."""
        self.settled = True
        self.away_since = self.report_at = None

    def lost(self, stream: int, detail: str, now: float) -> bool:
        """Records the end of a stream or attempt and plans the next one.

        Returns False if it was not the newest stream.
        """
        if stream != self.stream or self.retry_at is not None:
            return False
        away_since = self._note_absence(now)
        self.open = self.settled = False
        self.detail = detail
        timing = self._timing
        pause = max(timing.retry_first_s, timing.retry_share * (now - away_since))
        self.retry_at = now + min(pause, timing.retry_last_s) * (0.5 + self._jitter())
        return True

    def _note_absence(self, now: float) -> float:
        """Records since when the scheduler has been away."""
        if self.away_since is None:
            self.away_since = now
            self._report_interval_s = self._timing.report_first_s
            self.report_at = now + self._report_interval_s
        return self.away_since

    def reported(self, now: float) -> None:
        """Records that a line about the trouble was logged."""
        self._report_interval_s = min(2 * self._report_interval_s, self._timing.report_last_s)
        self.report_at = now + self._report_interval_s

    def put_off(self, now: float) -> None:
        """Records that the scheduler is there, but can neither welcome nor refuse workers at present."""
        if self.away_since is not None:
            self.away_since = now
            self.reported(now)

    def close(self) -> None:
        """Allows no further attempts."""
        self.open = self.settled = False
        self.retry_at = self.report_at = self.away_since = None
        self.stream += 1
