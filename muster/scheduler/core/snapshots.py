"""Agreement on the snapshot in the workers' memory that counts: the newest that all members keep.

Each member's heartbeats report what it keeps (``SnapshotReport``). The result is sent to all members when it
changes (``SnapshotWord``). A member drops the snapshot that counts only after it has heard that a newer one
counts. So nothing here is journaled: after a restart, the members report everything again, and none of them
can have dropped the snapshot that counted before.

The newest snapshot that all have is not the minimum of each member's newest snapshot: a member that hears
too late misses a step at which others take one. So the step of the next snapshot is chosen here. It is later
than all known steps, and the distance grows each time some member has missed it.

A member that reports falsely can do two things at most: keep newer snapshots from counting, or make a
snapshot count although it does not keep its own part. A snapshot counts only if each of the others has
reported that it keeps it. While a member claims that a snapshot counts and the reports do not confirm this,
no other snapshot is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from muster.wire import messages

MOST_STEPS_AHEAD = 65_536
"""The largest distance of the chosen step from all known steps."""

LAST_STEP = 2**63 - 1


class SnapshotAgreement:
    """Decides from the reports of a generation's members which snapshot counts, and the step of the next.

    Args:
        generation: its number.
        members: node ids of its members.

    Attributes:
        word: the last word that was sent to the members; None if none was sent yet.
        taken_at: when the snapshot that counts was taken, according to the member whose report made it count.
    """

    def __init__(self, generation: int = 0, members: Iterable[str] = ()) -> None:
        self.word: messages.SnapshotWord | None = None
        self.taken_at = 0.0
        self._generation = generation
        self._members = frozenset(members)
        self._reports: dict[str, messages.SnapshotReport] = {}
        self._steps: dict[str, int] = {}
        self._held: Counter[int] = Counter()  # For each step, how many members keep the snapshot.
        # For each step, how many members know that the snapshot counts.
        self._known: Counter[int] = Counter()
        self._taken: Counter[int] = Counter()
        self._behind: set[str] = set()  # Members that have missed the chosen step.
        self._ahead = 1

    def word_for(self, node_id: str) -> messages.SnapshotWord | None:
        """Returns the word to send to a member on a new stream.

        None if there is nothing to send, or the member takes no snapshots.
        """
        return self.word if node_id in self._reports else None

    def hear(self, node_id: str, report: messages.SnapshotReport, step: int) -> messages.SnapshotWord | None:
        """Handles a member's report on the snapshots that it keeps.

        Args:
            node_id: the worker.
            report: its report.
            step: the steps that it has finished.

        Returns:
            The word to send to all members if it has changed; None otherwise.
        """
        if report.generation != self._generation or node_id not in self._members:
            return None
        self._steps[node_id] = step
        last = self._reports.get(node_id)
        if last is not None and _said(last) == _said(report):
            return None
        if last is not None:
            self._count(last, -1)
        self._reports[node_id] = report
        self._count(report, 1)
        self._look_behind(node_id)
        before = self.word
        if len(self._reports) == len(self._members):
            self._conclude()
        return self.word if self.word != before else None

    def _count(self, report: messages.SnapshotReport, by: int) -> None:
        kept = {step for step in (report.agreed, report.taken) if report.holds(step)}
        for counter, steps in (
            (self._held, kept),
            (self._known, {report.agreed}),
            (self._taken, {report.taken}),
        ):
            for step in steps:
                counter[step] += by
                if not counter[step]:
                    del counter[step]

    @property
    def _next(self) -> int:
        return self.word.next if self.word is not None else 0

    @property
    def _complete(self) -> int:
        return self.word.complete if self.word is not None else -1

    def _look_behind(self, node_id: str) -> None:
        report = self._reports[node_id]
        if report.taken < self._next <= report.passed:
            self._behind.add(node_id)
        else:
            self._behind.discard(node_id)

    def _conclude(self) -> None:
        """Computes which snapshot counts; chooses the next step once all have one or some have missed it."""
        newest = max((step for step, by in self._held.items() if by == len(self._members)), default=-1)
        if newest > self._complete:
            self._ahead = max(1, self._ahead // 2)
            # A member takes a snapshot only if this scheduler or an earlier one has told all to do so, so a
            # newer snapshot may still become complete.
            under_way = any(step > newest for step in self._taken)
            self._tell(newest, newest + 1 if under_way else self._beyond())
        if self._has_lapsed():
            self._ahead = min(2 * self._ahead, MOST_STEPS_AHEAD)
            self._tell(self._complete, self._beyond())

    def _has_lapsed(self) -> bool:
        """Whether the snapshot in progress can never become complete everywhere."""
        if max(self._known) > self._complete:
            # Told by an earlier scheduler, or reported falsely: no member may drop anything for now.
            return False
        if self._behind:
            return True
        return sum(step >= self._next for step in self._taken) > 1

    def _beyond(self) -> int:
        """A step that no member is known to have reached."""
        furthest = max(self._steps.values())
        passed = max(report.passed for report in self._reports.values())
        return min(max(furthest, passed, max(self._taken)) + self._ahead, LAST_STEP)

    def _tell(self, complete: int, following: int) -> None:
        self.word = messages.SnapshotWord(self._generation, complete, following)
        for node_id in self._reports:
            self._look_behind(node_id)


def _said(report: messages.SnapshotReport) -> tuple[int, int, bool, int]:
    return report.agreed, report.taken, report.complete, report.passed
