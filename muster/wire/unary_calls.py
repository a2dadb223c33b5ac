"""Decodes and checks the requests of unary calls, which operators and launchers make."""

from __future__ import annotations

from typing import cast

from muster.wire import messages, rules
from muster.wire.codec import parse
from muster.wire.rules import WireError
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.wire.v1 import watch_pb2 as watch_pb

MAX_DRAINED = 1024
LATEST_S = 253_402_300_799.0
"""The latest accepted time, in seconds since 1970: the end of the year 9999."""


def decode_status_request(data: bytes) -> str:
    """Returns the job of the request; "" stands for the scheduler's own job.

    Raises:
        WireError: not protobuf, or a field out of bounds.
    """
    return cast(str, rules.name(empty=True)("job_id", parse(pb.StatusRequest, data).job_id))


def decode_drain_request(data: bytes) -> messages.DrainOrder:
    """Returns which workers are to leave, when and why; ``job_id`` "" stands for the scheduler's own job.

    Raises:
        WireError: not protobuf, or a field out of bounds.
    """
    request = parse(pb.DrainRequest, data)
    node_ids = [*([request.node_id] if request.node_id else []), *request.node_ids]
    if len(node_ids) + len(request.hosts) > MAX_DRAINED:
        raise WireError(f"node_ids and hosts may have at most {MAX_DRAINED} entries together.")
    if not request.cancel and not node_ids and not request.hosts:
        rules.name()("node_id", request.node_id)
    if not 0.0 <= request.at_s <= LATEST_S:
        raise WireError("at_s must be a time in seconds since 1970, or 0.")
    return messages.DrainOrder(
        job_id=rules.name(empty=True)("job_id", request.job_id),
        node_ids=tuple(dict.fromkeys(rules.name()("node_id", each) for each in node_ids)),
        hosts=tuple(dict.fromkeys(rules.name(253)("hosts", each) for each in request.hosts)),
        reason=rules.text("reason", request.reason),
        at_s=request.at_s,
        cancel=request.cancel,
        preview=request.preview,
    )


def decode_admit_request(data: bytes) -> tuple[str, str]:
    """Returns the job ("" for the scheduler's own), and the host, node or GPU that is to be admitted again.

    Raises:
        WireError: not protobuf, or a field out of bounds.
    """
    request = parse(pb.AdmitRequest, data)
    job_id = rules.name(empty=True)("job_id", request.job_id)
    return job_id, cast(str, rules.name(300)("name", request.name))


def encode_admit_reply(sentence: str) -> bytes:
    """Encodes the answer to an operator's Admit."""
    return pb.AdmitReply(sentence=sentence).SerializeToString()


def decode_stacks_request(data: bytes) -> tuple[str, str]:
    """Returns the job ("" for the scheduler's own), and the node whose stacks are wanted; "" for all workers.

    Raises:
        WireError: not protobuf, or a field out of bounds.
    """
    request = parse(pb.StacksRequest, data)
    job_id = rules.name(empty=True)("job_id", request.job_id)
    return job_id, cast(str, rules.name(empty=True)("node_id", request.node_id))


def decode_process_ended_request(data: bytes) -> tuple[str, str, int, str]:
    """Returns the job ("" for the scheduler's own), the node, its incarnation, and how the process ended.

    Raises:
        WireError: not protobuf, or a field out of bounds.
    """
    request = parse(pb.ProcessEndedRequest, data)
    job_id = rules.name(empty=True)("job_id", request.job_id)
    node_id, detail = rules.name()("node_id", request.node_id), rules.text("detail", request.detail)
    return job_id, node_id, request.incarnation, detail or "has ended"


def encode_process_ended_reply(*, gone: bool) -> bytes:
    """Encodes the answer to a launcher's ProcessEnded."""
    return pb.ProcessEndedReply(gone=gone).SerializeToString()


def decode_end_job_request(data: bytes) -> tuple[str, str]:
    """Returns the job that is to end ("" for the scheduler's own), and the reason.

    Raises:
        WireError: not protobuf, or a field out of bounds.
    """
    request = parse(watch_pb.EndJobRequest, data)
    return rules.name(empty=True)("job_id", request.job_id), rules.text("reason", request.reason)


def encode_drain_reply(sentence: str) -> bytes:
    """Encodes the answer to an operator's Drain."""
    return pb.DrainReply(sentence=sentence).SerializeToString()
