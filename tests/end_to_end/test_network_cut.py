"""A host that is cut off the network: the others go on without it, and it does not train on alone."""

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
from tests.waiting import LIMIT_S, wait_for

NODE_TIMEOUT_S = 3.0
LATE_S = 30.0  # of a busy machine; TCP alone would notice after a quarter of an hour
RECONNECT_TIMEOUT_S = 4.0

pytestmark = [
    pytest.mark.netns,
    pytest.mark.system,  # many processes on several hosts
    pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces cannot be made here"),
    pytest.mark.timeout(240, method="signal"),
]


class Trained:
    """A scheduler on ``control``, and two workers each on ``alpha`` and ``beta``; two are enough."""

    def __init__(self, net: Cluster, directory: Path) -> None:
        self.net, self.directory = net, directory
        pki = Pki.make(directory)
        pki.issue("server", Identity("default", "scheduler"), (net["control"].address(),))
        self.pace = directory / "pace"
        self.pace.write_text("0.02")
        self._env = {
            "MS_WORKER_NUM": "4",
            "MS_WORKER_MIN": "2",
            "MS_SCHED_HOST": net["control"].address(),
            "MS_SCHED_PORT": str(PORT),
            "MS_TOPO_TIMEOUT": "60",
            "MS_NODE_TIMEOUT": f"{NODE_TIMEOUT_S:g}",
            "MS_RECONNECT_TIMEOUT": f"{RECONNECT_TIMEOUT_S:g}",
            PACE_VARIABLE: str(self.pace),
            **pki.env(),
        }
        self.scheduler_log = directory / "scheduler.log"
        self.scheduler = net["control"].start(
            self.scheduler_log, *python("-m", "scheduler"), **self._env, MS_ROLE="MS_SCHED"
        )
        self.alpha = [self._worker("alpha", number) for number in (0, 1)]
        self.beta = [self._worker("beta", number) for number in (2, 3)]

    def _worker(self, host: str, number: int) -> WorkerProcess:
        record, log = self.directory / f"record_{number}.jsonl", self.directory / f"worker_{number}.log"
        command = python("-m", "muster.bench.recovery.digits", "--epochs=60", "--checkpoint-dir=")
        env = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(number), RECORD_VARIABLE: str(record)}
        process = self.net[host].start(log, *command, **self._env, **env)
        return WorkerProcess(str(number), process, record, log)

    def await_steps(self, workers: list[WorkerProcess], world: int) -> None:
        """Waits until these have finished some steps as ``world`` ranks."""

        def there() -> bool:
            last = [worker.steps()[-3:] for worker in workers]
            done = all(len(each) == 3 and each[0]["world"] == world for each in last)
            assert done or all(worker.alive for worker in workers), self.logs()
            return done

        wait_for(there, self.logs)

    def logs(self) -> str:
        """All output."""
        return "\n".join(f"--- {path}\n{path.read_text()}" for path in self.directory.glob("*.log"))


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Trained]:
    with cluster("control", "alpha", "beta") as net:
        yield Trained(net, tmp_path)


def test_the_majority_goes_on_and_the_cut_side_ends(trained: Trained) -> None:
    trained.await_steps([*trained.alpha, *trained.beta], 4)
    cut = time.monotonic()
    trained.net.unplug("beta")
    trained.await_steps(trained.alpha, 2)
    told = [event for worker in trained.alpha for event in worker.follow() if event["what"] == "interrupted"]
    assert len(told) == 2
    assert max(event["t"] for event in told) - cut < NODE_TIMEOUT_S + LATE_S
    assert "(node 2 on host beta) is lost" in trained.scheduler_log.read_text()

    # No split brain: a worker that is cut off ends with the reason, and has finished no step by itself.
    assert [worker.process.wait(LIMIT_S) for worker in trained.beta] == [1, 1], trained.logs()
    for worker in trained.beta:
        assert "seems to be cut off" in worker.log.read_text().splitlines()[-1]
        assert {step["generation"] for step in worker.steps()} == {1}
    first_alone = min(step["step"] for step in trained.alpha[0].steps() if step["generation"] > 1)
    assert max(step["step"] for worker in trained.beta for step in worker.steps()) <= first_alone

    # The network is whole again: the job has lost nothing, and ends well.
    trained.net.plug_in("beta")
    trained.pace.unlink()
    assert [worker.process.wait(LIMIT_S) for worker in trained.alpha] == [0, 0], trained.logs()
    assert trained.scheduler.wait(LIMIT_S) == 0
    for worker in trained.alpha:
        assert "test accuracy: 0.9" in worker.log.read_text()
        assert [step["step"] for step in worker.steps()] == list(range(1, 60 * 23 + 1))
