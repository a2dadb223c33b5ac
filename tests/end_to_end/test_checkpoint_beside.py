"""Checkpoints written from snapshots beside training: an end, a planned change of members, a full disk."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.disks import filled, mounted_disk
from tests.scheduler.processes import Pki, environment, scheduler

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]
LIMIT_S = 180

PROGRAM = """
import sys, time, torch, muster
from pathlib import Path
from muster.torch import Snapshots, SnapshotTrainingState

folder, rate, steps = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
torch.set_num_threads(1)
net = torch.nn.Linear(256, 256)
with muster.init() as session:
    sampler = muster.ShardedSampler(8 * session.world_size * 1000, 8 * session.world_size)
    optimizer = muster.ShardedOptimizer(
        net, session, elastic=True, make=lambda parts: torch.optim.AdamW(parts, lr=1e-3)
    )
    state = SnapshotTrainingState(
        {"net": net, "optimizer": optimizer}, sampler, snapshots=Snapshots(every=2),
        checkpoint=folder, mbytes_per_s=rate,
    )
    print("begins at", state.step, flush=True)
    world = session.world_size
    for step in muster.ElasticLoop(session, state, epochs=10, steps=steps):
        with step:
            print("step", state.step, flush=True)
            if session.world_size != world:
                print("unfinished", len(list(Path(folder).rglob(".*.part"))), flush=True)
                break
            optimizer.zero_grad()
            net(torch.ones(8, 256) * (state.step % 7)).square().mean().backward()
            optimizer.step()
            time.sleep(0.02)  # a snapshot is to be complete before the last step
            if state.step % 10 == 9 and state.save_beside():
                print("writes", flush=True)
    print("after the loop", state.step, flush=True)
"""


class Launch:
    """``muster run`` of two workers, both of whose lines are shown."""

    def __init__(self, directory: Path, pki: Pki, folder: Path, rate: float, steps: int) -> None:
        (directory / "job.py").write_text(PROGRAM)
        words = ["-n", "2", "--scheduler", "--tail", "all", "--", sys.executable, "job.py"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "muster", "run", *words, str(folder), str(rate), str(steps)],
            cwd=directory,
            env=environment(**pki.env()),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said = ""

    def await_line(self, pattern: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if re.search(pattern, line):
                return
        raise AssertionError(self.said)

    def end(self) -> int:
        self.said += self.process.communicate(timeout=LIMIT_S)[0]
        return self.process.returncode


class Drained:
    """A worker of a scheduler that the test has started."""

    def __init__(self, directory: Path, node_id: str, port: int, *arguments: str) -> None:
        (directory / "job.py").write_text(PROGRAM)
        self._log = directory / f"worker_{node_id}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "job.py", *arguments],
                cwd=directory,
                env=environment(
                    MS_ROLE="MS_WORKER",
                    MS_WORKER_NUM="2",
                    MS_WORKER_MIN="1",
                    MS_NODE_ID=node_id,
                    MS_SCHED_PORT=str(port),
                ),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    pytest.importorskip("torch")
    return Pki.make(tmp_path_factory.mktemp("pki"))


def await_unfinished(folder: Path) -> None:
    """Waits until some rank is in the middle of writing."""
    limit = time.monotonic() + LIMIT_S
    while not list(folder.rglob(".*.part")):
        assert time.monotonic() < limit, "nobody has begun to write"
        time.sleep(0.01)


def test_an_end_that_is_asked_for_waits_for_the_checkpoint_under_way(pki: Pki, tmp_path: Path) -> None:
    """The state takes a second or so to write; a run that follows goes on from that checkpoint."""
    folder = tmp_path / "kept"
    launch = Launch(tmp_path, pki, folder, 0.4, 10**6)
    for _ in range(3):  # the first may be of step 0
        launch.await_line(r"\[0\] writes")
    await_unfinished(folder)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end() == 143, launch.said
    assert not list(folder.rglob(".*.part")), launch.said
    newest = max(int(each.name.rpartition(".")[2]) for each in folder.glob("snapshot_*"))
    assert newest > 0, launch.said
    after = Launch(tmp_path, pki, folder, 0, newest + 5)
    assert after.end() == 0, after.said
    assert "The state is that of the checkpoint" in after.said
    first = re.search(r"\[0\] step (\d+)", after.said)
    assert first is not None and int(first[1]) == newest, after.said


def test_a_drain_waits_for_the_checkpoint_under_way(tmp_path: Path) -> None:
    """When the others train on without the drained worker, both ranks' parts have been written."""
    pytest.importorskip("torch")
    folder = tmp_path / "kept"
    arguments = str(folder), "0.4", str(10**6)
    with scheduler(MS_WORKER_NUM="2", MS_WORKER_MIN="1") as running, contextlib.ExitStack() as stack:
        workers = [Drained(tmp_path, node_id, running.port, *arguments) for node_id in "01"]
        for worker in workers:
            stack.callback(worker.process.wait, LIMIT_S)
            stack.callback(worker.process.kill)
        limit = time.monotonic() + LIMIT_S
        while len(re.findall("writes", workers[0].said)) < 3:
            assert time.monotonic() < limit, workers[0].said
            time.sleep(0.02)
        await_unfinished(folder)
        assert running.command("drain", "1", "--reason", "maintenance").returncode == 0
        assert workers[1].process.wait(LIMIT_S) == 0, workers[1].said
        assert workers[0].process.wait(LIMIT_S) == 0, workers[0].said
    assert re.findall(r"unfinished (\d+)", workers[0].said) == ["0"], workers[0].said
    newest = max(folder.glob("snapshot_*"))
    assert sorted(each.name for each in newest.iterdir()) == ["part_0_of_2", "part_1_of_2"]


def test_a_full_disk_is_a_sentence_and_training_goes_on(pki: Pki, tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk") as disk:
        folder = disk / "kept"
        folder.mkdir()
        with filled(disk, left_bytes=100_000):
            launch = Launch(tmp_path, pki, folder, 0, 300)
            assert launch.end() == 0, launch.said
        assert re.findall(r"\[\d\] after the loop (\d+)", launch.said) == ["300", "300"]
        assert "No space left on device. Training goes on." in launch.said
        assert not list(folder.rglob("*.part"))
