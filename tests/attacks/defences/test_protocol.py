"""Attacks in the protocol by insiders: twins of those on one job."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import grpc
import pytest

from muster.scheduler.core import events, joining
from muster.scheduler.core.job import Job as Parts
from muster.scheduler.core.ledger import Ledger
from muster.scheduler.core.machine import Machine as Job
from muster.scheduler.core.members import Members
from muster.scheduler.serve import host_stream
from muster.scheduler.store import key_value_store
from muster.scheduler.store.key_value_store import (
    Answer,
    KeyValueStore,
    Operation,
    OperationKind,
    Quotas,
    Status,
)
from muster.scheduler.watch.service import WatchLimits
from muster.wire import codec, messages, rules
from muster.wire.v1 import host_pb2
from muster.wire.v1 import rendezvous_pb2 as pb
from tests.attacks.defences.attack import Attack, Try, check
from tests.attacks.defences.service import SETUP, pki, served
from tests.attacks.on_one_job.test_hosts_stores_watchers import HOST_STREAM, WATCH, batch, exchanged
from tests.attacks.on_one_job.test_identity import join
from tests.attacks.on_one_job.test_protocol import BAD_JOINS
from tests.attacks.on_one_job.test_transport import bare
from tests.scheduler.jobs.test_adoption import SETTINGS, A, B, C, D, candidate
from tests.scheduler.jobs.test_adoption import journal as journal_of
from tests.waiting import LIMIT_S

# ---------------------------------------------------------------- what a Join may say


def said(what: str) -> Try:
    """A Join with this in it: whether it gets past the decoder."""

    def attack(_: Path) -> bool:
        try:
            codec.decode_worker_message(join(**BAD_JOINS[what]).SerializeToString())
        except codec.WireError:
            return False
        return True

    return attack


def take_what_is_protobuf(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(codec, "decode_worker_message", pb.WorkerMessage.FromString)


JOINS = tuple(
    Attack(
        f"join with {what}",
        "the log, the ledger",
        "a certificate of the job",
        said(what),
        take_what_is_protobuf,
    )
    for what in BAD_JOINS
)


def command_terminals(_: Path) -> bool:
    """Gives a reason for its leave that operators' terminals, and logs, take for more than that."""
    evil = "x\x1b[2J\x1b]0;owned\x07\n2026-01-01T00:00:00.000Z INFO forged"
    leave = codec.decode_worker_message(pb.WorkerMessage(leave=pb.Leave(reason=evil)).SerializeToString())
    assert isinstance(leave, messages.Leave)
    return not leave.reason.isprintable()


# ---------------------------------------------------------------- who has a say in a generation


SPARE = events.SessionId(77)
NEWCOMER = events.SessionId(78)
ONE_SPARE = dataclasses.replace(SETTINGS, spares=1)


def job(*, stands: bool) -> Job:
    """A job of three, and a spare on a stream of its own."""
    records = journal_of(A, B, C)
    made = Job.recover("job", ONE_SPARE, records if stands else records[:-1], 0.0)
    for rank, who in enumerate((A, B, C)):
        made.step(
            events.Joined(
                events.SessionId(rank), who, 1, rank, built=stands, probe_address=f"10.0.0.{rank}:5"
            ),
            0.5,
        )
    made.step(events.Joined(SPARE, D.replaced(spare=True)), 0.6)
    return made


def sent(made: Job, event: events.Event) -> set[type]:
    """What kinds of messages follow an event."""
    return {type(message) for _, message in made.step(event, 1.0).messages}


IDS = (b"INTRUDER" * 16,)


def spare_gives_the_unique_ids(_: Path) -> bool:
    """All members would build a group whose secret it knows."""
    return messages.UniqueIds in sent(job(stands=False), events.UniqueIdsPublished(SPARE, 1, IDS))


def rank_1_gives_the_unique_ids(_: Path) -> bool:
    return messages.UniqueIds in sent(
        job(stands=False), events.UniqueIdsPublished(events.SessionId(1), 1, IDS)
    )


def ids_of_another_generation(_: Path) -> bool:
    """Rank 0 hands in those of a generation that is not, which would wait for it."""
    return messages.UniqueIds in sent(
        job(stands=False), events.UniqueIdsPublished(events.SessionId(0), 2, IDS)
    )


def any_generation(patch: pytest.MonkeyPatch) -> None:
    behind = Parts.member_behind
    patch.setattr(
        Parts, "member_behind", lambda self, session, _: behind(self, session, self.ledger.generation)
    )


def spare_suspects_a_member(_: Path) -> bool:
    """A word of its own would have all members probe each other."""
    return messages.Probe in sent(job(stands=True), events.PeerSuspected(SPARE, 1, 0, "it is dead"))


def spare_is_late(_: Path) -> bool:
    return messages.Probe in sent(job(stands=True), events.PeerLate(SPARE, 1, 100.0))


def all_are_members(patch: pytest.MonkeyPatch) -> None:
    """Who has no rank has rank 0."""
    rank_of = Ledger.rank_of
    patch.setattr(Ledger, "rank_of", lambda self, node_id: max(0, rank_of(self, node_id)))


def all_count_as_members(patch: pytest.MonkeyPatch) -> None:
    """The same, but for the ledger itself."""
    rank_of = Parts.rank_of
    patch.setattr(Parts, "rank_of", lambda self, node_id: max(0, rank_of(self, node_id)))


def all_are_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Parts, "rank_of", lambda self, node_id: 0)


def take_a_living_ones_name(_: Path) -> bool:
    made = Job.recover("job", SETTINGS, journal_of(A, B)[:3], 0.0)
    made.step(events.Joined(events.SessionId(0), A), 0.5)
    return messages.Welcome in sent(made, events.Joined(NEWCOMER, candidate("a", incarnation=666)))


def come_with_other_settings(_: Path) -> bool:
    made = Job.recover("job", SETTINGS, journal_of(A, B)[:3], 0.0)
    made.step(events.Joined(events.SessionId(0), A), 0.5)
    return messages.Welcome in sent(made, events.Joined(NEWCOMER, C.replaced(backend="nccl")))


def say_that_a_living_one_has_ended(_: Path) -> bool:
    """As a launcher says of a worker of its own: whoever has the certificate of workers may say it."""
    said_so = job(stands=True).step(events.ProcessEnded("a", 1, "was killed by SIGKILL"), 1.0)
    return any(type(record).__name__ == "Removed" for record in said_so.records)


def nobody_has_a_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Members, "session_of", lambda self, node_id: None)


OUTSIDER, MEMBER = "a spare of the job", "a member of the job"
SAYS = (
    Attack(
        "command terminals by a reason", "the terminal, the log", MEMBER, command_terminals,
        lambda patch: patch.setattr(rules, "one_line", str),
    ),
    Attack(
        "a spare gives the unique ids", "gradients", OUTSIDER, spare_gives_the_unique_ids, all_are_members
    ),
    Attack("rank 1 gives the unique ids", "gradients", MEMBER, rank_1_gives_the_unique_ids, all_are_first),
    Attack(
        "unique ids of another generation", "the group", MEMBER, ids_of_another_generation, any_generation
    ),
    Attack(
        "a spare suspects a member", "the training", OUTSIDER, spare_suspects_a_member, all_count_as_members
    ),
    Attack("a spare is late", "the training", OUTSIDER, spare_is_late, all_count_as_members),
    Attack(
        "take a living one's name", "a place", "a certificate of the job", take_a_living_ones_name,
        lambda patch: patch.setattr(joining, "check_node", lambda ledger, who: None),
    ),
    Attack(
        "come with other settings", "the training", "a certificate of the job", come_with_other_settings,
        lambda patch: patch.setattr(joining, "check_place", lambda ledger, settings, who: None),
    ),
    Attack(
        "say that a living one has ended", "a place", "a certificate of the job",
        say_that_a_living_one_has_ended, nobody_has_a_stream,
    ),
)  # fmt: skip


# ---------------------------------------------------------------- greed


FEW = Quotas(keys=50, size_bytes=2_000_000, waits=20, unconfirmed=20, answer_bytes=1000)
"""So much may be held where the product's quotas would make a test long."""

GREED = {"quotas": FEW}


def asked_of_the_store(*operations: Operation) -> Try:
    """Whether all of it is taken."""

    def attack(_: Path) -> bool:
        answers: list[Answer] = []
        store = KeyValueStore(lambda _, answer: answers.append(answer), quotas=GREED["quotas"])
        try:
            for operation in operations:
                store.execute(("a", 1), operation, 0.0)
            while store.looking:
                store.turn()
        except key_value_store.QuotaError:
            return False
        return not any(answer.status is Status.REFUSED for answer in answers)

    return attack


def product_quotas(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(GREED, "quotas", Quotas())


KEYS = [b"%d" % number for number in range(100)]
STORE = (
    Attack(
        "wait for a hundred things", "memory", MEMBER,
        asked_of_the_store(*(Operation(n + 1, OperationKind.WAIT, (key,)) for n, key in enumerate(KEYS))),
        product_quotas,
    ),
    Attack(
        "a hundred keys", "memory", MEMBER,
        asked_of_the_store(
            *(Operation(n + 1, OperationKind.SET, (key,), (b"v",)) for n, key in enumerate(KEYS))
        ),
        product_quotas,
    ),
    Attack(
        "never confirm an answer", "memory", MEMBER,
        asked_of_the_store(*(Operation(n, OperationKind.ADD, (b"n",), amount=1) for n in range(1, 100))),
        product_quotas,
    ),
    Attack(
        "much in a few keys", "memory", MEMBER,
        asked_of_the_store(
            *(Operation(n + 1, OperationKind.SET, (KEYS[n],), (bytes(500_000),)) for n in range(5))
        ),
        product_quotas,
    ),
    Attack(
        "a value of 900 kB", "memory", MEMBER,
        asked_of_the_store(Operation(1, OperationKind.SET, (b"k",), (bytes(900_000),))),
        lambda patch: patch.setattr(key_value_store, "MAX_VALUE_BYTES", 1 << 30),
    ),
    Attack(
        "a key of 5 kB", "memory", MEMBER,
        asked_of_the_store(Operation(1, OperationKind.SET, (bytes(5000),), (b"v",))),
        lambda patch: patch.setattr(key_value_store, "MAX_KEY_BYTES", 1 << 30),
    ),
)  # fmt: skip


def too_many_items(_: Path) -> bool:
    with served() as here, here.channel("host") as over:
        return exchanged(over, HOST_STREAM, [batch(*[host_pb2.FromWorker()] * 5000)])[1] == "OK"


def keep_other_operators_out(_: Path) -> bool:
    """Operators of one job watch as often as they can; whether another job's operator is still let in."""
    with served() as here, contextlib.ExitStack() as held:
        for name in ("operator", "operator", "operator", "operator", "other-operator"):
            over = held.enter_context(here.channel(name))
            call = bare(over.unary_stream(WATCH))(b"", timeout=LIMIT_S)
            held.callback(call.cancel)
            try:
                next(call)
            except grpc.RpcError:
                out = name
            else:
                out = ""
        return out == "other-operator"


def watch_often(_: Path) -> bool:
    """Five watchers of one job's operators, where two may be."""
    with served() as here, contextlib.ExitStack() as held:
        over = held.enter_context(here.channel("operator"))
        for _number in range(5):
            call = bare(over.unary_stream(WATCH))(b"\x0a\x07default", timeout=LIMIT_S)
            held.callback(call.cancel)
            try:
                next(call)
            except grpc.RpcError:
                return False
        return True


SERVED = (
    Attack(
        "too many items at once", "processor time", "a host's certificate", too_many_items,
        lambda patch: patch.setattr(host_stream, "MAX_ITEMS", 1 << 30),
    ),
    Attack(
        "watch often", "memory, processor time", "an operator", watch_often,
        lambda patch: patch.setattr(SETUP, "watch", WatchLimits()),
    ),
    Attack(
        "keep other operators out", "what they see", "an operator", keep_other_operators_out,
        lambda patch: patch.setattr(SETUP, "watch", WatchLimits(watchers=4, of_one_job=4)),
    ),
)  # fmt: skip


@pytest.fixture
def _few_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few may watch that a test need not make many."""
    monkeypatch.setattr(SETUP, "watch", WatchLimits(watchers=4, of_one_job=2))
    pki()


@pytest.mark.usefixtures("_few_watchers")
@pytest.mark.parametrize("attack", (*JOINS, *SAYS, *STORE, *SERVED), ids=lambda attack: attack.name)
def test_its_defence_and_nothing_else_stops_it(attack: Attack, tmp_path: Path) -> None:
    check(attack, tmp_path)
