"""Collectives among workers: all members of a generation meet, or hang."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

Key = tuple[object, ...]


class DataPlane:
    """Who waits for whom. A meeting is (kind, generation, what else must agree)."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.meetings: dict[Key, list[Worker]] = {}

    def enter(self, worker: Worker, key: Key) -> None:
        """A worker calls a collective; it completes once all members of the generation have."""
        assert worker.place is not None
        present = self.meetings.setdefault(key, [])
        present.append(worker)
        if len(present) < len(worker.place.members):
            return
        del self.meetings[key]
        if key[0] == "sync":
            self._share_state(present)
        duration = self.world.scenario.step_s if key[0] == "step" else 0.02
        for member in present:
            self.world.loop.after(duration + self.world.rng.random() * 0.02, member.met, key)

    def leave(self, worker: Worker) -> None:
        """The worker aborts, or dies: its peers may notice, or hang."""
        key, place = worker.waiting_for, worker.place
        worker.waiting_for = None
        if key in self.meetings and worker in self.meetings[key]:
            self.meetings[key].remove(worker)
        if place is None:
            return
        for other_key, present in self.meetings.items():
            if other_key[1] != place.generation:
                continue
            for peer in present:
                if self.world.rng.random() < self.world.scenario.peers_notice:
                    self.world.loop.after(0.02, peer.collective_fails, other_key, max(place.rank, 0))

    def _share_state(self, present: list[Worker]) -> None:
        """Newcomers take the state of the member that is furthest; without any state all start anew."""
        holders = [worker for worker in present if worker.has_state] or present
        furthest = max(worker.step for worker in holders)
        for worker in present:
            worker.step = furthest
