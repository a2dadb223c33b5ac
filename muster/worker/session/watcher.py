"""Watches how long the training thread has waited for its peers, and probes them when asked.

It reads a few numbers once a second and does not slow down steps. A late collective is reported to the
scheduler, which asks all members to probe each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from muster.worker.session import events
from muster.worker.session.pace import Pace
from muster.worker.session.threads import LOOK_S, Loop, Threads

log = logging.getLogger("muster.worker")

TICK_S = 0.1

STOOD_STILL_S = 1.0
"""If a thread has not run for this many seconds, it or its machine must have been stopped."""

TRIES = 3
"""How often probes are tried if this process was paused; after that, it sends no answer."""


ProbeAll = Callable[[dict[str, str]], dict[str, str]]
"""Given addresses by node id, returns why some of those workers cannot be reached."""


class WatchedThread(Protocol):
    """The part of a :class:`~muster.worker.session.training_thread.TrainingThread` that the watcher uses."""

    @property
    def busy(self) -> str:
        """What the thread does alone, in words; empty if nothing."""

    def late_s(self) -> float:
        """Returns for how long the thread has waited for other members, in seconds; 0 if it does not wait."""

    def waits(self) -> bool:
        """Whether the thread is blocked until other members act."""


class Informed(Protocol):
    """The part of a :class:`~muster.worker.session.client.Client` that the watcher uses."""

    @property
    def news_of_members(self) -> object:
        """A value that changes with the members, with a new group, and when the scheduler cannot decide.

        If it changed during a wait, the length of that wait says nothing about the pace of the steps.
        """

    def post(self, event: events.Event) -> object:
        """Passes an event to the membership machine."""


class Watcher:
    """Reports late collectives of one worker, and probes others when asked.

    Args:
        pace: how long collectives may take.
        training: the state of the training thread.
        client: gets the results.
        prober: given addresses by node id, returns why some of those workers cannot be reached.
        threads: starts threads.
    """

    def __init__(
        self,
        pace: Pace,
        training: WatchedThread,
        client: Informed,
        prober: ProbeAll,
        threads: Threads,
    ) -> None:
        self._pace = pace
        self._training = training
        self._client = client
        self._prober = prober
        self._late_s = 0.0
        self._late_in: object = None
        self._threads = threads
        self._loop: Loop | None = None
        self._look_at = 0.0

    def start(self) -> None:
        """Starts the thread."""
        self._look_at = self._threads.now() + LOOK_S
        self._loop = self._threads.loop("muster-watcher", self._look_again, self._answer)

    def ask(self, wanted: events.ProbeWanted) -> None:
        """Starts probing some workers; can be called from any thread, and returns immediately."""
        if self._loop is not None:
            self._loop.put(wanted)

    def close(self) -> None:
        """Ends the thread; a thread that is probing ends by itself."""
        if self._loop is not None:
            self._loop.close()

    def _look_again(self) -> float:
        now = self._threads.now()
        if now >= self._look_at:
            self.look()
            self._look_at = now + LOOK_S
        return self._look_at - now

    def look(self) -> None:
        """Reports to the machine if the training thread has waited for too long."""
        news = self._client.news_of_members  # Read first, because the wait may end in between.
        late_s = self._training.late_s()
        if late_s > self._pace.limit_s:
            self._late_s, self._late_in = late_s, news
            self._client.post(events.PeersLate(late_s))
        elif self._late_s:
            if self._late_in == self._client.news_of_members:
                self._pace.note_wait(self._late_s)
            self._late_s = 0.0

    def _answer(self, wanted: events.ProbeWanted) -> None:
        targets = dict(wanted.targets)
        for _ in range(TRIES):
            unreached, seconds, stood_still = self._probe(targets)
            if unreached is None:
                return
            if not (stood_still and unreached):
                training = self._training
                late = training.late_s() > self._pace.limit_s
                failed = tuple(unreached.items())
                done = events.ProbesDone(wanted.round, failed, late, training.waits(), training.busy, seconds)
                self._client.post(done)
                return
            # After a pause, ``seconds`` would not say when a probe failed, so the failed ones are repeated.
            targets = {node_id: targets[node_id] for node_id in unreached}

    def _probe(self, targets: dict[str, str]) -> tuple[dict[str, str] | None, float, bool]:
        """Probes once; returns failures by node id, seconds taken, and whether this process was paused."""
        clock, found = self._threads.now, self._threads.queue()
        self._threads.start("muster-probes", lambda: self._try(targets, found))
        began = lived_since = seen_at = clock()
        while True:
            try:
                unreached = found.get(timeout=TICK_S)
                break
            except Empty:
                pass
            finally:
                now = clock()
                lived_since = now if now > seen_at + STOOD_STILL_S else lived_since
                seen_at = now
        return unreached, clock() - lived_since, lived_since > began

    def _try(self, targets: dict[str, str], found: SimpleQueue[Any]) -> None:
        try:
            found.put(self._prober(dict(targets)))
        except Exception:
            log.exception("Fault while probing the other workers.")
            found.put(None)
