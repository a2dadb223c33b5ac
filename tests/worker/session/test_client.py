"""The client's own part: threads, time and waiting. What it decides is the machine's."""

from __future__ import annotations

import itertools
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from muster.communicators.base import Communicator
from muster.communicators.fault_aware import FlightRecorder
from muster.errors import (
    CommunicatorError,
    LeaveGranted,
    MembershipChanged,
    NotInitializedError,
    PeerFinishedError,
    PeerLostError,
    RefusedError,
    WorkerError,
)
from muster.wire.messages import Assignment, Quiesce, RefusalCode, Refused, Suspended, Waiting
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.worker.session import events
from muster.worker.session.client import Client
from muster.worker.session.connection import SchedulerConnection
from muster.worker.session.leave import LoneLeave
from muster.worker.session.machine import MembershipMachine
from muster.worker.session.pace import Pace
from muster.worker.session.threads import Threads
from muster.worker.session.training_thread import HANG_S, Collectives
from tests.waiting import wait_for
from tests.worker.session.machine import assignment, profile
from tests.worker.session.scripted import Line, ScriptedConnector, Thread, stub_communicator


class Minter:
    """A backend, as far as a client uses it."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.thread = ""

    def mint_unique_ids(self, count: int) -> tuple[bytes, ...]:
        self.thread = threading.current_thread().name
        if self.error is not None:
            raise self.error
        return tuple(b"minted" for _ in range(count))


class Calls(FlightRecorder):
    """Collectives that a test says to be under way for as long as it likes."""

    seconds = 0.0

    def hanging_s(self) -> float:
        return self.seconds


def all_are_reached(targets: dict[str, str]) -> dict[str, str]:
    return {}


def client(
    connector: ScriptedConnector,
    minter: Minter | None = None,
    calls: Collectives | None = None,
    threads: Threads | None = None,
    pace: Pace | None = None,
    lone_leave: LoneLeave | None = None,
    **timing: Any,
) -> Client:
    """A client that waits for nobody once it is to leave, unless a test says so."""
    core = MembershipMachine(profile(), events.Timing(**timing), lambda: 0.5)
    return Client(
        core,
        SchedulerConnection(connector.dial),
        threads=threads,
        backend=minter or Minter(),
        collectives=calls or Calls(),
        prober=all_are_reached,
        pace=pace,
        lone_leave=lone_leave or LoneLeave(unreachable_s=0.0, unformed_s=0.0, unfinished_s=0.0),
    )


@pytest.fixture
def connector() -> ScriptedConnector:
    return ScriptedConnector()


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def running(connector: ScriptedConnector, calls: Calls) -> Iterator[Client]:
    """A client in generation 1, whose goodbye nobody answers."""
    made = client(connector, calls=calls, goodbye_timeout_s=0.01)
    run(made, connector)
    yield made
    made.close()


def run(made: Client, connector: ScriptedConnector) -> None:
    """Brings a client into generation 1."""
    stand(made, build(made, connector))


def build(made: Client, connector: ScriptedConnector) -> Line:
    """Has a client build generation 1."""
    made.start()
    line = connector.next_line()
    line.welcome()
    building = Thread(made.next_build)
    line.assign(line.hear("join"))
    line.say(unique_ids=pb.UniqueIds(generation=1, unique_ids=[b"secret"]))
    assert building.result().unique_ids == (b"secret",)
    return line


def stand(made: Client, line: Line) -> None:
    """Lets what a client has built stand."""
    building = Thread(lambda: made.built(1))
    line.hear("built")
    line.say(group_built=pb.GroupBuilt(generation=1))
    assert building.result()


def test_no_thread_is_left_after_close(connector: ScriptedConnector) -> None:
    others = set(threading.enumerate())

    def its_threads() -> set[str]:
        """Of Muster: what an earlier test left behind may start threads of its own."""
        new = set(threading.enumerate()) - others
        return {thread.name for thread in new if thread.name.startswith("muster-")}

    made = client(connector)
    made.start()
    line = connector.next_line()
    line.hear("join")
    assert its_threads() == {"muster-timer", "muster-stream", "muster-watcher"}
    made.close()
    made.close()
    assert its_threads() == set()
    assert line.closed
    assert made.post(events.DeadlineReached()) == events.Effects()


def test_an_unanswered_goodbye_ends_at_its_deadline(running: Client) -> None:
    leaving = Thread(lambda: running.leave(finished=True, reason="done"))
    assert leaving.result()


def test_heartbeats_come_without_anybody_asking(connector: ScriptedConnector) -> None:
    made = client(connector)
    made.start()
    line = connector.next_line()
    line.hear("join")
    line.welcome(heartbeat_interval_s=0.001)
    for _ in range(3):
        line.hear("heartbeat")
    made.close()


def test_ids_are_minted_off_the_training_thread(connector: ScriptedConnector) -> None:
    minter = Minter()
    made = client(connector, minter)
    made.start()
    line = connector.next_line()
    line.welcome()
    line.assign(line.hear("join"), 1, 0)
    assert list(line.hear("publish_unique_ids").unique_ids) == [b"minted"]
    assert minter.thread == "muster-stream"
    made.close()


def test_a_fault_on_the_stream_is_no_end(caplog: pytest.LogCaptureFixture) -> None:
    connector = ScriptedConnector(ValueError("unforeseen"))
    made = client(connector)
    made.start()
    connector.next_line().hear("join")  # connected again
    made.close()
    assert "fault on the scheduler's stream" in caplog.text


@pytest.mark.parametrize(
    "error", [WorkerError("no network interface for NCCL"), RuntimeError("no network interface for NCCL")]
)
def test_ids_that_cannot_be_minted_end_the_wait(connector: ScriptedConnector, error: Exception) -> None:
    minter = Minter()
    minter.error = error
    made = client(connector, minter)
    made.start()
    line = connector.next_line()
    line.welcome()
    building = Thread(made.next_build)
    line.assign(line.hear("join"), 1, 0)
    with pytest.raises(WorkerError, match="no network interface"):
        building.result()
    made.close()


def test_a_communicator_of_a_generation_that_is_over_is_aborted_at_once(
    running: Client, connector: ScriptedConnector
) -> None:
    running.post(events.Received(1, _next_assignment()))
    late = stub_communicator()
    running.adopt(1, late)
    assert isinstance(late.error, MembershipChanged)
    assert not running.built(1)


def test_a_suspension_says_once_that_the_generation_is_over(running: Client) -> None:
    running.post(events.Received(1, Suspended(1, "Generation 1 is over: rank 0 left. Waiting.", 30.0)))
    with pytest.raises(MembershipChanged, match=r"^Generation 1 is over: rank 0 left\. Waiting\."):
        running.check(1)


def test_whoever_does_not_come_after_a_generation_that_never_stood_waits_for_nobody(
    connector: ScriptedConnector,
) -> None:
    """The training thread is in something of its own, and the others wait for it."""
    made = client(connector)
    made.start()
    line = connector.next_line()
    line.welcome()

    rounds = itertools.count(1)

    def waits() -> bool:
        line.say(probe=pb.Probe(round=next(rounds)))
        return bool(line.hear("probed").waits)

    building = Thread(made.next_build)
    join = line.hear("join")
    line.assign(join)
    line.say(unique_ids=pb.UniqueIds(generation=1, unique_ids=[b"secret"]))
    building.result()
    assert waits()  # it builds
    made.post(events.Received(1, Suspended(1, "Generation 1 is over: rank 0 left. Waiting.", 30.0)))
    assert not waits()
    entering = Thread(made.next_build)
    wait_for(waits)
    line.assign(join, 2)
    line.say(unique_ids=pb.UniqueIds(generation=2, unique_ids=[b"other"]))
    assert entering.result().assignment.generation == 2
    made.close()


def raise_verdict(running: Client) -> None:
    raise running.verdict(1, 0, PeerLostError("Rank 0 is gone.", rank=0))


@pytest.mark.parametrize(
    "call",
    [
        lambda running: running.check(1),
        lambda running: running.start_step(1, 1),
        lambda running: running.next_build(),
        lambda running: running.built(1),
        raise_verdict,
    ],
)
def test_an_error_that_is_raised_again_and_again_shows_the_last_time_only(
    running: Client, call: Callable[[Client], object]
) -> None:
    running.post(events.Received(1, Refused(RefusalCode.EXPELLED, "revoked")))
    depths = set()
    for _ in range(3):
        with pytest.raises(RefusedError, match="Revoked") as caught:
            call(running)
        depths.add(len(list(traceback.walk_tb(caught.value.__traceback__))))
    assert len(depths) == 1


def test_communicators_are_ended_youngest_first_and_after_their_abort(running: Client) -> None:
    world, part = stub_communicator(), stub_communicator()
    running.adopt(1, world)
    running.adopt(1, part)
    running.post(events.Received(1, _next_assignment()))
    ended: list[Communicator] = []

    def end(communicator: Communicator) -> None:
        assert isinstance(world.error, MembershipChanged) and isinstance(part.error, MembershipChanged)
        ended.append(communicator)

    running.communicators.end(end)
    running.communicators.end(end)
    assert ended == [part, world]


def test_the_end_of_a_generation_aborts_what_is_being_closed(running: Client) -> None:
    """A close that waits for a peer would wait for ever if that died meanwhile."""
    world, part, closed = stub_communicator(), stub_communicator(), stub_communicator()
    for each in (world, part, closed):
        running.adopt(1, each)
    running.communicators.forget(closed)

    def end(communicator: Communicator) -> None:
        if communicator is part:
            running.post(events.Received(1, _next_assignment()))
            part.hang()

    running.communicators.end(end)
    assert isinstance(part.error, MembershipChanged) and isinstance(world.error, MembershipChanged)
    assert closed.error is None
    running.communicators.forget(closed)


def test_a_failure_that_blames_nobody_is_put_down_to_the_rank_that_has_finished(
    running: Client, connector: ScriptedConnector
) -> None:
    failed = CommunicatorError("all_reduce failed in NCCL: connection closed")
    asking = Thread(lambda: running.verdict(1, -1, failed))
    assert connector.lines[0].hear("suspect_peer").rank == -1
    running.post(events.Received(1, Waiting(1, 2, "Rank 1 has finished.", (1,))))
    error = asking.result()
    assert isinstance(error, PeerFinishedError) and error.rank == 1
    assert str(error).startswith("Rank 1 has finished. Let all ranks make as many steps")


class Fast(Threads):
    """A clock that runs twenty times as fast."""

    def now(self) -> float:
        return 20.0 * super().now()


class LateCalls(FlightRecorder):
    """A collective that has been waited for as long as a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.looks, self.late = 0, 0.0

    def late_s(self) -> float:
        self.looks += 1
        return self.late

    def waited(self, seconds: float) -> None:
        """Waits until the watcher has seen it so."""
        self.late, before = seconds, self.looks
        wait_for(lambda: self.looks >= before + 3)


@pytest.mark.parametrize("undecided", [False, True])
def test_a_wait_says_nothing_of_the_steps_once_the_scheduler_could_decide_nothing(
    connector: ScriptedConnector, undecided: bool
) -> None:
    """Else the next wait would be late after five times as long as there was no space."""
    calls, pace = LateCalls(), Pace()
    made = client(connector, threads=Fast(), calls=calls, pace=pace, goodbye_timeout_s=0.01)
    run(made, connector)
    calls.waited(30.0)
    made.post(events.Received(1, Waiting(1, 1, "There is no space.", undecided=undecided)))
    calls.waited(0.0)
    made.close()
    assert pace.limit_s == (Pace().limit_s if undecided else 150.0)


def test_how_long_a_group_takes_to_stand_says_nothing_of_the_steps(connector: ScriptedConnector) -> None:
    """Else nobody would be probed while the next one is built: its time would be over before it is late."""
    calls, pace = LateCalls(), Pace()
    made = client(connector, threads=Fast(), calls=calls, pace=pace, late_again_s=1e9, goodbye_timeout_s=0.01)
    line = build(made, connector)
    line.hear("late")
    stand(made, line)
    calls.waited(0.0)
    made.close()
    assert pace.limit_s == Pace().limit_s


def test_who_is_to_leave_a_lost_scheduler_goes_without_its_consent(running: Client) -> None:
    communicator = stub_communicator()
    running.adopt(1, communicator)
    asking = Thread(lambda: running.verdict(1, 0, PeerLostError("Rank 0 is gone.", rank=0)))
    running.post(events.StreamLost(1, "it was killed"))
    running.expect_leave("SIGTERM")
    granted = asking.result()
    assert isinstance(granted, LeaveGranted) and granted.alone
    with pytest.raises(LeaveGranted):
        running.start_step(1, 1)
    running.communicators.settle_aborts()
    assert communicator.error is granted


def test_who_is_to_leave_waits_for_a_scheduler_that_is_there(running: Client) -> None:
    running.expect_leave("SIGTERM")
    running.start_step(0, 1)
    running.post(events.StreamLost(1, "it was killed"))
    with pytest.raises(LeaveGranted):
        Thread(lambda: endless(running)).result()


def test_a_leave_is_told_while_the_training_thread_is_in_a_step(
    running: Client, connector: ScriptedConnector
) -> None:
    running.start_step(0, 1)
    running.expect_leave("SIGTERM")
    running.expect_leave("again")
    assert connector.lines[0].hear("request_leave").reason == "SIGTERM"
    running.check(1)  # its own step may take as long as it likes: it waits for nobody


def test_a_leave_that_was_asked_for_is_told_again_after_the_place_was_lost(
    connector: ScriptedConnector,
) -> None:
    made = client(connector, lone_leave=LoneLeave(unfinished_s=1e6), goodbye_timeout_s=0.01)
    made.start()
    made.expect_leave("SIGTERM")
    for renewed in (False, True):
        if renewed:
            made.renew(78, "127.0.0.1:6000")
        line = connector.next_line()
        line.welcome()
        line.assign(line.hear("join"))
        assert line.hear("request_leave").reason == "SIGTERM"
    made.close()


def test_who_is_to_leave_waits_but_a_while_for_others_in_a_collective(
    running: Client, calls: Calls, connector: ScriptedConnector
) -> None:
    communicator = stub_communicator()
    running.adopt(1, communicator)
    running.start_step(0, 1)
    calls.seconds = HANG_S + 1
    running.expect_leave("SIGTERM")
    assert connector.lines[0].hear("request_leave").reason == "SIGTERM"
    communicator.hang()  # until it is aborted
    with pytest.raises(LeaveGranted, match="did not finish the step") as caught:
        running.start_step(1, 1)
    assert caught.value.alone
    assert communicator.error is caught.value


def test_who_is_to_leave_waits_but_a_while_for_others_at_a_step_boundary(running: Client) -> None:
    running.post(events.Received(1, Quiesce(1, "node b leaves")))
    held = Thread(lambda: running.start_step(0, 1))
    running.expect_leave("SIGTERM")
    with pytest.raises(LeaveGranted, match="did not finish the step") as caught:
        held.result()
    assert caught.value.alone


def test_who_is_to_leave_waits_but_a_while_for_the_next_generation_to_form(
    connector: ScriptedConnector,
) -> None:
    made = client(connector)
    made.start()
    line = connector.next_line()
    line.welcome()
    line.assign(line.hear("join"))
    entering = Thread(made.next_build)  # no unique ids come
    made.expect_leave("SIGTERM")
    with pytest.raises(LeaveGranted, match="did not form") as caught:
        entering.result()
    assert caught.value.alone
    made.close()


@pytest.mark.parametrize("is_there", [True, False])
def test_who_leaves_now_waits_for_nothing(connector: ScriptedConnector, is_there: bool) -> None:
    made = client(connector, lone_leave=LoneLeave(unfinished_s=1e6))
    made.start()
    if is_there:
        line = connector.next_line()
        line.welcome()
        line.hear("join")
    entering = Thread(made.next_build)
    made.leave_now("SIGTERM")
    with pytest.raises(LeaveGranted, match=r"^This worker leaves the job: SIGTERM\.$"):
        entering.result()
    made.close()


@pytest.mark.timeout(120, method="signal")
def test_a_signal_that_another_thread_got_ends_the_wait(connector: ScriptedConnector) -> None:
    """As when a process is stopped, terminated and continued; the main thread is not interrupted then."""
    changed = threading.Condition(threading.RLock())

    class Watched(Threads):
        def condition(self) -> threading.Condition:
            return changed

    made = client(connector, threads=Watched())
    made.start()
    line = connector.next_line()
    line.hear("join")
    line.welcome()
    waits = threading.Event()

    def get_signal() -> None:
        assert waits.wait(100)
        with changed:  # the main thread is in its wait, or has given this lock up for it
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: made.leave_now("SIGUSR1"))
    try:
        thread = Thread(get_signal)
        with changed:
            waits.set()
            with pytest.raises(LeaveGranted):
                made.next_build()
        thread.result()
    finally:
        signal.signal(signal.SIGUSR1, before)
        made.close()


def test_who_leaves_learns_that_nobody_goes_on_with_the_state(running: Client) -> None:
    running.start_step(0, 1)
    running.post(events.Received(1, assignment(2, -1, state_source_rank=-1)))
    with pytest.raises(LeaveGranted) as caught:
        running.check(1)
    assert caught.value.alone


def endless(running: Client) -> None:
    while True:
        running.start_step(1, 1)


def test_closing_frees_a_thread_that_waits_at_a_step_boundary(running: Client) -> None:
    running.start_step(0, 1)
    running.post(events.Received(1, _quiesce()))
    held = Thread(lambda: running.start_step(1, 1))
    running.close()
    with pytest.raises(NotInitializedError):
        held.result()


def test_closing_frees_a_thread_that_waits_for_a_generation(connector: ScriptedConnector) -> None:
    made = client(connector)
    made.start()
    line = connector.next_line()
    line.welcome()
    line.hear("join")
    joining = Thread(made.next_build)
    made.close()
    with pytest.raises(NotInitializedError):
        joining.result()


def test_closing_frees_a_thread_that_waits_for_the_others_to_build(running: Client) -> None:
    building = Thread(lambda: running.built(2))
    running.close()
    with pytest.raises(NotInitializedError):
        building.result()


def _next_assignment() -> Assignment:
    return assignment(2, 1)


def _quiesce() -> Quiesce:
    return Quiesce(1, "grow")
