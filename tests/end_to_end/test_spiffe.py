"""A job whose processes have certificates of a SPIFFE Workload API that rotates while it trains."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certs.spiffe_agent import Entry, FakeAgent
from tests.ports import free_port
from tests.scheduler.processes import environment
from tests.waiting import wait_for

WAIT_S = 100.0
RULES = [
    {"uri": "spiffe://prod.example/{job}/scheduler", "role": "scheduler"},
    {"uri": "spiffe://prod.example/{job}/worker/{node}", "role": "worker"},
]

TRAIN = """
import pathlib, sys, time
import numpy as np
import muster

stop, note, step = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), 0
session = muster.init()
while True:
    try:
        total = muster.all_reduce(np.array([float(session.rank + 1), float(stop.exists())]), op="sum")
    except muster.MembershipChanged:
        session.rejoin()
        continue
    assert total[0] == sum(range(1, session.world_size + 1)), total
    step += 1
    session.report(step, 1.0)
    note.write_text(str(step))
    if total[1]:
        break
    time.sleep(0.02)
print("steps", step, "generation", session.generation, flush=True)
muster.release()
"""


class Job:
    """A scheduler and workers n0 and n1, each with a socket of the agent of its own."""

    def __init__(self, directory: Path, agent: FakeAgent) -> None:
        self.directory, self.agent = directory, agent
        self.stop = directory / "stop"
        self.script = directory / "train.py"
        self.script.write_text(TRAIN)
        self.configure(RULES)
        self._port = str(free_port("127.0.0.1"))
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.start(
            "scheduler", Entry("red/scheduler", dns=("localhost",)), "-m", "scheduler", MS_ROLE="MS_SCHED"
        )

    def configure(self, rules: list[dict[str, str]]) -> None:
        new = self.directory / "config.new"
        new.write_text(json.dumps({"spiffe_endpoint_socket": "env", "identity_map": rules}))
        new.replace(self.directory / "config.json")

    def work(self, node: str, path: str = "") -> None:
        entry = Entry(path or f"red/worker/{node}")
        own = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": node}
        self.start(
            node, entry, str(self.script), str(self.stop), str(self.directory / f"{node}.steps"), **own
        )

    def start(self, name: str, entry: Entry, *command: str, **env: str) -> None:
        own = {
            "SPIFFE_ENDPOINT_SOCKET": self.agent.serve(self.directory / f"{name}.sock", entry),
            "MS_CONFIG_FILE": str(self.directory / "config.json"),
            "MS_JOB_ID": "red",
            "MS_SCHED_HOST": "localhost",
            "MS_SCHED_PORT": self._port,
            "MS_WORKER_NUM": "2",
            "MS_WORKER_MIN": "1",
            "MS_TOPO_TIMEOUT": "60",
        }
        with (self.directory / f"{name}.log").open("w") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *command],
                env=environment(**own, **env),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def steps(self, node: str) -> int:
        note = self.directory / f"{node}.steps"
        return int(note.read_text() or 0) if note.exists() else 0

    def await_steps(self, node: str, count: int) -> None:
        goal = self.steps(node) + count
        wait_for(lambda: self.steps(node) >= goal, self.logs)

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def logs(self) -> str:
        """All output."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in self.directory.glob("*.log"))

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait(WAIT_S)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with FakeAgent() as agent:
        made = Job(tmp_path, agent)
        yield made
        made.end()


def test_rotations_of_certificates_and_authorities_cost_no_step_and_end_no_stream(job: Job) -> None:
    for node in ("n0", "n1"):
        job.work(node)
    job.await_steps("n0", 5)
    for rotate in (job.agent.rotate, job.agent.rotate_authority, job.agent.rotate):
        seen = job.log("scheduler").count("new certificate spiffe://prod.example/red/scheduler")
        rotate()
        said = lambda seen=seen: job.log("scheduler").count("new certificate spiffe://") > seen  # noqa: E731
        wait_for(said, job.logs)
        job.await_steps("n0", 20)
    job.agent.forget_old_authorities()
    wait_for(lambda: job.log("n0").count("new authorities are in force") == 2, job.logs)
    job.await_steps("n1", 20)
    job.stop.touch()
    assert [job.processes[name].wait(WAIT_S) for name in ("n0", "n1", "scheduler")] == [0, 0, 0], job.logs()
    assert "generation 1\n" in job.log("n0") and "generation 1\n" in job.log("n1")
    assert "spiffe://prod.example/red/worker/n1 (muster://red/worker/n1)" in job.log("scheduler")


def test_who_is_mapped_no_more_goes_in_words_and_who_never_was_is_turned_away(job: Job) -> None:
    for node in ("n0", "n1"):
        job.work(node)
    job.await_steps("n1", 5)
    job.configure(
        [RULES[0], {"uri": "spiffe://prod.example/{job}/worker/n0", "role": "worker", "node": "n0"}]
    )
    assert job.processes["n1"].wait(WAIT_S) != 0
    assert "spiffe://prod.example/red/worker/n1 stands for no job and role here" in job.log("n1")
    job.await_steps("n0", 20)
    job.work("n2", "red/stranger/n2")
    assert job.processes["n2"].wait(WAIT_S) != 0
    assert "spiffe://prod.example/red/stranger/n2 stands for no job and role here" in job.log("n2")
    job.stop.touch()
    assert job.processes["n0"].wait(WAIT_S) == 0, job.logs()
