"""Which snapshot in the workers' memory counts: the newest that every member keeps, here and at its partners.

Each member's heartbeats say what it keeps (``SnapshotReport``); what follows goes to all members when it
changes (``SnapshotWord``). A member drops what counts only after it has heard that a newer one does, so that
nothing here is journaled: after a restart all is learned again from the members, none of which can have
dropped what counted before.

The newest that all have is not the minimum of what each has: one that heard too late lets a step pass that
others take. So the step at which all take the next one is named here. It is beyond all that are known of, and
by more the more often some member has missed it.

What a member says falsely can at most keep newer snapshots from counting, or let one count of which it does
not keep its own part: a step counts only if all others have said, each for itself, that they keep it, and
while somebody claims to know that one counts that is not seen to, no other lapses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from muster.wire import messages

MOST_STEPS_AHEAD = 65_536
"""By how much the named step is beyond all known ones at most."""

LAST_STEP = 2**63 - 1


class SnapshotAgreement:
    """What the members of one generation say of their snapshots, and what follows.

    Args:
        generation: its number.
        members: node ids of its members.

    Attributes:
        word: what the members have been told; None: nothing yet.
        taken_at: when the one that counts was taken, as the member says by whose word it came to count.
    """

    def __init__(self, generation: int = 0, members: Iterable[str] = ()) -> None:
        self.word: messages.SnapshotWord | None = None
        self.taken_at = 0.0
        self._generation = generation
        self._members = frozenset(members)
        self._reports: dict[str, messages.SnapshotReport] = {}
        self._steps: dict[str, int] = {}
        self._held: Counter[int] = Counter()  # by how many each is kept
        self._known: Counter[int] = Counter()  # by how many each is known to count
        self._taken: Counter[int] = Counter()
        self._behind: set[str] = set()  # who has let the named step pass
        self._ahead = 1

    def word_for(self, node_id: str) -> messages.SnapshotWord | None:
        """What this member is to be told on a new stream; None: nothing, or it takes no snapshots."""
        return self.word if node_id in self._reports else None

    def hear(self, node_id: str, report: messages.SnapshotReport, step: int) -> messages.SnapshotWord | None:
        """Takes in what a worker says it keeps.

        Args:
            node_id: the worker.
            report: what it says.
            step: the steps that it has finished.

        Returns:
            What all members are to be told, if that has changed.
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
        """Says what counts now, and names the next step where all have one, or some have missed it."""
        newest = max((step for step, by in self._held.items() if by == len(self._members)), default=-1)
        if newest > self._complete:
            self._ahead = max(1, self._ahead // 2)
            # Who has taken a newer one was told to, by this scheduler or one before: it may become complete.
            under_way = any(step > newest for step in self._taken)
            self._tell(newest, newest + 1 if under_way else self._beyond())
        if self._has_lapsed():
            self._ahead = min(2 * self._ahead, MOST_STEPS_AHEAD)
            self._tell(self._complete, self._beyond())

    def _has_lapsed(self) -> bool:
        """Whether what is under way can never be complete everywhere."""
        if max(self._known) > self._complete:
            return False  # told by a scheduler before this one, or falsely: nobody may drop anything for now
        if self._behind:
            return True
        return sum(step >= self._next for step in self._taken) > 1

    def _beyond(self) -> int:
        """A step that nobody is known to have come to."""
        furthest = max(self._steps.values())
        passed = max(report.passed for report in self._reports.values())
        return min(max(furthest, passed, max(self._taken)) + self._ahead, LAST_STEP)

    def _tell(self, complete: int, following: int) -> None:
        self.word = messages.SnapshotWord(self._generation, complete, following)
        for node_id in self._reports:
            self._look_behind(node_id)


def _said(report: messages.SnapshotReport) -> tuple[int, int, bool, int]:
    return report.agreed, report.taken, report.complete, report.passed
