"""Launchers that tell the one that leads which of their workers have ended; and words that are not true."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from muster.scheduler.core import events

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

LAUNCHED = 0.5
"""The share of seeds whose workers run under launchers."""

FORGED = 0.3
"""The share of seeds in which somebody says what is not so."""

AGAIN_S = 0.25
BEGINS_S = (0.2, 0.8)
"""How long it takes until the word is said for the first time."""

SAID = "its launcher says"
"""In the reason of who is lost for such a word."""


class Launchers:
    """Those of one world; their random numbers are their own, so that other seeds play as they did.

    Attributes:
        there: workers run under launchers.
        waiting: who has ended, and of whom it is still said.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"launchers {world.seed}")
        self.there = self._rng.random() < LAUNCHED
        self.waiting: set[tuple[str, int]] = set()
        self._forges = False

    def begin(self) -> None:
        """Puts the words of forgers on the queue."""
        self._forges = self._rng.random() < FORGED
        if self._forges:
            for _ in range(self._rng.randint(1, 6)):
                at = self._rng.uniform(1.0, self._world.scenario.fault_end + 5.0)
                self._world.loop.at(at, self._forge)

    def led(self) -> None:
        """Another scheduler leads, and not all workers are back."""
        if self._forges:
            for _ in range(8):
                self._world.loop.after(self._rng.uniform(0.0, 1.5), self._forge)

    def collect(self, worker: Worker) -> None:
        """A process has ended without a word of its own."""
        if self.there:
            self.waiting.add((worker.node_id, worker.incarnation))
            self._world.loop.after(
                self._rng.uniform(*BEGINS_S), self._say, worker.node_id, worker.incarnation
            )

    def _say(self, node_id: str, incarnation: int) -> None:
        world = self._world
        over = world.judge.outcome is not None or world.judge.claims.get(node_id) != incarnation
        if over and incarnation in world.judge.admitted.get(node_id, ()):  # which is durable
            self.waiting.discard((node_id, incarnation))
            return
        self._arrive(events.ProcessEnded(node_id, incarnation, "was killed by SIGKILL"))
        world.loop.after(AGAIN_S, self._say, node_id, incarnation)

    def _arrive(self, event: events.ProcessEnded) -> None:
        scheduler, now = self._world.scheduler.leading, self._world.loop.now
        if (
            scheduler is not None
            and scheduler.up
            and now >= max(scheduler.paused_until, scheduler.deaf_until)
        ):
            scheduler.feed(event)

    def _forge(self) -> None:
        """Of an older incarnation than there is, or of a worker that is heard."""
        world, rng = self._world, self._rng
        living = world.living()
        if not living or world.judge.outcome is not None:
            return
        worker = rng.choice(living)
        # A twin that looks for the scheduler just now is not older: a word for it counts, true or not.
        twins = {w.incarnation for w in living if w.node_id == worker.node_id and not self._is_heard(w)}
        older = sorted(world.judge.admitted.get(worker.node_id, set()) - {worker.incarnation} - twins)
        stale = not self._is_heard(worker) or rng.random() < 0.5
        incarnation = rng.choice([*older, worker.incarnation ^ 2]) if stale else worker.incarnation
        world.note(f"!! a forger says that {worker.node_id}#{incarnation} has ended")
        self._arrive(events.ProcessEnded(worker.node_id, incarnation, "was killed by SIGKILL"))

    def _is_heard(self, worker: Worker) -> bool:
        """Whether the one that leads has taken in its Join, and not seen the end of that stream."""
        stream, scheduler = worker.stream, self._world.scheduler.leading
        if stream is None or scheduler is not stream.scheduler or stream.session not in scheduler.streams:
            return False
        return scheduler.up and self._world.judge.identity.get(stream.session) is not None
