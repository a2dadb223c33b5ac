"""Checkpoints that a process of its own writes beside the training: real processes, files and signals."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from muster.errors import LeaveGranted, SettingsError
from muster.training import checkpoint
from muster.training.checkpoint import CheckpointError
from muster.training.loop import ElasticLoop
from muster.training.sampler import ShardedSampler
from muster.training.state import TrainingState
from tests.fakes import ElasticWorld
from tests.logs import said

SLOW_MBYTES_PER_S = 1e-5
"""A file takes minutes with that: what is to happen before it is whole has the time."""


def make(step: int, *, size: int = 300) -> TrainingState:
    arrays = {
        "w": np.arange(size, dtype=np.float64),
        "half": np.arange(7, dtype=np.float16).reshape(1, 7),
        "empty": np.zeros((0, 3), np.float32),
        "n": np.array(step, np.int64),
        "flag": np.array([True, False]),
    }
    return TrainingState(arrays, ShardedSampler(100, 8, seed=1), step=step)


def writers(parent: int) -> list[int]:
    """The processes that write for another one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                status = (entry / "status").read_text()
            except OSError:
                continue
            if b"muster.training.writer" in words and f"PPid:\t{parent}\n" in status:
                found.append(int(entry.name))
    return found


def wait_for_end(pid: int) -> None:
    """Waits until a process is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([descriptor], [], [], 60)[0], "the process has not ended"
    os.close(descriptor)


def contents(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    with safe_open(path, framework="np") as file:
        names = file.keys()
        return file.metadata(), {name: file.get_tensor(name) for name in names}


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".attempts")


@pytest.fixture
def folder_of(tmp_path: Path) -> Any:
    """Makes folders; what they are still writing is ended with the test."""

    def build(state: TrainingState, **options: Any) -> checkpoint.Folder:
        return checkpoint.Folder(str(tmp_path), state, **options)

    yield build
    for pid in writers(os.getpid()):
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)  # the next test counts them


def test_the_file_is_that_of_a_synchronous_save_of_the_same_step(
    tmp_path: Path, folder_of: Callable[..., checkpoint.Folder]
) -> None:
    state = make(20)
    folder = folder_of(state)
    want, arrays = contents(checkpoint.save(tmp_path / "sync", state))
    folder.save_beside()
    state.arrays["w"] += 1.0  # the training goes on
    folder.wait()
    found, read = contents(tmp_path / "step_000000020.safetensors")
    assert {**found, "saved_at": ""} == {**want, "saved_at": ""}
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)
    other = make(0)
    checkpoint.load(tmp_path / "step_000000020.safetensors", other)
    assert other.step == 20


def test_the_write_before_is_awaited_and_each_is_reported(
    tmp_path: Path, folder_of: Callable[..., checkpoint.Folder]
) -> None:
    from tests.training.test_checkpoint import Launch

    state, launch = make(1), Launch(5)
    folder = folder_of(state, session=launch, mbytes_per_s=0.005)
    folder.save_beside()
    state.step = 2
    folder.save_beside()
    assert [step for step, *_ in launch.written] == [1], "the first was not awaited"
    state.step = 3
    folder.save()
    assert [step for step, *_ in launch.written] == [1, 2, 3]
    assert all(size > 2400 for _, size, _ in launch.written)
    assert [one.step for one in checkpoint.find(tmp_path)] == [3, 2, 1]
    assert "waits for a checkpoint that is being written" in launch.busy_with
    assert len(writers(os.getpid())) == 1


def test_a_writer_that_is_killed_is_a_sentence_and_the_next_checkpoint_is_written(
    tmp_path: Path, folder_of: Callable[..., checkpoint.Folder], caplog: pytest.LogCaptureFixture
) -> None:
    state = make(1, size=300_000)
    folder = folder_of(state, mbytes_per_s=0.02)
    folder.save_beside()
    while not list(tmp_path.glob(".*.part")):
        assert len(writers(os.getpid())) <= 1
    (pid,) = writers(os.getpid())
    os.kill(pid, signal.SIGKILL)
    folder.wait()
    (message,) = said(caplog)
    assert "was killed by SIGKILL" in message
    assert "\n" not in message
    assert left(tmp_path) == []
    state.arrays["w"] = np.arange(3)  # quickly written
    folder.save_beside()
    folder.wait()
    assert left(tmp_path) == ["step_000000001.safetensors"]


def test_a_full_disk_is_a_sentence_and_training_goes_on(
    tmp_path: Path, folder_of: Callable[..., checkpoint.Folder], caplog: pytest.LogCaptureFixture
) -> None:
    state = make(1)
    folder = folder_of(state)
    folder.save_beside()
    folder.wait()
    (pid,) = writers(os.getpid())
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, before[1]))
    state.step = 2
    folder.save_beside()
    folder.wait()
    (message,) = said(caplog)
    assert "could not be written: File too large" in message
    assert "Training goes on" in message
    assert left(tmp_path) == ["step_000000001.safetensors"]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)  # there is room again
    state.step = 3
    folder.save_beside()
    folder.wait()
    assert left(tmp_path) == ["step_000000001.safetensors", "step_000000003.safetensors"]


TRAINER = """
import sys
sys.path[:0] = sys.argv[4:]
from muster.training import checkpoint
from tests.training.test_writer_process import make
folder = checkpoint.Folder(sys.argv[1], make(4), mbytes_per_s=float(sys.argv[2]))
folder.save_beside()
print("writes", flush=True)
if sys.argv[3] == "stay":
    sys.stdin.read()
"""


def start_trainer(folder: Path, mbytes_per_s: float, how: str) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(folder), str(mbytes_per_s), how, root, *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writes\n"
    return process


def test_a_trainer_that_is_killed_takes_its_writer_along_and_leaves_no_half_file(tmp_path: Path) -> None:
    process = start_trainer(tmp_path, SLOW_MBYTES_PER_S, "stay")
    while not list(tmp_path.glob("*.part")):
        assert process.poll() is None
    (pid,) = writers(process.pid)
    process.kill()
    process.communicate()
    wait_for_end(pid)
    assert left(tmp_path) == []


def test_a_script_that_ends_waits_for_its_file(tmp_path: Path) -> None:
    process = start_trainer(tmp_path, 0.02, "end")
    process.communicate()
    assert process.returncode == 0
    assert left(tmp_path) == ["step_000000004.safetensors"]


def test_sigterm_during_a_write_waits_and_the_file_is_whole(
    tmp_path: Path, folder_of: Callable[..., checkpoint.Folder]
) -> None:
    (session,) = ElasticWorld(1).members
    state = TrainingState({"w": np.zeros(300)}, ShardedSampler(100, 8, seed=1))
    folder = folder_of(state, mbytes_per_s=0.02)
    folder.save_beside()  # the writer is there
    loop = ElasticLoop(session, state, epochs=1)
    with pytest.raises(LeaveGranted):
        for step in loop:
            with step:
                state.arrays["w"] += 1.0
            if state.step == 3:
                folder.save_beside()
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(writers(os.getpid())[0], signal.SIGTERM)  # as a launcher tells the whole group
    other = TrainingState({"w": np.zeros(300)}, ShardedSampler(100, 8, seed=1))
    checkpoint.load(tmp_path / "step_000000003.safetensors", other)
    np.testing.assert_array_equal(other.arrays["w"], np.full(300, 3.0))


def test_the_end_of_a_loop_waits_for_what_is_being_written(
    tmp_path: Path, folder_of: Callable[..., checkpoint.Folder]
) -> None:
    (session,) = ElasticWorld(1).members
    state = TrainingState({"w": np.zeros(300)}, ShardedSampler(100, 8, seed=1))
    folder = folder_of(state, mbytes_per_s=0.02)
    for step in ElasticLoop(session, state, epochs=1, steps=2):
        with step:
            pass
        if state.step == 2:
            folder.save_beside()
    assert left(tmp_path) == ["step_000000002.safetensors"]


def test_what_was_asked_for_wrongly_is_refused(
    tmp_path: Path, folder_of: Callable[..., checkpoint.Folder]
) -> None:
    state = make(1)
    with pytest.raises(SettingsError, match="mbytes_per_s is -1"):
        folder_of(state, mbytes_per_s=-1.0)
    state.begin()
    with pytest.raises(CheckpointError, match="in the middle of a step"):
        folder_of(state).save_beside()
    checkpoint.Folder("", state).save_beside()
    assert not left(tmp_path)
