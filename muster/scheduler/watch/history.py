"""Keeps the latest events: a limited number of each job, and of refusals that belong to no job."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from muster.scheduler.core import records
from muster.wire.log_lines import one_line
from muster.wire.v1 import watch_pb2 as pb

EVENTS_KEPT = 256
"""The most events that are kept of each job's decisions, of each job's workers, and of refusals."""

JOBS_KEPT = 256
MAX_TEXT = 2000
OF_THE_JOB = frozenset(("formed", "stands", "over", "ended", "decided"))
NOBODY = ""
"""The job id of events that belong to no job: refused calls and handshakes."""


class EventHistory:
    """Events in order of their numbers.

    Args:
        wall_clock: returns the time in seconds since 1970.
    """

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._numbers = itertools.count(1)
        self._kept: OrderedDict[str, tuple[deque[pb.Happening], deque[pb.Happening]]] = OrderedDict()
        self.last = 0

    def note(self, kind: str, text: str, code: str, facts: Mapping[str, Any]) -> str:
        """Adds an event of the scheduler's log; returns the id of its job."""
        return self._keep(
            pb.Happening(
                kind=kind,
                code=code,
                text=text if kind == "decided" else one_line(text),
                job_id=str(facts.get("job_id", NOBODY)),
                node_id=str(facts.get("node_id", "")),
                rank=int(facts.get("rank", -1)),
                generation=int(facts.get("generation", 0)),
                host=str(facts.get("host", "")),
                identity=str(facts.get("identity", "")),
                certificate=str(facts.get("certificate", "")),
                peer=str(facts.get("peer", "")),
                count=int(facts.get("count", 0)),
            )
        )

    def record(self, job_id: str, record: records.Record) -> None:
        """Adds a record of a job as an event, if it is about a generation or the job's end."""
        happening = pb.Happening(job_id=job_id, rank=-1)
        if isinstance(record, records.GenerationFormed):
            happening.kind, happening.generation, happening.text = "formed", record.generation, record.reason
            happening.count = len(record.members)
        elif isinstance(record, records.GroupEstablished):
            happening.kind, happening.generation = "stands", record.generation
        elif isinstance(record, records.GenerationEnded):
            happening.kind, happening.generation, happening.text = "over", record.generation, record.reason
        elif isinstance(record, records.JobEnded):
            happening.kind, happening.text = "ended", record.reason
            happening.code = "ok" if record.ok else "failed"
        else:
            return
        self._keep(happening)

    def since(self, number: int, jobs: Iterable[str]) -> list[pb.Happening]:
        """Returns the kept events of these jobs whose numbers are above ``number``, in order."""
        found = [
            each
            for job_id in jobs
            for kept in self._kept.get(job_id, ())
            for each in itertools.takewhile(lambda event: event.number > number, reversed(kept))
        ]
        return sorted(found, key=lambda event: event.number)

    def _keep(self, happening: pb.Happening) -> str:
        happening.number = self.last = next(self._numbers)
        happening.time = self._wall_clock()
        happening.text = happening.text[:MAX_TEXT]
        job_id = happening.job_id
        if job_id not in self._kept:
            if len(self._kept) >= JOBS_KEPT:
                self._kept.popitem(last=False)
            self._kept[job_id] = (deque(maxlen=EVENTS_KEPT), deque(maxlen=EVENTS_KEPT))
        self._kept[job_id][happening.kind in OF_THE_JOB].append(happening)
        return job_id
