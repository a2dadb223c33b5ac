"""The codec's two halves: what one side encodes, the other decodes to the same value."""

from __future__ import annotations

from typing import get_args

import pytest

from muster.wire import messages as m
from muster.wire.codec import decode_scheduler_message, decode_worker_message, encode
from muster.wire.v1 import rendezvous_pb2 as pb

HOST = m.Host("host-id", "host", "10.0.0.1", "rack 1")
DEVICE = m.Device("cuda", 3, "0000:1B:00.0", "NVIDIA H200")
LOST = m.FirstLoss("b", 9, "b left", 3)
PROFILE = m.Profile(
    node_id="a",
    incarnation=2**64 - 1,
    host=HOST,
    device=DEVICE,
    worker_num=4,
    worker_min=3,
    backend="tcp",
    local_index=2,
    data_address="[fe80::1]:4000",
    spare=True,
    facts=(("cuda", "12"), ("nccl", "2.28.9")),
    job_id="job",
    probe_address="[fe80::1]:4001",
    last_call_s=30.0,
)
MEMBERS = (m.Member(0, "a", 7, HOST, DEVICE, 0, 2, "x:1"), m.Member(1, "b", 8, HOST, DEVICE, 1, 2, "x:2"))
MESSAGES = (
    m.Join(PROFILE, 3, 1, True, 9, 2, True),
    m.PublishUniqueIds(2, (b"a", b"b")),
    m.Built(2),
    m.Heartbeat(
        2, 5, 6, 9.5, (m.Collective(9, "all_reduce", "world", "float32", 4096, True),), 1, 0.25, 7, 0.1
    ),
    m.Quiesced(2, 7),
    m.SuspectPeer(2, 1, "reset"),
    m.Late(2, 3.5),
    m.Probed(7, (("b", "reset"),), True, True, "evaluation", 3.5),
    m.RequestLeave(2, "SIGTERM"),
    m.Leave(2, True, "done", True, 3),
    m.Welcome(1.0, 5.0, 60.0, True, 1.5),
    m.Waiting(1, 2, "b is missing", (1, 3), undecided=True),
    m.Assignment(2, 1, MEMBERS, 1, (0,), 1, "b replaces c", 12, ("c was lost",), 2**64 - 1, LOST),
    m.UniqueIds(2, (b"a", b"b")),
    m.GroupBuilt(2),
    m.Suspended(2, "few", 9.0, LOST, True),
    m.Quiesce(2, "drain"),
    m.Probe(7, (("b", "x:1"),)),
    m.Refused(m.RefusalCode.JOB_FULL, "full"),
    m.Ended(True, "done", True, LOST),
)


def test_the_list_above_has_every_message() -> None:
    assert {type(each) for each in MESSAGES} == {*get_args(m.WorkerMessage), *get_args(m.SchedulerMessage)}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_through_whole(message: m.WorkerMessage | m.SchedulerMessage) -> None:
    decode = decode_worker_message if isinstance(message, m.WorkerMessage) else decode_scheduler_message
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_field_of_the_wire_is_carried(message: m.WorkerMessage | m.SchedulerMessage) -> None:
    wrapper = pb.WorkerMessage if isinstance(message, m.WorkerMessage) else pb.SchedulerMessage
    sent = wrapper.FromString(encode(message))
    body = getattr(sent, sent.WhichOneof("body") or "")
    fields = {field.name for field in body.DESCRIPTOR.fields}
    fields -= {"packed", "base", "kept"}  # of a large generation, in place of others
    assert {field.name for field, _ in body.ListFields()} == fields


def test_no_secret_stands_in_a_representation() -> None:
    assert "secret" not in repr(m.PublishUniqueIds(1, (b"secret",))) + repr(m.UniqueIds(1, (b"secret",)))


@pytest.mark.parametrize("loss", [None, 0.0, float("inf")])
def test_a_loss_of_zero_is_not_the_same_as_none(loss: float | None) -> None:
    beat = m.Heartbeat(2, 5, 6, 9.5, loss=loss)
    assert decode_worker_message(encode(beat)) == beat
