"""What a session tells of its GPU, and how often; which it is; what a check of it that fails leads to."""

from __future__ import annotations

import pytest

from muster.errors import GpuFailedError
from muster.wire.messages import Device, GpuReport
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.worker.gpu_health.check import GpuCheck
from muster.worker.gpu_health.identity import GpuIdentity
from muster.worker.gpu_health.judgement import GpuLimits
from muster.worker.gpu_health.trial import GpuVerdict
from muster.worker.gpu_health.watch import GpuWatch
from muster.worker.host import DeviceChoice
from muster.worker.session.failures import is_consequence
from muster.worker.session.own_gpu import OwnGpu
from tests.waiting import wait_for
from tests.worker.gpu_health.fake_nvml import FakeNvml
from tests.worker.session.scripted import (
    ScriptedConnector,
    StubBackend,
    Thread,
    beats,
    end,
    is_over,
    opened,
    scripted_session,
)


class News(GpuWatch):
    """Has something new at each look."""

    started = 0

    def start(self) -> None:
        self.started += 1

    def take(self) -> GpuReport:
        return GpuReport("well")


def test_members_of_a_large_group_tell_less_often() -> None:
    now = [0.0]
    watch = News(GpuIdentity(0), GpuLimits())
    gpu = OwnGpu(lambda ordinal: watch, clock=lambda: now[0])
    assert gpu.take() is None, "no place has said yet which GPU it is"
    gpu.watch(-1)
    assert gpu.take() is None
    gpu.watch(0, members=1000)
    told = []
    for now[0] in range(25):
        if gpu.take() is not None:
            told.append(now[0])
    assert told == [0, 10, 20]
    gpu.watch(0, members=8)
    assert watch.started == 1
    now[0] = 30.0
    assert gpu.take() is not None
    now[0] = 30.1
    assert gpu.take() is not None


def test_without_a_gpu_nothing_is_done() -> None:
    gpu = OwnGpu()
    gpu.watch(0)
    assert gpu.take() is None and gpu.fault_before_join() == gpu.fault_after_loss() == ""
    gpu.close()


def test_the_gpu_that_its_place_gives_a_worker_is_read_and_told_with_heartbeats() -> None:
    nvml, asked = FakeNvml(), []

    def make(ordinal: int) -> GpuWatch:
        asked.append(ordinal)
        return GpuWatch(GpuIdentity(ordinal), GpuLimits(), load=lambda: nvml, every_s=60.0)

    connector = ScriptedConnector()
    device = DeviceChoice(Device("cuda"), -1, visible_count=2)
    session = scripted_session(connector, device=device, gpu=OwnGpu(make))
    line, _ = opened(session, connector, heartbeat_interval_s=0.05)
    told = next(beat.gpu for beat in beats(line) if beat.HasField("gpu"))
    assert (told.state, told.celsius, told.used_mb) == ("well", 61, 10_000)
    assert asked == [1] and not next(beats(line)).HasField("gpu"), "what was told is not told again"
    end(session, line)
    assert nvml.shut_down


class Checked(GpuCheck):
    """A check that finds what the test says."""

    def __init__(self, *found: GpuVerdict) -> None:
        super().__init__(0)
        self.found = list(found)
        self.closed = False

    def before_join(self) -> GpuVerdict:
        return self.found.pop(0)

    after_loss = before_join

    def close(self) -> None:
        self.closed = True


PASSED, SKIPPED = GpuVerdict("passed", "", 0.5), GpuVerdict("unknown", "torch is not installed here")
BROKEN = GpuVerdict("failed", "7 words differ.")


@pytest.mark.parametrize("found", [PASSED, SKIPPED])
def test_a_gpu_that_has_passed_or_was_not_checked_joins(found: GpuVerdict) -> None:
    connector, check = ScriptedConnector(), Checked(found)
    session = scripted_session(connector, gpu=OwnGpu(check=check))
    line, join = opened(session, connector)
    assert join.gpu_fault == "" and not check.found
    end(session, line)
    assert check.closed


def test_a_gpu_that_has_failed_is_told_and_its_worker_refused() -> None:
    connector = ScriptedConnector()
    session = scripted_session(connector, gpu=OwnGpu(check=Checked(BROKEN)))
    opening = Thread(session.open)
    line = connector.next_line()
    assert line.hear("join").gpu_fault == "7 words differ."
    line.say(refused=pb.Refused(code="REFUSAL_CODE_GPU_FAILED", sentence="the sentence"))
    with pytest.raises(GpuFailedError, match="The sentence") as caught:
        opening.result()
    assert caught.value.code == "GPU_FAILED" and not is_consequence(caught.value)


def test_where_the_scheduler_knows_of_no_checks_a_worker_whose_gpu_has_failed_refuses_itself() -> None:
    connector = ScriptedConnector()
    session = scripted_session(connector, gpu=OwnGpu(check=Checked(BROKEN)))
    opening = Thread(session.open)
    line = connector.next_line()
    line.hear("join")
    line.welcome()
    with pytest.raises(
        GpuFailedError, match="The GPU of node n0 on host alpha has failed its check: 7 words"
    ):
        opening.result()


def test_after_a_loss_the_gpu_is_checked_and_one_that_has_failed_goes() -> None:
    connector = ScriptedConnector()
    session = scripted_session(connector, gpu=OwnGpu(check=Checked(PASSED, PASSED, BROKEN)))
    line, join = opened(session, connector)
    for generation in (2, 3):
        line.assign(join, generation, lost=("Rank 0 was killed.",))
        wait_for(lambda: is_over(session))
        rejoining = Thread(session.rejoin)
        if generation == 2:
            line.say(unique_ids=pb.UniqueIds(generation=2, unique_ids=[b"secret"]))
            assert line.hear("built").generation == 2
            line.say(group_built=pb.GroupBuilt(generation=2))
            rejoining.result()
    leave = line.hear("leave")
    assert (leave.finished, leave.consequence, leave.gpu_fault) == (
        False,
        False,
        "7 words differ.",
    )
    line.say(ended=pb.Ended(ok=True, reason="bye"))
    with pytest.raises(GpuFailedError) as caught:
        rejoining.result()
    assert str(caught.value) == (
        "The GPU of node n0 on host alpha has failed its check: 7 words differ. Reset or replace it,"
        " then let it in again: muster admit alpha."
    )


def test_where_nobody_was_lost_the_gpu_is_not_checked() -> None:
    connector, check = ScriptedConnector(), Checked(PASSED)
    session = scripted_session(connector, gpu=OwnGpu(check=check))
    line, join = opened(session, connector)
    line.assign(join, 2)
    wait_for(lambda: is_over(session))
    rejoining = Thread(session.rejoin)
    line.say(unique_ids=pb.UniqueIds(generation=2, unique_ids=[b"secret"]))
    line.hear("built")
    line.say(group_built=pb.GroupBuilt(generation=2))
    rejoining.result()
    end(session, line)


@pytest.mark.parametrize(("ordinal", "expected"), [(3, 3), (-1, 1)])
def test_a_gpu_is_the_one_chosen_or_that_of_the_local_rank(ordinal: int, expected: int) -> None:
    connector, backend = ScriptedConnector(), StubBackend()
    session = scripted_session(connector, backend)
    session.device = DeviceChoice(Device("cuda", 7), ordinal, 4)
    line, join = opened(session, connector)
    assert session.device_ordinal == expected
    assert [peer.device_index for peer in backend.made[0].membership.peers] == [-1, expected]
    # When others die its local rank changes, but not the GPU that its arrays lie on.
    line.assign(join, 2, 0)
    wait_for(lambda: is_over(session))
    rejoining = Thread(session.rejoin)
    line.hear("publish_unique_ids")
    line.say(unique_ids=pb.UniqueIds(generation=2, unique_ids=[b"secret"]))
    line.hear("built")
    line.say(group_built=pb.GroupBuilt(generation=2))
    rejoining.result()
    assert (session.local_rank, session.device_ordinal) == (0, expected)
    end(session, line)
