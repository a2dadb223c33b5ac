"""``train.py`` as users run it: a real scheduler, real worker processes, mutual TLS."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from muster.example import datasets
from muster.training import checkpoint
from muster.training.sampler import ShardedSampler
from tests.scheduler.processes import ROOT, Pki, Scheduler, environment, scheduler
from tests.waiting import LIMIT_S

HANG_S = 240  # of one test; a hung one then shows where it hangs
LINE = re.compile(r"epoch: (\d+) step: (\d+), loss is ([0-9.e-]+)$")
STEPS_PER_EPOCH = 23


pytestmark = pytest.mark.timeout(HANG_S, method="signal")


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


class Trainer:
    """One process of ``train.py``; ``lines`` is what it has printed so far."""

    def __init__(self, directory: Path, name: str, arguments: tuple[str, ...], env: dict[str, str]) -> None:
        self.lines: list[str] = []
        self.log = directory / f"{name}.log"
        with self.log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-X", "faulthandler", str(ROOT / "train.py"), *arguments],
                env=environment(**{"MS_ROLE": "MS_WORKER", "MS_NODE_ID": name, **env}),
                cwd=directory,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def await_line(self, words: str) -> None:
        """Reads on until a line with these words."""
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            assert line, f"it ended with {self.process.wait(LIMIT_S)}:\n{self.log.read_text()}"
            self.lines.append(line.rstrip())
            if words in line:
                return

    def finish(self) -> int:
        """Reads to the end; returns the exit code."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        return self.process.wait(LIMIT_S)

    @property
    def losses(self) -> dict[tuple[int, int], float]:
        """Printed losses by epoch and step."""
        found = (LINE.match(line) for line in self.lines)
        return {(int(m[1]), int(m[2])): float(m[3]) for m in found if m}

    @property
    def accuracy(self) -> float:
        return float(self.lines[-1].removeprefix("test accuracy: "))


class Training:
    """The workers of one job."""

    def __init__(self, directory: Path, sched: Scheduler, env: dict[str, str]) -> None:
        self.directory = directory
        self.scheduler = sched
        self._env = {"MS_SCHED_PORT": str(sched.port), **env}
        self.trainers: list[Trainer] = []

    def start(self, name: str, *arguments: str) -> Trainer:
        trainer = Trainer(self.directory, name, arguments, self._env)
        self.trainers.append(trainer)
        return trainer

    def finish(self, *trainers: Trainer) -> None:
        """Waits until they have all ended well."""
        codes = [trainer.finish() for trainer in trainers]
        logs = "\n".join(trainer.log.read_text() for trainer in trainers)
        assert codes == [0] * len(trainers), f"{codes}\n{logs}\n{self.scheduler.log}"


@contextlib.contextmanager
def training(directory: Path, pki: Pki, workers: int, **env: str) -> Iterator[Training]:
    """A scheduler for ``workers`` workers; what still runs at the end is killed."""
    env = {"MS_WORKER_NUM": str(workers), "MS_TOPO_TIMEOUT": "60", **env}
    with scheduler(**env, **pki.env()) as sched:
        job = Training(directory, sched, {**env, **pki.env()})
        try:
            yield job
        finally:
            for trainer in job.trainers:
                if trainer.process.poll() is None:  # it hangs: where, stands in its log
                    trainer.process.send_signal(signal.SIGABRT)
                    trainer.process.wait(LIMIT_S)
                    print(trainer.log.read_text())
                assert trainer.process.stdout is not None
                trainer.process.stdout.close()


def run(directory: Path, pki: Pki, workers: int, *arguments: str) -> list[Trainer]:
    """Trains undisturbed; in order of rank."""
    with training(directory, pki, workers) as job:
        for rank in range(workers):
            job.start(str(rank), *arguments)
        job.finish(*job.trainers)
        assert job.scheduler.wait() == 0
        return job.trainers


@pytest.mark.parametrize("workers", [2, 4])
def test_digits_are_learnt_and_all_ranks_print_the_same_falling_losses(
    pki: Pki, tmp_path: Path, workers: int
) -> None:
    trainers = run(tmp_path, pki, workers)
    assert len({tuple(trainer.lines) for trainer in trainers}) == 1
    losses = list(trainers[0].losses.values())
    assert len(losses) == 20
    assert losses[0] > 1 > 0.1 > losses[-1]
    assert trainers[0].accuracy >= 0.95
    assert [one.step for one in checkpoint.find(tmp_path / "checkpoints")] == [460, 437, 414]


def one_process(batch_size: int, epochs: int) -> dict[str, NDArray[np.float64]]:
    """The same training, written once more: no buckets, no ranks."""
    data, random = datasets.load_digits(), np.random.default_rng(0)
    w0, w1 = random.normal(0, np.sqrt(2 / 64), (64, 64)), random.normal(0, np.sqrt(2 / 64), (64, 10))
    b0, b1 = np.zeros(64), np.zeros(10)
    parameters = {"w0": w0, "b0": b0, "w1": w1, "b1": b1}
    velocity = {name: np.zeros_like(array) for name, array in parameters.items()}
    sampler = ShardedSampler(len(data.train_x), batch_size, seed=0)
    while sampler.epoch < epochs:
        rows = sampler.batch().indices
        x, y = data.train_x[rows] / 16, data.train_y[rows]
        hidden = np.maximum(x @ w0 + b0, 0)
        exp = np.exp(hidden @ w1 + b1)
        d1 = (exp / exp.sum(axis=1, keepdims=True) - np.eye(10)[y]) / len(rows)
        d0 = (d1 @ w1.T) * (hidden > 0)
        gradients = {"w0": x.T @ d0, "b0": d0.sum(axis=0), "w1": hidden.T @ d1, "b1": d1.sum(axis=0)}
        for name, parameter in parameters.items():
            velocity[name] = 0.9 * velocity[name] + gradients[name]
            parameter -= 0.1 * velocity[name]
        sampler.advance()
    return parameters


def check_trained(path: Path, expected: dict[str, NDArray[np.float64]]) -> None:
    trained = load_file(path)
    for name, array in expected.items():
        np.testing.assert_allclose(trained[name], array, rtol=1e-6, atol=1e-9 * np.abs(array).max())


@pytest.mark.parametrize(("workers", "pieces"), [(1, 1), (2, 1), (3, 4), (4, 1)])
def test_fifty_steps_of_any_number_of_workers_equal_those_of_one_process(
    pki: Pki, tmp_path: Path, workers: int, pieces: int
) -> None:
    """29 samples a step make 50 steps an epoch, whose last has 17: no number of workers divides either."""
    arguments = ("--dtype=float64", "--batch-size=29", "--epochs=1", f"--accumulate={pieces}")
    run(tmp_path, pki, workers, *arguments)
    check_trained(tmp_path / "checkpoints" / "step_000000050.safetensors", one_process(29, epochs=1))


def test_a_run_resumes_where_the_last_checkpoint_was_made(pki: Pki, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    run(whole, pki, 2, "--epochs=4", "--dtype=float64")
    run(parts, pki, 2, "--epochs=2", "--dtype=float64")
    resumed = run(parts, pki, 3, "--epochs=4", "--dtype=float64", "--resume")
    assert resumed[0].lines[0].startswith("resumed after step 46 from checkpoints/step_000000046")
    assert list(resumed[0].losses) == [(3, 23), (4, 23)]
    expected = load_file(whole / "checkpoints" / "step_000000092.safetensors")
    for name, array in load_file(parts / "checkpoints" / "step_000000092.safetensors").items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-9, atol=1e-12)


def test_the_quickstart_set_trains_with_its_own_recipe(pki: Pki, tmp_path: Path) -> None:
    trainers = run(tmp_path, pki, 2, "--data=quickstart", "--checkpoint-dir=")
    losses = trainers[0].losses
    assert list(losses) == [(epoch, step) for epoch in range(1, 6) for step in range(1, 5)]
    assert list(losses.values()) == sorted(losses.values(), reverse=True)
    assert trainers[1].losses == losses
    assert not (tmp_path / "checkpoints").exists()


EPOCHS = 12
LONG = (f"--epochs={EPOCHS}", "--dtype=float64", "--checkpoint-dir=kept")


def check_final(job: Training, trainers: list[Trainer]) -> None:
    """The result is that of an undisturbed run, sample by sample and step by step, on all ranks."""
    assert len({trainer.lines[-1] for trainer in trainers}) == 1
    assert trainers[0].accuracy >= 0.95
    check_trained(
        job.directory / "kept" / f"step_{EPOCHS * STEPS_PER_EPOCH:09d}.safetensors", one_process(64, EPOCHS)
    )


def test_a_killed_worker_is_replaced_and_the_others_stay_the_same_processes(pki: Pki, tmp_path: Path) -> None:
    with training(tmp_path, pki, 3) as job:
        first, victim, third = [job.start(str(rank), *LONG) for rank in range(3)]
        victim.await_line("epoch: 3 ")
        victim.process.send_signal(signal.SIGKILL)
        victim.finish()
        replacement = job.start("1", *LONG)
        job.finish(first, third, replacement)
        check_final(job, [first, third, replacement])
        assert min(epoch for epoch, _ in replacement.losses) >= 3
        assert list(first.losses) == [(epoch, STEPS_PER_EPOCH) for epoch in range(1, EPOCHS + 1)]


def test_when_all_that_hold_the_state_are_dead_replacements_take_the_last_checkpoint(
    pki: Pki, tmp_path: Path
) -> None:
    """Beside the checkpoints of an earlier launch, of a higher step, that nobody asked to resume."""
    run(tmp_path, pki, 1, "--dtype=float64", "--checkpoint-dir=kept", f"--epochs={EPOCHS + 2}")
    older = sorted(one.name for one in (tmp_path / "kept").glob("step_*"))
    with training(tmp_path, pki, 2) as job:
        lost = [job.start(str(rank), *LONG) for rank in range(2)]
        lost[0].await_line("--resume")
        lost[0].await_line("epoch: 3 ")
        lost[0].await_line("epoch: 4 ")
        for trainer in lost:
            trainer.process.send_signal(signal.SIGKILL)
        for trainer in lost:
            trainer.finish()
        replacements = [job.start(str(rank), *LONG) for rank in range(2)]
        job.finish(*replacements)
        said = replacements[0].lines[0]
        found = re.search(r"no member holds the state: resumed after step (\d+) from (\S+)/", said)
        assert found is not None, said
        assert int(found[1]) >= 3 * STEPS_PER_EPOCH
        assert min(epoch for epoch, _ in replacements[0].losses) >= 4
        own = tmp_path / found[2]
        check_trained(own / f"step_{EPOCHS * STEPS_PER_EPOCH:09d}.safetensors", one_process(64, EPOCHS))
    assert sorted(one.name for one in (tmp_path / "kept").glob("step_*")) == older


def test_a_job_goes_on_smaller_where_it_may(pki: Pki, tmp_path: Path) -> None:
    with training(tmp_path, pki, 3, MS_WORKER_MIN="2") as job:
        victim, second, third = [job.start(str(rank), *LONG) for rank in range(3)]
        victim.await_line("epoch: 3 ")
        victim.process.send_signal(signal.SIGKILL)
        job.finish(second, third)
        check_final(job, [second, third])


def test_sigterm_lets_a_worker_leave_at_a_step_boundary(pki: Pki, tmp_path: Path) -> None:
    with training(tmp_path, pki, 3, MS_WORKER_MIN="2") as job:
        first, leaver, third = [job.start(str(rank), *LONG) for rank in range(3)]
        leaver.await_line("epoch: 3 ")
        leaver.process.send_signal(signal.SIGTERM)
        assert leaver.finish() == 143
        assert "test accuracy" not in leaver.lines[-1]
        job.finish(first, third)
        check_final(job, [first, third])


@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_without_a_scheduler_saves_and_leaves(pki: Pki, tmp_path: Path, workers: int) -> None:
    """Alone it trains on meanwhile; of two, one waits to hear that the other is dead."""
    with training(tmp_path, pki, workers) as job:
        leaver, *others = [job.start(str(rank), "--epochs", "100000") for rank in range(workers)]
        for trainer in (leaver, *others):
            trainer.await_line("epoch: 2 ")
        job.scheduler.signal(signal.SIGKILL)
        for other in others:
            other.process.send_signal(signal.SIGKILL)
        leaver.process.send_signal(signal.SIGTERM)
        assert leaver.finish() == 143
        assert "leaves the job as asked, by itself" in leaver.log.read_text()
        assert checkpoint.find(tmp_path / "checkpoints")[0].step >= 2 * STEPS_PER_EPOCH


def test_ctrl_c_ends_a_training_with_one_line(pki: Pki, tmp_path: Path) -> None:
    with training(tmp_path, pki, 1) as job:
        only = job.start("0", *LONG)
        only.await_line("epoch: 2 ")
        only.process.send_signal(signal.SIGINT)
        assert only.finish() == -signal.SIGINT
        assert only.log.read_text().endswith("\ninterrupted\n")
        assert "Traceback" not in only.log.read_text()
        job.scheduler.await_log("left: interrupted from the keyboard")


def test_below_the_minimum_survivors_wait_then_save_and_leave_with_the_reason(
    pki: Pki, tmp_path: Path
) -> None:
    with training(tmp_path, pki, 2, MS_TOPO_TIMEOUT="8") as job:
        survivor, victim = [job.start(str(rank), *LONG) for rank in range(2)]
        victim.await_line("epoch: 2 ")
        victim.process.send_signal(signal.SIGKILL)
        assert survivor.finish() == 1
        assert "muster: " in survivor.log.read_text()
        assert "node 1" in survivor.log.read_text().rpartition("muster: ")[2]
        newest = checkpoint.find(tmp_path / "kept")[0]
        assert newest.step >= 2 * STEPS_PER_EPOCH
