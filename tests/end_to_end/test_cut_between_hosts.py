"""Faults between workers that all reach the scheduler: who cannot be reached goes, who sleeps stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.recovery_job import Worker
from bench.recovery_loop import PACE_VARIABLE, RECORD_VARIABLE
from certs.identity import Identity
from tests.end_to_end.hosts import PORT, Cluster, can_make_namespaces, cluster, python
from tests.scheduler.processes import Pki
from tests.waiting import wait_for

WAIT_S = 60.0
LATE_S = 10.0

pytestmark = [
    pytest.mark.netns,
    pytest.mark.system,
    pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces cannot be made here"),
    pytest.mark.timeout(200, method="signal"),
]


class Job:
    """A scheduler on ``control``; workers 0, 1 on ``alpha``, 2 on ``beta``, 3 on ``gamma``; two are enough."""

    def __init__(self, net: Cluster, directory: Path) -> None:
        self.net, self.directory = net, directory
        pki = Pki.make(directory)
        pki.issue("server", Identity("default", "scheduler"), (net["control"].address(),))
        self.pace = directory / "pace"
        self.pace.write_text("0.05")
        self._env = {
            "MS_WORKER_NUM": "4",
            "MS_WORKER_MIN": "2",
            "MS_SCHED_HOST": net["control"].address(),
            "MS_SCHED_PORT": str(PORT),
            "MS_TOPO_TIMEOUT": "60",
            PACE_VARIABLE: str(self.pace),
            **pki.env(),
        }
        self.log = directory / "scheduler.log"
        self.scheduler = net["control"].start(
            self.log, *python("-m", "scheduler"), **self._env, MS_ROLE="MS_SCHED"
        )
        self.workers = [
            self._worker(host, number) for number, host in enumerate(("alpha", "alpha", "beta", "gamma"))
        ]

    def _worker(self, host: str, number: int) -> Worker:
        record, log = self.directory / f"record_{number}.jsonl", self.directory / f"worker_{number}.log"
        command = python("-m", "bench.recovery_digits", "--epochs=400", "--checkpoint-dir=")
        env = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(number), RECORD_VARIABLE: str(record)}
        process = self.net[host].start(log, *command, **self._env, **env)
        return Worker(str(number), process, record, log)

    def await_steps(self, workers: list[Worker], world: int) -> None:
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
def job(tmp_path: Path) -> Iterator[Job]:
    with cluster("control", "alpha", "beta", "gamma") as net:
        yield Job(net, tmp_path)


def test_a_one_way_cut_between_two_hosts_costs_the_smaller_one_its_place_until_it_heals(job: Job) -> None:
    job.await_steps(job.workers, 4)
    cut = time.monotonic()
    job.net.cut_one_way("alpha", "beta")
    stay = [job.workers[0], job.workers[1], job.workers[3]]
    job.await_steps(stay, 3)
    first = min(step["t"] for step in stay[0].steps() if step["world"] == 3)
    print(f"training went on {first - cut:.1f} s after the cut")
    told = job.log.read_text()
    assert "rank 2 (node 2 on host beta) was expelled: hosts alpha and beta cannot reach each other" in told

    # It asks for its place again, and gets it when it and the members reach each other, not before.
    beta = job.workers[2]
    wait_for(lambda: "is taken in when it and the members reach each other" in beta.log.read_text(), job.logs)
    assert beta.steps()[-1]["world"] == 4 and beta.alive
    job.net.heal("alpha", "beta")
    job.await_steps(job.workers, 4)
    assert {worker.steps()[-1]["generation"] for worker in job.workers} == {3}
