"""Ranks as threads that keep one another's snapshots over real connections, and a word that stands for the
scheduler's."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from muster.communicators import create_backend
from muster.communicators.membership import Membership, Peer
from muster.wire import messages
from tests.communicators.tcp.world import together
from tests.waiting import LIMIT_S


class Words:
    """Says that a snapshot counts once all members have reported it complete, as the scheduler does."""

    def __init__(self, generation: int, size: int) -> None:
        self.generation, self.size = generation, size
        self.word: messages.SnapshotWord | None = None
        self._reports: dict[int, messages.SnapshotReport] = {}
        self._changed = threading.Condition()

    def report(self, rank: int, report: messages.SnapshotReport) -> None:
        with self._changed:
            if report.generation != self.generation:
                return
            self._reports[rank] = report
            taken = {each.taken for each in self._reports.values() if each.complete}
            whole = len(self._reports) == self.size and all(r.complete for r in self._reports.values())
            if whole and len(taken) == 1:
                (step,) = taken
                latest = max([step, *(each.passed for each in self._reports.values())])
                self.word = messages.SnapshotWord(self.generation, step, latest + 1)
                self._changed.notify_all()

    def wait(self, step: int) -> None:
        """Waits until the snapshot of this step counts."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: self.word is not None and self.word.complete >= step, LIMIT_S
            )
            assert done, (step, self.word, self._reports)


class RankSession:
    """What Snapshots, and states that share themselves, need of a session."""

    state_source_rank: int
    newcomer_ranks: tuple[int, ...]

    def __init__(self, communicator: Any, members: tuple[messages.Member, ...], words: Words) -> None:
        self.communicator, self.members, self.words = communicator, members, words
        self.state_source_rank, self.newcomer_ranks = -1, ()
        self.launch = 7
        self.checkpoints: list[tuple[int, int]] = []

    @property
    def rank(self) -> int:
        return int(self.communicator.rank)

    @property
    def snapshot_word(self) -> messages.SnapshotWord | None:
        return self.words.word

    def busy(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def report_checkpoint(self, step: int, *, size_bytes: int, seconds: float) -> None:
        self.checkpoints.append((step, size_bytes))

    def report_snapshot(self, report: messages.SnapshotReport) -> None:
        self.words.report(self.rank, report)


class Process:
    """One worker that outlives generations."""

    def __init__(self, number: int, host: str) -> None:
        self.number, self.host = number, host
        self.backend = create_backend("tcp", tls=None, job_id="job")
        self.address = self.backend.open_endpoint("127.0.0.1")
        self.session: RankSession | None = None
        self.worker: Any = None

    def kill(self) -> None:
        """Ends it, with all that it held."""
        if self.worker is not None:
            self.worker.snapshots.close()
        if self.session is not None:
            self.session.communicator.close()
        self.backend.close()


class Job:
    """Processes, and the generations that they form."""

    def __init__(self) -> None:
        self.generation = 0
        self.processes: list[Process] = []
        self._count = 0

    def start(self, host: str) -> Process:
        self._count += 1
        return Process(self._count, host)

    def form(self, processes: Sequence[Process], body: Callable[[Process], Any]) -> list[Any]:
        """Forms a generation and runs ``body`` on all its ranks at once; returns what each returned."""
        for process in self.processes:
            if process.session is not None:
                process.session.communicator.close()
        self.generation += 1
        self.processes = list(processes)
        words = Words(self.generation, len(processes))
        ids = processes[0].backend.mint_unique_ids(1)
        peers, members = [], []
        for rank, each in enumerate(processes):
            host = messages.Host(each.host, each.host, "127.0.0.1")
            peers.append(Peer(rank, f"n{each.number}", each.number, each.host, each.host, each.address))
            members.append(
                messages.Member(rank, f"n{each.number}", each.number, host, messages.Device(), 0, 1)
            )

        def run(rank: int, process: Process) -> Any:
            membership = Membership("job", self.generation, "world", rank, tuple(peers), ids)
            communicator = process.backend.connect(membership, timeout_s=LIMIT_S, cancelled=lambda: None)
            process.session = RankSession(communicator, tuple(members), words)
            return body(process)

        results = together(
            [lambda rank=r, process=p: run(rank, process) for r, p in enumerate(processes)]  # type: ignore[misc]
        )
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def close(self) -> None:
        for process in self.processes:
            process.kill()


def settle(process: Process, step: int) -> None:
    """Waits until the snapshot of this step counts, as this rank hears."""
    assert process.session is not None
    process.session.words.wait(step)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
