"""Frames between a worker and its host's uplink: messages, signs of life, and the end of the session.

A frame consists of the content's length (4 bytes, big-endian), its kind (1 byte) and the content.
"""

from __future__ import annotations

import enum
import struct

from muster.worker.config import Settings
from muster.worker.session.streams import DeniedError, MessageRejectedError

MAX_FROM_WORKER_BYTES = 900 * 1024
"""The largest frame from a worker, in bytes; the scheduler accepts messages of 1 MiB."""

MAX_FROM_UPLINK_BYTES = 64 << 20
HEAD = struct.Struct("!IB")
ALIVE_EVERY_S = 0.25
"""Seconds between the uplink's signs of life; the first one is its answer to a new stream."""


MAX_REQUEST_BYTES = 8192


def request_of(settings: Settings) -> bytes:
    """Returns the address that is sent with a new stream, so that another launch's uplink refuses it."""
    return f"{settings.scheduler_address}\n{settings.config_path or ''}".encode()[:MAX_REQUEST_BYTES]


class UplinkFrameKind(enum.IntEnum):
    """The kind of a frame."""

    MESSAGE = 0  # A serialized WorkerMessage or SchedulerMessage.
    ALIVE = 1  # From the uplink; empty.
    END = 2  # The last frame from the uplink: how the session ended.
    MOVED = 3  # The last frame from the worker: it continues on another stream.


def frame(kind: UplinkFrameKind, content: bytes = b"") -> bytes:
    """Returns a complete frame."""
    return HEAD.pack(len(content), kind) + content


def encode_end(error: Exception | None) -> bytes:
    """Encodes how a session ended, as the content of an END; None means well."""
    if error is None:
        return b"ended\n"
    if isinstance(error, DeniedError):
        word = b"denied\n" if error.by_scheduler else b"denied here\n"
    else:
        word = b"malformed\n" if isinstance(error, MessageRejectedError) else b"lost\n"
    detail = str(getattr(error, "strerror", None) or error)
    return word + detail.encode(errors="replace")[:4096]


def decode_end(content: bytes) -> Exception | None:
    """Decodes an END: the error that the worker's own stream would have raised."""
    word, _, rest = content.partition(b"\n")
    detail = rest.decode(errors="replace")
    if word == b"ended":
        return None
    if word in (b"denied", b"denied here"):
        return DeniedError(detail, by_scheduler=word == b"denied")
    return MessageRejectedError(detail) if word == b"malformed" else ConnectionError(detail)
