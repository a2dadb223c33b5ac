"""Jobs whose workers keep snapshots in each other's memory: the real rules of both sides, and their promises.

Every rank holds a part of the state that nobody else has, so each new generation goes back to a snapshot.
Copies take their time, different on each host; hosts are lost, up to as many at once as there are copies, and
bits flip. What is judged beside everything else:

* All ranks of a generation go back to the same moment: one step of one generation, of one state.
* As long as no more hosts are lost than there are copies, that is no older than what everybody had been told
  is complete everywhere, or what somebody among them had.
* No rank ever keeps more than two snapshots of its own, nor of those whose partner it is.
* Where nothing happens, newer and newer snapshots come to count.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from muster.training.snapshots import partners as partner_rules
from muster.training.snapshots import restoration
from muster.training.snapshots.parts import PartKey, SnapshotId
from muster.training.snapshots.restoration import Handing, Holding, Restoration, Told
from muster.training.snapshots.retention import Retention, RetentionChange
from muster.worker.session import events
from tests.simulation.data_plane import DataPlane
from tests.simulation.judge import Judge
from tests.simulation.scenario import TOPO_TIMEOUT_S
from tests.simulation.worker import Worker
from tests.simulation.world import World, play

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = ("calm", "crashes", "pauses", "crashes", "supervised", "supervised", "supervised", "supervised")
TRAINS_S = (20.0, 40.0)
COPYING_S = (0.1, 0.5, 2.0)
SETTLED_S = 16.0
"""In so long without trouble a newer snapshot counts: two tries, each with copies and heartbeats."""

Process = tuple[str, int]


@dataclass
class Copy:
    """A part in a process's memory."""

    state: int
    announced: int
    is_own: bool
    is_whole: bool = True


def checksum(state: int, part: PartKey) -> int:
    return hash((state, part.rank)) % 2**64


class KeepingWorker(Worker):
    """A worker with a part of the state, which it copies to its own and its partners' memory."""

    world: SnapshotWorld

    def __init__(self, world: World, node_id: str, incarnation: int, *, spare: bool = False) -> None:
        super().__init__(world, node_id, incarnation, spare=spare)
        self.state = 0
        self.retention = Retention(self.world.every)
        self.memory: dict[PartKey, Copy] = {}
        self.own: set[PartKey] = set()
        self.told_by_all: tuple[bytes, ...] = ()
        self.copying_s = self.world.chance.choice(COPYING_S)
        self.partners: dict[int, Process] = {}
        self._awaited: dict[PartKey, set[int]] = {}

    @property
    def process(self) -> Process:
        return self.node_id, self.incarnation

    # ------------------------------------------------------------ a new generation

    def tell(self) -> bytes:
        """What it says that it holds, to all members."""
        holdings = [
            Holding(part, copy.announced, checksum(copy.state, part), copy.is_own)
            for part, copy in sorted(self.memory.items())
            if copy.is_whole
        ]
        return restoration.encode(Told(self.retention.agreed, tuple(holdings)))

    def takes_up(self) -> None:
        assert self.place is not None
        place = self.place
        everybody = [
            restoration.decode(told.ljust(restoration.MAX_BYTES, b"\0")) for told in self.told_by_all
        ]
        decision = restoration.decide(everybody)
        self.world.watch.decided(self, everybody, decision)
        keep = None
        self.step, self.state = 0, 0
        if isinstance(decision, Restoration):
            keep = decision.keep
            states = {self._load(decision, rank).state for rank in decision.needs[place.rank]}
            self.step = decision.snapshot.step
            self.world.watch.loaded(self, place.generation, decision.snapshot, states)
            self.state = min(states)
        chosen = partner_rules.partners(place.members, self.world.copies)
        keepers = [place.members[rank] for rank in chosen[place.rank]]
        self.partners = {each.rank: (each.node_id, each.incarnation) for each in keepers}
        self._carry_out(
            self.retention.enter(
                place.generation,
                rank=place.rank,
                world_size=len(place.members),
                step=self.step,
                keep=keep,
            )
        )

    def _load(self, decision: Restoration, rank: int) -> Copy:
        """A part that it needs, from its own memory or another's; hands out first what others need."""
        assert self.place is not None
        here, generation = self.place.rank, self.place.generation
        for handing in decision.handings:
            if handing.source == here:
                self.world.handed[generation, handing] = replace(self.memory[handing.part])
        part = PartKey(decision.snapshot, decision.world_size, rank)
        mine = next((x for x in decision.handings if (x.part, x.target) == (part, here)), None)
        if mine is None:
            return self._checked(part, self.memory[part])
        while (generation, mine) not in self.world.handed:
            self.client.check(generation)
            self.threads.sleep(0.1)
        self.threads.sleep(self.world.chance.random() * self.copying_s / len(decision.needs[here]))
        self.client.check(generation)
        return self._checked(part, self.world.handed[generation, mine])

    def _checked(self, part: PartKey, copy: Copy) -> Copy:
        """A bit may have flipped since it was told what there is: then all decide again."""
        assert self.place is not None
        generation, nobody = self.place.generation, len(self.place.members)
        if checksum(copy.state, part) != copy.announced:
            self.client.post(events.CommunicatorFailed(generation, nobody, "a copy has changed"))
            while True:
                self.client.check(generation)
                self.threads.sleep(0.1)
        return copy

    # ------------------------------------------------------------ a step

    def has_stepped(self) -> None:
        assert self.place is not None
        generation = self.place.generation
        self.state = hash((self.state, generation, self.step))
        word = self.client.snapshot_word
        self._carry_out(self.retention.at_step(self.step, word))
        self.world.watch.stepped(self, generation)

    def _carry_out(self, change: RetentionChange) -> None:
        for part in change.drop:
            self.memory.pop(part, None)
            self.own.discard(part)
            self._awaited.pop(part, None)
        if change.take is not None:
            self.own.add(change.take)
            took = self.world.chance.uniform(0.5, 1.0) * self.copying_s
            self.threads.after(took, self._copied, change.take, self.state)
        self.world.watch.kept(self)
        self._report()

    def _report(self) -> None:
        if self.alive:
            self.client.post(events.SnapshotChanged(self.retention.report()))

    # ------------------------------------------------------------ copies

    def _copied(self, part: PartKey, state: int) -> None:
        """Its part is in its host's memory; it goes to the partners."""
        if part not in self.own or not self.alive:
            return
        if self.world.chance.random() < self.world.no_memory:
            self.world.note(f"!! no memory for {part} at {self}")
            self._carry_out(self.retention.failed(part))
            return
        self.memory[part] = Copy(state, checksum(state, part), is_own=True)
        self._awaited[part] = set(self.partners)
        for rank, to in self.partners.items():
            self.threads.after(self.world.chance.random() * self.copying_s, self._send, part, rank, to)
        self._acknowledged(part, -1)

    def _send(self, part: PartKey, rank: int, to: Process) -> None:
        target = self.world.process(to)
        if part not in self.own or not self.alive or target is None:
            return
        if self.world.cables.is_cut(self.world.host(self.node_id), self.world.host(target.node_id)):
            self.threads.after(0.5, self._send, part, rank, to)
            return
        target.threads.after(0.01, target.receive, self, rank, part, replace(self.memory[part], is_own=False))

    def receive(self, sender: KeepingWorker, rank: int, part: PartKey, copy: Copy) -> None:
        """The header of another's part has come; the rest takes a while."""
        if not self.alive or not sender.alive:
            return
        change = self.retention.accept(part, sender.retention.agreed)
        self._carry_out(change)
        if part in change.drop:
            return
        self.memory[part] = replace(copy, is_whole=False)
        took = self.world.chance.random() * self.copying_s
        self.threads.after(took, self._received, sender, rank, part, copy)

    def _received(self, sender: KeepingWorker, rank: int, part: PartKey, copy: Copy) -> None:
        if not self.alive or not sender.alive or part not in self.memory:
            return
        if checksum(copy.state, part) != copy.announced:  # a bit had flipped before it was sent
            del self.memory[part]
            sender.threads.after(0.01, sender._refused, part)
            return
        self.memory[part] = copy
        sender.threads.after(0.01, sender._acknowledged, part, rank)

    def _refused(self, part: PartKey) -> None:
        if part in self.own and self.alive:
            self._carry_out(self.retention.failed(part))

    def _acknowledged(self, part: PartKey, rank: int) -> None:
        awaited = self._awaited.get(part)
        if awaited is None or not self.alive:
            return
        awaited.discard(rank)
        if not awaited:
            self.retention.completed(part)
            self._report()


class HandingOut(DataPlane):
    """At the first meeting of a generation all tell all others what they hold."""

    def _share_state(self, present: list[Worker]) -> None:
        super()._share_state(present)
        in_order = sorted(present, key=lambda worker: worker.place.rank if worker.place else -1)
        told = tuple(worker.tell() for worker in in_order if isinstance(worker, KeepingWorker))
        for worker in present:
            assert isinstance(worker, KeepingWorker)
            worker.told_by_all = told


class Onlooker:
    """Holds what the workers do against what was promised."""

    def __init__(self, world: SnapshotWorld) -> None:
        self.world = world
        self.members: dict[int, dict[Process, str]] = {}  # by generation: its processes, and their hosts
        self.told: dict[SnapshotId, set[Process]] = {}
        self.spoiled: set[str] = set()  # hosts with a flipped bit
        self.loads: dict[int, tuple[SnapshotId, set[int]]] = {}
        self.counted_at: dict[Process, tuple[SnapshotId | None, float]] = {}
        self.restored = self.missing = self.counted = 0

    def expect(self, holds: bool, what: str) -> None:
        self.world.judge.expect(holds, what)

    def decided(
        self,
        worker: KeepingWorker,
        everybody: list[Told],
        decision: restoration.Restoration | restoration.PartsMissing,
    ) -> None:
        """A worker has decided where to begin."""
        assert worker.place is not None
        generation = worker.place.generation
        if generation in self.members:
            return
        here = {(each.node_id, each.incarnation): each.host.id for each in worker.place.members}
        self.members[generation] = here
        by_all = [
            which for which, heard in self.told.items() if heard >= self.members[which.generation].keys()
        ]
        by_some = [told.agreed for told in everybody if told.agreed in self.told]
        promised = max([*by_all, *filter(None, by_some)], default=None)
        found = isinstance(decision, Restoration)
        self.restored += found
        self.missing += not found
        self.world.note(
            f"generation {generation}: {decision if not found else decision.snapshot}, {promised} is known"
        )
        if isinstance(decision, Restoration):
            self._check_copies(everybody, decision)
        if not self.spoiled:
            newest = self._newest_found(everybody)
            self.expect(newest == (decision.snapshot if found else None), f"{newest} is there, {decision}")
        if promised is None or promised.generation not in self.members:
            return
        then = self.members[promised.generation]
        by_host = len(set(then.values())) > 1
        domains = {process: host if by_host else process[0] for process, host in then.items()}
        lost = {domain for process, domain in domains.items() if process not in here}
        lost |= {domain for process, domain in domains.items() if process[0] in self.spoiled}
        if len(lost) > min(self.world.copies, len(set(domains.values())) - 1):
            return
        self.expect(found, f"{promised} was complete everywhere, {lost} are lost, and there is {decision}")
        assert isinstance(decision, Restoration)
        self.expect(decision.snapshot >= promised, f"back to {decision.snapshot}, and {promised} counted")

    def _check_copies(self, everybody: list[Told], decision: Restoration) -> None:
        """Every part comes from a copy that is as it was announced."""
        comes_from = {(handing.target, handing.part): handing.source for handing in decision.handings}
        for target, ranks in enumerate(decision.needs):
            for rank in ranks:
                part = PartKey(decision.snapshot, decision.world_size, rank)
                holder = comes_from.get((target, part), target)
                sound = [x.announced == x.found for x in everybody[holder].holdings if x.part == part]
                self.expect(
                    sound == [True], f"rank {target} takes {part} from rank {holder}, whose copy is bad"
                )

    @staticmethod
    def _newest_found(everybody: list[Told]) -> SnapshotId | None:
        """The newest snapshot all of whose parts somebody holds, where no bit has flipped."""
        parts = {holding.part for told in everybody for holding in told.holdings}
        whole = [
            part.snapshot
            for part in parts
            if parts >= {PartKey(part.snapshot, part.world_size, rank) for rank in range(part.world_size)}
        ]
        return max(whole, default=None)

    def loaded(self, worker: KeepingWorker, generation: int, snapshot: SnapshotId, states: set[int]) -> None:
        """A worker has its part of the state."""
        before = self.loads.setdefault(generation, (snapshot, states))
        self.expect(len(states) == 1, f"{worker} mixes {len(states)} states")
        self.expect(before == (snapshot, states), f"{worker} goes back to {snapshot}, another to {before[0]}")

    def kept(self, worker: KeepingWorker) -> None:
        """A worker's memory has changed."""
        own = {part for part in worker.retention.kept if part in worker.own}
        self.expect(own == worker.own, f"{worker} has {worker.own}, and says that it keeps {own}")
        self.expect(len(own) <= 2, f"{worker} keeps {len(own)} snapshots of its own")
        others = [part for part in worker.retention.kept if part not in own]
        for part in others:
            same = [
                x for x in others if (x.snapshot.generation, x.rank) == (part.snapshot.generation, part.rank)
            ]
            self.expect(len(same) <= 2, f"{worker} keeps {len(same)} snapshots of rank {part.rank}")
        generation = worker.retention.report().generation
        older = {part.snapshot for part in worker.retention.kept if part.snapshot.generation < generation}
        self.expect(len(older) <= 1, f"{worker} keeps {len(older)} snapshots of generations before")

    def stepped(self, worker: KeepingWorker, generation: int) -> None:
        """A worker has finished a step, and has heard what there was to hear."""
        now, agreed = self.world.loop.now, worker.retention.agreed
        if agreed is not None and agreed.generation == generation:
            heard = self.told.setdefault(agreed, set())
            self.counted += not heard
            heard.add(worker.process)
        last, since = self.counted_at.get(worker.process, (None, -1.0))
        if last != agreed or since < 0.0:
            self.counted_at[worker.process] = (agreed, now)
            return
        calm_since = max(
            since, self.world.judge.disturbed_at, self.world.judge.formed_at, self.world.scheduler.up_since
        )
        if self.world.no_memory or self.world.scheduler.lacked_space():
            return
        self.expect(
            now < calm_since + self.world.settled_s,
            f"for {now - calm_since:.1f} s nothing newer than {agreed} counts",
        )


class RestoringJudge(Judge):
    """In these jobs steps are redone: all go back to a snapshot."""

    def step_met(self, worker: Worker, generation: int, step: int) -> None:
        super().step_met(worker, generation, step)
        self.redone = 0

    def _settled(self, what: str) -> None:
        """Who has gone back and is asked to stop before its first step names the last one of before.

        A planned change may then wait for that, until it is overdue.
        """


class SnapshotWorld(World):
    """A job whose state lies in pieces on its workers."""

    worker = KeepingWorker
    grace_s = 20 * TOPO_TIMEOUT_S

    def __init__(self, seed: int, trace: list[str] | None = None) -> None:
        super().__init__(seed, trace)
        self.chance = chance = random.Random(f"snapshots {seed}")
        kind = chance.choice(KINDS)
        worker_num, step_s = chance.choice((1, 2, 3, 4, 4, 6, 6)), chance.choice((0.2, 0.5, 1.0))
        disturbed = kind == "supervised"
        self.scenario = replace(
            self.scenario,
            kind=kind,
            worker_num=worker_num,
            worker_min=chance.randint(1, worker_num),
            spares=0,
            steps=int(chance.uniform(*TRAINS_S) / step_s),
            step_s=step_s,
            commit_crash=chance.choice((0.0, 0.1)) if disturbed else 0.15 if kind == "crashes" else 0.0,
            faults=chance.randint(0, 3),
            fault_end=chance.uniform(5.0, 25.0),
            per_host=chance.choice((1, 2, 2)),
        )
        self.is_apart = False
        self.every = chance.choice((1, 2, 3, 5))
        self.copies = chance.choice((1, 1, 2))
        self.no_memory = chance.choice((0.0, 0.0, 0.1))
        self.settled_s = SETTLED_S + 3 * self.every * step_s
        self.judge = RestoringJudge(self)
        self.watch = Onlooker(self)
        self.data_plane = HandingOut(self)
        self.handed: dict[tuple[int, Handing], Copy] = {}
        self._plan_losses(disturbed)

    def _plan_losses(self, disturbed: bool) -> None:
        faults: tuple[Callable[[], None], ...] = (self._lose_hosts, self._lose_hosts, self._flip)
        for _ in range(self.chance.randint(1, 4) if disturbed else 0):
            at = self.chance.uniform(4.0, self.scenario.fault_end + 10.0)
            self.loop.at(at, self.chance.choice(faults))
        if disturbed and self.copies > 1:
            self.loop.at(self.chance.uniform(5.0, 15.0), self._lose_two, self.scenario.fault_end + 15.0)

    def process(self, process: Process) -> KeepingWorker | None:
        """A living process."""
        for worker in self.living():
            if (worker.node_id, worker.incarnation) == process and isinstance(worker, KeepingWorker):
                return worker
        return None

    def _lose_hosts(self) -> None:
        """Up to as many hosts as there are copies are gone at once."""
        hosts = sorted({self.host(worker.node_id) for worker in self.living()})
        if self.judge.outcome is not None or not hosts:
            return
        most = min(self.copies, len(hosts))
        gone = self.chance.sample(hosts, self.chance.randint(1, most))
        if len(gone) < most and self.chance.random() < 0.7:  # one more before the rest have copied all again
            self.loop.after(self.chance.uniform(0.3, 5.0), self._lose_hosts)
        for host in gone:
            self._kill_host(host)

    def _lose_two(self, until: float) -> None:
        """A host goes, and all go back to a snapshot of which another alone has a part; that goes, too."""
        if self.loop.now > until or self.judge.outcome is not None:
            return
        found = self._alone_with_a_part()
        if found is None:
            self.loop.after(0.05, self._lose_two, until)
            return
        first, second, generation = found
        self._kill_host(first)
        self._lose_when_entered(second, generation, until)

    def _lose_when_entered(self, host: str, generation: int, until: float) -> None:
        keepers = [each for each in self.living() if isinstance(each, KeepingWorker)]
        here = [each for each in keepers if self.host(each.node_id) == host]
        if self.loop.now > until or not here:
            return
        if all(each.retention.report().generation > generation for each in here):
            self._kill_host(host)
        else:
            self.loop.after(0.02, self._lose_when_entered, host, generation, until)

    def _alone_with_a_part(self) -> tuple[str, str, int] | None:
        """Of the newest snapshot, not counting yet: a host without which it is found, and the next to go."""
        keepers = [each for each in self.living() if isinstance(each, KeepingWorker)]
        kept = {
            (part, self.host(each.node_id))
            for each in keepers
            for part, copy in each.memory.items()
            if copy.is_whole
        }
        newest = max((part.snapshot for part, _ in kept), default=None)
        agreed = [each.retention.agreed for each in keepers if each.retention.agreed is not None]
        if (
            newest is None
            or not agreed
            or newest <= max(agreed)
            or newest.generation != max(agreed).generation
        ):
            return None
        where: dict[PartKey, set[str]] = {}
        for part, host in kept:
            if part.snapshot == newest:
                where.setdefault(part, set()).add(host)
        if len(where) < next(iter(where)).world_size:
            return None
        for first in sorted({self.host(each.node_id) for each in keepers}):
            left = [sorted(hosts - {first}) for hosts in where.values()]
            if all(left) and (alone := [hosts[0] for hosts in left if len(hosts) == 1]):
                return first, min(alone), newest.generation
        return None

    def _kill_host(self, host: str) -> None:
        self.note(f"!! kill_host {host}")
        self.judge.disturbed()
        for worker in self.living():
            if self.host(worker.node_id) == host:
                worker.kill()

    def _flip(self) -> None:
        """A bit of a part in somebody's memory flips."""
        kept = [
            (each, part)
            for each in self.living()
            if isinstance(each, KeepingWorker)
            for part in sorted(each.memory)
        ]
        if kept:
            worker, part = self.chance.choice(kept)
            self.note(f"!! flip {part} at {worker}")
            self.watch.spoiled |= {
                node for node in self.newest if self.host(node) == self.host(worker.node_id)
            }
            worker.memory[part].state ^= 1


def play_snapshots(seed: int, trace: list[str] | None = None) -> str:
    """Plays one seed; returns what was broken, or "" if all was well."""
    return play(seed, trace, kind=SnapshotWorld)
