"""The scheduler's codec: protobuf on one side, the core's values on the other. Pure functions."""

from muster.scheduler.wire.decode import (
    PROTOCOL_VERSION,
    JoinRequest,
    decode_drain_request,
    decode_status_request,
    decode_worker_message,
)
from muster.scheduler.wire.encode import (
    AssignmentEncoder,
    encode_drain_reply,
    encode_scheduler_message,
    encode_status,
)

__all__ = [
    "PROTOCOL_VERSION",
    "AssignmentEncoder",
    "JoinRequest",
    "decode_drain_request",
    "decode_status_request",
    "decode_worker_message",
    "encode_drain_reply",
    "encode_scheduler_message",
    "encode_status",
]
