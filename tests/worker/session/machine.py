"""A hand-driven membership machine for transcripts: what is fed, and what comes out."""

from __future__ import annotations

from typing import TypeVar

from muster.wire import messages as m
from muster.worker.session import events as e
from muster.worker.session.machine import MembershipMachine

HOST = m.Host("host-id", "alpha", "10.0.0.1")
NotT = TypeVar("NotT")


def profile(node_id: str = "n0", incarnation: int = 7, **changes: object) -> m.Profile:
    values: dict[str, object] = {
        "job_id": "job",
        "worker_num": 2,
        "worker_min": 0,
        "host": HOST,
        "device": m.Device(),
        "backend": "tcp",
        **changes,
    }
    return m.Profile(node_id=node_id, incarnation=incarnation, **values)  # type: ignore[arg-type]


def member(rank: int, node_id: str, incarnation: int) -> m.Member:
    return m.Member(rank, node_id, incarnation, HOST, m.Device(), rank, 2, f"10.0.0.1:{5000 + rank}")


def assignment(generation: int = 1, rank: int = 0, incarnation: int = 7, **changes: object) -> m.Assignment:
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
    return m.Assignment(generation, rank, tuple(members), **values)  # type: ignore[arg-type]


class Machine:
    """Feeds a machine and keeps the last decision. ``now`` only moves when a test moves it."""

    def __init__(
        self, timing: e.Timing | None = None, jitter: float = 0.5, address: str = "", **changes: object
    ) -> None:
        who = profile(**changes)  # type: ignore[arg-type]
        self.core = MembershipMachine(who, timing or e.Timing(), lambda: jitter, address)
        self.now = 100.0
        self.stream = 0
        self.last = e.Effects()

    def feed(self, event: e.Event) -> e.Effects:
        self.last = self.core.step(event, self.now)
        for notice in self.last.notices:
            if isinstance(notice, e.Connect):
                self.stream = notice.stream
        return self.last

    def hear(self, message: m.SchedulerMessage) -> e.Effects:
        return self.feed(e.Received(self.stream, message))

    def tick_at_deadline(self) -> e.Effects:
        deadline = self.core.deadline()
        assert deadline is not None
        self.now = max(self.now, deadline)
        return self.feed(e.DeadlineReached())

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
        self.feed(e.Started())
        self.feed(e.EntryRequested())
        return self.reconnected()

    def reconnected(self) -> Machine:
        self.feed(e.StreamOpened(self.stream))
        self.hear(m.Welcome(1.0, 5.0, 60.0))
        return self

    def running(self, generation: int = 1, rank: int = 1) -> Machine:
        self.welcomed()
        self.hear(assignment(generation, rank))
        return self.entered(generation)

    def entered(self, generation: int) -> Machine:
        self.hear(m.UniqueIds(generation, (b"secret",)))
        self.feed(e.CommunicatorBuilt(generation))
        self.hear(m.GroupBuilt(generation))
        assert self.core.phase == "running"
        return self
