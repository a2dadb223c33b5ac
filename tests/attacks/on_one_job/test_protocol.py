"""Attacks in the protocol itself, by an insider whose certificate is good."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from muster.wire.v1 import rendezvous_pb2 as pb
from muster.wire.v1 import rendezvous_pb2_grpc as pb_grpc
from tests.attacks import http2
from tests.attacks.field import Field
from tests.attacks.on_one_job.test_identity import join, refusal
from tests.attacks.on_one_job.test_transport import bare
from tests.fuzzing.engine import Target, mutated
from tests.fuzzing.shapes import filled
from tests.scheduler.processes import Stream, error_of

LINE = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z (DEBUG|INFO|WARNING|ERROR) ")


def sent_raw(field: Field, *messages: bytes) -> tuple[list[pb.SchedulerMessage], str]:
    """Sends bytes as messages of one session; returns what came, and the code of its end."""
    with field.channel("client") as over:
        return sent_over(over, *messages)


def sent_over(over: grpc.Channel, *messages: bytes) -> tuple[list[pb.SchedulerMessage], str]:
    """The same on a channel that stays."""
    call = bare(over.stream_stream(http2.SESSION))(iter(messages), timeout=30)
    got: list[pb.SchedulerMessage] = []
    try:
        for data in call:
            got.append(pb.SchedulerMessage.FromString(data))
    except grpc.RpcError as error:
        return got, error.code().name
    return got, "OK"


def host(**fields: str) -> pb.Host:
    return pb.Host(**{"id": "h", "name": "host", "address": "127.0.0.1", **fields})


BAD_JOINS: dict[str, dict[str, Any]] = {
    "newline in the node id": {"node_id": "x\n2026-01-01T00:00:00.000Z INFO joined node_id=forged"},
    "carriage return in the node id": {"node_id": "x\rforged"},
    "terminal escape in the node id": {"node_id": "x\x1b[2J"},
    "a node id that runs backwards": {"node_id": "x\u202etxt.exe"},
    "blank in the node id": {"node_id": "x y"},
    "empty node id": {"node_id": ""},
    "oversized node id": {"node_id": "x" * 129},
    "a node id of 500 kB": {"node_id": "x" * 500_000},
    "oversized job id": {"job_id": "x" * 129},
    "newline in the job id": {"job_id": "default\nforged"},
    "newline in the host name": {"host": host(name="h\nforged")},
    "oversized host name": {"host": host(name="h" * 254)},
    "newline in the topology": {"host": host(topology="rack\nforged")},
    "newline in the data address": {"data_address": "1.2.3.4:5\nforged"},
    "an unknown kind of device": {"device": pb.Device(kind="/dev/mem")},
    "a negative device": {"device": pb.Device(kind="cpu", index=-2)},
    "no incarnation": {"incarnation": 0},
    "two billion workers": {"worker_num": 2**31 - 1},
    "a negative number of workers": {"worker_num": -1},
    "a generation beyond all": {"held_generation": 2**64 - 1},
    "10,000 facts": {"facts": {f"f{i}": "v" for i in range(10_000)}},
    "another protocol": {"protocol_version": 99},
}


@pytest.mark.parametrize("name", BAD_JOINS)
def test_a_malformed_join_is_refused_by_the_name_of_its_field(field: Field, name: str) -> None:
    code, sentence = refusal(field, "client", join(**{"node_id": "intruder-0", **BAD_JOINS[name]}))
    assert code in ("MALFORMED", "NOT_PERMITTED")
    assert len(sentence) < 1000
    assert sentence.isprintable()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, "JOB_FULL"),
        ({"worker_num": 4}, "SETTINGS_DIFFER"),
        ({"backend": "nccl"}, "SETTINGS_DIFFER"),
        ({"node_id": "../../etc/passwd"}, "JOB_FULL"),
        ({"node_id": "%s%n{0.__class__}"}, "JOB_FULL"),
    ],
)
def test_who_fits_no_place_is_refused(field: Field, changes: dict[str, Any], code: str) -> None:
    assert refusal(field, "client", join(**{"node_id": "intruder-0", **changes}))[0] == code


def test_a_session_begins_with_join(field: Field) -> None:
    got, code = sent_raw(field, pb.WorkerMessage(built=pb.Built(generation=1)).SerializeToString())
    assert got[0].refused.code == pb.REFUSAL_CODE_MALFORMED
    assert code == "INVALID_ARGUMENT"


def test_a_session_has_one_join(field: Field) -> None:
    data = join("spare-1", spare=True).SerializeToString()
    got, code = sent_raw(field, data, data)
    assert got[-1].refused.sentence == "A session takes one Join only."
    assert code == "INVALID_ARGUMENT"


def test_random_bytes_are_no_message(field: Field) -> None:
    chance = random.Random(1)
    with field.channel("client") as over:
        for _ in range(50):
            got, code = sent_over(over, b"\xff" + chance.randbytes(chance.randrange(1, 300)))
            assert code == "INVALID_ARGUMENT"
            assert got[0].refused.code == pb.REFUSAL_CODE_MALFORMED


def test_fuzzed_joins_and_messages_end_in_refusals(field: Field) -> None:
    chance = random.Random(2)
    good = join("fuzz-0", spare=True).SerializeToString()
    target = Target("join", lambda data: None, (), (good,))
    ends = ("OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "PERMISSION_DENIED")
    with field.channel("client") as over:
        for index in range(150):
            first = mutated(good, chance, target, [good])
            then = filled(pb.WorkerMessage(), chance).SerializeToString()
            assert sent_over(over, first if index % 2 else good, then)[1] in ends
    assert field.status().state == "running"


def test_unary_calls_take_no_malformed_request(field: Field) -> None:
    with field.channel("operator") as over:
        for call in ("Status", "Drain"):
            raw = bare(over.unary_unary(f"/rendezvous.v1.Rendezvous/{call}"))
            bodies = [b"\xff\xff\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x03a\nb"]
            for body in bodies:
                code, sentence = error_of(lambda raw=raw, body=body: raw(body, timeout=30))  # type: ignore[misc]
                assert code == "INVALID_ARGUMENT"
                assert sentence.isprintable()


def test_draining_nobody_finds_nobody(field: Field) -> None:
    with field.channel("operator") as over:
        drain = pb_grpc.RendezvousStub(over).Drain
        request = pb.DrainRequest(node_id="victim-9", reason="x\n2026-01-01T00:00:00.000Z INFO forged")
        assert error_of(lambda: drain(request, timeout=30))[0] == "NOT_FOUND"


def _published(generation: int) -> pb.WorkerMessage:
    ids = pb.PublishUniqueIds(generation=generation, unique_ids=[b"INTRUDER" * 16])
    return pb.WorkerMessage(publish_unique_ids=ids)


INTRUSIONS: dict[str, Callable[[], pb.WorkerMessage]] = {
    "false unique ids": lambda: _published(1),
    "unique ids of a generation to come": lambda: _published(2),
    "unique ids of no generation": lambda: _published(2**62),
    "false suspicion": lambda: pb.WorkerMessage(
        suspect_peer=pb.SuspectPeer(generation=1, rank=0, detail="x\n2026-01-01T00:00:00.000Z INFO forged")
    ),
    "suspicion of a rank that is not": lambda: pb.WorkerMessage(
        suspect_peer=pb.SuspectPeer(generation=1, rank=65_535)
    ),
    "built what it is not in": lambda: pb.WorkerMessage(built=pb.Built(generation=1)),
    "quiesced what it is not in": lambda: pb.WorkerMessage(
        quiesced=pb.Quiesced(generation=1, last_started_step=2**62)
    ),
    "progress of others": lambda: pb.WorkerMessage(heartbeat=pb.Heartbeat(generation=1, step=2**62)),
    "finished for all": lambda: pb.WorkerMessage(
        leave=pb.Leave(generation=1, finished=True, reason="x\n2026-01-01T00:00:00.000Z INFO forged")
    ),
}


@pytest.mark.parametrize("name", INTRUSIONS)
def test_a_spare_has_no_say_in_the_generation_and_gets_no_unique_id(field: Field, name: str) -> None:
    got, _ = sent_raw(
        field, join("spare-2", spare=True).SerializeToString(), INTRUSIONS[name]().SerializeToString()
    )
    assert got[0].welcome.spare
    assert not [
        each for each in got if each.WhichOneof("body") in ("unique_ids", "assignment", "group_built")
    ]
    assert field.status().generation == 1


def test_asking_for_the_unique_id_of_a_generation_that_one_is_not_in(field: Field) -> None:
    """As a spare that claims to have been in, with and without a place."""
    for rank in (-1, 0, 2):
        claim = join("spare-3", spare=True, held_generation=1, held_rank=rank, built=rank >= 0)
        got, _ = sent_raw(field, claim.SerializeToString())
        assert "unique_ids" not in [each.WhichOneof("body") for each in got]


def test_a_flood_of_heartbeats_delays_nobody(field: Field) -> None:
    beat = pb.WorkerMessage(heartbeat=pb.Heartbeat(generation=0, step=1)).SerializeToString()
    before = field.steps()
    got, code = sent_raw(field, join("spare-4", spare=True).SerializeToString(), *[beat] * 5000)
    assert code == "OK"
    assert got[0].welcome.spare
    assert field.steps() >= before


def test_joining_and_vanishing_a_hundred_times(field: Field) -> None:
    with field.channel("client") as over:
        for _ in range(100):
            stream = Stream(over)
            stream.put(join("spare-5", spare=True))
            stream.next("welcome")
            stream.call.cancel()
            stream.half_close()
    assert field.status().state == "running"


def test_a_session_that_never_joins_is_closed(field: Field) -> None:
    assert field.silent is not None
    error = field.silent.end()
    assert error is not None
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert error.details() == "The caller opened a session and sent no Join."


def test_nobody_has_forged_a_line_of_the_log(field: Field) -> None:
    """What follows no stamp of ours are gRPC's own warnings."""
    lines = field.running.log.splitlines()
    assert not [line for line in lines if not LINE.match(line) and not re.match(r"^[EWI]\d{4} ", line)]
    assert not [line for line in lines if "\x1b" in line or "\u202e" in line]
    assert not [entry for entry in field.audit() if "forged" in entry.get("node_id", "")]
