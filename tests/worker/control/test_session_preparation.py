"""What a session begins before it is a member: the GPU is made ready while the scheduler is waited for."""

from __future__ import annotations

import pytest

from muster.rendezvous.messages import Device
from muster.rendezvous.v1 import rendezvous_pb2 as pb
from muster.worker.host import DeviceChoice
from tests.worker.control.scripted import ScriptedConnector, StubBackend, Thread, opened, scripted_session


class PreparedBackend(StubBackend):
    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[int] = []

    def prepare(self, device_index: int) -> None:
        assert not self.made
        self.prepared.append(device_index)


@pytest.mark.parametrize(("spare", "ordinal", "prepared"), [(False, 2, 2), (False, -1, -1), (True, 2, -1)])
def test_the_device_is_prepared_before_the_job_forms(spare: bool, ordinal: int, prepared: int) -> None:
    connector, backend = ScriptedConnector(), PreparedBackend()
    session = scripted_session(connector, backend, spare=spare)
    session.device = DeviceChoice(Device("cuda", 7), ordinal, 4)
    line, _join = opened(session, connector)
    assert backend.prepared == [prepared]
    releasing = Thread(session.release)
    line.say(ended=pb.Ended(ok=True, reason="bye"))
    releasing.result()
