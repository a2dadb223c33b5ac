"""Sessions against a scripted scheduler and a stub data plane."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from muster.communicators.membership import Membership
from muster.communicators.reduce_ops import ReduceOp
from muster.communicators.tcp.endpoint import Endpoint
from muster.errors import (
    FormationTimeoutError,
    GroupError,
    JobEndedError,
    LeaveGranted,
    MembershipChanged,
    NotInitializedError,
    PeerLostError,
    RefusedError,
    SchedulerUnreachableError,
    SecurityError,
    SettingsError,
    WorkerError,
)
from muster.wire import messages
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.worker.session.events import Timing
from muster.worker.session.session import Session
from muster.worker.session.streams import DeniedError, MessageRejectedError
from tests.waiting import LIMIT_S, wait_for
from tests.worker.session.scripted import (
    Line,
    ScriptedConnector,
    StubBackend,
    StubCommunicator,
    Thread,
    end,
    is_over,
    opened,
    scripted_session,
)

X = np.zeros(4)


@dataclass
class Stage:
    """A session that runs as rank 1 of 2 in generation 1, and both its other sides."""

    session: Session
    backend: StubBackend
    connector: ScriptedConnector
    line: Line
    join: Any

    @property
    def communicator(self) -> StubCommunicator:
        return self.backend.made[-1]

    def all_reduce(self) -> Thread:
        return Thread(lambda: self.session.communicator.all_reduce(X, X, ReduceOp.SUM))


@contextlib.contextmanager
def staged(timing: Timing | None = None) -> Iterator[Stage]:
    backend, connector = StubBackend(), ScriptedConnector()
    session = scripted_session(connector, backend, timing=timing)
    line, join = opened(session, connector)
    stage = Stage(session, backend, connector, line, join)
    yield stage
    end(session, stage.line)


@pytest.fixture
def stage() -> Iterator[Stage]:
    with staged() as made:
        yield made


# ---------------------------------------------------------------- joining


def test_the_session_tells_its_place(stage: Stage) -> None:
    session = stage.session
    assert (session.rank, session.world_size, session.local_rank, session.local_world_size) == (1, 2, 1, 2)
    assert (session.generation, session.node_id, session.job_id) == (1, "n0", "job")
    assert [member.node_id for member in session.members] == ["n1", "n0"]
    assert (session.state_source_rank, session.newcomer_ranks, session.device_ordinal) == (-1, (), -1)
    assert session.change_reason == "because 1"


def test_the_communicator_gets_members_ids_and_deadline(stage: Stage) -> None:
    membership = stage.communicator.membership
    assert (membership.rank, membership.generation, membership.unique_ids) == (1, 1, (b"secret",))
    assert [peer.node_id for peer in membership.peers] == ["n1", "n0"]
    assert stage.communicator.timeout_s == 600.0


def test_the_members_addresses_are_known_where_probes_are_answered() -> None:
    class Known(Endpoint):
        addresses: tuple[str, ...] = ()

        def know(self, addresses: Iterable[str]) -> None:
            self.addresses = tuple(addresses)

    connector, answering = ScriptedConnector(), Known(None)
    session = scripted_session(connector, answering=answering)
    line, _ = opened(session, connector)
    assert answering.addresses == tuple(member.host.address for member in session.members) != ()
    end(session, line)


def test_rank_0_mints_and_publishes() -> None:
    connector = ScriptedConnector()
    session = scripted_session(connector)
    opening = Thread(session.open)
    line = connector.next_line()
    join = line.hear("join")
    line.welcome()
    line.assign(join, 1, 0)
    assert list(line.hear("publish_unique_ids").unique_ids) == [b"minted"]
    line.say(unique_ids=pb.UniqueIds(generation=1, unique_ids=[b"minted"]))
    line.hear("built")
    line.say(group_built=pb.GroupBuilt(generation=1))
    opening.result()
    end(session, line)


def refuse(code: str) -> Callable[[Line], None]:
    return lambda line: line.say(refused=pb.Refused(code=f"REFUSAL_CODE_{code}", sentence="the sentence"))


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (refuse("JOB_FULL"), RefusedError),
        (refuse("SETTINGS_DIFFER"), RefusedError),
        (refuse("TOPO_TIMEOUT"), FormationTimeoutError),
        (refuse("NOT_PERMITTED"), SecurityError),
        (lambda line: line.say(ended=pb.Ended(ok=False, reason="the sentence")), FormationTimeoutError),
        (lambda line: line.say(ended=pb.Ended(ok=True, reason="the sentence")), JobEndedError),
        (lambda line: line.fail(DeniedError("the sentence", by_scheduler=True)), SecurityError),
        (lambda line: line.fail(MessageRejectedError("the sentence")), RefusedError),
    ],
)
def test_endings_while_joining(act: Callable[[Line], None], error: type[WorkerError]) -> None:
    connector, backend = ScriptedConnector(), StubBackend()
    session = scripted_session(connector, backend)
    opening = Thread(session.open)
    line = connector.next_line()
    line.hear("join")
    act(line)
    with pytest.raises(error, match=r"The sentence\."):
        opening.result()
    assert backend.closed
    with pytest.raises(NotInitializedError):
        session.rank  # noqa: B018


def test_a_spare_that_was_not_needed_exits_well() -> None:
    connector = ScriptedConnector()
    opening = Thread(scripted_session(connector).open)
    line = connector.next_line()
    line.say(ended=pb.Ended(ok=True, reason="all finished"))
    with pytest.raises(JobEndedError) as caught:
        opening.result()
    assert caught.value.exit_code == 0


def test_a_rank_id_that_is_not_the_rank_is_refused() -> None:
    connector = ScriptedConnector()
    opening = Thread(scripted_session(connector, rank_id=0).open)
    line = connector.next_line()
    join = line.hear("join")
    line.welcome()
    line.assign(join, rank=1)
    line.say(unique_ids=pb.UniqueIds(generation=1, unique_ids=[b"secret"]))
    leave = line.hear("leave")
    assert (leave.finished, leave.consequence, leave.exit_code) == (False, False, 2)
    line.say(ended=pb.Ended(ok=True, reason="bye"))
    with pytest.raises(SettingsError, match="RANK_ID is 0, but this worker, node n0, has rank 1"):
        opening.result()


def test_a_rank_id_that_is_the_rank_is_welcome() -> None:
    connector = ScriptedConnector()
    session = scripted_session(connector, rank_id=1)
    line, _ = opened(session, connector)
    assert session.rank == 1
    end(session, line)


@pytest.mark.parametrize(
    ("error", "consequence", "exit_code"),
    [
        (ValueError("mine"), False, 1),
        (SystemExit(3), False, 3),
        (MembershipChanged("Over.", generation=1), True, 1),
    ],
)
def test_a_goodbye_says_whether_it_is_because_of_others_and_how_the_process_ends(
    error: BaseException, consequence: bool, exit_code: int
) -> None:
    connector = ScriptedConnector()
    session = scripted_session(connector)
    line, _ = opened(session, connector)
    ending = Thread(lambda: session.end(error))
    leave = line.hear("leave")
    assert (leave.finished, leave.consequence, leave.exit_code) == (False, consequence, exit_code)
    line.say(ended=pb.Ended(ok=True, reason="bye"))
    ending.result()


def test_who_was_the_first_to_go_is_noted_for_the_launcher_before_the_change_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: list[dict[str, object]] = []

    def note(**facts: object) -> None:
        if not facts.keys() & {"group", "waits"}:
            noted.append(facts)

    monkeypatch.setattr("muster.worker.ending.note", note)
    connector = ScriptedConnector()
    session = scripted_session(connector)
    line, join = opened(session, connector)
    loss = pb.FirstLoss(node_id="n1", incarnation=3, sentence="rank 0 left: ValueError", exit_code=1)
    line.say(suspended=pb.Suspended(generation=1, reason="rank 0 left", wait_s=9, first_loss=loss))
    wait_for(lambda: is_over(session))
    first = {"node_id": "n1", "incarnation": 3, "sentence": "rank 0 left: ValueError", "exit_code": 1}
    assert noted == [{"node_id": "n0", "incarnation": join.incarnation}, {"first": first}]
    rejoining = Thread(session.rejoin)
    line.form(join, 2)
    rejoining.result()
    assert noted[2:] == [{"first": None}], "they go on"
    end(session, line)


def test_tls_trouble_ends_at_once_and_a_closed_port_is_tried_again() -> None:
    connector = ScriptedConnector(
        OSError("refused"), OSError("refused"), DeniedError("wrong CA", by_scheduler=False)
    )
    with pytest.raises(SecurityError, match=r"Wrong CA\."):
        Thread(scripted_session(connector).open).result()
    assert connector.attempts == 3


def test_a_scheduler_that_never_answers() -> None:
    connector = ScriptedConnector(*(ConnectionRefusedError(111, "Connection refused") for _ in range(999)))
    with pytest.raises(SchedulerUnreachableError, match=r"within 1 s: Connection refused\. .*MS_SCHED_HOST"):
        Thread(scripted_session(connector, topo_timeout_s=1.0).open).result()


def test_a_generation_that_ends_while_it_is_built_is_replaced_silently() -> None:
    connector, backend = ScriptedConnector(), StubBackend()
    session = scripted_session(connector, backend)
    opening = Thread(session.open)
    line = connector.next_line()
    join = line.hear("join")
    line.welcome()

    def connecting(membership: Membership, cancelled: Callable[[], Exception | None]) -> None:
        if membership.generation == 1:
            line.assign(join, 2)
            while (error := cancelled()) is None:
                pass
            raise error

    backend.connecting = connecting
    line.assign(join, 1)
    line.say(unique_ids=pb.UniqueIds(generation=1, unique_ids=[b"secret"]))
    line.say(unique_ids=pb.UniqueIds(generation=2, unique_ids=[b"secret"]))
    # The ids of generation 2 may come before its assignment: the scheduler sends them again on reconnect.
    line.fail(OSError("cut"))
    line = connector.next_line()
    line.hear("join")
    line.welcome()
    line.form(join, 2)
    opening.result()
    assert session.generation == 2
    assert len(backend.made) == 1
    end(session, line)


# ---------------------------------------------------------------- change


def test_a_hanging_collective_is_cut_off_when_a_member_is_lost(stage: Stage) -> None:
    stage.communicator.behave = StubCommunicator.hang
    hanging = stage.all_reduce()
    assert stage.communicator.entered.wait(LIMIT_S)
    stage.line.assign(stage.join, 2, lost=("Rank 0 was killed.",))
    with pytest.raises(MembershipChanged) as caught:
        hanging.result()
    assert (caught.value.generation, caught.value.lost) == (1, ("Rank 0 was killed.",))
    with pytest.raises(MembershipChanged):
        stage.session.communicator  # noqa: B018
    old = stage.communicator
    rejoining = Thread(stage.session.rejoin)
    stage.line.say(unique_ids=pb.UniqueIds(generation=2, unique_ids=[b"secret"]))
    assert stage.line.hear("built").generation == 2
    stage.line.say(group_built=pb.GroupBuilt(generation=2))
    rejoining.result()
    assert old.closed
    assert stage.session.generation == 2
    stage.all_reduce().result()


def test_a_lost_peer_is_reported_and_becomes_a_change_of_members(stage: Stage) -> None:
    stage.communicator.error = PeerLostError("reset", rank=0)
    failing = stage.all_reduce()
    suspect = stage.line.hear("suspect_peer")
    assert (suspect.generation, suspect.rank, suspect.detail) == (1, 0, "reset")
    stage.line.assign(stage.join, 2)
    with pytest.raises(MembershipChanged) as caught:
        failing.result()
    assert isinstance(caught.value.__cause__, PeerLostError)


def test_what_the_scheduler_knows_nothing_of_stays_an_error_of_its_own() -> None:
    with staged(Timing(verdict_margin_s=0.01)) as stage:
        stage.line.welcome(node_timeout_s=0.01)
        stage.communicator.error = PeerLostError("reset", rank=-1)
        failing = stage.all_reduce()
        stage.line.hear("suspect_peer")
        with pytest.raises(PeerLostError, match="reset"):
            failing.result()


def test_rejoin_in_a_generation_that_stands_does_nothing(stage: Stage) -> None:
    stage.session.rejoin()
    assert stage.session.generation == 1


def test_two_threads_that_rejoin_enter_one_generation_once(stage: Stage) -> None:
    """As those of a data loader and of the training; a second entry would be that of the generation after."""
    stage.communicator.behave = StubCommunicator.hang
    hanging = stage.all_reduce()
    stage.line.assign(stage.join, 2, lost=("Rank 0 was killed.",))
    with pytest.raises(MembershipChanged):
        hanging.result()
    threads = [Thread(stage.session.rejoin) for _ in range(2)]
    stage.line.say(unique_ids=pb.UniqueIds(generation=2, unique_ids=[b"secret"]))
    assert stage.line.hear("built").generation == 2
    stage.line.say(group_built=pb.GroupBuilt(generation=2))
    for thread in threads:
        thread.result()
    assert stage.session.generation == 2


def test_a_planned_change_happens_at_the_step_boundary(stage: Stage) -> None:
    session, line = stage.session, stage.line
    session.step_boundary(4)
    line.say(quiesce=pb.Quiesce(generation=1, reason="a worker joins"))
    assert line.hear("quiesced").last_started_step == 5
    event = session.membership_event
    assert event is not None and event.reason == "a worker joins"
    held = Thread(lambda: session.step_boundary(5))
    line.assign(stage.join, 2, switch_after_step=6, newcomer_ranks=(0,), state_source_rank=1, launch=7)
    held.result()
    with pytest.raises(MembershipChanged, match=r"Generation 1 is over: because 2\. Call session"):
        session.step_boundary(6)
    assert not stage.communicator.aborted.is_set()
    rejoining = Thread(session.rejoin)
    line.say(unique_ids=pb.UniqueIds(generation=2, unique_ids=[b"secret"]))
    line.hear("built")
    line.say(group_built=pb.GroupBuilt(generation=2))
    rejoining.result()
    assert (session.newcomer_ranks, session.state_source_rank, session.launch) == ((0,), 1, 7)
    assert session.membership_event is None
    session.step_boundary(6)


def test_snapshots_and_checkpoints_are_told_and_the_word_of_this_generation_is_heard(stage: Stage) -> None:
    report = messages.SnapshotReport(1, -1, 10, complete=True, size_bytes=4096, seconds=0.5, partners=(0,))
    stage.session.report_snapshot(report)
    stage.session.report_checkpoint(7, size_bytes=1000, seconds=2.0)
    stage.line.say(probe=pb.Probe(round=1))  # a heartbeat goes before its answer
    beat = stage.line.hear("heartbeat")
    assert (beat.snapshot.taken, beat.snapshot.complete, list(beat.snapshot.partners)) == (10, True, [0])
    assert (beat.checkpoint.step, beat.checkpoint.size_bytes) == (7, 1000)
    assert stage.session.snapshot_word is None
    stage.line.say(snapshot_word=pb.SnapshotWord(generation=1, complete=10, next=11))
    wait_for(lambda: stage.session.snapshot_word == messages.SnapshotWord(1, 10, 11))
    stage.line.say(snapshot_word=pb.SnapshotWord(generation=9, complete=10, next=11))
    wait_for(lambda: stage.session.snapshot_word is None)


def test_own_numbers_and_the_time_of_checkpoints_go_with_heartbeats(stage: Stage) -> None:
    with stage.session.busy("saves a checkpoint"):
        pass
    with stage.session.busy("evaluation"):
        pass
    stage.session.report(accuracy=0.5, loss=2)
    stage.session.report(epoch=3, epochs=10)
    stage.line.say(probe=pb.Probe(round=1))  # a heartbeat goes before its answer
    beat = stage.line.hear("heartbeat")
    assert dict(beat.numbers) == {"accuracy": 0.5} and beat.step == 1
    assert (beat.epoch, beat.epochs) == (3, 10)
    assert beat.checkpoints_s > 0.0


@pytest.mark.parametrize(
    "wrong", [{"size_bytes": -1}, {"seconds": math.nan}, {"seconds": -1.0}, {"partners": (-1,)}]
)
def test_figures_that_no_message_can_carry_are_refused(stage: Stage, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        stage.session.report_snapshot(messages.SnapshotReport(1, -1, 10).replaced(**wrong))
    if "partners" not in wrong:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            stage.session.report_checkpoint(1, **wrong)


def test_a_worker_says_where_it_stands_however_that_is_found_out(stage: Stage) -> None:
    def answer(limit_bytes: int) -> str:
        stage.line.say(stacks_wanted=pb.StacksWanted(request=7, limit_bytes=limit_bytes))
        told: pb.Stacks = stage.line.hear("stacks")
        assert told.request == 7
        return told.text

    def fails(limit_bytes: int) -> str:
        raise RuntimeError("no room")

    assert ", MainThread (most recent call first)" in answer(60_000)
    assert len(answer(500).encode()) <= 500
    stage.session.take_stacks = lambda limit_bytes: f"at most {limit_bytes}"  # as an agent does
    assert answer(500) == "at most 500"
    stage.session.take_stacks = fails
    assert answer(500) == "No stacks were taken: RuntimeError('no room')."


def test_a_probe_is_answered_with_what_the_rank_does_alone(stage: Stage) -> None:
    def answer(number: int) -> pb.Probed:
        stage.line.say(probe=pb.Probe(round=number))
        told: pb.Probed = stage.line.hear("probed")
        assert told.round == number and not told.late and not told.unreached
        return told

    assert answer(1).busy == "" and not answer(2).waits
    with stage.session.busy("evaluation"), stage.session.busy():
        assert answer(3).busy == "evaluation, works alone"
    assert answer(4).busy == ""


def test_a_probe_is_answered_while_this_rank_waits_for_the_others(stage: Stage) -> None:
    stage.line.say(quiesce=pb.Quiesce(generation=1, reason="a worker joins"))
    stage.line.hear("quiesced")
    held = Thread(lambda: stage.session.step_boundary(0))
    number = 0

    def waits() -> bool:
        nonlocal number
        number += 1
        stage.line.say(probe=pb.Probe(round=number))
        return bool(stage.line.hear("probed").waits)

    wait_for(waits)
    stage.line.assign(stage.join, 1)
    held.result()


def test_leaving_as_asked(stage: Stage) -> None:
    stage.session.step_boundary(0)
    stage.session.request_leave("SIGTERM")
    assert stage.line.hear("request_leave").reason == "SIGTERM"
    stage.line.assign(stage.join, 2, -1, switch_after_step=1)
    stage.session.step_boundary(0)
    with pytest.raises(LeaveGranted) as caught:
        while True:
            stage.session.step_boundary(1)
    assert caught.value.exit_code == 0


def test_who_was_declared_dead_may_come_back_as_a_newcomer(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.line.say(refused=pb.Refused(code="REFUSAL_CODE_SUPERSEDED", sentence="declared dead"))
    assert stage.communicator.aborted.wait(LIMIT_S)
    with pytest.raises(RefusedError, match=r"Declared dead\."):
        stage.session.step_boundary(1)
    rejoining = Thread(stage.session.rejoin)
    stage.line = stage.connector.next_line()
    join = stage.line.hear("join")
    assert join.incarnation != stage.join.incarnation
    assert join.held_generation == 0
    stage.line.welcome()
    stage.line.form(join, 3)
    rejoining.result()
    assert stage.session.generation == 3
    assert "this worker has lost its place and asks for one as a newcomer: Declared dead." in caplog.text


SUPERSEDED = pb.Refused(code="REFUSAL_CODE_SUPERSEDED", sentence="not heard for 5.0 s")


@pytest.mark.parametrize("phase", ["waiting", "assigned", "connecting", "built"])
def test_who_is_declared_dead_before_its_first_place_asks_again_as_often_as_need_be(
    phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    connector, backend = ScriptedConnector(), StubBackend()
    session = scripted_session(connector, backend)
    opening = Thread(session.open)
    connecting = threading.Event()

    def connect(membership: Membership, cancelled: Callable[[], Exception | None]) -> None:
        connecting.set()
        while phase == "connecting" and membership.generation < 3:
            if (error := cancelled()) is not None:
                raise error

    backend.connecting = connect
    incarnations = set()
    for generation in (1, 2):
        line = connector.next_line()
        join = line.hear("join")
        assert join.held_generation == 0
        incarnations.add(join.incarnation)
        line.welcome()
        if phase != "waiting":
            line.assign(join, generation)
        if phase in ("connecting", "built"):
            line.say(unique_ids=pb.UniqueIds(generation=generation, unique_ids=[b"secret"]))
            assert connecting.wait(LIMIT_S)
            connecting.clear()
        if phase == "built":
            line.hear("built")
        line.say(refused=SUPERSEDED)
    line = connector.next_line()
    join = line.hear("join")
    assert len(incarnations | {join.incarnation}) == 3
    assert all(made.closed for made in backend.made)
    line.welcome()
    line.form(join, 3)
    opening.result()
    assert (session.generation, session.rank) == (3, 1)
    assert caplog.text.count("asks for one as a newcomer: Not heard for 5.0 s.") == 2
    end(session, line)


def test_a_newcomer_whose_node_id_was_taken_meanwhile_is_refused() -> None:
    connector = ScriptedConnector()
    opening = Thread(scripted_session(connector).open)
    line = connector.next_line()
    line.hear("join")
    line.say(refused=SUPERSEDED)
    line = connector.next_line()
    line.hear("join")
    refuse("NODE_ID_TAKEN")(line)
    with pytest.raises(RefusedError, match=r"The sentence\."):
        opening.result()


def test_a_reconnect_does_not_disturb_the_training(stage: Stage) -> None:
    stage.line.fail(OSError("cut"))
    stage.line = stage.connector.next_line()
    join = stage.line.hear("join")
    assert (join.held_generation, join.held_rank, join.built) == (1, 1, True)
    stage.all_reduce().result()


def test_malformed_messages_cost_the_stream_not_the_membership(stage: Stage) -> None:
    stage.line.say()
    stage.line = stage.connector.next_line()
    assert stage.line.hear("join").held_generation == 1


# ---------------------------------------------------------------- groups


def test_a_group_that_was_destroyed_is_not_kept(stage: Stage) -> None:
    stage.session.groups.create("pair", [1, 0])
    part = stage.communicator.parts[0]
    stage.session.groups.destroy("pair")
    assert part.closed
    stage.line.assign(stage.join, 2)
    stage.communicator.hang()
    rejoining = Thread(stage.session.rejoin)  # waits for aborts under way
    stage.line.form(stage.join, 2)
    rejoining.result()
    assert not part.aborted.is_set()  # nobody holds it to abort it


def test_a_release_whose_communicator_hangs_ends_when_the_generation_does() -> None:
    connector, backend = ScriptedConnector(), StubBackend()
    session = scripted_session(connector, backend)
    line, join = opened(session, connector)
    communicator, closing = backend.made[-1], threading.Event()

    def close() -> None:
        closing.set()
        communicator.hang()

    communicator.close = close  # type: ignore[method-assign]
    releasing = Thread(session.release)
    assert closing.wait(LIMIT_S)
    line.assign(join, 2)  # the other died
    assert line.hear("leave").finished
    line.say(ended=pb.Ended(ok=True, reason="bye"))
    releasing.result()


def test_groups_are_made_again_in_the_next_generation(stage: Stage) -> None:
    stage.session.groups.create("pair", [1, 0])
    stage.session.groups.create("first", [0])
    assert stage.session.group("pair").rank == 0
    with pytest.raises(GroupError, match="Rank 1 is not in the group 'first'"):
        stage.session.group("first")
    stage.line.assign(stage.join, 2)
    assert stage.communicator.aborted.wait(LIMIT_S)
    assert stage.backend.made[0].parts[0].aborted.wait(LIMIT_S)
    rejoining = Thread(stage.session.rejoin)
    stage.line.say(unique_ids=pb.UniqueIds(generation=2, unique_ids=[b"secret"]))
    stage.line.hear("built")
    stage.line.say(group_built=pb.GroupBuilt(generation=2))
    rejoining.result()
    assert stage.communicator.calls == ["split pair", "split first"]
    assert stage.session.group("pair").membership.generation == 2


# ---------------------------------------------------------------- the end


def test_release_says_finished_and_is_idempotent(stage: Stage) -> None:
    releasing = Thread(stage.session.release)
    leave = stage.line.hear("leave")
    assert leave.finished and leave.generation == 1
    stage.line.say(ended=pb.Ended(ok=True, reason="bye"))
    releasing.result()
    assert stage.communicator.closed and stage.backend.closed and stage.line.closed
    assert stage.communicator.finished  # what it says to peers that wait for it all the same
    stage.session.release()
    with pytest.raises(NotInitializedError):
        stage.session.communicator  # noqa: B018
    with pytest.raises(NotInitializedError):
        stage.session.step_boundary(1)


def goodbye(session: Session, line: Line) -> tuple[bool, str]:
    """What a release without arguments says: finished or not, and why."""
    releasing = Thread(session.release)
    leave = line.hear("leave")
    line.say(ended=pb.Ended(ok=True, reason="bye"))
    releasing.result()
    return leave.finished, leave.reason


def test_who_has_left_does_not_say_finished(stage: Stage) -> None:
    stage.session.note_left()
    assert goodbye(stage.session, stage.line) == (False, "asked to leave")
    assert stage.communicator.closed and not stage.communicator.finished


def test_who_is_granted_leave_does_not_say_finished(stage: Stage) -> None:
    stage.line.say(quiesce=pb.Quiesce(generation=1, reason="node n0 leaves"))
    stage.line.hear("quiesced")
    stage.line.assign(stage.join, 2, -1, switch_after_step=0)
    with pytest.raises(LeaveGranted):
        stage.session.step_boundary(0)
    assert goodbye(stage.session, stage.line) == (False, "asked to leave")


def test_a_leave_where_too_few_remain_ends_a_collective_and_the_session(stage: Stage) -> None:
    stage.communicator.behave = StubCommunicator.hang
    hanging = stage.all_reduce()
    assert stage.communicator.entered.wait(LIMIT_S)
    stage.line.say(ended=pb.Ended(ok=True, reason="This worker leaves the job: SIGTERM.", leave=True))
    with pytest.raises(LeaveGranted, match="leaves the job: SIGTERM") as caught:
        hanging.result()
    assert caught.value.alone
    stage.session.release()


def test_a_block_that_fails_says_why(stage: Stage) -> None:
    def body() -> None:
        with stage.session:
            raise ValueError("out\nof luck")

    failing = Thread(body)
    leave = stage.line.hear("leave")
    assert (leave.finished, leave.reason) == (False, "ValueError: out of luck")
    stage.line.say(ended=pb.Ended(ok=False, reason="bye"))
    with pytest.raises(ValueError, match="out"):
        failing.result()


def test_progress_and_collectives_reach_the_scheduler(stage: Stage) -> None:
    stage.all_reduce().result()
    stage.session.report(7, 250.0)
    stage.line.welcome(heartbeat_interval_s=0.001)
    beat = stage.line.hear("heartbeat")
    assert (beat.step, beat.samples_per_s, beat.generation) == (7, 250.0, 1)
    (collective,) = beat.recent
    assert (collective.name, collective.group, collective.dtype) == ("all_reduce", "world", "float64")
    assert (collective.size_bytes, collective.done) == (32, True)
    stage.line.welcome()


def test_slow_work_begins_before_the_job_forms() -> None:
    connector, backend, prepared = ScriptedConnector(), StubBackend(), list[int]()
    session = scripted_session(connector, backend, prepare=lambda: prepared.append(len(backend.made)))
    line, _join = opened(session, connector)
    assert prepared == [0]
    releasing = Thread(session.release)
    line.say(ended=pb.Ended(ok=True, reason="bye"))
    releasing.result()
