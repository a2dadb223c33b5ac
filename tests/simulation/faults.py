"""What goes wrong, and when."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from muster.scheduler.core import events
from tests.simulation.data_plane import Lie
from tests.simulation.network import HUNG_S
from tests.simulation.scenario import PAUSE_S, TOPO_TIMEOUT_S, WAITING_HEARTBEAT_S
from tests.simulation.scheduler import FAILED_AND_WRITTEN

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

FROZEN_PING_S = 2.7
"""So soon at the earliest a ping ends the stream of a member that is frozen: a stream that ends within two
heartbeats is that of one that was killed, and its last word may be under way for a while."""

WAITING_PING_S = 2 * WAITING_HEARTBEAT_S + 0.5
"""The same of a worker that is heard less often, because it has no place yet."""

UPLINKS = 0.25
"""The share of seeds in which workers have an uplink that dies, or stands still."""

FULL_DISKS = 0.25
"""The share of seeds in which the journal finds no space for a while."""

FULL_S = (1.0, 8.0, 30.0)

APART = 0.35
"""The share of seeds of the kind "cuts" in which, in place of its faults, one member or port is at fault, or
two halves are apart."""

APART_S = 12.0
"""So much training such a seed has."""

TURN_S = 9.0
"""So long a liar, or a bad port, is after one victim: the others are late in 5 s and are asked."""

Fault = Callable[["World", "Worker"], None]


def kill(world: World, worker: Worker) -> None:
    worker.kill()


def stop(world: World, worker: Worker) -> None:
    """SIGSTOP, and SIGCONT after a while."""
    worker.stopped_until = world.loop.now + world.rng.choice((1.0, 4.0, 6.0, 9.0))
    world.judge.disturbed(worker.stopped_until)


def freeze(world: World, worker: Worker) -> None:
    """SIGSTOP for less than MS_NODE_TIMEOUT: pings, or a box on the way, may end the stream meanwhile."""
    now = world.loop.now
    if now < max(worker.stopped_until, worker.calm_until):
        return
    worker.stopped_until = now + world.rng.uniform(1.0, PAUSE_S)
    worker.calm_until = worker.stopped_until + WAITING_HEARTBEAT_S + 1.0  # until it has been heard again
    world.judge.disturbed(worker.stopped_until)
    stream = worker.stream
    is_reading = now >= world.scheduler.deaf_until
    heard = world.judge.is_heard_as_member((worker.node_id, worker.incarnation))
    first, last = (
        now + (FROZEN_PING_S if heard else WAITING_PING_S),
        worker.stopped_until - 0.4,
    )  # it comes through before the worker does
    if stream is not None and is_reading and first < last and world.rng.random() < 0.7:
        world.loop.at(world.rng.uniform(first, last), world.network.break_up, stream, "ping timeout")


def flood(world: World, worker: Worker) -> None:
    """Handshakes of strangers keep the scheduler from reading its streams, or from its turns."""
    now = world.loop.now
    frozen = any(now < each.calm_until for each in world.living())  # who comes back then finds no way in
    if world.scheduler.up and not frozen:
        world.scheduler.drown(world.rng.choice((2.0, 9.0, 20.0)), late=world.rng.random() < 0.3)


def hang(world: World, worker: Worker) -> None:
    """The training thread stands still between two steps; the process lives and sends its heartbeats."""
    longest = 1.5 * TOPO_TIMEOUT_S if world.judge.ever_established else 20.0  # a job that trains waits for it
    if world.loop.now >= worker.busy_until:
        worker.busy_since = world.loop.now
        worker.busy = world.rng.choice(("", "", "evaluation"))
    very_long = 80.0 if world.scenario.kind == "cuts" and world.judge.ever_established else longest
    lasts = world.rng.choice((5.0, 20.0, longest, very_long))
    worker.busy_until = max(worker.busy_until, world.loop.now + lasts)  # who sleeps already is not woken
    world.judge.disturbed(worker.busy_until)
    world.loop.at(worker.busy_until - 0.1, world.judge.hung, worker, worker.busy_until)


def cut_pair(world: World, worker: Worker) -> None:
    """Two hosts cannot reach each other for a while; in a job that can do without one of them, for good."""
    hosts = sorted({world.host(each.node_id) for each in world.living()})
    if len(hosts) < 2:
        return
    one, other = world.rng.sample(hosts, 2)
    scenario = world.scenario
    lasts = world.rng.choice((2.0, 8.0, 25.0))
    enough = scenario.worker_min <= scenario.worker_num - scenario.per_host
    if scenario.kind == "cuts" and enough and not world.cut_for_good and world.rng.random() < 0.5:
        world.cut_for_good, lasts = True, 1e6
    one_way = world.rng.random() < 0.3
    world.note(f"   {one} to {other} for {lasts:g} s{', one way' if one_way else ''}")
    world.cables.cut(one, other, world.loop.now + lasts, one_way=one_way)
    world.judge.disturbed(world.loop.now + min(lasts, 40.0))


def flap(world: World, worker: Worker) -> None:
    """Two hosts lose each other again and again."""
    hosts = sorted({world.host(each.node_id) for each in world.living()})
    if len(hosts) < 2:
        return
    one, other = world.rng.sample(hosts, 2)
    for number in range(4):
        at = world.loop.now + 6.0 * number
        lasts = world.rng.choice((1.0, 3.0, 5.0))
        world.loop.at(at, lambda s=lasts: world.cables.cut(one, other, world.loop.now + s))
    world.judge.disturbed(world.loop.now + 40.0)


def lying_member(world: World, worker: Worker) -> None:
    """A member does not go on with another one, each time another; it accuses it, or refuses its probes."""
    world.at_fault = {worker.node_id}
    _take_turns(world, worker, world.apart.random() < 0.5)


def flapping_port(world: World, worker: Worker) -> None:
    """A host's port fails now and then, each time towards another host."""
    host = world.host(worker.node_id)
    world.at_fault = {world.node(n) for n in range(50) if world.host(world.node(n)) == host}
    _take_turns(world, worker, None)


def _take_turns(world: World, worker: Worker, accuses: bool | None) -> None:
    """Between a worker and each of the others in turn something is wrong; ``accuses`` None: the cable."""
    begun, host = world.loop.now, world.host(worker.node_id)
    past: set[str] = set()

    def turn() -> None:
        others = sorted({each.node_id for each in world.living() if each.node_id in world.judge.claims})
        others = [each for each in others if world.host(each) != host]
        fresh = [each for each in others if each not in past]
        now = world.loop.now
        if not fresh or now > begun + 5 * TURN_S:
            return
        victim = world.apart.choice(fresh)
        past.add(victim)
        world.note(f"   {worker.node_id} and {victim} for {TURN_S:g} s")
        if accuses is None:
            world.cables.cut(host, world.host(victim), now + TURN_S)
        else:
            world.cables.lie(Lie(worker.node_id, victim, now, now + TURN_S, accuses))
        world.judge.disturbed(now + TURN_S)
        world.loop.after(TURN_S, turn)

    turn()


def cut_into_halves(world: World, worker: Worker) -> None:
    """Every host of one side loses every host of the other, for a while."""
    hosts = sorted({world.host(each.node_id) for each in world.living()})
    world.apart.shuffle(hosts)
    number, until = world.apart.randint(1, max(1, len(hosts) - 1)), world.loop.now + 25.0
    for one in hosts[:number]:
        for other in hosts[number:]:
            world.cables.cut(one, other, until)
    world.judge.disturbed(until)


def cut(world: World, worker: Worker) -> None:
    """The network to the scheduler is cut for a while; keepalive may notice before it is back."""
    pause = world.rng.choice((0.5, 3.0, 10.0))
    worker.cut_until = world.loop.now + pause
    world.judge.disturbed(worker.cut_until)  # what was on its way arrives then
    if worker.stream is not None and pause > 2.0 and world.rng.random() < 0.7:
        world.loop.after(world.rng.uniform(1.0, pause), world.network.break_up, worker.stream, "keepalive")


def blip(world: World, worker: Worker) -> None:
    """The stream breaks; both live."""
    if worker.stream is not None:
        world.network.break_up(worker.stream, "broken pipe")


def uplink_dies(world: World, worker: Worker) -> None:
    """One process carries the streams of all workers of a host, and is killed."""
    for each in _on_a_calm_host(world, worker):
        if each.stream is not None:
            world.network.uplink_dies(each.stream)


def uplink_stands_still(world: World, worker: Worker) -> None:
    """SIGSTOP of that process, and SIGCONT after a while: workers connect directly meanwhile."""
    lasts = world.rng.choice((1.0, 3.0, 9.0))
    for each in _on_a_calm_host(world, worker):
        if each.stream is not None:
            world.network.uplink_stands_still(each.stream, world.loop.now + lasts)


def _on_a_calm_host(world: World, worker: Worker) -> list[Worker]:
    """The workers of this one's host; none where one has just been silent for another reason."""
    now, host = world.loop.now, world.host(worker.node_id)
    here = [each for each in world.living() if world.host(each.node_id) == host]
    busy = max(world.scheduler.deaf_until, world.scheduler.paused_until)
    if now < busy or any(now < max(each.calm_until, each.stopped_until, each.cut_until) for each in here):
        return []
    for each in here:
        each.calm_until = now + HUNG_S + WAITING_HEARTBEAT_S + 1.0
    world.judge.disturbed(now + HUNG_S)
    return here


def crash(world: World, worker: Worker) -> None:
    if world.scheduler.crashes_left > 0:
        world.scheduler.crash("just so")


def pause(world: World, worker: Worker) -> None:
    """SIGSTOP of the scheduler, or its machine frozen, and SIGCONT after a while."""
    if world.scheduler.up:
        world.scheduler.pause(world.rng.choice((1.0, 8.0, 9.0)))


def broken_disk(world: World, worker: Worker) -> None:
    """The scheduler's disk fails for a while: it ends with its first write, as often as it is started."""
    world.scheduler.break_disk(world.rng.choice((0.3, 2.0, 5.0)))


def full_disk(world: World, seconds: float) -> None:
    """There is no space for a while: the scheduler waits, and all that it says is that it does."""
    if world.judge.outcome is None:
        world.note(f"!! full_disk for {seconds:g} s")
        world.scheduler.fill_disk(seconds)


def failing_write(world: World, worker: Worker) -> None:
    """The next write fails; the records may be on the disk nevertheless, all of them or none."""
    world.scheduler.next_write = world.rng.choice(("the disk says no", FAILED_AND_WRITTEN))


def drain(world: World, worker: Worker) -> None:
    world.leavers.add(worker.node_id)
    if world.scheduler.up:
        world.scheduler.feed(events.DrainRequested(worker.node_id, "maintenance"))


def request_leave(world: World, worker: Worker) -> None:
    """SIGTERM: it is told at once; who waits too long for a generation to form saves and goes by itself."""
    worker.terminate()


def evict(world: World, worker: Worker) -> None:
    """SIGTERM to all who have begun to train, as when a cluster takes back its machines."""
    for each in world.living():
        if each.has_state:
            world.loop.after(world.rng.random() * 0.3, request_leave, world, each)


def expel(world: World, worker: Worker) -> None:
    if world.scheduler.up:
        world.scheduler.feed(events.Expel(worker.node_id, "revoked"))


def extra(world: World, worker: Worker) -> None:
    """A worker too many, or of an unknown name; nothing may come of it but a place that is free."""
    number = world.rng.randint(0, world.scenario.worker_num + 2)
    node_id = world.node(number)
    current = world.newest.get(node_id)
    if current is None or not current.alive:
        # A node is started over as it was: a job whose ordinary workers come as spares never forms.
        world.start(node_id, spare=world.rng.random() < 0.5 and number >= world.scenario.worker_num)


def twin(world: World, worker: Worker) -> None:
    """A second process with the node id of a living one."""
    newest = world.newest[worker.node_id]
    world.start(worker.node_id)
    world.newest[worker.node_id] = newest


def peer_trouble(world: World, worker: Worker) -> None:
    """A collective fails though all live."""
    if worker.waiting_for is not None and worker.place is not None and len(worker.place.members) > 1:
        rank = (worker.place.rank + 1) % len(worker.place.members)
        worker.collective_fails(worker.waiting_for, rank)


EVERYTHING: tuple[Fault, ...] = (
    kill, kill, kill, kill, stop, hang, cut, blip, crash, pause, drain, request_leave, evict, expel, extra,
    twin,
    peer_trouble,
    cut_pair,
    flap,
    freeze,
    flood,
    broken_disk,
    failing_write,
)  # fmt: skip
BY_KIND: dict[str, tuple[Fault, ...]] = {
    "calm": (),
    "crashes": (crash, pause, pause, broken_disk, failing_write),
    "pauses": (freeze, freeze, flood),
    "elastic": (drain, request_leave, drain, request_leave, evict, extra),
    "trouble": (peer_trouble,),
    "cuts": (cut_pair, cut_pair, cut_pair, flap, hang, stop),
    "supervised": EVERYTHING,
    "wild": EVERYTHING,
}


def plan_faults(world: World) -> None:
    """Puts the seed's faults on the queue."""
    kinds = BY_KIND[world.scenario.kind]
    for _ in range(world.scenario.faults if kinds else 0):
        fault = world.rng.choice(kinds)
        at = world.rng.uniform(0.0, world.scenario.fault_end)
        if not world.is_apart:
            world.loop.at(at, _happen, world, fault)
    if world.is_apart:
        fault = world.apart.choice((lying_member, flapping_port, cut_into_halves))
        world.loop.at(world.apart.uniform(2.0, 4.0), _happen, world, fault)
    # By numbers of their own, so that all other seeds play as they did before there were uplinks.
    uplinks = random.Random(f"uplinks {world.seed}")
    if kinds and uplinks.random() < UPLINKS:
        fault = uplinks.choice((uplink_dies, uplink_stands_still))
        world.loop.at(uplinks.uniform(0.0, world.scenario.fault_end), _happen, world, fault)
    space = random.Random(f"full disks {world.seed}")  # likewise
    if kinds and space.random() < FULL_DISKS:
        at, seconds = space.uniform(0.0, world.scenario.fault_end), space.choice(FULL_S)
        world.loop.at(at, full_disk, world, seconds)
    world.loop.at(world.scenario.fault_end, _calm_down, world)


def _happen(world: World, fault: Fault) -> None:
    living = world.living()
    if not living or world.judge.outcome is not None:
        return
    worker = world.rng.choice(living)
    world.note(f"!! {fault.__name__} {worker}")
    world.judge.disturbed()
    fault(world, worker)


def _calm_down(world: World) -> None:
    world.scheduler.quiet = True
