from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from worker import checkpoint
from worker.checkpoint import CheckpointError, DamagedCheckpointError
from worker.sharding import ShardedSampler
from worker.state import StateMismatchError, TrainingState


def make(value: float = 0.0, step: int = 0) -> TrainingState:
    arrays = {
        "w": np.full((4, 3), value),
        "momentum.w": np.full((4, 3), value / 2, "float32"),
        "n": np.array(value),
    }
    state = TrainingState(arrays, ShardedSampler(100, 8, seed=1), step=step)
    for _ in range(step):
        state.sampler.advance()
    return state


def save_steps(folder: Path, *steps: int, keep: int = 3) -> list[Path]:
    return [
        checkpoint.save(folder, make(float(step), step), keep=keep, clock=lambda n=number: 1000.0 + n)  # type: ignore[misc]
        for number, step in enumerate(steps)
    ]


def damage(path: Path, how: str) -> None:
    raw = bytearray(path.read_bytes())
    if how == "a bit of the data":
        raw[-3] ^= 1
    elif how == "a digit of the state":
        at = raw.index(b'\\"step\\": ') + len(b'\\"step\\": ')
        raw[at] = ord("9")
    elif how == "half of the file":
        del raw[len(raw) // 2 :]
    elif how == "the whole header":
        raw[:8] = b"\xff" * 8
    else:
        raw.clear()
    path.write_bytes(raw)


DAMAGES = ["a bit of the data", "a digit of the state", "half of the file", "the whole header", "everything"]


def test_a_state_comes_back_as_it_was_into_the_same_arrays(tmp_path: Path) -> None:
    old, new = make(3.0, step=20), make()
    weights = new.arrays["w"]
    path = checkpoint.save(tmp_path / "deep" / "folder", old)
    assert path.name == "step_000000020.safetensors"
    checkpoint.load(path, new)
    assert new.arrays["w"] is weights
    for name, array in old.arrays.items():
        np.testing.assert_array_equal(new.arrays[name], array)
        assert new.arrays[name].dtype == array.dtype
    assert new.describe() == old.describe()


def test_any_safetensors_reader_can_open_it(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, make(2.0, step=5), clock=lambda: 12.5)
    with safe_open(path, framework="np") as file:
        assert set(file.keys()) == {"w", "momentum.w", "n"}
        assert (file.metadata()["step"], file.metadata()["saved_at"]) == ("5", "12.5")


def test_the_last_saved_is_read_whatever_its_step(tmp_path: Path) -> None:
    """A run begun anew in the same directory counts from 0 again: its files are the later ones."""
    save_steps(tmp_path, 50, 60, 10)
    state = make()
    assert checkpoint.load_latest(tmp_path, state) == tmp_path / "step_000000010.safetensors"
    assert state.step == 10


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, keep=2)
    assert [one.step for one in checkpoint.find(tmp_path)] == [4, 3]
    save_steps(tmp_path / "all", 1, 2, 3, 4, 5, keep=0)
    assert len(checkpoint.find(tmp_path / "all")) == 5


def test_without_checkpoints_nothing_is_read(tmp_path: Path) -> None:
    assert checkpoint.load_latest(tmp_path / "absent", make()) is None


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_refused_and_the_one_before_it_offered(tmp_path: Path, how: str) -> None:
    paths = save_steps(tmp_path, 10, 20, 30)
    damage(paths[2], how)
    damage(paths[1], "a bit of the data")
    state = make(9.0)
    with pytest.raises(DamagedCheckpointError) as caught:
        checkpoint.load(paths[2], state)
    assert str(paths[2]) in caught.value.message
    assert f"step 10: resume with --resume {paths[0]}" in str(caught.value)
    assert state.describe() == make(9.0).describe()
    assert (state.arrays["w"] == 9.0).all()


@pytest.mark.parametrize("how", DAMAGES)
def test_resuming_passes_over_damaged_files_and_says_so(tmp_path: Path, how: str) -> None:
    paths = save_steps(tmp_path, 10, 20)
    damage(paths[1], how)
    state, said = make(), list[str]()
    assert checkpoint.load_latest(tmp_path, state, say=said.append) == paths[0]
    assert state.step == 10
    assert len(said) == 1
    assert str(paths[1]) in said[0]


def test_when_nothing_is_sound_resuming_is_refused(tmp_path: Path) -> None:
    (path,) = save_steps(tmp_path, 10)
    damage(path, "half of the file")
    with pytest.raises(DamagedCheckpointError, match=r"No checkpoint in .* is sound"):
        checkpoint.load_latest(tmp_path, make())
    with pytest.raises(DamagedCheckpointError, match="There is no sound one beside it"):
        checkpoint.load(path, make())


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"There is no checkpoint .*step_1\.safetensors"):
        checkpoint.load(tmp_path / "step_1.safetensors", make())


def test_a_checkpoint_of_another_model_is_refused_not_passed_over(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    other = make()
    other.arrays["w"] = np.zeros((4, 5))
    with pytest.raises(StateMismatchError, match=r"w is float64\[4, 3\] there and float64\[4, 5\] here"):
        checkpoint.load_latest(tmp_path, other)


def test_a_safetensors_file_of_someone_else_is_not_taken(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.zeros((4, 3))}, tmp_path / "step_1.safetensors")
    with pytest.raises(DamagedCheckpointError, match="not a checkpoint of this program"):
        checkpoint.load(tmp_path / "step_1.safetensors", make())


def test_a_failed_write_leaves_the_files_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = save_steps(tmp_path, 10)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="could not be written: No space left on device"):
        checkpoint.save(tmp_path, make(5.0, step=10))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="choose another directory with --checkpoint-dir"):
        checkpoint.save(tmp_path / "file", make())
