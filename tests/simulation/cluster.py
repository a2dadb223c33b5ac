"""Several schedulers on a simulated etcd: the real election, journal and driver in each; answers get lost.

What is judged beside everything else: nobody writes, or says a final word, who does not lead; no batch is
written twice; workers that live are back with the next leader in time, and those that died meanwhile are out.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from muster.scheduler.core import events as scheduler_events
from muster.scheduler.core import records
from muster.scheduler.core.events import Decision
from muster.scheduler.core.shortage import LONGEST_PAUSE_S
from muster.scheduler.errors import DeposedError
from muster.scheduler.etcd import journal as journal_module
from muster.scheduler.etcd.api import EtcdRefusedError, EtcdUnreachableError, delete
from muster.scheduler.etcd.journal import EtcdJournal
from muster.scheduler.etcd.leadership import Leadership
from muster.scheduler.jobs.storage import Storage
from muster.wire import codec, patience
from muster.wire.v1 import etcd_pb2 as pb
from muster.worker.session import events as worker_events
from muster.worker.session.schedulers import Turns
from tests.scheduler.etcd.store import Store
from tests.simulation import worker as worker_module
from tests.simulation.judge import Violation
from tests.simulation.loop import Process
from tests.simulation.network import Network, Stream
from tests.simulation.scenario import NODE_TIMEOUT_S, TOPO_TIMEOUT_S, Scenario
from tests.simulation.scheduler import Scheduler, Watched
from tests.simulation.worker import Worker
from tests.simulation.world import World

MS_NODE_TIMEOUT_S = 4.5
"""To which a scheduler adds one and a half heartbeats, which is :data:`NODE_TIMEOUT_S`."""

SCHEDULERS = 3
CALL_TIMEOUT_S = 0.6
KINDS = ("crashes", "crashes", "crashes", "supervised", "supervised")
FAULTS = (
    *("kill", "kill", "stop", "stop", "stop", "replace", "outage", "part", "kill and lose", "lose"),
    "delete the key",
)
FULL = "fill etcd"
"""Drawn apart from the other faults, so that their seeds play as they did."""

FULLS = 0.3
COMPACT_RECORDS = 12
OUT_S = MS_NODE_TIMEOUT_S + 2.5
TOLD_S = 3.0
LEASE_LATE_S = 0.5
"""So late etcd may find that a lease is over."""


@dataclasses.dataclass(frozen=True)
class Shared(Scenario):
    """A scenario of several schedulers."""

    unanswered: float = 0.0

    @property
    def settings(self) -> scheduler_events.CoreSettings:
        patience_s = patience.takeover_patience_s(MS_NODE_TIMEOUT_S)
        return dataclasses.replace(
            super().settings,
            recovered_timeout_s=patience_s,
            breaking_pause_s=patience.breaking_pause_s(MS_NODE_TIMEOUT_S),
        )


class EtcdLine:
    """One process's calls: delayed, lost before or after they were carried out, or carried out too late."""

    def __init__(self, member: Member) -> None:
        self.member, self.cluster, self.world = member, member.cluster, member.world

    async def _ask(self, action: Callable[[], Any]) -> Any:
        world, rng = self.world, self.world.rng
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        late = rng.random() < self.cluster.unanswered / 4
        world.loop.after(
            world.network.delay() + (rng.uniform(0.5, 3.0) if late else 0.0), self._reach, action, answer
        )
        world.loop.after(CALL_TIMEOUT_S, _resolve, answer, None)
        reply = await answer
        if reply is None:
            raise EtcdUnreachableError("etcd at e:2379 does not answer: simulated.")
        if isinstance(reply[0], EtcdRefusedError):
            raise reply[0]
        return reply[0]

    def _reach(self, action: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        world, rng = self.world, self.world.rng
        if world.loop.now < max(self.cluster.outage_until, self.member.parted_until):
            return
        if rng.random() < self.cluster.unanswered / 2:
            return
        try:
            reply = action()
        except EtcdRefusedError as error:
            reply = error
        if rng.random() >= self.cluster.unanswered / 2:
            world.loop.after(world.network.delay(), _resolve, answer, (reply,))

    async def read(self, request: pb.RangeRequest) -> pb.RangeResponse:
        reply: pb.RangeResponse = await self._ask(lambda: self.cluster.store.read(request))
        return reply

    async def transact(self, request: pb.TxnRequest) -> pb.TxnResponse:
        reply: pb.TxnResponse = await self._ask(lambda: self._transact(request))
        return reply

    def _transact(self, request: pb.TxnRequest) -> pb.TxnResponse:
        self.cluster.store.expire()
        leads = self.member.leads()
        reply = self.cluster.store.transact(request)
        claims = any(op.HasField("request_put") and op.request_put.key == LEADER for op in request.success)
        if reply.succeeded and not claims:
            self.world.judge.expect(leads, f"{self.member} writes or speaks, and does not lead")
            self.member.fenced_at = self.world.loop.now
        return reply

    async def grant(self, ttl_s: int) -> int:
        lease: int = await self._ask(lambda: self.cluster.store.grant(ttl_s))
        return lease

    async def keep_alive(self, lease: int) -> int:
        ttl_s: int = await self._ask(lambda: self.cluster.store.keep_alive(lease))
        return ttl_s

    async def revoke(self, lease: int) -> None:
        await self._ask(lambda: self.cluster.store.end_lease(lease))

    async def await_deletion(self, key: bytes, revision: int, limit_s: float) -> None:
        store, world = self.cluster.store, self.world
        until = world.loop.now + limit_s
        deaf = world.rng.random() < 0.1
        while world.loop.now < until:
            await asyncio.sleep(0.05)
            reached = world.loop.now >= max(self.cluster.outage_until, self.member.parted_until)
            if reached and not deaf:
                store.expire()
                if any(gone == key and at >= revision for gone, at in store.deletions):
                    return


def _resolve(answer: asyncio.Future[Any], reply: Any) -> None:
    if not answer.done():
        answer.set_result(reply)


LEADER = b"/muster/job/leader"
BATCHES = b"/muster/job/jobs/job/"


class WatchedHere(Watched):
    """Also notes when the machine was stepped."""

    def step(self, event: scheduler_events.Event, now: float, *, more: bool = False) -> Decision:
        self.scheduler.stepped_at = self.world.loop.now  # type: ignore[attr-defined]
        return super().step(event, now, more=more)


class Member(Scheduler):
    """One of the schedulers: it stands by, leads, and is started again as a new one when it ends."""

    watched = WatchedHere

    def __init__(self, world: ClusterWorld, cluster: Cluster, number: int) -> None:
        super().__init__(world)
        self.cluster = cluster
        self.number = number
        self.crashes_left = 0
        self.parted_until = 0.0
        self.fenced_at = self.stepped_at = 0.0
        self.leadership: Leadership | None = None
        self.replaced = False
        self._lives: list[asyncio.Task[None]] = []

    def __str__(self) -> str:
        return f"scheduler {self.number}"

    def leads(self) -> bool:
        """Whether the leader's key is this process's."""
        pair = self.cluster.store.pairs.get(LEADER)
        token = self.leadership.token if self.leadership is not None else 0
        return pair is not None and pair.create_revision == token

    def start(self) -> None:
        self.process = Process(self.world.loop)
        self.world.note(f"!! {self} stands by")
        asyncio._set_running_loop(self.process.asyncio)
        try:
            self._lives.append(asyncio.Task(self._live(), loop=self.process.asyncio))
        finally:
            asyncio._set_running_loop(None)
        self._lives[-1].add_done_callback(self._ended)

    async def _live(self) -> None:
        self.leadership = claim = Leadership(EtcdLine(self), b"/muster/job", f"s{self.number}", self.process)
        await claim.campaign()
        journal = EtcdJournal(claim)
        keeping: asyncio.Task[None] = asyncio.Task(claim.keep(), loop=self.process.asyncio)
        self._lives.append(keeping)
        try:
            records = (await journal.load()).get("job", ())
        except DeposedError as error:
            self._die(f"because {error}", check=False)
            return
        self.journal = journal
        self.up_since = self.started_at = self.world.loop.now
        self.cluster.led(self)
        self._drive(records)
        await claim.deposed
        self._die(f"because {claim.deposed.result()}", check=False)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.process.error = task.exception()

    def _storage(self) -> Storage:
        return self.journal

    def feed(self, event: scheduler_events.Event) -> None:
        if self.up:
            super().feed(event)

    def pause(self, seconds: float) -> None:
        """It stands still; its workers leave it as soon as it answers no ping."""
        now, world = self.world.loop.now, self.world
        if now < self.paused_until or not self.process.alive:
            return
        self.paused_until = self.process.stopped_until = now + seconds
        world.judge.disturbed(self.paused_until)
        for stream in self.streams.values():
            detection_s = patience.PING_AFTER_S + patience.ping_answer_s(MS_NODE_TIMEOUT_S)
            when = now + world.rng.uniform(1.5, detection_s)
            if when < self.paused_until:
                world.loop.at(when, world.network.break_up, stream, "keepalive")

    def _die(self, why: str, *, check: bool) -> None:
        if not self.process.alive:
            return
        world = self.world
        world.note(f"!! {self} dies {why}")
        if check and self.up:
            world.judge.check_recovery(self.job.machine, self._records())
        self.up = False
        self.process.kill([*self._lives, *self._tasks])
        self.paused_until = 0.0
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            world.network.closed_by_scheduler(stream, "connection reset")
        world.judge.disturbed()
        if not self.replaced:
            world.loop.after(world.rng.choice((0.5, 1.0, 2.0)), self.cluster.start, self.number)

    def crash(self, when: str) -> None:
        settled = self.up and self.leads() and not self.writing and not self.job.stepped
        self._die(when, check=settled)

    def _records(self) -> list[records.Record]:
        pairs = self.cluster.store.pairs
        return [
            record
            for key in sorted(pairs)
            if key.startswith(BATCHES)
            for record in _unpacked(pairs[key].value)
        ]


def _unpacked(value: bytes) -> list[records.Record]:
    return [records.decode_record(each) for each in json.loads(zlib.decompress(value[1:]))]


class Cluster:
    """All schedulers, and their etcd; for the world, the one that leads."""

    def __init__(self, world: ClusterWorld) -> None:
        self.world = world
        self.unanswered = 0.0
        self.outage_until = self.full_until = 0.0
        self.store = Store(lambda: world.loop.now - world.lease_late_s)
        self.store.on_put = self._put
        self.store.is_full = lambda: world.loop.now < self.full_until
        self.members: list[Member] = []
        self.ghosts: list[Member] = []
        self._past: list[Member] = []  # what is left of the dead stays quiet
        self.last: Member | None = None
        self.changes = 0
        self.calm_since = 0.0

    def start(self, number: int = -1) -> None:
        """Starts all, or a new process in the place of one."""
        if number < 0:
            self.members = [Member(self.world, self, each) for each in range(SCHEDULERS)]
            for member in self.members:
                self.world.loop.after(0.1 * member.number, member.start)
        else:
            self._past.append(self.members[number])
            self.members[number] = Member(self.world, self, number)
            self.members[number].start()

    def _put(self, key: bytes, value: bytes) -> None:
        if not key.startswith(BATCHES):
            return
        judge = self.world.judge
        judge.expect(key not in self.store.pairs, "a batch is written over another")
        written = _unpacked(value)
        judge.check_secrecy([value.decode("latin-1"), repr(written)])
        judge.committed(tuple(each for each in written if not isinstance(each, records.Snapshot)))

    def led(self, member: Member) -> None:
        """The next leader begins to listen."""
        self.last = member
        self.changes += 1
        self.calm_since = self.world.loop.now
        self.world.note(f"!! {member} leads")
        self.world.launchers.led()
        checks = ((self.world.back_s, self._check_back), (OUT_S, self._check_out), (TOLD_S, self._check_told))
        for limit_s, check in checks:
            self.world.loop.after(limit_s, self._check_if_calm, check, member, self.changes, self.calm_since)

    def disturb(self) -> None:
        """Something happens that may keep workers away from the leader."""
        self.calm_since = self.world.loop.now

    def _check_if_calm(
        self, check: Callable[[Member, float], None], member: Member, change: int, since: float
    ) -> None:
        undisturbed = self.changes == change and self.calm_since == since and member.up
        if undisturbed and self.world.judge.outcome is None:
            check(member, since)

    def _check_out(self, member: Member, since: float) -> None:
        """A member that died while nobody led does not keep the others waiting."""
        judge = self.world.judge
        if self.unanswered:  # writing it down may take as long as it likes
            return
        for process, died_at in self.world.died_at.items():
            node_id, incarnation = process
            member_then = max(died_at, judge.placed_at.get(process, since)) < since
            out = not member_then or judge.claims.get(node_id) != incarnation
            judge.expect(out, f"{node_id} is dead, and a member {OUT_S:.1f} s after {member} began to lead")

    def _check_told(self, member: Member, since: float) -> None:
        """Of whom a launcher says that it died nobody waits until its time to come back is over."""
        judge = self.world.judge
        # Until one has come whom the journal knows, it may be older than the workers, and no word counts.
        others = since <= judge.came_back_at < since + TOLD_S / 2
        if self.unanswered or not others:
            return
        for node_id, incarnation in self.world.launchers.waiting:
            late = (
                self.world.died_at[node_id, incarnation] < since and judge.claims.get(node_id) == incarnation
            )
            judge.expect(not late, f"{node_id} is dead, its launcher says so, and {member} waits for it")

    def _check_back(self, member: Member, since: float) -> None:
        """Workers that lived through a takeover are back with the next leader."""
        world = self.world
        for worker in world.living():
            pair = (worker.node_id, worker.incarnation)
            member_then = pair in world.judge.since
            if worker.stopped_until >= since or worker.is_cut() or not member_then or worker.client.failure:
                continue
            here = worker.stream is not None and worker.stream.scheduler is member
            if worker.doing not in ("leaving", "gone"):
                world.judge.expect(
                    here, f"{worker} is not back {world.back_s:.1f} s after {member} began to lead"
                )

    # ------------------------------------------------------------ as one scheduler, for the world

    @property
    def leading(self) -> Member | None:
        """The one that leads and listens."""
        return next((each for each in self.members if each.up and each.leads()), None)

    @property
    def job(self) -> Watched:
        assert self.last is not None
        return self.last.job

    @property
    def up(self) -> bool:
        return self.leading is not None

    @property
    def up_since(self) -> float:
        leading = self.leading
        return leading.up_since if leading is not None else self.world.loop.now

    @property
    def started_at(self) -> float:
        """When the one that leads began to: from then on it remembers, whatever it stood still for."""
        return self.leading.started_at if self.leading is not None else self.world.loop.now

    @property
    def excused_at(self) -> float:
        """When silence last began to count again."""
        leading = self.leading
        return leading.excused_at if leading is not None else 0.0

    @property
    def paused_until(self) -> float:
        return self.leading.paused_until if self.leading is not None else 0.0

    deaf_until = 0.0

    @property
    def held_up_at(self) -> float:
        """When it last went on after it could write nothing."""
        return self.leading.held_up_at if self.leading is not None else 0.0

    def held_up_s(self) -> float:
        """How long the one that leads has tried to write what it decided last."""
        return self.leading.held_up_s() if self.leading is not None else 0.0

    def held_up_since(self, since: float) -> float:
        """For how long the one that leads has waited for etcd from then on."""
        return self.leading.held_up_since(since) if self.leading is not None else 0.0

    def lacked_space(self) -> bool:
        """Whether etcd had no space, ever."""
        return self.full_until > 0.0

    def forgives(self) -> bool:
        """Whether a stream that ends now may have broken because of its scheduler."""
        every = [*self.members, *self.ghosts]
        return self.up_since > self.world.loop.now - NODE_TIMEOUT_S - 2 or any(
            each.forgives() for each in every
        )

    # ------------------------------------------------------------ faults

    def harm(self, fault: str) -> None:
        """One fault."""
        world, rng = self.world, self.world.rng
        member = self.leading or rng.choice(self.members)
        if rng.random() < 0.15:
            member = rng.choice(self.members)
        self.disturb()
        seconds = rng.choice((0.5, 1.8, 2.2, 3.0, 6.0, 12.0))
        world.note(f"!! {fault} {member} {seconds}")
        if not hasattr(member, "process"):
            return
        if fault == "kill":
            member.crash("by SIGKILL")
        elif fault == "stop":
            member.pause(seconds)
        elif fault == "replace" and member.process.alive and not member.replaced:
            # Its machine seems dead; another of its name begins.
            member.pause(seconds + 6.0)
            member.replaced = True
            self.ghosts.append(member)
            world.loop.after(0.5, self.start, member.number)
            world.loop.at(member.paused_until, self._ask_late, member)
        elif fault == "outage":
            until = world.loop.now + seconds
            self.outage_until = max(self.outage_until, until)
            world.judge.disturbed(until)
            world.loop.at(until, self._outage_over, until)
        elif fault == "delete the key":
            self.store.transact(pb.TxnRequest(success=[delete(LEADER, LEADER + b"\0")]))
        elif fault == "part":
            member.parted_until = world.loop.now + seconds
            world.judge.disturbed(member.parted_until)
        elif world.scenario.kind == "supervised":
            living = [each for each in world.living() if each.stopped_until < world.loop.now]
            if fault == "kill and lose":
                member.crash("by SIGKILL")
            if len(living) > 1:
                world.loop.after(rng.uniform(0.0, 1.0), rng.choice(living).kill)

    def fill(self, seconds: float) -> None:
        """etcd reaches its quota, for so long."""
        world = self.world
        if world.judge.outcome is not None:
            return
        world.note(f"!! {FULL} for {seconds:g} s")
        self.full_until, over = world.loop.now + seconds, world.loop.now + seconds + LONGEST_PAUSE_S
        world.judge.disturbed(over)
        for at in (world.loop.now, over):
            world.loop.at(at, self.disturb)

    def _ask_late(self, member: Member) -> None:
        """An operator asked for something while it stood still; it may not write that down any more."""
        if member.up and not member.leads():
            member.feed(scheduler_events.DrainRequested(min(self.world.newest), "maintenance"))

    def _outage_over(self, until: float) -> None:
        """etcd's new leader gives each lease its whole time again."""
        self.disturb()
        if self.outage_until == until:
            for lease in self.store.leases:
                self.store.keep(lease)


class ClusterNetwork(Network):
    """Workers try one scheduler after the other, in the real order."""

    def __init__(self, world: ClusterWorld) -> None:
        super().__init__(world)
        self.turns: dict[Worker, Turns] = {}

    def connect(self, worker: Worker, number: int) -> None:
        turns = self.turns.setdefault(worker, Turns(SCHEDULERS))
        self.world.loop.after(self.delay(), self._try, worker, number, turns.order())

    def _try(self, worker: Worker, number: int, order: list[int]) -> None:
        world = self.world
        if not worker.alive:
            return
        if not order or worker.is_cut():
            world.loop.after(
                1.0 if worker.is_cut() else 0.0, worker.post, worker_events.StreamLost(number, "no answer")
            )
            return
        cluster: Cluster = world.scheduler  # type: ignore[assignment]
        member, rest = cluster.members[order[0]], order[1:]
        ghost = next((each for each in cluster.ghosts if each.number == order[0] and each.up), None)
        member = ghost if ghost is not None and not member.up else member
        if not member.up:
            world.loop.after(self.delay(), self._try, worker, number, rest)
        elif world.loop.now < member.paused_until:
            world.loop.after(patience.TRY_S, self._try, worker, number, rest)
        else:
            self.turns[worker].found(order[0])
            self.sessions += 1
            stream = Stream(self, self.sessions, worker, number, member)
            member.streams[stream.session] = stream
            worker.stream = stream
            worker.post(worker_events.StreamOpened(number))

    def send_down(self, stream: Stream, data: bytes) -> None:
        message = codec.decode_scheduler_message(data, stream.last)
        if type(message).__name__ in ("Refused", "Ended"):
            member: Any = stream.scheduler
            fenced = member.fenced_at >= member.stepped_at
            self.world.judge.expect(fenced, f"{member} says a final word, and has not asked whether it leads")
        super().send_down(stream, data)


class ClusterWorld(World):
    """One job under several schedulers."""

    def __init__(self, seed: int, trace: list[str] | None = None) -> None:
        super().__init__(seed, trace)
        rng = self.rng = random.Random(f"cluster {seed}")
        kind = rng.choice(KINDS)
        drawn = {f.name: getattr(self.scenario, f.name) for f in dataclasses.fields(Scenario)}
        worker_num = rng.randint(2, 4)
        drawn |= {
            "kind": kind,
            "worker_num": worker_num,
            "worker_min": rng.randint(1, worker_num),
            "spares": 0,
            "commit_crash": 0.0,
            "steps": rng.randint(10, 40),
            "per_host": 2,
            "fault_end": 40.0,
        }
        self.scenario = Shared(**drawn)
        self.lease_late_s = rng.uniform(0.0, LEASE_LATE_S)
        self.timing = worker_module.TIMING.replaced(
            verdict_margin_s=patience.verdict_margin_s(MS_NODE_TIMEOUT_S),
            reconnect_timeout_s=60.0,
            goodbye_timeout_s=60.0,
        )
        self.back_s = patience.takeover_patience_s(MS_NODE_TIMEOUT_S)
        self.network = ClusterNetwork(self)
        self.cluster = Cluster(self)
        self.cluster.unanswered = rng.choice((0.0, 0.02, 0.1))
        self.scheduler = self.cluster  # type: ignore[assignment]
        self.note(f"seed {seed}: {self.scenario}, unanswered {self.cluster.unanswered}")

    def run(self) -> None:
        rng, scenario = self.rng, self.scenario
        self.cluster.start()
        for number in range(scenario.worker_num):
            self.loop.at(rng.uniform(0.0, 2.0), self.start, self.node(number))
        at = rng.uniform(1.0, 4.0)
        for _ in range(rng.randint(1, 4)):
            self.loop.at(at, self.cluster.harm, rng.choice(FAULTS))
            at += rng.choice((0.5, 2.0, 5.0, 12.0)) * rng.uniform(0.5, 1.5)
        self.launchers.begin()
        space = random.Random(f"cluster journal {self.seed}")
        if space.random() < FULLS:
            self.loop.at(space.uniform(1.0, at), self.cluster.fill, space.choice((2.0, 6.0, 20.0)))
        try:
            self.loop.run(at + 6 * TOPO_TIMEOUT_S, self._over)
            self.note(f"ended: {self.judge.outcome}")
            self.judge.final()
        finally:
            for worker in self.processes:
                worker.threads.kill()


@contextmanager
def compacting_soon() -> Iterator[None]:
    """Snapshots after a few records, so that short jobs have some."""
    before, journal_module.COMPACT_RECORDS = journal_module.COMPACT_RECORDS, COMPACT_RECORDS
    try:
        yield
    finally:
        journal_module.COMPACT_RECORDS = before


def play_cluster(seed: int, trace: list[str] | None = None) -> str:
    """Plays one seed with several schedulers; returns what was broken, or "" if all was well."""
    world = ClusterWorld(seed, trace)
    try:
        with compacting_soon():
            world.run()
    except Violation as violation:
        world.note(f"VIOLATION {violation}")
        return str(violation)
    return ""
