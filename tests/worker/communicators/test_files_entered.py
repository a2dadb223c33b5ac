"""How many of the project's files one all_reduce goes through, from the script to the wire."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import muster
from muster.rendezvous.v1 import rendezvous_pb2 as pb
from muster.worker import runtime as process
from muster.worker.communicators.base import Communicator, Membership, Peer, ReduceOp
from muster.worker.communicators.nccl.communicator import NcclCommunicator
from tests.gpu.stand_in import OnGpu
from tests.scheduler.processes import ROOT
from tests.worker.communicators.tcp.world import Office, World, make_world
from tests.worker.control.scripted import (
    ScriptedConnector,
    StubBackend,
    Thread,
    opened,
    scripted_session,
)


class Given(StubBackend):
    """A backend whose communicator is there already."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self.communicator = communicator

    def connect(self, membership: Membership, **_: Any) -> Communicator:
        return self.communicator


def files_entered(call: Callable[[], object]) -> list[str]:
    """The project's files in which a function was called meanwhile, by this thread and those it starts."""
    seen: set[str] = set()

    def enter(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    paths = {Path(name).resolve() for name in seen}
    ours = {str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT) and path.is_file()}
    return sorted(name for name in ours if not name.startswith(("tests/", ".venv")))


def end(session: Any, line: Any) -> None:
    releasing = Thread(session.release)
    line.say(ended=pb.Ended(ok=True, reason="bye"))
    releasing.result()


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Communicator], None]]:
    """Makes a session of two, of which this is rank 1, the script's own."""
    connector = ScriptedConnector()
    opening: list[Any] = []

    def make(communicator: Communicator) -> None:
        session = scripted_session(connector, Given(communicator))
        line, _ = opened(session, connector)
        opening.append((session, line))
        monkeypatch.setattr(process.process, "session", session)

    yield make
    for session, line in opening:
        end(session, line)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    office = Office(tmp_path)
    made = make_world([office.credentials(), office.credentials()])
    yield made
    made.close()


@pytest.mark.parametrize("elements", [1, 250_000])
def test_a_sum_over_tcp_goes_through_few_files(
    world: World, enter: Callable[[Communicator], None], elements: int
) -> None:
    first, second = world.connect()
    enter(second)
    x, other = np.ones(elements, np.float32), np.ones(elements, np.float32)
    peer = Thread(lambda: [first.all_reduce(other, other, ReduceOp.SUM) for _ in range(2)])
    muster.all_reduce(x)  # later calls are what counts; the first one learns the kind of array
    entered = files_entered(lambda: muster.all_reduce(x, out=x))
    peer.result()
    assert x.tolist() == [3.0] * elements
    assert len(entered) <= 10, entered
    first.close()


def test_a_sum_over_nccl_goes_through_few_files(
    enter: Callable[[Communicator], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    issued: list[Any] = []

    class Recording:
        NCCLError = RuntimeError

        def all_reduce(self, *arguments: Any) -> None:
            issued.append(arguments)

        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: 0

    torch: Any = ModuleType("torch")
    torch.strided = "strided"
    torch.device = lambda kind, index: (kind, index)
    torch._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: 77)
    torch.cuda = SimpleNamespace(
        Event=lambda: SimpleNamespace(record=lambda stream: None, query=lambda: True),
        current_stream=lambda device: SimpleNamespace(query=lambda: True),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    two = Membership("job", 1, "world", 1, tuple(Peer(r, f"w{r}", r, "h", "h", "") for r in range(2)))
    enter(NcclCommunicator(Recording(), "comm", None, two, device=0, timeout_s=5))
    x = OnGpu()
    muster.all_reduce(x, out=x)
    entered = files_entered(lambda: muster.all_reduce(x, out=x))
    assert [call[:7] for call in issued] == [(4096, 4096, 3, 7, 0, "comm", 77)] * 2
    assert len(entered) <= 7, entered
