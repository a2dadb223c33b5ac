"""Workers that are asked to leave, by SIGTERM or a drain, and run nothing but the README's lines."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.workers import Process
from tests.scheduler.processes import Scheduler, scheduler
from tests.waiting import LIMIT_S

STEPS = 200
EXIT_CODES = {"SIGTERM": 143, "drain": 0}
COMPLETED = "has completed the training"

pytestmark = pytest.mark.timeout(240, method="signal")


class Worker(Process):
    """One process of ``plain_loop``."""

    def __init__(self, directory: Path, running: Scheduler, node_id: str, **env: str) -> None:
        self.node_id = node_id
        self.saved = directory / f"saved_{node_id}"
        log = directory / f"{node_id}.log"
        place = {"MS_NODE_ID": node_id, "MS_SCHED_PORT": str(running.port)}
        super().__init__(log, "plain_loop", str(self.saved), **place, **env)
        self._last = 0

    def await_step(self, number: int | None = None) -> int:
        """Reads on to this step, or to the next one; returns its number."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if number is None or line.split()[0] == str(number):
                self._last = int(line)
                return self._last
        raise AssertionError(f"it ended with {self.process.wait(LIMIT_S)}:\n{self.log}")

    def await_line(self, line: str) -> None:
        assert self.process.stdout is not None
        for each in self.process.stdout:
            if each.strip() == line:
                return
            self._last = int(each)
        raise AssertionError(self.log)

    def end(self) -> tuple[int, str]:
        """Its exit code and the step it came to, with ``done`` if the lines after its loop have run."""
        assert self.process.stdout is not None
        lines = self.process.stdout.read().splitlines()
        steps = [line for line in lines if line.isdecimal()]
        last = steps[-1] if steps else str(self._last)
        if lines and lines[-1].startswith("end "):
            assert lines[-1] == f"end {last} done"
            return self.process.wait(LIMIT_S), f"{last} done"
        return self.process.wait(LIMIT_S), f"{last} left"


class Workers:
    """The workers of one test."""

    def __init__(self, directory: Path, running: Scheduler, **env: str) -> None:
        self._directory, self._running, self._env = directory, running, env
        self.all: list[Worker] = []

    def start(self, node_id: str, **env: str) -> Worker:
        self.all.append(Worker(self._directory, self._running, node_id, **self._env, **env))
        return self.all[-1]

    def go(self) -> None:
        """Lets them come to the end: until then they have steps left, whatever the test waits for."""
        (self._directory / "go").touch()

    def close(self) -> None:
        for each in self.all:
            each.process.kill()
            each.process.communicate(timeout=LIMIT_S)


@contextlib.contextmanager
def job(directory: Path, size: int, least: int, **env: str) -> Iterator[tuple[Scheduler, Workers]]:
    """A scheduler, and workers that are killed at the end."""
    sizes = {"MS_WORKER_NUM": str(size), **({"MS_WORKER_MIN": str(least)} if least < size else {})}
    with scheduler(**sizes, **env) as running:
        workers = Workers(directory, running, **sizes)
        with contextlib.closing(workers):
            yield running, workers


@pytest.mark.parametrize("how", ["SIGTERM", "drain"])
def test_a_leave_below_the_minimum_is_granted_and_the_others_wait_for_a_replacement(
    how: str, tmp_path: Path
) -> None:
    with job(tmp_path, 2, 2) as (running, workers):
        leaver, stayer = workers.start("0"), workers.start("1")
        leaver.await_step(5)
        if how == "SIGTERM":
            leaver.process.send_signal(signal.SIGTERM)
        else:
            assert running.command("drain", "0").returncode == 0
        workers.go()
        code, last = leaver.end()
        assert (code, last.split()[1]) == (EXIT_CODES[how], "left"), leaver.log
        assert "Traceback" not in leaver.log
        assert leaver.saved.read_text() == last.split()[0]
        running.await_log("MS_WORKER_MIN is 2; waiting")
        replacement = workers.start("2")
        assert [each.end() for each in (stayer, replacement)] == [(0, f"{STEPS} done")] * 2, stayer.log
        assert running.wait() == 0
        assert "node 0 on host" not in running.await_log(COMPLETED)
        # Too few were left: the state is safe. Who is still within the step as the other goes makes it again.
        assert int(leaver.saved.read_text()) - int(stayer.saved.read_text()) in (0, 1)


def test_who_leaves_while_it_waits_for_members_has_not_completed_the_training(tmp_path: Path) -> None:
    with job(tmp_path, 2, 2) as (running, workers):
        leaver, victim = workers.start("0"), workers.start("1")
        leaver.await_step(5)
        victim.process.kill()
        workers.go()
        running.await_log("MS_WORKER_MIN is 2; waiting")
        leaver.process.send_signal(signal.SIGTERM)
        code, last = leaver.end()
        assert (code, last.split()[1]) == (143, "left"), leaver.log
        assert leaver.saved.read_text() == last.split()[0]
        running.await_log("INFO left job_id=")
        assert COMPLETED not in running.log
        others = [workers.start("0"), workers.start("1")]
        assert [each.end() for each in others] == [(0, f"{STEPS} done")] * 2, others[0].log
        assert running.wait() == 0


def test_who_leaves_beside_one_that_dies_does_not_end_the_training_of_the_others(tmp_path: Path) -> None:
    with job(tmp_path, 3, 2) as (running, workers):
        leaver, victim, stayer = (workers.start(str(number)) for number in range(3))
        leaver.await_step(5)
        leaver.process.send_signal(signal.SIGTERM)
        victim.process.kill()
        workers.go()
        code, last = leaver.end()
        assert (code, last.split()[1]) == (143, "left"), leaver.log
        replacement = workers.start("1")
        assert [each.end() for each in (stayer, replacement)] == [(0, f"{STEPS} done")] * 2, running.log
        assert running.wait() == 0


def test_sigterm_ends_a_worker_that_waits_for_the_group_with_a_goodbye(tmp_path: Path) -> None:
    with job(tmp_path, 2, 2) as (running, workers):
        waiting = workers.start("0")
        running.await_log("1 of 2 workers is in")
        waiting.process.send_signal(signal.SIGTERM)
        assert waiting.end()[0] == 143, waiting.log
        assert waiting.log.endswith("muster.worker INFO This worker leaves the job: SIGTERM.\n")
        assert "Traceback" not in waiting.log
        running.await_log("left: asked to leave")
        assert "WARNING" not in running.log


def test_sigterm_ends_a_worker_that_waits_for_the_schedulers_name(tmp_path: Path) -> None:
    with job(tmp_path, 1, 1) as (_, workers):
        waiting = workers.start("0", MS_SCHED_HOST="no.such.host.invalid", MS_ALLOW_INSECURE="1")
        while "Trying again in" not in waiting.log:
            assert waiting.process.poll() is None, waiting.log
        waiting.process.send_signal(signal.SIGTERM)
        assert waiting.end()[0] == 143, waiting.log
        assert waiting.log.endswith("muster.worker INFO This worker leaves the job: SIGTERM.\n")
        assert "Traceback" not in waiting.log


@pytest.mark.parametrize("how", ["SIGTERM", "drain"])
def test_a_spare_that_is_asked_to_leave_ends_well(how: str, tmp_path: Path) -> None:
    with job(tmp_path, 1, 1, MS_SPARES="1") as (running, workers):
        only = workers.start("0")
        only.await_step(5)
        spare = workers.start("1", MS_WORKER_SPARE="1")
        running.await_log("as a spare")
        if how == "SIGTERM":
            spare.process.send_signal(signal.SIGTERM)
        else:
            assert running.command("drain", "1", "--reason", "SIGTERM").returncode == 0
        assert spare.end()[0] == EXIT_CODES[how], spare.log
        workers.go()
        assert spare.log.endswith("muster.worker INFO This worker leaves the job: SIGTERM.\n")
        assert "Traceback" not in spare.log
        assert only.end() == (0, f"{STEPS} done")
        assert "WARNING" not in running.log


def test_a_spare_that_is_not_needed_ends_well_with_the_job(tmp_path: Path) -> None:
    with job(tmp_path, 1, 1, MS_SPARES="1") as (running, workers):
        only = workers.start("0")
        only.await_step(5)
        spare = workers.start("1", MS_WORKER_SPARE="1")
        running.await_log("as a spare")
        workers.go()
        assert only.end() == (0, f"{STEPS} done")
        assert spare.end()[0] == 0, spare.log
        assert "Traceback" not in spare.log
        assert "muster.worker INFO " in spare.log.splitlines()[-1]
        assert "completed the training" in spare.log.splitlines()[-1]
        assert running.wait() == 0


def ask_to_leave(how: str, running: Scheduler, *leavers: Worker) -> None:
    for leaver in leavers:
        if how == "SIGTERM":
            leaver.process.send_signal(signal.SIGTERM)
        else:
            assert running.command("drain", leaver.node_id).returncode == 0


def check_handed_over(how: str, heir: Worker, *leavers: Worker) -> None:
    """The heir goes on from where the leavers were, to the end, and nobody needed a checkpoint."""
    ends = [leaver.end() for leaver in leavers]
    assert {(code, last.split()[1]) for code, last in ends} == {(EXIT_CODES[how], "left")}, leavers[0].log
    assert heir.await_step() > 5, heir.log
    assert heir.end() == (0, f"{STEPS} done"), heir.log
    assert not any(each.saved.exists() for each in (heir, *leavers))


@pytest.mark.parametrize(("size", "how"), [(1, "SIGTERM"), (1, "drain"), (2, "SIGTERM")])
def test_a_spare_takes_the_state_over_when_all_members_leave(size: int, how: str, tmp_path: Path) -> None:
    with job(tmp_path, size, 1, MS_SPARES="1") as (running, workers):
        members = [workers.start(str(number)) for number in range(size)]
        members[0].await_step(5)
        spare = workers.start("9", MS_WORKER_SPARE="1")
        running.await_log("as a spare")
        ask_to_leave(how, running, *members)
        workers.go()
        check_handed_over(how, spare, *members)
        assert running.wait() == 0
        assert "no member is known" not in running.log


def test_who_leaves_when_the_other_member_dies_hands_over_to_a_spare(tmp_path: Path) -> None:
    with job(tmp_path, 2, 1, MS_SPARES="1") as (running, workers):
        leaver, victim = workers.start("0"), workers.start("1")
        leaver.await_step(5)
        spare = workers.start("9", MS_WORKER_SPARE="1")
        running.await_log("as a spare")
        victim.process.kill()
        ask_to_leave("SIGTERM", running, leaver)
        workers.go()
        check_handed_over("SIGTERM", spare, leaver)
        assert running.wait() == 0


def test_where_nobody_holds_the_state_any_more_everybody_is_told(tmp_path: Path) -> None:
    told = "no member is known to hold the training state: without one it starts from a checkpoint or"
    with job(tmp_path, 2, 1, MS_SPARES="1") as (running, workers):
        members = [workers.start("0"), workers.start("1")]
        members[0].await_step(5)
        spare = workers.start("9", MS_WORKER_SPARE="1")
        running.await_log("as a spare")
        for member in members:
            member.process.kill()
        assert spare.await_step() == 1
        assert told in running.await_log("is formed with 1 member")
        assert told in running.command("status").stdout
        assert told in re.sub(r"\n\S+ \S+ \S+ \S+ \+ ", " ", spare.log)  # long lines are wrapped


def test_who_has_taken_the_state_is_known_to_hold_it_with_its_first_step(tmp_path: Path) -> None:
    """Its giver dies in that step, long before the next heartbeat."""
    with job(tmp_path, 2, 1) as (running, workers):
        giver, victim = workers.start("0"), workers.start("1")
        giver.await_step(5)
        victim.process.kill()
        running.await_log("Generation 2 stands with 1 member")
        heir = workers.start("1")
        first = heir.await_step()
        giver.process.kill()
        heir.await_step(first + 1)
        line = running.await_log("Generation 4 is formed with 1 member")
        assert "no member is known" not in line


def test_a_leave_is_known_while_the_worker_waits_in_a_collective_for_one_that_blocks(tmp_path: Path) -> None:
    with job(tmp_path, 2, 1, MS_STALL_TIMEOUT="6") as (running, workers):
        leaver, blocked = workers.start("0"), workers.start("1", BLOCK_AFTER="5")
        blocked.await_line("blocked")
        ask_to_leave("SIGTERM", running, leaver)
        running.await_log("will leave at a step boundary: SIGTERM")
        assert leaver.process.poll() is None
        code, last = leaver.end()
        assert (code, last) == (143, "5 left"), leaver.log
        assert blocked.process.poll() is None


def test_who_leaves_does_not_wait_for_one_that_blocks_until_it_is_killed(tmp_path: Path) -> None:
    """A platform's grace is over sooner than MS_STALL_TIMEOUT; the blocked one keeps its place."""
    with job(tmp_path, 2, 1) as (running, workers):
        leaver, blocked = workers.start("0", MS_LEAVE_TIMEOUT="1"), workers.start("1", BLOCK_AFTER="5")
        blocked.await_line("blocked")
        ask_to_leave("SIGTERM", running, leaver)
        code, last = leaver.end()
        assert (code, last) == (143, "5 left"), leaver.log
        assert leaver.saved.read_text() == "5"
        assert "others did not finish the step with it within 1 s" in leaver.log
        running.await_log("Generation 2 is formed with 1 member")
        assert blocked.process.poll() is None
