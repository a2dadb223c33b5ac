"""What a Join does, and on how straight a way."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import muster.scheduler.core
from muster.scheduler.core import events as e
from muster.scheduler.core.machine import Machine
from muster.wire import messages as m

CORE = Path(muster.scheduler.core.__file__).parent
VALUES = {"events", "records"}


def join(session: int, node_id: str) -> e.Joined:
    host = m.Host(f"id-{node_id}", f"host-{node_id}", "10.0.0.1")
    return e.Joined(session, m.Candidate(node_id, 1, host, m.Device(), 4, 0, "tcp"))


def matter(frame: FrameType | None) -> str:
    """The file of the core that this runs in, or else its caller; empty: none does."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent == CORE and path.stem not in VALUES:
            return path.stem
        frame = frame.f_back
    return ""


def test_a_join_is_handled_with_few_returns_between_the_files_of_the_core() -> None:
    """Each call from one file into another, from when the Join's handler is called until it is done."""
    machine = Machine("red", e.Settings(4, 0, 0, 30.0, 5.0, 1.0))
    machine.step(join(1, "a"), 0.0)
    ways: list[str] = []
    depth = 0

    def note(frame: FrameType, kind: str, _: object) -> None:
        nonlocal depth
        is_handler = frame.f_code.co_name == "joined"
        depth += is_handler and kind == "call"
        if kind == "call" and depth and frame.f_code.co_filename.startswith(str(CORE)):
            here, there = matter(frame.f_back), matter(frame)
            if here != there and Path(frame.f_code.co_filename).stem not in VALUES:
                ways.append(f"{here} -> {there}.{frame.f_code.co_name}")
        depth -= is_handler and kind == "return"

    sys.setprofile(note)
    try:
        decision = machine.step(join(2, "b"), 1.0)
    finally:
        sys.setprofile(None)
    assert decision.reason.startswith("Node b on host host-b has joined.")
    assert "machine -> joining.joined" in ways
    assert len(ways) < 10, ways
