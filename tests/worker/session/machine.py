"""A hand-driven membership machine for transcripts: what is fed, and what comes out."""

from __future__ import annotations

from typing import TypeVar

from muster.wire import messages
from muster.worker.session import events
from muster.worker.session.machine import MembershipMachine

HOST = messages.Host("host-id", "alpha", "10.0.0.1")
NotT = TypeVar("NotT")


def profile(node_id: str = "n0", incarnation: int = 7, **changes: object) -> messages.Profile:
    values: dict[str, object] = {
        "job_id": "job",
        "worker_num": 2,
        "worker_min": 0,
        "host": HOST,
        "device": messages.Device(),
        "backend": "tcp",
        **changes,
    }
    return messages.Profile(node_id=node_id, incarnation=incarnation, **values)  # type: ignore[arg-type]


def member(rank: int, node_id: str, incarnation: int) -> messages.Member:
    return messages.Member(
        rank, node_id, incarnation, HOST, messages.Device(), rank, 2, f"10.0.0.1:{5000 + rank}"
    )


def assignment(
    generation: int = 1, rank: int = 0, incarnation: int = 7, **changes: object
) -> messages.Assignment:
    """Two members; this worker is ``n0``, at ``rank`` (-1: not among them)."""
    members = [member(0, "n1", 8), member(1, "n2", 9)]
    if rank >= 0:
        members[rank] = member(rank, "n0", incarnation)
    values: dict[str, object] = {
        "state_source_rank": -1,
        "newcomer_ranks": (),
        "unique_id_count": 1,
        "reason": f"because {generation}",
        **changes,
    }
    return messages.Assignment(generation, rank, tuple(members), **values)  # type: ignore[arg-type]


class Machine:
    """Feeds a machine and keeps the last decision. ``now`` only moves when a test moves it."""

    def __init__(
        self, timing: events.Timing | None = None, jitter: float = 0.5, address: str = "", **changes: object
    ) -> None:
        who = profile(**changes)  # type: ignore[arg-type]
        self.core = MembershipMachine(who, timing or events.Timing(), lambda: jitter, address)
        self.now = 100.0
        self.stream = 0
        self.last = events.Effects()

    def feed(self, event: events.Event) -> events.Effects:
        self.last = self.core.step(event, self.now)
        for notice in self.last.notices:
            if isinstance(notice, events.Connect):
                self.stream = notice.stream
        return self.last

    def hear(self, message: messages.SchedulerMessage) -> events.Effects:
        return self.feed(events.Received(self.stream, message))

    def tick_at_deadline(self) -> events.Effects:
        deadline = self.core.deadline()
        assert deadline is not None
        self.now = max(self.now, deadline)
        return self.feed(events.DeadlineReached())

    def notice(self, kind: type[NotT]) -> NotT:
        found = [notice for notice in self.last.notices if isinstance(notice, kind)]
        assert len(found) == 1, f"{kind.__name__} not once in {self.last}"
        return found[0]

    def message(self, kind: type[NotT]) -> NotT:
        found = [message for message in self.last.messages if isinstance(message, kind)]
        assert len(found) == 1, f"{kind.__name__} not once in {self.last}"
        return found[0]

    # ---- stretches of road that many transcripts share

    def welcomed(self) -> Machine:
        self.feed(events.Started())
        self.feed(events.EntryRequested())
        return self.reconnected()

    def reconnected(self) -> Machine:
        self.feed(events.StreamOpened(self.stream))
        self.hear(messages.Welcome(1.0, 5.0, 60.0))
        return self

    def running(self, generation: int = 1, rank: int = 1) -> Machine:
        self.welcomed()
        self.hear(assignment(generation, rank))
        return self.entered(generation)

    def entered(self, generation: int) -> Machine:
        self.hear(messages.UniqueIds(generation, (b"secret",)))
        self.feed(events.CommunicatorBuilt(generation))
        self.hear(messages.GroupBuilt(generation))
        assert self.core.phase == "running"
        return self
