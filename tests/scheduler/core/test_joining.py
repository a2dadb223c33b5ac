"""What a Join does: refusals, warnings, admissions, and on how straight a way."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest

import muster.scheduler.core
from muster.scheduler.core import events
from muster.scheduler.core.machine import Machine
from muster.version import __version__
from muster.wire import messages
from muster.wire.messages import series_of
from muster.wire.rank_table import RankTable, RankTableEntry
from tests.scheduler.core.scenes import SETTINGS, history, join, running


def test_who_has_no_device_is_told_so_where_a_rank_table_asks_for_one() -> None:
    table = RankTable((RankTableEntry(0, "host-a", 0), RankTableEntry(1, "host-a", 1)))
    job = Machine("red", replace(SETTINGS, rank_table=table))
    [refused] = [
        told for _, told in job.step(join(1, "a"), 0.0).messages if isinstance(told, messages.Refused)
    ]
    assert refused.code is messages.RefusalCode.NOT_IN_RANK_TABLE
    assert "no device: DEVICE_ID is not set" in refused.sentence


def test_a_thousand_joins_cost_few_messages() -> None:
    number = 1000
    job = Machine("red", replace(SETTINGS, worker_num=number))
    sent = [len(job.step(join(n, str(n), number), 0.0).messages) for n in range(number)]
    assert sum(sent[:-1]) < 4 * number
    assert sent[-1] == number + 1


def reasons(*events: events.Joined) -> str:
    job = Machine("red", replace(SETTINGS, worker_num=3))
    return " ".join(job.step(event, 0.0).reason for event in events)


def test_a_worker_without_a_node_id_is_refused() -> None:
    assert reasons(join(1, "")) == "The node id is empty; set MS_NODE_ID."


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        (7, "this scheduler knows no generation after 1: it was started without the journal of the job"),
        (1, "this process has no place in the job, which is in generation 1"),
    ],
)
def test_who_holds_a_place_that_nobody_knows_is_refused_with_the_reason(generation: int, said: str) -> None:
    job = Machine("red", SETTINGS)
    history(job, join(1, "a"), join(2, "b"))
    back = join(3, "c").replaced(held_generation=generation, held_rank=3, built=True)
    (refused,) = (each for _, each in job.step(back, 0.0).messages if isinstance(each, messages.Refused))
    assert f"says it holds rank 3 of generation {generation}, but {said}" in refused.sentence


def with_facts(event: events.Joined, model: str = "", **facts: str) -> events.Joined:
    device = event.candidate.device.replaced(model=model)
    pairs = tuple(sorted((key.replace("soft_", "~"), value) for key, value in facts.items()))
    return event.replaced(candidate=event.candidate.replaced(device=device, facts=pairs))


SEALED = {"MS_NCCL_ENCRYPTION": "prefer", "nccl_traffic": "sealed"}


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({"NCCL_NET": "IB"}, {**SEALED, "MS_NCCL_ENCRYPTION": "require"}, "MS_NCCL_ENCRYPTION=require"),
        (SEALED, {}, "MS_NCCL_ENCRYPTION=(unset)"),
        (SEALED, {**SEALED, "nccl_traffic": "plain"}, "nccl_traffic=plain"),
    ],
)
def test_workers_of_which_one_would_seal_nccl_s_traffic_and_another_not_do_not_meet(
    first: dict[str, str], second: dict[str, str], named: str
) -> None:
    said = reasons(with_facts(join(1, "a", 3), **first), with_facts(join(2, "b", 3), **second))
    assert f"b on host host-b has {named}, but node a" in said, said


def test_a_fact_that_differs_is_refused_and_a_soft_one_is_warned_of_once() -> None:
    first = with_facts(join(1, "a", 3), "H200", nccl="2.28.9", soft_driver="580.1")
    said = reasons(
        first,
        with_facts(join(2, "b", 3), "H100", nccl="2.28.9", soft_driver="570.2"),
        with_facts(join(3, "c", 3), "H200", nccl="2.28.9", soft_driver="570.2"),
    )
    assert (
        said.count("Warning: Node b on host host-b has driver 570.2, but node a on host host-a has 580.1.")
        == 1
    )
    assert "Node b on host host-b has GPU model H100, but node a on host host-a has H200." in said
    assert "node c on host host-c has driver" not in said
    assert "Generation 1 is formed with 3 members" in said
    assert "has nccl=2.27.0, but node a" in reasons(first, with_facts(join(2, "b", 3), "H200", nccl="2.27.0"))


def changed(change: tuple[int, int]) -> str:
    """A version whose minor number differs from this one's by so much, and a patch number."""
    series = series_of(__version__)
    assert series is not None
    return f"{series[0]}.{series[1] + change[0]}.{change[1]}"


@pytest.mark.parametrize(
    ("change", "words"),
    [((1, 0), "upgrade the scheduler first"), ((-2, 0), "Upgrade the worker"), ((-1, 0), ""), ((0, 3), "")],
)
def test_workers_of_this_minor_version_and_the_one_before_are_admitted(
    change: tuple[int, int], words: str
) -> None:
    said = reasons(with_facts(join(1, "a", 3), muster=changed(change)))
    assert words in said and ("is refused" in said) == bool(words), said


def test_patch_releases_train_together_with_a_warning_and_minor_versions_do_not() -> None:
    first = with_facts(join(1, "a", 3), muster=changed((0, 0)))
    said = reasons(first, with_facts(join(2, "b", 3), muster=changed((0, 1))), join(3, "c", 3))
    assert f"Node b on host host-b has muster {changed((0, 1))}, but node a" in said
    assert "node a on host host-a has muster=" in reasons(
        first, with_facts(join(2, "b", 3), muster=changed((-1, 0)))
    )


def test_two_machines_with_one_name_are_warned_of() -> None:
    twin = join(2, "b", 3)
    twin = twin.replaced(
        candidate=twin.candidate.replaced(host=messages.Host("id-other", "host-a", "10.0.0.2"))
    )
    assert "Warning: several machines are named host-a" in reasons(join(1, "a", 3), twin)
    assert "Warning" not in reasons(join(1, "a", 3), join(2, "b", 3))


def with_label(event: events.Joined, label: str) -> events.Joined:
    host = messages.Host("id-h", "h", "10.0.0.1", label)
    return event.replaced(candidate=event.candidate.replaced(host=host))


def test_two_labels_of_one_host_are_worth_one_warning() -> None:
    said = reasons(
        with_label(join(1, "a", 3), "r2"),
        with_label(join(2, "b", 3), ""),
        with_label(join(3, "c", 3), "r1"),
    )
    assert said.count("Warning") == 1
    assert "Warning: workers of host h came with MS_TOPOLOGY (unset) and r2; give all the same." in said
    one = reasons(with_label(join(1, "a", 3), "r1"), with_label(join(2, "b", 3), "r1"), join(3, "c", 3))
    assert "Warning" not in one


def test_a_host_with_two_labels_has_the_same_ranks_after_a_restart() -> None:
    settings = replace(SETTINGS, worker_num=3, worker_min=2)
    job = Machine("red", settings)
    labels = ("b", "a", "b")
    joins = [with_label(join(n, f"w{n}", 3), label) for n, label in enumerate(labels)]
    records = history(job, *joins, *(events.BuiltReported(n, 1) for n in range(3)))
    again = Machine.recover("red", settings, records, 0.0)
    for number, event in enumerate(joins):  # under new streams
        rank = job.job.ledger.rank_of(event.candidate.node_id)
        again.step(event.replaced(session=number + 3, held_generation=1, held_rank=rank, built=True), 0.0)
    for each, gone in ((job, 0), (again, 3)):
        each.step(events.SessionLost(gone, "killed"), 1.0)
    after = [[(w.candidate.node_id, w.rank) for w in each.view(1.0).workers] for each in (job, again)]
    assert after[0] == after[1] == [("w1", 0), ("w2", 1)]


def test_a_stream_that_asks_twice_while_it_is_unclear_who_comes_back_gets_one_answer() -> None:
    settings = replace(SETTINGS, worker_num=1)
    records = history(Machine("red", settings), join(1, "a", 1))
    job = Machine.recover("red", settings, records, 0.0)
    asks: list[events.Event] = [join(2, "b", 1), join(3, "c", 1), join(3, "c", 1), join(4, "a", 1)]
    asks.append(events.SessionLost(4, "reset"))
    answers = [told for i, ask in enumerate(asks) for told in job.step(ask, 1.0 + i).messages]
    assert [type(message) for session, message in answers if session == 3] == [messages.Refused]


def test_a_join_that_comes_twice_on_a_stream_is_answered_once() -> None:
    """A member that has stopped for a planned change would take a second answer for leave to go on."""
    job, _ = running(SETTINGS)
    back = join(7, "b").replaced(held_generation=1, held_rank=1, built=True)
    assert job.step(back, 1.0).messages
    again = job.step(back, 1.0)
    assert (again.messages, again.records) == ((), ())


def test_a_join_that_comes_late_on_a_stream_that_was_given_up_takes_nobodys_place() -> None:
    job = Machine("red", replace(SETTINGS, worker_num=2))
    job.step(join(5, "a"), 0.0)
    told = job.step(join(3, "a"), 0.1).messages
    assert [(session, type(message)) for session, message in told] == [(3, messages.Refused)]
    job.step(events.SessionLost(3, "it closed the stream", True), 0.2)
    assert 5 in {session for session, _ in job.step(join(6, "b"), 0.3).messages}


def test_a_launch_is_named_by_its_first_admission_whoever_comes_later_and_after_a_restart() -> None:
    """So that replacements know which checkpoints are of their own launch."""

    def launches(job: Machine, session: int, node_id: str, incarnation: int) -> set[int]:
        sent = job.step(join(session, node_id, incarnation=incarnation), 1.0).messages
        return {message.launch for _, message in sent if isinstance(message, messages.Assignment)}

    job = Machine("red", SETTINGS)
    records = history(job, join(1, "a", incarnation=71))
    decision = job.step(join(2, "b", incarnation=72), 0.0)
    assert {x.launch for _, x in decision.messages if isinstance(x, messages.Assignment)} == {71}
    records += decision.records
    lost = [job.step(events.SessionLost(session, "reset"), 0.5) for session in (1, 2)]
    records += [record for each in lost for record in each.records]
    recovered = Machine.recover("red", SETTINGS, records, 0.7)
    for each in (job, recovered):
        assert launches(each, 3, "a", 73) | launches(each, 4, "b", 74) == {71}


CORE = Path(muster.scheduler.core.__file__).parent
VALUES = {"events", "records"}


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
    machine = Machine("red", events.CoreSettings(4, 0, 0, 30.0, 5.0, 1.0))
    machine.step(join(1, "a", 4), 0.0)
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
        decision = machine.step(join(2, "b", 4), 1.0)
    finally:
        sys.setprofile(None)
    assert decision.reason.startswith("Node b on host host-b has joined.")
    assert "machine -> joining.joined" in ways
    assert len(ways) < 10, ways
