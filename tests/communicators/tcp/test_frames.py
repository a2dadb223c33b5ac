"""Frames between two ranks: what goes in comes out, and garbage is recognised."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.communicators.tcp import frames as wire
from muster.communicators.tcp.handshake import HELLO as HELLO
from muster.communicators.tcp.handshake import Hello
from muster.errors import CommunicatorError


def test_a_call_survives_the_wire_and_shows_itself() -> None:
    call = wire.Call("reduce", "float32", "mean", 2, 12, 99)
    assert wire.Call.decode(call.encode()) == call
    assert str(call) == "reduce(mean, float32, 12 elements, root 2)"
    assert str(wire.Call("send", "bool", "", 1, 3)) == "send(bool, 3 elements, to rank 1)"
    assert str(wire.Call("barrier")) == "barrier()"


def test_blocks_survive_the_wire() -> None:
    blocks = [(wire.Call("barrier").encode(), b""), (wire.Call("all_reduce", "int64").encode(), b"x" * 8)]
    data = wire.blocks_frame(wire.FrameKind.CALLS, blocks)
    kind, count, length = wire.read_frame(data[: wire.FRAME.size])
    assert (kind, count, length) == (wire.FrameKind.CALLS, 2, len(data) - wire.FRAME.size)
    read = wire.read_blocks(memoryview(data)[wire.FRAME.size :], count)
    assert [(call, bytes(payload)) for call, payload in read] == blocks


@given(st.binary(max_size=200), st.integers(0, 5))
def test_garbage_gives_typed_errors_only(data: bytes, count: int) -> None:
    readers = (
        lambda: wire.read_frame(data[:16].ljust(16, b"\0")),
        lambda: wire.read_blocks(memoryview(data), count),
        lambda: wire.Call.decode(data[:24].ljust(24, b"\xff")),
        lambda: Hello.decode(data[: HELLO.size].ljust(HELLO.size, b"\0")),
    )
    for reader in readers:
        try:
            reader()
        except CommunicatorError:
            continue
    assert wire.read_goodbye(data) is None


def test_a_frame_longer_than_any_is_refused() -> None:
    with pytest.raises(CommunicatorError):
        wire.read_frame(wire.FRAME.pack(wire.MAGIC, 1, 1, wire.MAX_FRAME + 1))


PRINTABLE = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=600)


@given(st.sampled_from(list(wire.Reason)), PRINTABLE)
def test_a_goodbye_has_one_size_and_keeps_its_reason(reason: wire.Reason, text: str) -> None:
    data = wire.goodbye(reason, text)
    assert len(data) == wire.GOODBYE_BYTES
    read = wire.read_goodbye(data)
    assert read is not None
    assert read[0] is reason
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    assert shown.startswith(read[1])
    assert read[1].isprintable()
    assert read[1] == text or len(text.encode()) > 400


@given(st.text(max_size=100))
def test_a_goodbye_cannot_forge_a_line_in_a_log(text: str) -> None:
    read = wire.read_goodbye(wire.goodbye(wire.Reason.FAILED, text + "\n2026 forged"))
    assert read is not None
    assert read[1].isprintable()
    assert read[1].endswith("\\n2026 forged")
