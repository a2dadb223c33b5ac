"""Faults between workers that all reach the scheduler: who cannot be reached goes, who sleeps stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.bench.recovery.job import WorkerProcess
from muster.bench.recovery.loop import PACE_VARIABLE, RECORD_VARIABLE
from muster.certs.pki.identity import Identity
from tests.end_to_end.hosts import PORT, Cluster, can_make_namespaces, cluster, python
from tests.scheduler.processes import Pki
from tests.waiting import wait_for

LATE_S = 10.0

pytestmark = [
    pytest.mark.netns,
    pytest.mark.system,
    pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces cannot be made here"),
    pytest.mark.timeout(300, method="signal"),
]


class Job:
    """A scheduler on ``control``; workers 0 and 1 on ``alpha``, 2 on ``beta``, 3 on ``gamma``."""

    def __init__(self, net: Cluster, directory: Path, worker_min: int, **env: str) -> None:
        self.net, self.directory = net, directory
        pki = Pki.make(directory)
        pki.issue("server", Identity("default", "scheduler"), (net["control"].address(),))
        self._env = {
            "MS_WORKER_NUM": "4",
            "MS_WORKER_MIN": str(worker_min),
            "MS_SCHED_HOST": net["control"].address(),
            "MS_SCHED_PORT": str(PORT),
            "MS_TOPO_TIMEOUT": "60",
            **pki.env(),
            **env,
        }
        self.log = directory / "scheduler.log"
        self.scheduler = net["control"].start(
            self.log, *python("-m", "scheduler"), **self._env, MS_ROLE="MS_SCHED"
        )
        self.workers = [
            self._worker(host, number) for number, host in enumerate(("alpha", "alpha", "beta", "gamma"))
        ]

    def _worker(self, host: str, number: int) -> WorkerProcess:
        record, log = self.directory / f"record_{number}.jsonl", self.directory / f"worker_{number}.log"
        command = python("-m", "muster.bench.recovery.digits", "--epochs=400", "--checkpoint-dir=")
        self.pace(number, 0.05)
        env = {
            "MS_ROLE": "MS_WORKER",
            "MS_NODE_ID": str(number),
            RECORD_VARIABLE: str(record),
            PACE_VARIABLE: str(self.directory / f"pace_{number}"),
        }
        process = self.net[host].start(log, *command, **self._env, **env)
        return WorkerProcess(str(number), process, record, log)

    def pace(self, number: int, seconds: float) -> None:
        """A worker sleeps so long before each of its steps from now on."""
        (self.directory / f"pace_{number}").write_text(f"{seconds:g}")

    def await_steps(self, workers: list[WorkerProcess], world: int) -> None:
        """Waits until these have finished some steps as ``world`` ranks."""

        def there() -> bool:
            last = [worker.steps()[-3:] for worker in workers]
            assert all(worker.alive for worker in workers), self.logs()
            return all(len(each) == 3 and each[0]["world"] == world for each in last)

        wait_for(there, self.logs)

    def logs(self) -> str:
        """All output."""
        return "\n".join(f"--- {path}\n{path.read_text()}" for path in self.directory.glob("*.log"))


@pytest.fixture
def net() -> Iterator[Cluster]:
    with cluster("control", "alpha", "beta", "gamma") as made:
        yield made


def test_a_one_way_cut_between_two_hosts_costs_the_smaller_one_its_place_until_it_heals(
    net: Cluster, tmp_path: Path
) -> None:
    job = Job(net, tmp_path, worker_min=2)
    job.await_steps(job.workers, 4)
    cut = time.monotonic()
    net.cut_one_way("alpha", "beta")
    stay = [job.workers[0], job.workers[1], job.workers[3]]
    job.await_steps(stay, 3)
    first = min(step["t"] for step in stay[0].steps() if step["world"] == 3)
    print(f"training went on {first - cut:.1f} s after the cut")
    told = job.log.read_text()
    assert "Rank 2 (node 2 on host beta) was expelled: hosts alpha and beta cannot reach each other" in told

    # It asks for its place again, and gets it when it and the members reach each other, not before.
    beta = job.workers[2]
    wait_for(lambda: "is taken in when it and the members reach each other" in beta.log.read_text(), job.logs)
    assert beta.steps()[-1]["world"] == 4 and beta.alive
    net.heal("alpha", "beta")
    job.await_steps(job.workers, 4)
    assert {worker.steps()[-1]["generation"] for worker in job.workers} == {3}


def test_a_rank_that_sleeps_is_named_and_waited_for_beyond_the_deadline_of_a_collective(
    net: Cluster, tmp_path: Path
) -> None:
    job = Job(net, tmp_path, worker_min=4, MS_COLLECTIVE_TIMEOUT="14")
    job.await_steps(job.workers, 4)
    job.pace(2, 40.0)
    wait_for(lambda: "does not come to the step for which 3 members wait" in job.log.read_text(), job.logs)
    job.pace(2, 0.05)  # read before the next step: the sleep goes on
    (told,) = [line for line in job.log.read_text().splitlines() if "does not come to the step" in line]
    assert "Rank 2 (node 2 on host beta) can be reached" in told
    assert "nobody is expelled, because only 3 could go on, and MS_WORKER_MIN is 4" in told
    slept_at = job.workers[2].steps()[-1]["step"]
    # The collective's deadline passes; a new generation waits for the rank, and nobody ends.
    wait_for(lambda: "generation 2 built it, waiting for rank 2" in job.log.read_text(), job.logs)
    assert all(worker.alive for worker in job.workers) and job.workers[2].steps()[-1]["step"] == slept_at
    wait_for(lambda: job.workers[2].steps()[-1]["step"] > slept_at, job.logs)
    job.await_steps(job.workers, 4)
    for worker in job.workers:
        steps = [step["step"] for step in worker.steps()]
        assert steps == list(range(1, len(steps) + 1)), "no step is lost, and none is done twice"
