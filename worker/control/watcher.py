"""A thread that watches how long the training thread has waited for its peers, and probes them when asked.

It looks at a few numbers once a second; nothing of it stands in the way of a step. That something is late
goes to the scheduler, which asks all members to probe each other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from muster.worker.control import events as e
from muster.worker.control.pace import Pace

log = logging.getLogger("muster.worker")

LOOK_S = 1.0
JOIN_TIMEOUT_S = 1.0
TICK_S = 0.1

STOOD_STILL_S = 1.0
"""A thread that is not run for so long was stopped, or its machine was: others have probed it in vain."""


class Watcher:
    """Watches over the waits of one worker.

    Args:
        pace: how long they may take.
        hanging_s: for how long the training thread has waited for something that others must do, in seconds;
            0: it does not wait.
        waits: whether the training thread can do nothing without others.
        busy: what it does alone; empty: nothing.
        probe_all: takes addresses by node id, returns why some cannot be reached.
        post: feeds the membership machine.
    """

    def __init__(
        self,
        pace: Pace,
        *,
        hanging_s: Callable[[], float],
        waits: Callable[[], bool],
        busy: Callable[[], str],
        probe_all: Callable[[dict[str, str]], dict[str, str]],
        post: Callable[[e.Event], object],
    ) -> None:
        self._pace = pace
        self._hanging_s = hanging_s
        self._waits = waits
        self._busy = busy
        self._probe_all = probe_all
        self._post = post
        self._late_s = 0.0
        self._requests: SimpleQueue[e.ProbeWanted | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="muster-watcher", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def ask(self, wanted: e.ProbeWanted) -> None:
        """Has some workers probed; callable from any thread, returns at once."""
        self._requests.put(wanted)

    def close(self) -> None:
        """Ends the thread; one that probes ends by itself."""
        self._requests.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            try:
                wanted = self._requests.get(timeout=LOOK_S)
            except Empty:
                self.look()
                continue
            if wanted is None:
                return
            self._answer(wanted)

    def look(self) -> None:
        """Tells the machine if what is waited for is late."""
        hanging_s = self._hanging_s()
        if hanging_s > self._pace.limit_s:
            self._late_s = hanging_s
            self._post(e.PeersLate(hanging_s))
        elif self._late_s:
            self._pace.note_wait(self._late_s)
            self._late_s = 0.0

    def _answer(self, wanted: e.ProbeWanted) -> None:
        found: SimpleQueue[dict[str, str] | None] = SimpleQueue()
        threading.Thread(target=self._try, args=(wanted, found), name="muster-probes", daemon=True).start()
        lived_since = seen_at = time.monotonic()
        while True:
            try:
                unreached = found.get(timeout=TICK_S)
                break
            except Empty:
                pass
            finally:
                now = time.monotonic()
                lived_since = now if now > seen_at + STOOD_STILL_S else lived_since
                seen_at = now
        if unreached is None:
            return
        late = self._hanging_s() > self._pace.limit_s
        done = e.ProbesDone(
            wanted.round,
            tuple(unreached.items()),
            late,
            self._waits(),
            self._busy(),
            time.monotonic() - lived_since,
        )
        self._post(done)

    def _try(self, wanted: e.ProbeWanted, found: SimpleQueue[dict[str, str] | None]) -> None:
        try:
            found.put(self._probe_all(dict(wanted.targets)))
        except Exception:
            log.exception("Fault while probing the other workers.")
            found.put(None)
