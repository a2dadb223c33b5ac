"""The codec's two halves: what one side encodes, the other decodes to the same value."""

from __future__ import annotations

from typing import get_args

import pytest

from muster.wire import messages
from muster.wire.codec import (
    MAX_STACKS_BYTES,
    WireError,
    decode_scheduler_message,
    decode_worker_message,
    encode,
)
from muster.wire.v1 import rendezvous_pb2 as pb

HOST = messages.Host("host-id", "host", "10.0.0.1", "rack 1")
DEVICE = messages.Device("cuda", 3, "0000:1B:00.0", "NVIDIA H200")
LOST = messages.FirstLoss("b", 9, "b left", 3)
PROFILE = messages.Profile(
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
    gpu_uuid="GPU-1",
    gpu_fault="7 words differ",
)
MEMBERS = (
    messages.Member(0, "a", 7, HOST, DEVICE, 0, 2, "x:1"),
    messages.Member(1, "b", 8, HOST, DEVICE, 1, 2, "x:2"),
)
MESSAGES = (
    messages.Join(PROFILE, 3, 1, True, 9, 2, True, True),
    messages.PublishUniqueIds(2, (b"a", b"b")),
    messages.Built(2),
    messages.Heartbeat(
        2,
        5,
        6,
        9.5,
        (messages.Collective(9, "all_reduce", "world", "float32", 4096, True),),
        1,
        0.25,
        7,
        0.1,
        messages.SnapshotReport(2, 4, 5, True, 3, 1.5, 4096, 0.5, (1, 3)),
        messages.CheckpointReport(5, 1.5, 4096, 0.5),
        messages.StepTimes(3, (0.5, 0.25, 1.5, 1.0, 0.125, 0.125, 0.5), 2),
        messages.GpuReport("ill", ("Xid 79",), 0, 10, 80, 1980, 61, 1, 2, 3, (48, 79)),
        1.5,
        (("accuracy", 0.5), ("val/loss", -1.0)),
        1000,
        3,
        10,
    ),
    messages.Quiesced(2, 7),
    messages.SuspectPeer(2, 1, "reset"),
    messages.Late(2, 3.5),
    messages.Probed(7, (("b", "reset"),), True, True, "evaluation", 3.5),
    messages.Stacks(7, "Thread 0x1\n  in train"),
    messages.RequestLeave(2, "SIGTERM"),
    messages.Leave(2, True, "done", True, 3, "7 words differ"),
    messages.Welcome(1.0, 5.0, 60.0, True, 1.5),
    messages.Waiting(1, 2, "b is missing", (1, 3), undecided=True),
    messages.Assignment(2, 1, MEMBERS, 1, (0,), 1, "b replaces c", 12, ("c was lost",), 2**64 - 1, LOST),
    messages.UniqueIds(2, (b"a", b"b")),
    messages.GroupBuilt(2),
    messages.Suspended(2, "few", 9.0, LOST, True),
    messages.Quiesce(2, "drain"),
    messages.Probe(7, (("b", "x:1"),)),
    messages.StacksWanted(7, 65536),
    messages.SnapshotWord(2, 5, 6),
    messages.Refused(messages.RefusalCode.JOB_FULL, "full"),
    messages.Ended(True, "done", True, LOST),
)


def test_the_list_above_has_every_message() -> None:
    assert {type(each) for each in MESSAGES} == {
        *get_args(messages.WorkerMessage),
        *get_args(messages.SchedulerMessage),
    }


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_through_whole(message: messages.WorkerMessage | messages.SchedulerMessage) -> None:
    decode = (
        decode_worker_message if isinstance(message, messages.WorkerMessage) else decode_scheduler_message
    )
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_field_of_the_wire_is_carried(
    message: messages.WorkerMessage | messages.SchedulerMessage,
) -> None:
    wrapper = pb.WorkerMessage if isinstance(message, messages.WorkerMessage) else pb.SchedulerMessage
    sent = wrapper.FromString(encode(message))
    body = getattr(sent, sent.WhichOneof("body") or "")
    fields = {field.name for field in body.DESCRIPTOR.fields}
    fields -= {"packed", "base", "kept"}  # of a large generation, in place of others
    assert {field.name for field, _ in body.ListFields()} == fields


def test_a_worker_s_stacks_can_steer_no_terminal_and_are_bounded() -> None:
    told = decode_worker_message(encode(messages.Stacks(7, "a\x1b[2J\nb\rc")))
    assert told == messages.Stacks(7, "a\\x1b[2J\nb\\rc")
    with pytest.raises(WireError):
        decode_worker_message(encode(messages.Stacks(7, "x" * (MAX_STACKS_BYTES + 1))))


def test_no_secret_stands_in_a_representation() -> None:
    assert "secret" not in repr(messages.PublishUniqueIds(1, (b"secret",))) + repr(
        messages.UniqueIds(1, (b"secret",))
    )


@pytest.mark.parametrize("loss", [None, 0.0, float("inf")])
def test_a_loss_of_zero_is_not_the_same_as_none(loss: float | None) -> None:
    beat = messages.Heartbeat(2, 5, 6, 9.5, loss=loss)
    assert decode_worker_message(encode(beat)) == beat
