"""Checkpoints written from snapshots beside training, under a real scheduler: an end, and a full disk."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.disks import filled, mounted_disk
from tests.scheduler.processes import Pki, environment

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
LIMIT_S = 100

PROGRAM = """
import sys, time, torch, muster
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
    for step in muster.ElasticLoop(session, state, epochs=10, steps=steps):
        with step:
            print("step", state.step, flush=True)
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
