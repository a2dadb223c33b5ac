"""Records a worker's steps and changes of members for the recovery benchmark."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from muster.errors import MembershipChanged
from muster.training.loop import ElasticLoop, Step

RECORD_VARIABLE = "MUSTER_BENCH_RECORD"
PACE_VARIABLE = "MUSTER_BENCH_PACE"


class EventFile:
    """Appends events to a file; times are those of the host's monotonic clock, the same in all processes."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, what: str, **facts: Any) -> None:
        """Writes one event."""
        line = json.dumps({"t": time.monotonic(), "what": what, **facts}) + "\n"
        os.write(self._file, line.encode())


class RecordingLoop(ElasticLoop):
    """An elastic loop that records its steps and changes of members; a file can slow it down."""

    def __init__(self, session: Any, state: Any, **options: Any) -> None:
        super().__init__(session, state, **options)
        self.record = EventFile(os.environ[RECORD_VARIABLE])
        self.facts: dict[str, Any] = {}
        pace = os.environ.get(PACE_VARIABLE, "")
        self._pace = Path(pace) if pace else None
        self.record.note("joined", pid=os.getpid(), **self._place())

    def _place(self) -> dict[str, int]:
        session: Any = self.session
        return {
            "generation": session.generation,
            "rank": session.rank,
            "world": session.world_size,
            "step": self.state.step,
        }

    def _begin(self) -> None:
        if self._pace is not None:
            try:
                time.sleep(float(self._pace.read_text() or 0))
            except FileNotFoundError:
                self._pace = None
        super()._begin()

    def _finish(self, step: Step) -> None:
        super()._finish(step)
        self.record.note("step", **self._place(), **self.facts)

    def _recover(self, change: BaseException | None) -> None:
        self.record.note("interrupted", step=self.state.step)
        super()._recover(change)

    def _rejoin(self) -> None:
        super()._rejoin()
        if not (self.left or self._closed):
            self.record.note("rejoined", **self._place())

    def _share(self) -> None:
        try:
            super()._share()
        except MembershipChanged:
            self.record.note("broken again")
            raise
        self.record.note("shared", **self._place())
