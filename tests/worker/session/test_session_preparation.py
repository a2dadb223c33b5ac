"""What begins before a worker is a member: the GPU is made ready while the scheduler is waited for."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from muster.communicators import BACKENDS
from muster.wire.messages import Device
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.worker import host, runtime
from muster.worker.config import SecurityContext
from muster.worker.host import DeviceChoice
from tests.worker.session.scripted import ScriptedConnector, StubBackend, Thread, opened, scripted_session


def test_slow_work_begins_before_the_job_forms() -> None:
    connector, backend, prepared = ScriptedConnector(), StubBackend(), list[int]()
    session = scripted_session(connector, backend, prepare=lambda: prepared.append(len(backend.made)))
    line, _join = opened(session, connector)
    assert prepared == [0]
    releasing = Thread(session.release)
    line.say(ended=pb.Ended(ok=True, reason="bye"))
    releasing.result()


class WarmUp:
    """Notes what is asked of it."""

    def __init__(self, asked: list[object], ordinal: int) -> None:
        self._asked = asked
        asked.append(ordinal)

    def load(self) -> None:
        self._asked.append("load")


@pytest.mark.parametrize(("spare", "ordinal", "warmed"), [("0", 2, 2), ("0", -1, -1), ("1", 2, -1)])
def test_a_gpu_is_warmed_at_once_but_for_a_spares(
    monkeypatch: pytest.MonkeyPatch, spare: str, ordinal: int, warmed: int
) -> None:
    """And its library is loaded no sooner than the worker joins: it would hold up other imports."""
    asked: list[object] = []
    kind = type(BACKENDS["nccl"])
    warm_up: Any = partial(WarmUp, asked)
    monkeypatch.setitem(BACKENDS, "nccl", kind(lambda needs: StubBackend(), warm_up=warm_up))
    monkeypatch.setattr(host, "choose_device", lambda settings: DeviceChoice(Device("cuda", 7), ordinal, 4))
    env = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_SCHED_PORT": "1", "MS_BACKEND": "nccl"}
    session = runtime.open_session(env | {"MS_WORKER_SPARE": spare}, SecurityContext())
    assert asked == [warmed]
    session.release()
