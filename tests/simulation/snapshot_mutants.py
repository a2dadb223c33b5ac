"""Planted bugs in the rules of snapshots: ``python -m tests.simulation --snapshots --mutants``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from muster.scheduler.core.snapshots import SnapshotAgreement
from muster.training.snapshots import partners, restoration
from muster.training.snapshots.parts import PartKey, SnapshotId
from muster.training.snapshots.restoration import PartsMissing, Restoration
from muster.training.snapshots.retention import Retention, RetentionChange
from muster.wire import messages
from tests.simulation.mutants import Mutant, instead


def counts_what_is_complete_here(right: Any) -> Any:
    def at_step(self: Retention, step: int, word: messages.SnapshotWord | None) -> RetentionChange:
        own = self.report()
        if own.complete and own.taken >= 0:
            word = messages.SnapshotWord(own.generation, own.taken, own.taken + 1)
        done: RetentionChange = right(self, step, word)
        return done

    return at_step


def counts_what_somebody_has(self: SnapshotAgreement) -> None:
    newest = max(self._held, default=-1)
    if newest > self._complete:
        self._tell(newest, self._beyond())


def counts_the_least_newest(right: Any) -> Any:
    def conclude(self: SnapshotAgreement) -> None:
        newest = min(report.newest for report in self._reports.values())
        if newest > self._complete:
            self._tell(newest, newest + 1)

    return conclude


def counts_what_those_have_that_told(right: Any) -> Any:
    def hear(self: SnapshotAgreement, node_id: str, report: messages.SnapshotReport, step: int) -> Any:
        self._members = frozenset((*self._reports, node_id)) if node_id in self._members else self._members
        return right(self, node_id, report, step)

    return hear


def takes_one_more(right: Any) -> Any:
    def at_step(self: Retention, step: int, word: messages.SnapshotWord | None) -> RetentionChange:
        if step % self.every == 0 and step > self._first:
            return RetentionChange(self._take(step), self._hear(word))
        done: RetentionChange = right(self, step, word)
        return done

    return at_step


def says_complete_at_once(right: Any) -> Any:
    def report(self: Retention) -> messages.SnapshotReport:
        own: messages.SnapshotReport = right(self)
        return own.replaced(complete=own.taken >= 0)

    return report


def hears_words_of_any_generation(right: Any) -> Any:
    def hear(self: Retention, word: messages.SnapshotWord | None) -> Any:
        return right(self, None if word is None else word.replaced(generation=self._generation))

    return hear


def keeps_all_of_others(right: Any) -> Any:
    def accept(self: Retention, part: PartKey, agreed: SnapshotId | None) -> RetentionChange:
        self._kept.add(part)
        return RetentionChange()

    return accept


def drops_what_counts_with_the_generation(right: Any) -> Any:
    return lambda self, generation, **more: right(self, generation, **{**more, "keep": None})


def keeps_what_it_goes_back_to(right: Any) -> Any:
    def decide(*arguments: Any) -> Restoration | PartsMissing:
        decision = right(*arguments)
        if isinstance(decision, PartsMissing):
            return decision
        snapshot, size, needs, handings, _ = decision
        return Restoration(snapshot, size, needs, handings, keep=snapshot)

    return decide


def goes_back_to_what_counted_first(right: Any) -> Any:
    """Of the snapshots that are found, the oldest."""

    def decide(told: Sequence[restoration.Told], *needs: Any) -> Any:
        decision = right(told, *needs)
        snapshots = sorted({holding.part.snapshot for each in told for holding in each.holdings})
        for oldest in snapshots:
            less = [
                restoration.Told(each.agreed, tuple(x for x in each.holdings if x.part.snapshot == oldest))
                for each in told
            ]
            if isinstance(other := right(less, *needs), Restoration):
                return other
        return decision

    return decide


def any_copy_is_good(copies: Any) -> tuple[int, ...]:
    return tuple(rank for rank, _ in copies)


def trusts_what_it_received(copies: Any) -> tuple[int, ...]:
    """Compares what was announced, and never what lies in memory."""
    copies = list(copies)
    return tuple(rank for rank, holding in copies if holding.announced == copies[0][1].announced)


def on_the_same_host(right: Any) -> Any:
    def choose(members: Sequence[messages.Member], copies: int = 1) -> Any:
        hosts = [member.host.id for member in members]
        mates = [
            [r for r, host in enumerate(hosts) if host == own and r != me] for me, own in enumerate(hosts)
        ]
        chosen = right(members, copies)
        return tuple(tuple(near[:1]) or far for near, far in zip(mates, chosen, strict=True))

    return choose


SNAPSHOT_MUTANTS: dict[str, Mutant] = {
    "what is complete here counts": Mutant(Retention, "at_step", counts_what_is_complete_here),
    "what somebody has counts": Mutant(SnapshotAgreement, "_conclude", instead(counts_what_somebody_has)),
    "the least of the newest counts": Mutant(SnapshotAgreement, "_conclude", counts_the_least_newest, 4),
    "who has not told yet is not asked": Mutant(SnapshotAgreement, "hear", counts_what_those_have_that_told),
    "what is missed does not lapse": Mutant(SnapshotAgreement, "_has_lapsed", instead(lambda self: False), 4),
    "one more is taken": Mutant(Retention, "at_step", takes_one_more),
    "it is complete as soon as it is taken": Mutant(Retention, "report", says_complete_at_once),
    "words of generations before are heard": Mutant(Retention, "_hear", hears_words_of_any_generation),
    "all of others is kept": Mutant(Retention, "accept", keeps_all_of_others),
    "what counts goes with its generation": Mutant(
        Retention, "enter", drops_what_counts_with_the_generation, 10),
    "what all go back to is kept instead": Mutant(
        restoration, "decide", keeps_what_it_goes_back_to, 231),
    "back to the oldest": Mutant(restoration, "decide", goes_back_to_what_counted_first),
    "checksums are not compared": Mutant(restoration, "_good", instead(any_copy_is_good), 19),
    "what was received is not checked": Mutant(restoration, "_good", instead(trusts_what_it_received), 19),
    "partners on the same host": Mutant(partners, "partners", on_the_same_host, 5),
}  # fmt: skip
