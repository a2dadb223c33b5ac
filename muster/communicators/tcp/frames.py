"""The frames that two ranks exchange on a connection: calls, and goodbyes.

Every frame starts with :data:`FRAME`. A frame of calls contains, for each of some ranks, the rank's
call and (for small arrays) its data. A goodbye is the last frame on a connection and has a fixed
size, so that it is found at the end of a stream after any other bytes.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from muster.errors import CommunicatorError
from muster.wire.log_lines import one_line

Buffer = bytes | bytearray | memoryview

FRAME = struct.Struct("!4sBxHQ")
"""Magic, kind, number of blocks, length of what follows."""

MAGIC = b"Mus1"
MAX_FRAME = 1 << 26
CALL = struct.Struct("!BBBxiQQ")
BLOCK = struct.Struct("!Q24s")
"""Length of a block's payload, and the call (:data:`CALL`)."""

GOODBYE_BYTES = 512


class FrameKind(enum.IntEnum):
    """The kinds of frames."""

    CALLS = 1
    POINT = 2
    GOODBYE = 3


class Reason(enum.IntEnum):
    """Why a rank says goodbye."""

    DONE = 0
    MISMATCH = 1
    TIMEOUT = 2
    LOST = 3
    ABORTED = 4
    FAILED = 5


HAS_FINISHED = "finished"
"""Sent with ``DONE`` if the rank needs no communicator any more."""

KINDS = (
    "nothing",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "send",
    "recv",
    "split",
    "connect",
)
OPS = ("", "sum", "mean", "min", "max", "prod")
DTYPES = (
    *("", "float16", "float32", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "bool", "bfloat16"),
)
_ROOTED = {"reduce", "broadcast", "gather", "scatter"}


@dataclass(frozen=True, slots=True)
class Call:
    """The collective that one rank has called.

    ``sequence`` counts collectives from 0 (point-to-point calls are counted per pair); ``root`` is the
    root or, of a point-to-point call, the peer.
    """

    kind: str
    dtype: str = ""
    op: str = ""
    root: int = -1
    count: int = 0
    sequence: int = 0

    def encode(self) -> bytes:
        """Returns the call as 24 bytes."""
        return CALL.pack(
            KINDS.index(self.kind),
            DTYPES.index(self.dtype),
            OPS.index(self.op),
            self.root,
            self.count,
            self.sequence,
        )

    @classmethod
    def decode(cls, data: bytes) -> Call:
        """Reads what :meth:`encode` wrote.

        Raises:
            CommunicatorError: the bytes are not a call.
        """
        kind, dtype, op, root, count, sequence = CALL.unpack(data)
        if kind >= len(KINDS) or dtype >= len(DTYPES) or op >= len(OPS):
            raise CommunicatorError("A peer sent a call that is not known here.")
        return cls(KINDS[kind], DTYPES[dtype], OPS[op], root, count, sequence)

    def __str__(self) -> str:
        """Returns the call as messages show it."""
        parts = [self.op] if self.op else []
        if self.dtype:
            parts += [self.dtype, f"{self.count} elements"]
        if self.kind in _ROOTED:
            parts.append(f"root {self.root}")
        if self.kind in ("send", "recv"):
            parts.append(f"{'to' if self.kind == 'send' else 'from'} rank {self.root}")
        return f"{self.kind}({', '.join(parts)})"


def frame(kind: FrameKind, blocks: int, length: int) -> bytes:
    """Packs a frame's header, 16 bytes."""
    return FRAME.pack(MAGIC, kind, blocks, length)


def read_frame(data: bytes | bytearray | memoryview) -> tuple[FrameKind, int, int]:
    """Reads a frame's first 16 bytes: kind, number of blocks, length of the rest.

    Raises:
        CommunicatorError: the bytes are not a frame.
    """
    magic, kind, blocks, length = FRAME.unpack(data)
    if magic != MAGIC or kind not in FrameKind._value2member_map_ or length > MAX_FRAME:
        raise CommunicatorError("A peer sent data that is no frame: the two ranks are out of step.")
    return FrameKind(kind), blocks, length


def blocks_frame(kind: FrameKind, blocks: Sequence[tuple[bytes, Buffer]]) -> bytes:
    """Makes a frame of blocks: the calls of some ranks, each with its payload."""
    parts: list[Buffer] = [b""]
    length = 0
    for call, payload in blocks:
        parts += (BLOCK.pack(len(payload), call), payload)
        length += BLOCK.size + len(payload)
    parts[0] = frame(kind, len(blocks), length)
    return b"".join(parts)


def read_blocks(data: memoryview, count: int) -> list[tuple[bytes, memoryview]]:
    """Reads a frame's blocks.

    Raises:
        CommunicatorError: the blocks do not fill the frame.
    """
    blocks = []
    offset = 0
    for _ in range(count):
        if offset + BLOCK.size > len(data):
            break
        size, call = BLOCK.unpack_from(data, offset)
        offset += BLOCK.size
        blocks.append((call, data[offset : offset + size]))
        offset += size
    if len(blocks) != count or offset != len(data):
        raise CommunicatorError("A peer sent a frame whose blocks do not fill it.")
    return blocks


def goodbye(reason: Reason, message: str) -> bytes:
    """Packs a goodbye, the last 512 bytes on a connection."""
    room = GOODBYE_BYTES - FRAME.size - 2
    text = message.encode()[:room].decode(errors="ignore").encode()
    head = frame(FrameKind.GOODBYE, int(reason), GOODBYE_BYTES - FRAME.size)
    return (head + len(text).to_bytes(2, "big") + text).ljust(GOODBYE_BYTES, b"\0")


def read_goodbye(data: bytes) -> tuple[Reason, str] | None:
    """Reads a goodbye; returns None if these bytes are not one."""
    if len(data) != GOODBYE_BYTES:
        return None
    magic, kind, reason, length = FRAME.unpack(data[: FRAME.size])
    if magic != MAGIC or kind != FrameKind.GOODBYE or length != GOODBYE_BYTES - FRAME.size:
        return None
    size = int.from_bytes(data[FRAME.size : FRAME.size + 2], "big")
    text = data[FRAME.size + 2 : FRAME.size + 2 + size].decode(errors="replace")
    known = reason in Reason._value2member_map_
    return (Reason(reason) if known else Reason.FAILED), one_line(text)


def end_in_words(reason: Reason, text: str) -> str:
    """Returns how a connection ended, as the predicate of a sentence."""
    if reason is Reason.LOST:
        return f"broke: {text or 'the process ended or the network failed'}"
    if reason is Reason.DONE:
        return "was closed by it in good order, while this rank still needed it"
    return f"was closed by it: {text}"
