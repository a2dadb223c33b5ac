"""A training that stands still: the scheduler's log and ``status`` say which rank lags, and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.workers import Company, company
from tests.scheduler.processes import Pki, Scheduler, scheduler

ENV = {"MS_STALL_TIMEOUT": "4", "MS_WORKER_NUM": "3"}
"""So long may a busy machine take between two steps of a test before it is taken for a hang."""


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


def status_reason(sched: Scheduler, pki: Pki) -> str:
    shown = json.loads(sched.command("status", "--json", **pki.env()).stdout)
    return str(shown["reason"])


def trained(hired: Company, steps: int) -> None:
    """All workers train so many steps of one collective each."""
    step = "(s.step_boundary(n), worker.all_reduce(np.ones(4)), s.report(n + 1, 1.0))"
    for worker in hired.workers:
        worker.tell(f"[{step} for n in range({steps})] and None")
    assert [worker.answer() for worker in hired.workers] == ["ok None"] * len(hired.workers)


def test_the_rank_that_does_not_come_is_named(pki: Pki, tmp_path: Path) -> None:
    with scheduler(**ENV, **pki.env()) as sched, company(tmp_path, sched, pki) as hired:
        workers = hired.form(3)
        trained(hired, 3)
        for worker in workers[:2]:
            worker.tell("(s.step_boundary(3), worker.all_reduce(np.ones(1000)))")
        line = sched.await_log("No progress for")
        assert "rank 2 (node 2 " in line and "lags in step 3 with 3 finished" in line
        assert "ranks 0, 1 called collective 4 of group world (all_reduce of 8000 B float64)" in line
        assert "rank 2 did not" in line
        assert "rank 2 did not" in status_reason(sched, pki)
        # It was reported, and nobody was killed: the training goes on as soon as the rank comes.
        workers[2].tell("(s.step_boundary(3), worker.all_reduce(np.ones(1000)), s.report(4, 1.0)) and None")
        assert [worker.answer().split()[0] for worker in workers] == ["ok"] * 3
        sched.await_log("Training goes on")


def test_the_rank_that_never_came_in_this_generation_is_named(pki: Pki, tmp_path: Path) -> None:
    with scheduler(**ENV, **pki.env()) as sched, company(tmp_path, sched, pki) as hired:
        workers = hired.form(3)
        for worker in (workers[0], workers[2]):
            worker.tell("worker.all_reduce(np.ones(1000))")
        line = sched.await_log("No progress for")
        assert "rank 1 (node 1 " in line and "lags at 0 finished steps" in line
        assert "ranks 0, 2 called collective 1 of group world (all_reduce of 8000 B float64)" in line
        assert "rank 1 did not" in line


def test_the_collective_on_which_groups_of_ranks_disagree_is_named(pki: Pki, tmp_path: Path) -> None:
    with scheduler(**ENV, **pki.env()) as sched, company(tmp_path, sched, pki) as hired:
        workers = hired.form(3)
        trained(hired, 2)
        for worker in workers:
            worker.tell("worker.create_group('ends', [0, 2])")
        assert [worker.answer() for worker in workers] == ["ok None"] * 3
        # Ranks 0 and 2 wait for each other in different groups.
        workers[0].tell("worker.all_reduce(np.ones(8), group='ends')")
        workers[1].tell("worker.all_reduce(np.ones(5))")
        workers[2].tell("worker.all_reduce(np.ones(5))")
        line = sched.await_log("No progress for")
        assert (
            "ranks 1, 2 called collective" in line and "of group world (all_reduce of 40 B float64)" in line
        )
        assert "rank 0 did not" in line


def test_a_rank_that_is_busy_while_members_change_is_named_and_waited_for(pki: Pki, tmp_path: Path) -> None:
    """Beyond all time-outs of a group that is built: nobody who lives is ended for it, nor who waits."""
    times = {"MS_TOPO_TIMEOUT": "6", "MS_COLLECTIVE_TIMEOUT": "6", "MS_WORKER_MIN": "2"}
    with (
        scheduler(**{**ENV, **times, "MS_STALL_TIMEOUT": "1.5"}, **pki.env()) as sched,
        company(tmp_path, sched, pki) as hired,
    ):
        workers = hired.form(3, **times)
        trained(hired, 3)
        workers[2].tell("[s.step_boundary(3), __import__('time').sleep(14), worker.all_reduce(np.ones(4))]")
        workers[0].tell("(s.step_boundary(3), worker.all_reduce(np.ones(4)))")
        sched.await_log("No progress for")
        workers[1].kill()
        assert workers[0].answer().startswith("error MembershipChanged")
        workers[0].tell("s.rejoin()")
        line = sched.await_log("generation 2 built it, waiting for rank 1 (node 2 ")
        assert "No progress for" in line or "is being built" in line
        assert "still in step 4 of generation 1, last collective 3 of group world (all_reduce, done)" in line
        assert workers[2].answer().startswith("error MembershipChanged")
        assert workers[2].ask("s.rejoin()") == workers[0].answer() == "ok None"
        for index in (0, 2):
            workers[index].tell("worker.all_reduce(np.ones(1))")
        assert [workers[index].answer() for index in (0, 2)] == ["ok [2.]"] * 2
        assert "waiting for rank 1 (node 2 " in workers[0].log
        assert workers[0].ask("s.generation") == "ok 2"
