"""Collectives among workers: all members of a generation meet, or hang."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

Key = tuple[object, ...]


@dataclass(frozen=True)
class Lie:
    """For a while one worker says that it does not reach another (``accuses``), or refuses its probes."""

    liar: str
    victim: str
    begun: float
    until: float
    accuses: bool


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
        self._try(key, broken_for=0.0)

    def _try(self, key: Key, broken_for: float) -> None:
        """Completes a meeting to which all have come, once they all reach each other."""
        present = self.meetings.get(key, [])
        if not present or len(present) < len(present[0].place.members if present[0].place else ()):
            return
        broken = self.world.cables.broken_pair(present)
        if broken is not None:
            if broken_for == 3.0 and self.world.rng.random() < self.world.scenario.peers_notice / 2:
                one, other = broken
                assert other.place is not None
                one.collective_fails(key, other.place.rank)
            self.world.loop.after(0.5, self._try, key, broken_for + 0.5)
            return
        del self.meetings[key]
        if key[0] == "sync":
            self._share_state(present)
        duration = self.world.scenario.step_s if key[0] == "step" else 0.02
        for member in present:
            self.world.loop.after(duration + self.world.rng.random() * 0.02, member.met, key)

    def leave(self, worker: Worker, *, broken: bool = True) -> None:
        """Its collective is over; broken, because it aborts or dies, its peers may notice, or hang."""
        key, place = worker.waiting_for, worker.place
        worker.waiting_for = None
        if not broken:
            return
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
        """Newcomers take the state of the member that is furthest; without any state all start over."""
        holders = [worker for worker in present if worker.has_state] or present
        furthest = max(worker.step for worker in holders)
        for worker in present:
            worker.step = furthest


class Cables:
    """Which hosts can reach which; a group needs connections both ways.

    A cut breaks them both ways, also one of a single direction, because answers are lost. Behind a firewall
    one side still opens connections to the other.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._cuts: list[tuple[str, str, float, float]] = []
        self._opens: set[tuple[str, str, float]] = set()
        self._lies: list[Lie] = []

    def cut(self, one: str, other: str, until: float, *, one_way: bool = False) -> None:
        """Loses what goes from one host to the other, until a time.

        Args:
            one: a host.
            other: another host.
            until: when it is over, in seconds.
            one_way: connections from the other host to the one are still opened.
        """
        self._cuts.append((one, other, self.world.loop.now, until))
        if one_way:
            self._opens.add((other, one, until))

    def lie(self, lie: Lie) -> None:
        """One worker does not go on with another, though nothing is between them."""
        self._lies.append(lie)

    def is_cut(
        self, one: str, other: str, since: float | None = None, *, begun_by: float | None = None
    ) -> bool:
        """Whether two hosts cannot reach each other now, or could not for a while since a time.

        Args:
            one: a host.
            other: another one.
            since: the time; None: now.
            begun_by: only what had begun by then counts; None: all.
        """
        now = self.world.loop.now
        begun_by = now if begun_by is None else begun_by
        since = now if since is None else since
        pair = {one, other}
        host = self.world.host
        lies = ((host(lie.liar), host(lie.victim), lie.begun, lie.until) for lie in self._lies)
        return any(
            {a, b} == pair and begun <= begun_by and since < until
            for a, b, begun, until in (*self._cuts, *lies)
        )

    def _lied(self, one: str, other: str) -> Lie | None:
        now = self.world.loop.now
        lies = (lie for lie in self._lies if {one, other} == {lie.liar, lie.victim})
        return next((lie for lie in lies if lie.begun <= now < lie.until), None)

    def was_cut_throughout(self, one: str, other: str, since: float) -> bool:
        """Whether one cut has lasted from a time until now."""
        now, pair = self.world.loop.now, {one, other}
        return any({a, b} == pair and begun <= since and now < until for a, b, begun, until in self._cuts)

    def most_together(self, nodes: list[str], since: float) -> int:
        """How many of these workers all reached each other since a time."""
        host = self.world.host
        hosts = sorted({host(node_id) for node_id in nodes})
        sets = (some for n in range(len(hosts) + 1) for some in itertools.combinations(hosts, n))
        whole = [s for s in sets if not any(self.is_cut(*p, since) for p in itertools.combinations(s, 2))]
        return max(sum(host(node_id) in each for node_id in nodes) for each in whole)

    def _cut_now(self, one: str, other: str) -> bool:
        now = self.world.loop.now
        return any({a, b} == {one, other} and begun <= now < until for a, b, begun, until in self._cuts)

    def broken_pair(self, workers: list[Worker]) -> tuple[Worker, Worker] | None:
        """Two of these that cannot reach each other; None: there are none."""
        host = self.world.host
        for one in workers:
            for other in workers:
                if one is other:
                    continue
                if self._cut_now(host(one.node_id), host(other.node_id)) or self._lied(
                    one.node_id, other.node_id
                ):
                    return one, other
        return None

    def probe(self, worker: Worker, address: str) -> tuple[float, str]:
        """How long a probe takes, and why it fails; "" if it does not."""
        node_id, _, incarnation = address.removesuffix(":1").partition("#")
        here, there, now = self.world.host(worker.node_id), self.world.host(node_id), self.world.loop.now
        for a, b, begun, until in self._cuts:
            lasts = {a, b} == {here, there} and begun <= now < until
            if lasts and (here, there, until) not in self._opens:
                return 3.0, "timed out"
        lie = self._lied(worker.node_id, node_id)
        if lie is not None and (lie.liar == worker.node_id) == lie.accuses:
            return 0.02, "connection refused"
        for target in self.world.living():
            if (target.node_id, target.incarnation) == (node_id, int(incarnation)):
                stopped = target.stopped_until > self.world.loop.now + 3.0
                return (3.0, "no answer") if stopped else (0.02, "")
        return 3.0, "connection refused"
