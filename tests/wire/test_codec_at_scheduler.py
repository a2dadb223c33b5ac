"""The codec at the scheduler: what is well formed comes through whole, what is not ends in a typed error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.scheduler.core import events, records
from muster.scheduler.core.job import as_sent
from muster.scheduler.core.views import JobView, WorkerView
from muster.scheduler.serve.sessions import event_of
from muster.scheduler.serve.status import encode_status
from muster.wire import codec, messages, unary_calls
from muster.wire.codec import WireError
from muster.wire.v1 import rendezvous_pb2 as pb
from tests.scheduler.fakes import candidate, member

SESSION = 42


def join(**changes: object) -> pb.Join:
    fields: dict[str, object] = {
        "protocol_version": 1,
        "job_id": "job",
        "node_id": "node-a",
        "incarnation": 2**64 - 1,
        "worker_num": 4,
        "worker_min": 3,
        "backend": "tcp",
        "host": pb.Host(id="id", name="name", address="fe80::1", topology="rack 1"),
        "device": pb.Device(kind="cuda", index=3, pci_bus_id="0000:1B:00.0", model="NVIDIA H200"),
        "local_index": 2,
        "data_address": "[fe80::1]:4000",
        "facts": {"nccl": "2.28.9"},
    }
    return pb.Join(**(fields | changes))  # type: ignore[arg-type]


def decode(**body: object) -> object:
    return event_of(SESSION, codec.decode_worker_message(pb.WorkerMessage(**body).SerializeToString()))  # type: ignore[arg-type]


def test_join_comes_through_whole() -> None:
    request = decode(join=join(held_generation=5, held_rank=1, built=True, step=9, spare=True))
    assert request == events.Joined(
        session=SESSION,
        candidate=messages.Candidate(
            node_id="node-a",
            incarnation=2**64 - 1,
            host=messages.Host("id", "name", "fe80::1", "rack 1"),
            device=messages.Device("cuda", 3, "0000:1B:00.0", "NVIDIA H200"),
            worker_num=4,
            worker_min=3,
            backend="tcp",
            local_index=2,
            data_address="[fe80::1]:4000",
            spare=True,
            facts=(("nccl", "2.28.9"),),
        ),
        held_generation=5,
        held_rank=1,
        built=True,
        step=9,
    )


def test_an_unset_worker_min_is_worker_num() -> None:
    request = decode(join=join(worker_min=0))
    assert isinstance(request, events.Joined)
    assert request.candidate.worker_min == 4


@pytest.mark.parametrize(
    ("body", "event"),
    [
        ({"built": pb.Built(generation=3)}, events.BuiltReported(SESSION, 3)),
        (
            {"publish_unique_ids": pb.PublishUniqueIds(generation=3, unique_ids=[b"secret"])},
            events.UniqueIdsPublished(SESSION, 3, (b"secret",)),
        ),
        (
            {"heartbeat": pb.Heartbeat(generation=0, step=1, started_step=2, samples_per_s=3.5)},
            events.Heard(SESSION, 0, 1, 2, 3.5),
        ),
        (
            {"heartbeat": pb.Heartbeat(generation=4, entered_generation=3)},
            events.Heard(SESSION, 4, 0, 0, 0.0, entered_generation=3),
        ),
        (
            {
                "heartbeat": pb.Heartbeat(
                    generation=2,
                    recent=[
                        pb.Collective(
                            sequence=1, name="all_reduce", group="world", dtype="float32", size_bytes=8
                        )
                    ],
                )
            },
            events.Heard(
                SESSION, 2, 0, 0, 0.0, (messages.Collective(1, "all_reduce", "world", "float32", 8, False),)
            ),
        ),
        (
            {"quiesced": pb.Quiesced(generation=3, last_started_step=7)},
            events.QuiescedReported(SESSION, 3, 7),
        ),
        (
            {"suspect_peer": pb.SuspectPeer(generation=3, rank=1, detail="reset\nby peer")},
            events.PeerSuspected(SESSION, 3, 1, "reset\\nby peer"),
        ),
        ({"late": pb.Late(generation=3, seconds=12.5)}, events.PeerLate(SESSION, 3, 12.5)),
        (
            {"probed": pb.Probed(round=7, unreached=[pb.Unreached(node_id="b", detail="x\ny")], waits=True)},
            events.ProbeAnswered(SESSION, 7, (("b", "x\\ny"),), waits=True),
        ),
        (
            {
                "probed": pb.Probed(
                    round=7, unreached=[pb.Unreached(node_id="b")], late=True, busy="evaluation", seconds=3.5
                )
            },
            events.ProbeAnswered(
                SESSION, 7, (("b", "no reason given"),), late=True, busy="evaluation", seconds=3.5
            ),
        ),
        (
            {"request_leave": pb.RequestLeave(generation=3, reason="TERM")},
            events.LeaveRequested(SESSION, 3, "TERM"),
        ),
        (
            {"leave": pb.Leave(generation=3, finished=True, reason="done")},
            events.LeftCleanly(SESSION, 3, True, "done"),
        ),
        (
            {"leave": pb.Leave(generation=3, reason="lost", consequence=True, exit_code=3)},
            events.LeftCleanly(SESSION, 3, False, "lost", True, 3),
        ),
    ],
)
def test_every_message_becomes_its_event(body: dict[str, object], event: events.Event) -> None:
    assert decode(**body) == event


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"protocol_version": 2}, "protocol version 2"),
        ({"job_id": ""}, "job_id"),
        ({"node_id": ""}, "node_id"),
        ({"node_id": "a b"}, "node_id"),
        ({"node_id": "a\nb"}, "node_id"),
        ({"node_id": "a\u202eb"}, "node_id"),
        ({"node_id": "x" * 129}, "node_id"),
        ({"incarnation": 0}, "incarnation"),
        ({"worker_num": 0}, "worker_num"),
        ({"worker_num": -1}, "worker_num"),
        ({"worker_num": 65_537}, "worker_num"),
        ({"worker_min": 5}, "worker_min"),
        ({"worker_min": -1}, "worker_min"),
        ({"host": pb.Host(id="", name="n")}, "host.id"),
        ({"host": pb.Host(id="i", name="x" * 254)}, "host.name"),
        ({"host": pb.Host(id="i", name="n", address="a\x00b")}, "host.address"),
        ({"host": pb.Host(id="i", name="n", topology="a\x1b[31m")}, "host.topology"),
        ({"device": pb.Device(kind="tpu")}, "device.kind"),
        ({"device": pb.Device(kind="cpu", index=-2)}, "device.index"),
        ({"device": pb.Device(kind="cpu", model="x" * 257)}, "device.model"),
        ({"local_index": -2}, "local_index"),
        ({"data_address": "a b"}, "data_address"),
        ({"held_generation": 2**63}, "held_generation"),
        ({"held_generation": 1, "held_rank": 65_536}, "held_rank"),
        ({"step": 2**64 - 1}, "step"),
        ({"backend": ""}, "backend"),
        ({"facts": {f"k{i}": "v" for i in range(33)}}, "facts"),
        ({"facts": {"k": "a\nb"}}, "fact's value"),
        ({"facts": {"a b": ""}}, "fact's name"),
    ],
)
def test_a_join_out_of_bounds_is_refused_naming_the_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(WireError, match=field) as caught:
        decode(join=join(**changes))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"built": pb.Built()},
        {"quiesced": pb.Quiesced(generation=2**64 - 1)},
        {"publish_unique_ids": pb.PublishUniqueIds(generation=1)},
        {"publish_unique_ids": pb.PublishUniqueIds(generation=1, unique_ids=[b""])},
        {"publish_unique_ids": pb.PublishUniqueIds(generation=1, unique_ids=[b"x" * 1025])},
        {"publish_unique_ids": pb.PublishUniqueIds(generation=1, unique_ids=[b"x"] * 513)},
        {"heartbeat": pb.Heartbeat(samples_per_s=float("nan"))},
        {"heartbeat": pb.Heartbeat(samples_per_s=-1.0)},
        {"heartbeat": pb.Heartbeat(recent=[pb.Collective(name="a")] * 65)},
        {"heartbeat": pb.Heartbeat(snapshot=pb.SnapshotReport(taken=-2))},
        {"heartbeat": pb.Heartbeat(snapshot=pb.SnapshotReport(age_s=float("nan")))},
        {"heartbeat": pb.Heartbeat(snapshot=pb.SnapshotReport(seconds=-1.0))},
        {"heartbeat": pb.Heartbeat(snapshot=pb.SnapshotReport(size_bytes=2**63))},
        {"heartbeat": pb.Heartbeat(snapshot=pb.SnapshotReport(partners=[1] * 65))},
        {"heartbeat": pb.Heartbeat(snapshot=pb.SnapshotReport(partners=[65_536]))},
        {"heartbeat": pb.Heartbeat(checkpoint=pb.CheckpointReport(age_s=float("inf")))},
        {"heartbeat": pb.Heartbeat(times=[1, *[1.0] * 6, 0])},
        {"heartbeat": pb.Heartbeat(gpu=pb.GpuReport())},
        {"heartbeat": pb.Heartbeat(gpu=pb.GpuReport(state="poorly"))},
        {"heartbeat": pb.Heartbeat(gpu=pb.GpuReport(state="ill", reasons=["x"] * 9))},
        {"heartbeat": pb.Heartbeat(gpu=pb.GpuReport(state="ill", reasons=["x" * 121]))},
        {"heartbeat": pb.Heartbeat(gpu=pb.GpuReport(state="ill", reasons=["two\nlines"]))},
        {"heartbeat": pb.Heartbeat(gpu=pb.GpuReport(state="ill", xids=[48] * 17))},
        {"heartbeat": pb.Heartbeat(times=[1, *[1.0] * 8, 0])},
        {"heartbeat": pb.Heartbeat(times=[float("nan"), *[1.0] * 7, 0])},
        {"heartbeat": pb.Heartbeat(times=[float("inf"), *[1.0] * 7, 0])},
        {"heartbeat": pb.Heartbeat(times=[1, *[1.0] * 7, float("nan")])},
        {"heartbeat": pb.Heartbeat(times=[0, *[1.0] * 7, 0])},
        {"heartbeat": pb.Heartbeat(times=[1, *([1.0] * 6 + [-1.0]), 0])},
        {"heartbeat": pb.Heartbeat(times=[1, *([float("nan")] + [1.0] * 6), 0])},
        {"heartbeat": pb.Heartbeat(times=[1, *([1.0] * 6 + [float("nan")]), 0])},
        {"heartbeat": pb.Heartbeat(times=[1, *([1.0] * 6 + [float("inf")]), 0])},
        {"heartbeat": pb.Heartbeat(times=[1, *[1.0] * 7, 70_000])},
        {"suspect_peer": pb.SuspectPeer(generation=1, rank=-2)},
        {"late": pb.Late(seconds=1.0)},
        {"late": pb.Late(generation=1, seconds=float("inf"))},
        {"probed": pb.Probed(unreached=[pb.Unreached(node_id="a b")])},
        {"probed": pb.Probed(busy="x" * 2049)},
        {"probed": pb.Probed(seconds=float("inf"))},
        {"probed": pb.Probed(seconds=-1.0)},
        {"leave": pb.Leave(reason="x" * 2049)},
    ],
)
def test_other_messages_out_of_bounds_are_refused(body: dict[str, object]) -> None:
    with pytest.raises(WireError):
        decode(**body)


def test_a_refusal_never_shows_a_unique_id() -> None:
    with pytest.raises(WireError) as caught:
        decode(publish_unique_ids=pb.PublishUniqueIds(generation=1, unique_ids=[b"SECRET" * 300]))
    assert "SECRET" not in str(caught.value)
    assert "SECRET" not in repr(
        decode(publish_unique_ids=pb.PublishUniqueIds(generation=1, unique_ids=[b"SECRET"]))
    )


@given(st.binary(max_size=300))
@settings(max_examples=400, deadline=None)
def test_random_bytes_end_in_a_typed_error(data: bytes) -> None:
    for read in (
        lambda: codec.decode_worker_message(data),
        lambda: unary_calls.decode_status_request(data),
        lambda: unary_calls.decode_drain_request(data),
        lambda: unary_calls.decode_admit_request(data),
    ):
        try:
            read()
        except WireError as error:
            assert str(error).isprintable()


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_join_with_damaged_bytes_never_crashes(data: st.DataObject) -> None:
    raw = bytearray(pb.WorkerMessage(join=join()).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        request = codec.decode_worker_message(bytes(raw))
    except WireError:
        return
    if isinstance(request, events.Joined):
        one = request.candidate
        assert one.node_id.isprintable()
        assert 1 <= one.worker_min <= one.worker_num <= 65_536


# ---------------------------------------------------------------- to workers

ASSIGNMENT = messages.Assignment(
    generation=2,
    rank=1,
    members=(member(0, "a"), member(1, "b")),
    state_source_rank=0,
    newcomer_ranks=(1,),
    unique_id_count=1,
    reason="b replaces c",
    switch_after_step=12,
    lost=("c was lost",),
    launch=2**64 - 1,
)


def encoded(message: messages.SchedulerMessage) -> pb.SchedulerMessage:
    return pb.SchedulerMessage.FromString(codec.encode(message))


def test_assignment_comes_through_whole() -> None:
    got = encoded(ASSIGNMENT).assignment
    assert (got.generation, got.rank, got.state_source_rank, list(got.newcomer_ranks)) == (2, 1, 0, [1])
    assert (got.unique_id_count, got.reason, got.switch_after_step) == (1, "b replaces c", 12)
    assert list(got.lost) == ["c was lost"]
    first = got.members[0]
    assert (first.rank, first.node_id, first.incarnation, first.local_rank, first.local_world_size) == (
        0,
        "a",
        7,
        0,
        2,
    )
    host = got.hosts[first.host_index]
    assert (host.id, host.name, host.address, host.topology) == (
        "host-id",
        "host",
        "10.0.0.1",
        "rack-1",
    )
    assert (first.device.kind, first.device.index) == ("cpu", 0)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            messages.Welcome(1.0, 5.0, 60.0, True, version="0.9.1"),
            pb.SchedulerMessage(
                welcome=pb.Welcome(
                    heartbeat_interval_s=1.0,
                    node_timeout_s=5.0,
                    topo_timeout_s=60.0,
                    spare=True,
                    version="0.9.1",
                )
            ),
        ),
        (
            messages.Waiting(1, 2, "b is missing"),
            pb.SchedulerMessage(waiting=pb.Waiting(present=1, needed=2, sentence="b is missing")),
        ),
        (
            messages.UniqueIds(3, (b"a", b"b")),
            pb.SchedulerMessage(unique_ids=pb.UniqueIds(generation=3, unique_ids=[b"a", b"b"])),
        ),
        (messages.GroupBuilt(3), pb.SchedulerMessage(group_built=pb.GroupBuilt(generation=3))),
        (
            messages.Probe(7, (("b", "10.0.0.2:5"),)),
            pb.SchedulerMessage(
                probe=pb.Probe(round=7, targets=[pb.ProbeTarget(node_id="b", address="10.0.0.2:5")])
            ),
        ),
        (
            messages.Suspended(3, "too few", 60.0, save=True),
            pb.SchedulerMessage(
                suspended=pb.Suspended(generation=3, reason="too few", wait_s=60.0, save=True)
            ),
        ),
        (
            messages.Suspended(3, "too few", 60.0),
            pb.SchedulerMessage(suspended=pb.Suspended(generation=3, reason="too few", wait_s=60.0)),
        ),
        (messages.Quiesce(3, "drain"), pb.SchedulerMessage(quiesce=pb.Quiesce(generation=3, reason="drain"))),
        (messages.Ended(True, "done"), pb.SchedulerMessage(ended=pb.Ended(ok=True, reason="done"))),
        (
            messages.Suspended(3, "too few", 60.0, messages.FirstLoss("b", 9, "b left", 3)),
            pb.SchedulerMessage(
                suspended=pb.Suspended(
                    generation=3,
                    reason="too few",
                    wait_s=60.0,
                    first_loss=pb.FirstLoss(node_id="b", incarnation=9, sentence="b left", exit_code=3),
                )
            ),
        ),
        (
            messages.Ended(True, "you leave", leave=True),
            pb.SchedulerMessage(ended=pb.Ended(ok=True, reason="you leave", leave=True)),
        ),
    ],
)
def test_every_message_reaches_the_wire(
    message: messages.SchedulerMessage, expected: pb.SchedulerMessage
) -> None:
    assert encoded(message) == expected


@pytest.mark.parametrize("code", list(messages.RefusalCode))
def test_every_refusal_has_its_code_on_the_wire(code: messages.RefusalCode) -> None:
    refused = encoded(messages.Refused(code, "why")).refused
    assert pb.RefusalCode.Name(refused.code) == f"REFUSAL_CODE_{code.name}"
    assert refused.sentence == "why"


def test_receivers_of_one_membership_share_the_piece_that_holds_it() -> None:
    encoder = codec.AssignmentEncoder()
    pieces = [encoder.encode_parts(ASSIGNMENT.replaced(rank=rank)) for rank in (0, 1, -1)]
    assert pieces[0][0] is pieces[1][0] is pieces[2][0]
    ranks = [pb.SchedulerMessage.FromString(b"".join(each)).assignment.rank for each in pieces]
    assert ranks == [0, 1, -1]


def test_what_all_members_are_told_is_encoded_once() -> None:
    encoder = codec.AssignmentEncoder()
    ids, other = messages.UniqueIds(2, (b"id",)), messages.UniqueIds(3, (b"id",))
    assert encoder.encode_parts(ids)[0] is encoder.encode_parts(ids)[0]
    assert encoder.encode(other) == codec.encode(other) != encoder.encode(ids) == codec.encode(ids)


def test_a_large_generation_is_packed_once_for_all_its_members_and_comes_through_whole() -> None:
    hosts = [messages.Host(f"id-{i}", f"node{i}", f"10.0.0.{i}") for i in range(100)]
    members = tuple(
        messages.Member(
            i,
            f"node{i // 8}-{i % 8}",
            i + 1,
            hosts[i // 8],
            messages.Device("cuda", i % 8),
            i % 8,
            8,
            f"x:{i}",
        )
        for i in range(800)
    )
    large = ASSIGNMENT.replaced(members=members, lost=("c was lost",))
    encoder = codec.AssignmentEncoder()
    pieces = [encoder.encode_parts(large.replaced(rank=rank)) for rank in (0, 7, -1)]
    assert pieces[0][0] is pieces[1][0] is pieces[2][0]
    assert len(pieces[0][0]) < len(codec.encode(large)) / 3
    decoded = [codec.decode_scheduler_message(b"".join(each)) for each in pieces]
    assert decoded == [large.replaced(rank=rank) for rank in (0, 7, -1)]


def membership(numbers: Sequence[int], generation: int, per_host: int = 4) -> messages.Assignment:
    """A generation of these workers in this order."""
    sizes = Counter(number // per_host for number in numbers)
    seen: Counter[int] = Counter()
    members = []
    for rank, number in enumerate(numbers):
        host = number // per_host
        at = messages.Host(f"id-{host}", f"node{host}", f"10.0.0.{host}")
        device = messages.Device("cuda", number % per_host)
        place = (rank, f"n{number}", number + 1, at, device, seen[host], sizes[host], f"x:{number}")
        members.append(messages.Member(*place))
        seen[host] += 1
    return ASSIGNMENT.replaced(generation=generation, members=tuple(members), newcomer_ranks=())


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, unique=True), min_size=1, max_size=4))
def test_what_builds_on_the_generation_before_comes_through_whole(generations: list[list[int]]) -> None:
    encoder = codec.AssignmentEncoder(delta_from=1)
    held: messages.Assignment | None = None
    for generation, numbers in enumerate(generations, 1):
        new = membership(numbers, generation)
        for rank in (0, len(numbers) - 1, -1):
            for before in (held, None):
                parts = encoder.encode_parts(new.replaced(rank=rank), before.generation if before else 0)
                assert codec.decode_scheduler_message(b"".join(parts), before) == new.replaced(rank=rank)
        held = new


def test_who_holds_the_generation_before_is_told_what_has_changed() -> None:
    encoder = codec.AssignmentEncoder()
    first, second = membership(range(800), 1), membership([*range(5), *range(6, 800)], 2)
    whole = b"".join(encoder.encode_parts(first))
    delta, other = (encoder.encode_parts(second.replaced(rank=rank), 1) for rank in (0, 7))
    assert delta[0] is other[0]
    assert len(b"".join(delta)) < len(whole) / 10
    assert codec.decode_scheduler_message(b"".join(other), first) == second.replaced(rank=7)
    for held in (0, 2, 3):  # nothing, or another generation
        assert len(b"".join(encoder.encode_parts(second, held))) > len(whole) / 2
    third = membership(range(6, 800), 3)
    assert len(b"".join(encoder.encode_parts(third, 1))) > len(whole) / 2  # the one before that
    assert len(b"".join(encoder.encode_parts(third, 2))) < len(whole) / 10


def test_where_little_stays_as_it_was_all_is_told() -> None:
    encoder = codec.AssignmentEncoder()
    encoder.encode(membership(range(100), 1))
    message = pb.SchedulerMessage.FromString(b"".join(encoder.encode_parts(membership(range(60, 200), 2), 1)))
    assert not message.assignment.base


@pytest.mark.parametrize(
    ("base", "kept", "words"),
    [
        (2, (0, 2), "builds on generation 2, which has not come on this stream"),
        (1, (0,), "does not name ranks of generation 1, which has 3"),
        (1, (0, 4), "does not name ranks"),
        (1, (2, 2), "does not name ranks"),
        (1, (0, 2, 1, 2), "does not name ranks"),
        (1, (0, 2**32 - 1), "does not name ranks"),
        (1, (0, 2, 1, 1), "a node id stands twice"),
        (1, (0, 2), "in order of rank, from 0, without a gap"),
    ],
)
def test_what_does_not_fit_the_generation_before_is_refused(
    base: int, kept: tuple[int, ...], words: str
) -> None:
    held = membership(range(3), 1)
    listed = pb.Member(rank=2 if len(kept) < 4 else 3, node_id="new", local_world_size=1)
    if words.startswith("in order"):
        listed.rank = 7
    body = pb.Assignment(
        generation=3, base=base, kept=kept, members=[listed], hosts=[pb.Host(id="h")], unique_id_count=1
    )
    data = pb.SchedulerMessage(assignment=body).SerializeToString()
    with pytest.raises(codec.WireError, match=words):
        codec.decode_scheduler_message(data, held)
    with pytest.raises(codec.WireError, match="has not come on this stream"):
        codec.decode_scheduler_message(data)


def test_hosts_stand_once_however_many_of_their_devices_take_part() -> None:
    host = messages.Host("h0", "node0", "10.0.0.1")
    candidates = [messages.Candidate(f"n{i}", i, host, messages.Device(), 2, 2, "tcp") for i in (0, 1)]
    members = tuple(as_sent(records.Placed(rank, rank, 2, each)) for rank, each in enumerate(candidates))
    body = encoded(ASSIGNMENT.replaced(members=members)).assignment
    assert [each.id for each in body.hosts] == ["h0"]
    assert [each.host_index for each in body.members] == [0, 0]


def test_the_shared_encoder_says_the_same_as_the_plain_one() -> None:
    encoder = codec.AssignmentEncoder()
    other = messages.Assignment(3, 0, ASSIGNMENT.members, -1, (), 1, "c came", -1, ())
    for message in (ASSIGNMENT, messages.GroupBuilt(2), other, ASSIGNMENT):
        for rank in (0, 1):
            if isinstance(message, messages.Assignment):
                message = messages.Assignment(
                    message.generation,
                    rank,
                    message.members,
                    message.state_source_rank,
                    message.newcomer_ranks,
                    message.unique_id_count,
                    message.reason,
                    message.switch_after_step,
                    message.lost,
                    message.launch,
                )
            assert pb.SchedulerMessage.FromString(encoder.encode(message)) == encoded(message)


def test_status_comes_through_whole() -> None:
    last = messages.Collective(9, "all_reduce", "world", "float32", 4096, True)
    view = JobView(
        job_id="job",
        state="running",
        generation=3,
        worker_num=2,
        worker_min=1,
        workers=(
            WorkerView(
                candidate("a"),
                "member",
                0,
                0,
                0.5,
                10,
                99.5,
                last,
                snapshot=messages.SnapshotReport(3, 5, partners=(1,)),
                checkpoint=messages.CheckpointReport(4, 1.0, 10, 0.5),
                shares=messages.StepShares(0.5, 0.25, 0.125),
                gpu=messages.GpuReport("suspect", ("95 C, over 90 C",), 0, celsius=95),
                gpu_age_s=1.5,
            ),
        ),
        stragglers=(messages.Straggler("a", 1, "link", 5.0, 0.5, 2.0, 2, "Slow."),),
        missing=("node b",),
        reason="because",
        nccl_traffic="sealed",
        copies=messages.JobCopies(0, 1.5, 4096, 0.5, messages.CheckpointReport(4, 1.0, 10, 0.5), 0),
    )
    reply = pb.StatusReply.FromString(encode_status(view, uptime_s=4.5, version="1"))
    assert (reply.job_id, reply.state, reply.generation, reply.worker_num, reply.worker_min) == (
        "job",
        "running",
        3,
        2,
        1,
    )
    assert (list(reply.missing), reply.reason, reply.uptime_s, reply.version) == (
        ["node b"],
        "because",
        4.5,
        "1",
    )
    assert reply.nccl_traffic == "sealed"
    worker = reply.workers[0]
    assert (worker.node_id, worker.host_name, worker.host_id, worker.rank, worker.local_rank) == (
        "a",
        "host",
        "host-id",
        0,
        0,
    )
    assert (worker.silent_s, worker.step, worker.samples_per_s, worker.state) == (0.5, 10, 99.5, "member")
    assert (worker.topology, worker.address, worker.last_collective.sequence) == ("rack-1", "10.0.0.1", 9)
    assert (worker.snapshot.agreed, list(worker.snapshot.partners), worker.checkpoint.step) == (5, [1], 4)
    assert (worker.gpu.state, worker.gpu.celsius, worker.gpu_age_s) == ("suspect", 95, 1.5)
    assert worker.gpu.HasField("busy_percent") and not worker.gpu.HasField("clock_mhz")
    assert reply.copies.HasField("snapshot_step") and reply.copies.snapshot_bytes == 4096
    assert (reply.copies.checkpoint.step, reply.copies.checkpoint_rank) == (4, 0)


def test_admit_request() -> None:
    asked = pb.AdmitRequest(job_id="job", name="gpu-17").SerializeToString()
    assert unary_calls.decode_admit_request(asked) == ("job", "gpu-17")
    for wrong in ("", "two words", "x" * 301):
        with pytest.raises(codec.WireError):
            unary_calls.decode_admit_request(pb.AdmitRequest(name=wrong).SerializeToString())
    assert pb.AdmitReply.FromString(unary_calls.encode_admit_reply("Done.")).sentence == "Done."


def test_drain_request() -> None:
    raw = pb.DrainRequest(job_id="job", node_id="a", reason="maintenance\n").SerializeToString()
    assert unary_calls.decode_drain_request(raw) == messages.DrainOrder("job", ("a",), (), "maintenance\\n")
    many = pb.DrainRequest(node_ids=["a", "a", "b"], hosts=["h"], at_s=9.5, preview=True)
    assert unary_calls.decode_drain_request(many.SerializeToString()) == messages.DrainOrder(
        "", ("a", "b"), ("h",), "", 9.5, preview=True
    )
    assert unary_calls.decode_drain_request(pb.DrainRequest(cancel=True).SerializeToString()).cancel


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.DrainRequest(job_id="job"), "node_id"),
        (pb.DrainRequest(node_ids=["a b"]), "node_id"),
        (pb.DrainRequest(hosts=[""]), "hosts"),
        (pb.DrainRequest(hosts=["h"] * 1025), "1024"),
        (pb.DrainRequest(hosts=["h"], at_s=float("nan")), "at_s"),
        (pb.DrainRequest(hosts=["h"], at_s=-1.0), "at_s"),
    ],
)
def test_a_drain_request_out_of_bounds_is_refused(request_: pb.DrainRequest, field: str) -> None:
    with pytest.raises(WireError, match=field):
        unary_calls.decode_drain_request(request_.SerializeToString())
