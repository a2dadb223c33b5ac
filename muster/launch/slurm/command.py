"""``muster slurm``: starts the scheduler in the batch script and the workers by srun, and sees to their end.

  muster slurm --spare-nodes 1 -- train.py --resume

deploy/slurm/muster.sbatch is the batch script for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from muster.errors import SettingsError
from muster.launch.command import resolved
from muster.launch.programs import with_agent
from muster.launch.screen import say
from muster.launch.slurm.allocation import Allocation, Division, Questions, Sequel, decide, lost_nodes
from muster.launch.slurm.questions import QUESTION_S, ask, run
from muster.launch.slurm.watch import FIRST_NODE, start_watch, watch_first_node, why_not_reached
from muster.wire.settings import Environment

READY = b"\nscheduler ready "
START_S = 120.0
CHECK_S = 60.0
LOOK_S = 0.5
STEP_S = 5.0
"""How often Slurm is asked whether the workers' step, which has to end, still exists, in seconds."""
MAX_REQUEUES = 20
SPARE_FROM = "MUSTER_SLURM_SPARE_FROM"
"""Tells the batch script's tasks from which SLURM_NODEID on workers are spares."""

_HEALTH = "muster:node "
"""Begins the line in which a node reports what is wrong with it."""


def parser() -> argparse.ArgumentParser:
    """Makes the parser of ``muster slurm``."""
    made = argparse.ArgumentParser(
        prog="muster slurm",
        description="Runs a job in a Slurm allocation: the scheduler on the first node, a worker per task.",
        epilog="The batch script is deploy/slurm/muster.sbatch; what Slurm is asked for stands there.",
    )
    made.add_argument(
        "--spare-nodes",
        type=int,
        default=0,
        metavar="N",
        help="N nodes wait for the place of one that is lost (0)",
    )
    made.add_argument(
        "--requeue",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="put the job back into the queue when its time is up, or when nodes are lost and nobody takes "
        "their place; the script should resume from its checkpoint then (default: yes)",
    )
    made.add_argument(
        "--max-requeues",
        type=int,
        default=MAX_REQUEUES,
        metavar="N",
        help=f"after N requeues the job ends instead ({MAX_REQUEUES})",
    )
    made.add_argument(
        "--node-check",
        default="",
        metavar="COMMAND",
        help="run on each node before anything is started; a node where it fails is left out and drained, "
        "with the last line that it prints as the reason",
    )
    made.add_argument(
        "--drain",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="drain nodes that fail the check, where you may (default: yes)",
    )
    made.add_argument("--check-node", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--watch", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--task", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what each worker runs")
    return made


def main(argv: Sequence[str]) -> int:
    """Runs ``muster slurm``; returns the batch script's exit code."""
    options = parser().parse_args(argv)
    options.command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        if options.check_node:
            return check_node(options.node_check, os.environ)
        if options.watch:
            return watch_first_node(os.environ)
        if not options.command:
            raise SettingsError("No command to run.", remedy="As in: muster slurm -- train.py --resume")
        if options.task:
            return become_worker(options.command, dict(os.environ))
        return SlurmJob(options, dict(os.environ)).run()
    except SettingsError as error:
        print(f"muster: {error}", file=sys.stderr)
        return 2


# ---------------------------------------------------------------- on each node


def become_worker(command: Sequence[str], env: dict[str, str]) -> int:
    """Makes this task of srun a worker of the job, or a spare; returns only if that fails.

    Raises:
        SettingsError: the command cannot be found.
    """
    env["MS_ROLE"] = "MS_WORKER"
    env.setdefault("PYTHONUNBUFFERED", "1")  # its output is a pipe of Slurm
    spare_from = env.pop(SPARE_FROM, "")
    if spare_from and int(env.get("SLURM_NODEID", "0")) >= int(spare_from):
        env["MS_WORKER_SPARE"] = "1"
    in_place = Environment(env, SettingsError).flag("MS_IN_PLACE")
    argv = with_agent(resolved(command, env), "auto", env.get("PATH"), in_place=in_place)
    start_watch((*_own_command(), "--watch"), env)
    os.execvpe(argv[0], argv, env)


def check_node(check: str, env: Mapping[str, str]) -> int:
    """Prints why this node cannot take part, if so, in a line for :meth:`SlurmJob.check_nodes`."""
    why = _own_check(check) or why_not_reached(env["MS_SCHED_HOST"], int(env["MS_SCHED_PORT"]))
    print(_HEALTH + json.dumps([env.get("SLURMD_NODENAME", ""), why]), flush=True)
    return 0


def _own_check(check: str) -> str:
    if not check:
        return ""
    try:
        done = subprocess.run(
            shlex.split(check),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=CHECK_S - 10,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"{check}: {error}"
    last = (done.stdout + done.stderr).strip().rpartition("\n")[2]
    return f"{last or check} (exit code {done.returncode})" if done.returncode else ""


# ---------------------------------------------------------------- in the batch script


class SlurmJob:
    """One attempt of a job, from its batch script's point of view.

    Args:
        options: the options of the command line.
        env: the batch script's environment.

    Raises:
        SettingsError: this is not a batch script, or the options do not fit its allocation.
    """

    def __init__(self, options: argparse.Namespace, env: dict[str, str]) -> None:
        self._options = options
        self._env = env
        self.division = Division(Allocation.read(env), options.spare_nodes)
        self._time_is_up = False
        self._too_few = False
        self._scheduler_log = Path()
        self._scheduler: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Runs the job; returns the exit code, or does not return if the job goes back into the queue."""
        allocation = self.division.allocation
        if allocation.restarts:
            say(f"Slurm job {allocation.job_id} starts again (attempt {allocation.restarts + 1})")
        # sbatch --signal=B:... may name these signals.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._asked_to_end)
        with self._serving() as ready:
            if not ready:
                return 1
            self._leave_bad_nodes_out()
            if not self.division.can_start:
                return self._carry_out(
                    Sequel(1, self._requeues_left() > 0, f"{self.division.used_nodes} nodes are fit, too few")
                )
            workers = self._work()
            scheduler = self._stop()
        verdict = decide(
            workers,
            scheduler,
            time_is_up=self._time_is_up,
            lost=self._lost(),
            requeues_left=self._requeues_left(),
            minimum=bool(self._env.get("MS_WORKER_MIN")),
        )
        return self._carry_out(verdict)

    def _requeues_left(self) -> int:
        allowed = self._options.max_requeues if self._options.requeue else 0
        return max(0, allowed - self.division.allocation.restarts)

    def _asked_to_end(self, number: int, frame: FrameType | None) -> None:
        """Notes that the time limit is near, as ``--signal=B:TERM@...`` says; :meth:`_work` acts on it."""
        self._time_is_up = True

    def _step_runs(self) -> bool:
        """Whether Slurm knows of a step of this job, so that a signal can reach it."""
        job = self.division.allocation.job_id
        return (
            re.search(rf"StepId={job}\.\d+", ask(self._env, "scontrol", "show", "step", str(job)) or "")
            is not None
        )

    # ------------------------------------------------------------ the scheduler

    @contextlib.contextmanager
    def _serving(self) -> Iterator[bool]:
        """Starts the scheduler for the block, and ends it in any case; yields whether it serves."""
        allocation = self.division.allocation
        self._env |= self.division.environment(self._env)
        path = self._scheduler_log = Path(f"scheduler-{allocation.job_id}.log")
        begin = path.stat().st_size if path.exists() else 0  # a job that was queued again appends to its log
        with path.open("ab") as log:
            self._scheduler = subprocess.Popen(
                [sys.executable, "-m", "muster.scheduler"],
                env={**self._env, "MS_ROLE": "MS_SCHED"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        say(f"the scheduler at {self._env['MS_SCHED_HOST']}:{self._env['MS_SCHED_PORT']} writes {path}")
        try:
            yield self._await_ready(path, begin)
        finally:
            self._stop()

    def _await_ready(self, path: Path, begin: int) -> bool:
        assert self._scheduler is not None
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            text = path.read_bytes()[begin:]
            if READY in b"\n" + text:
                return True
            if self._scheduler.poll() is not None:
                break
            time.sleep(0.1)
        sys.stderr.write(path.read_bytes()[begin:].decode(errors="replace")[-4000:])
        say(f"the scheduler does not serve; its log: {path}")
        return False

    def _stop(self) -> int:
        """Ends the scheduler when no worker is left to do so; returns its exit code."""
        assert self._scheduler is not None
        if self._scheduler.poll() is None:
            self._scheduler.terminate()
        return self._scheduler.wait()

    # ------------------------------------------------------------ the nodes

    def _leave_bad_nodes_out(self) -> None:
        """Asks each node whether it can take part; excludes and drains those that cannot."""
        names, said = self.check_nodes()
        if not said:
            say("no node answered the check: all are used")
            return
        bad = {node: said.get(node, "did not answer the check") for node in names if said.get(node, "?")}
        # If no node is fit, something that they have in common is at fault, such as the scheduler's host. A
        # node that gave no answer has not said that it failed.
        drain = self._options.drain and len(bad) < len(names)
        for node, why in bad.items():
            say(f"node {node} is left out: {why}")
            if drain and node in said:
                self._drain(node, why)
        self.division = Division(self.division.allocation, self.division.spares, tuple(bad))
        self._env |= self.division.environment(self._env)

    def _drain(self, node: str, why: str) -> None:
        reason = f"Reason={f'muster: {why}'[:200]}"
        done = run(self._env, "scontrol", "update", f"NodeName={node}", "State=DRAIN", reason)
        if done is not None and done.returncode == 0:
            say(f"node {node} is drained")
            return
        error = done.stderr.strip().rpartition("\n")[2] if done else "scontrol gives no answer"
        say(f"node {node} could not be drained: {error}")

    def check_nodes(self) -> tuple[list[str], dict[str, str]]:
        """Returns the nodes of the allocation, and for each that answered, what is wrong ("": nothing)."""
        own = ("--node-check", self._options.node_check) if self._options.node_check else ()
        minutes = int(CHECK_S / 60) + 1
        command = self.division.srun(
            f"--time={minutes}", *_own_command(), "--check-node", *own, tasks_per_node=1
        )
        text = ""
        step = subprocess.Popen(command, env=self._env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        try:
            text = step.communicate(timeout=CHECK_S + QUESTION_S)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            step.terminate()  # srun ends its tasks; the answers of the other nodes are still read
            try:
                text = step.communicate(timeout=QUESTION_S)[0].decode(errors="replace")
            except subprocess.TimeoutExpired:
                step.kill()
                step.wait()
        said = dict(
            # Lines of two nodes may arrive as one line.
            json.JSONDecoder().raw_decode(answer)[0]
            for answer in text.split(_HEALTH)[1:]
        )
        names = ask(self._env, "scontrol", "show", "hostnames", self._env.get("SLURM_JOB_NODELIST", "")) or ""
        return names.split() or list(said), said

    def _work(self) -> int:
        """Runs the workers; returns srun's exit code, or 143 if time was up before they started."""
        if self._time_is_up:
            return 128 + signal.SIGTERM
        more = {SPARE_FROM: str(self.division.training_nodes)} if self.division.spares else {}
        if self._requeues_left():
            more[FIRST_NODE] = self.division.allocation.node
        command = self.division.srun(*_own_command(), "--task", "--", *self._options.command)
        step = subprocess.Popen(
            command, env={**self._env, **more}, stdin=subprocess.DEVNULL, start_new_session=True
        )
        questions, told, step_asked = Questions(), False, -STEP_S
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return step.wait(LOOK_S)
            now = time.monotonic()
            if not told and questions.is_due(now, self._scheduler_log.stat().st_size):
                self._too_few = self._too_few_are_left()
            if told or not (self._time_is_up or self._too_few) or now - step_asked < STEP_S:
                continue
            # Sent here and not in the signal's handler: a signal to a step that does not exist yet is lost.
            step_asked = now
            if self._step_runs():
                why = "the time limit is near" if self._time_is_up else "a node is lost, and none is spare"
                say(f"{why}: the workers leave, with a checkpoint where they can")
                # To the steps, not to this script; SIGTERM to srun would kill its tasks.
                ask(self._env, "scancel", "--signal=TERM", str(self.division.allocation.job_id))
                told = True

    def _too_few_are_left(self) -> bool:
        """Whether workers would wait in vain for a lost node, until MS_TOPO_TIMEOUT."""
        fit = self.division.used_nodes - len(set(self._lost()) - set(self.division.left_out))
        return fit < self.division.training_nodes and not self._env.get("MS_WORKER_MIN")

    def _lost(self) -> tuple[str, ...]:
        nodes = self._env.get("SLURM_JOB_NODELIST", "")
        return lost_nodes(
            ask(self._env, "sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %T") or ""
        )

    # ------------------------------------------------------------ the end

    def _carry_out(self, verdict: Sequel) -> int:
        if not verdict.requeue:
            say(verdict.why)
            return verdict.code
        job = str(self.division.allocation.job_id)
        if "JobState=RUNNING" not in (ask(self._env, "scontrol", "show", "job", job) or ""):
            say("the job was cancelled")
            return verdict.code
        say(verdict.why)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Slurm ends this script by it, or after KillWait
        if ask(self._env, "scontrol", "requeue", job) is None:
            say("Slurm refuses to requeue the job: submit it with sbatch --requeue")
            return verdict.code
        time.sleep(QUESTION_S)
        return verdict.code


def _own_command() -> tuple[str, ...]:
    return (sys.executable, "-m", "muster", "slurm")
