"""The codec at the worker: what goes out, and what is let in."""

from __future__ import annotations

import tracemalloc
import zlib
from typing import Any

import pytest

from muster.wire import codec, messages
from muster.wire.codec import MAX_RECENT, WireError, encode
from muster.wire.codec import decode_scheduler_message as decode
from muster.wire.v1 import rendezvous_pb2 as pb
from tests.worker.session.machine import assignment, profile
from tests.worker.session.scripted import to_wire


def body(message: messages.WorkerMessage) -> pb.WorkerMessage:
    return pb.WorkerMessage.FromString(encode(message))


def scheduler_message(**parts: object) -> bytes:
    return pb.SchedulerMessage(**parts).SerializeToString()  # type: ignore[arg-type]


def wire_assignment(**changes: object) -> pb.Assignment:
    """The wire's form of a sound assignment."""
    sound = to_wire(assignment())
    fields = {field.name: getattr(sound, field.name) for field in sound.DESCRIPTOR.fields}
    return pb.Assignment(**{**fields, **changes})


def test_join_carries_everything() -> None:
    me = profile(facts=(("nccl", "2.28.9"),), spare=True, local_index=3, data_address="10.0.0.1:5000")
    join = body(messages.Join(me, 4, 2, True, 17)).join
    assert (join.protocol_version, join.job_id, join.node_id, join.incarnation) == (1, "job", "n0", 7)
    assert (join.worker_num, join.worker_min, join.spare, join.backend) == (2, 0, True, "tcp")
    assert (join.host.id, join.host.name, join.host.address) == ("host-id", "alpha", "10.0.0.1")
    assert (join.device.kind, join.device.index, join.local_index) == ("cpu", -1, 3)
    assert (join.held_generation, join.held_rank, join.built, join.step) == (4, 2, True, 17)
    assert (dict(join.facts), join.data_address) == ({"nccl": "2.28.9"}, "10.0.0.1:5000")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (messages.Built(3), pb.WorkerMessage(built=pb.Built(generation=3))),
        (
            messages.PublishUniqueIds(3, (b"a", b"b")),
            pb.WorkerMessage(publish_unique_ids=pb.PublishUniqueIds(generation=3, unique_ids=[b"a", b"b"])),
        ),
        (
            messages.Quiesced(3, 9),
            pb.WorkerMessage(quiesced=pb.Quiesced(generation=3, last_started_step=9)),
        ),
        (
            messages.SuspectPeer(3, 1, "reset"),
            pb.WorkerMessage(suspect_peer=pb.SuspectPeer(generation=3, rank=1, detail="reset")),
        ),
        (messages.Late(3, 12.5), pb.WorkerMessage(late=pb.Late(generation=3, seconds=12.5))),
        (
            messages.Probed(7, (("b", "re\nset"),), late=True, waits=True, busy="evaluation", seconds=3.5),
            pb.WorkerMessage(
                probed=pb.Probed(
                    round=7,
                    unreached=[pb.Unreached(node_id="b", detail="re\\nset")],
                    late=True,
                    waits=True,
                    busy="evaluation",
                    seconds=3.5,
                )
            ),
        ),
        (
            messages.RequestLeave(3, "SIGTERM"),
            pb.WorkerMessage(request_leave=pb.RequestLeave(generation=3, reason="SIGTERM")),
        ),
        (
            messages.Leave(3, True, "done"),
            pb.WorkerMessage(leave=pb.Leave(generation=3, finished=True, reason="done")),
        ),
        (
            messages.Leave(3, False, "lost", consequence=True, exit_code=3),
            pb.WorkerMessage(leave=pb.Leave(generation=3, reason="lost", consequence=True, exit_code=3)),
        ),
    ],
)
def test_other_messages(message: messages.WorkerMessage, expected: pb.WorkerMessage) -> None:
    assert body(message) == expected


def test_a_heartbeat_keeps_the_newest_collectives() -> None:
    recent = tuple(
        messages.Collective(i, "all_reduce", "world", "float32", 4, True) for i in range(MAX_RECENT + 5)
    )
    beat = body(messages.Heartbeat(2, 5, 6, 9.5, recent, 1)).heartbeat
    assert (beat.generation, beat.entered_generation) == (2, 1)
    assert (beat.step, beat.started_step, beat.samples_per_s) == (5, 6, 9.5)
    assert [c.sequence for c in beat.recent] == list(range(5, MAX_RECENT + 5))


LOST = pb.FirstLoss(node_id="b", incarnation=9, sentence="b\nleft", exit_code=3)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (
            {"welcome": pb.Welcome(heartbeat_interval_s=1, node_timeout_s=5, topo_timeout_s=60, spare=True)},
            messages.Welcome(1.0, 5.0, 60.0, True, version=""),
        ),
        ({"waiting": pb.Waiting(present=1, needed=2, sentence="n1")}, messages.Waiting(1, 2, "n1")),
        ({"assignment": wire_assignment()}, assignment()),
        ({"unique_ids": pb.UniqueIds(generation=2, unique_ids=[b"x"])}, messages.UniqueIds(2, (b"x",))),
        ({"group_built": pb.GroupBuilt(generation=2)}, messages.GroupBuilt(2)),
        (
            {"suspended": pb.Suspended(generation=2, reason="few", wait_s=9)},
            messages.Suspended(2, "few", 9.0),
        ),
        (
            {"suspended": pb.Suspended(generation=2, reason="few", wait_s=9, save=True)},
            messages.Suspended(2, "few", 9.0, save=True),
        ),
        (
            {"probe": pb.Probe(round=7, targets=[pb.ProbeTarget(node_id="b", address="x:1")])},
            messages.Probe(7, (("b", "x:1"),)),
        ),
        ({"quiesce": pb.Quiesce(generation=2, reason="grow")}, messages.Quiesce(2, "grow")),
        (
            {"refused": pb.Refused(code="REFUSAL_CODE_JOB_FULL", sentence="full")},
            messages.Refused(messages.RefusalCode.JOB_FULL, "full"),
        ),
        ({"ended": pb.Ended(ok=True, reason="all done")}, messages.Ended(True, "all done")),
        ({"ended": pb.Ended(ok=True, reason="go", leave=True)}, messages.Ended(True, "go", leave=True)),
        (
            {"suspended": pb.Suspended(generation=2, reason="few", wait_s=9, first_loss=LOST)},
            messages.Suspended(2, "few", 9.0, messages.FirstLoss("b", 9, "b\\nleft", 3)),
        ),
    ],
)
def test_what_the_scheduler_says(part: dict[str, object], expected: messages.SchedulerMessage) -> None:
    assert decode(scheduler_message(**part)) == expected


def test_a_leaving_worker_has_no_rank_in_its_assignment() -> None:
    decoded = decode(scheduler_message(assignment=wire_assignment(rank=-1, unique_id_count=0)))
    assert isinstance(decoded, messages.Assignment)
    assert decoded.rank == -1


def test_a_refusal_of_a_newer_scheduler_keeps_its_sentence() -> None:
    raw = pb.SchedulerMessage(refused=pb.Refused(code=99, sentence="new reason"))  # type: ignore[arg-type]
    assert decode(raw.SerializeToString()) == messages.Refused(messages.RefusalCode.UNSPECIFIED, "new reason")


def test_text_cannot_forge_a_second_line() -> None:
    decoded = decode(scheduler_message(ended=pb.Ended(reason="a\nERROR b")))
    assert decoded == messages.Ended(False, "a\\nERROR b")


def _members(*ranks: int, node_id: str = "") -> list[pb.Member]:
    return [
        pb.Member(rank=rank, node_id=node_id or f"n{i}", local_world_size=2, local_rank=0)
        for i, rank in enumerate(ranks)
    ]


def packed(content: bytes, **beside: Any) -> bytes:
    """An assignment whose large fields are packed, and what stands in it beside them."""
    alone = wire_assignment(members=[], hosts=[], lost=[], packed=content, **beside)
    return scheduler_message(assignment=alone)


LARGE = pb.Assignment(members=wire_assignment().members, hosts=wire_assignment().hosts).SerializeToString()


def test_a_packed_assignment_is_the_same_as_one_that_is_not() -> None:
    assert decode(packed(zlib.compress(LARGE))) == assignment().replaced(lost=())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (packed(b"nothing"), "packed must be a zlib stream"),
        (packed(zlib.compress(LARGE)[:-5]), "a whole zlib stream"),
        (packed(zlib.compress(LARGE) + b"more"), "something follows"),
        (packed(zlib.compress(b"\xff\xff")), "not a Assignment"),
        (packed(zlib.compress(pb.Assignment(rank=3).SerializeToString())), "members, hosts, lost alone"),
        (packed(zlib.compress(pb.Assignment(packed=b"x").SerializeToString())), "members, hosts, lost alone"),
    ],
)
def test_what_is_packed_wrongly_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        decode(data)


def test_members_do_not_stand_beside_packed_ones() -> None:
    with pytest.raises(WireError, match="beside those that are packed"):
        decode(scheduler_message(assignment=wire_assignment(packed=zlib.compress(LARGE))))


def test_what_would_unpack_to_too_much_is_refused_before_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = packed(zlib.compress(bytes(codec.MAX_UNPACKED_BYTES + 1)))
    assert len(bomb) < codec.MAX_UNPACKED_BYTES / 900
    tracemalloc.start()
    try:
        monkeypatch.setattr(codec, "MAX_UNPACKED_BYTES", 1 << 20)
        with pytest.raises(WireError, match="at most 1048576 bytes"):
            decode(bomb)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xff", "not a SchedulerMessage"),
        (b"", "no body"),
        (scheduler_message(welcome=pb.Welcome(heartbeat_interval_s=0)), "heartbeat_interval_s"),
        (
            scheduler_message(welcome=pb.Welcome(heartbeat_interval_s=float("nan"))),
            "heartbeat_interval_s",
        ),
        (scheduler_message(group_built=pb.GroupBuilt()), "generation"),
        (scheduler_message(unique_ids=pb.UniqueIds(generation=1)), "number of unique ids"),
        (scheduler_message(unique_ids=pb.UniqueIds(generation=1, unique_ids=[b""])), "length of a unique id"),
        (scheduler_message(assignment=wire_assignment(generation=0)), "generation"),
        (scheduler_message(assignment=wire_assignment(hosts=[])), "host_index"),
        (scheduler_message(assignment=wire_assignment(rank=2)), "rank must be from -1 to 1"),
        (scheduler_message(assignment=wire_assignment(unique_id_count=0)), "unique_id_count"),
        (scheduler_message(assignment=wire_assignment(state_source_rank=2)), "state_source_rank"),
        (scheduler_message(assignment=wire_assignment(newcomer_ranks=[2])), "newcomer_ranks"),
        (scheduler_message(assignment=wire_assignment(members=_members(0, 2))), "without a gap"),
        (scheduler_message(assignment=wire_assignment(members=_members(1, 0))), "in order of rank"),
        (scheduler_message(assignment=wire_assignment(members=_members(0, 1, node_id="n"))), "stands twice"),
    ],
)
def test_what_is_malformed_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        decode(data)
