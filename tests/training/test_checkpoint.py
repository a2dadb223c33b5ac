from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from muster.training import attempts, checkpoint
from muster.training.checkpoint import CheckpointError, DamagedCheckpointError
from muster.training.sampler import ShardedSampler
from muster.training.state import StateMismatchError, TrainingState


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


GOLDEN = Path(__file__).parents[1] / "golden"
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
    """A run started over in the same directory counts from 0 again: its files are the later ones."""
    save_steps(tmp_path, 50, 60, 10)
    state = make()
    assert checkpoint.load_latest(tmp_path, state) == tmp_path / "step_000000010.safetensors"
    assert state.step == 10


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, keep=2)
    assert [one.step for one in checkpoint.find(tmp_path)] == [4, 3]
    save_steps(tmp_path / "all", 1, 2, 3, 4, 5, keep=0)
    assert len(checkpoint.find(tmp_path / "all")) == 5


def test_after_a_start_again_nothing_of_a_higher_step_is_deleted(tmp_path: Path) -> None:
    """All holders died, replacements began at 0: three saves removed steps up to 951."""
    save_steps(tmp_path, 649, 800, 951)
    save_steps(tmp_path, 10, 20, 30, 40, keep=3)
    assert {one.step for one in checkpoint.find(tmp_path)} == {951, 800, 649, 40, 30, 20}


@pytest.mark.parametrize("what", ["program", "model", "run"])
def test_files_of_others_are_neither_deleted_nor_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def other(value: float, step: int) -> TrainingState:
        state = make(value, step)
        if what == "model":
            state.arrays["w"] = np.full((4, 5), value)
        state.run = "b" if what == "run" else ""
        return state

    save_steps(tmp_path, 1, 2, 3)
    if what == "program":
        monkeypatch.setattr(sys, "argv", ["/elsewhere/other.py"])
    for step in (1, 2, 3, 4):
        path = checkpoint.save(tmp_path, other(9.0, step), clock=lambda n=step: 2000.0 + n)  # type: ignore[misc]
    assert len(checkpoint.find(tmp_path)) == 6
    for step in (1, 2, 3):
        state = make()
        checkpoint.load(tmp_path / f"step_{step:09d}.safetensors", state)
        assert (state.step, float(state.arrays["w"][0, 0])) == (step, float(step))
    if what == "model":  # and the last one of this model is found all the same
        assert checkpoint.load_latest(tmp_path, make()) == tmp_path / "step_000000003.safetensors"
    state = other(0.0, 0)
    assert checkpoint.load_latest(tmp_path, state) == path
    assert (state.step, state.run) == (4, "b" if what == "run" else "")


def as_version_0_1(path: Path, name: str, told_step: int) -> None:
    """Rewrites a file as it was written then: without the new metadata, under a step that is too low."""
    from safetensors.numpy import load_file, save_file

    arrays = load_file(path)
    with safe_open(path, framework="np") as file:
        metadata = {key: file.metadata()[key] for key in ("format", "state", "saved_at")}
    values = json.loads(metadata["state"])
    del values["run"]
    metadata |= {"state": json.dumps(values), "step": str(told_step)}
    metadata["digest"] = checkpoint.digest_of(metadata["state"], arrays)
    path.unlink()
    save_file(arrays, path.with_name(name), metadata)


def test_files_of_version_0_1_load_under_whatever_name_and_are_not_overwritten(tmp_path: Path) -> None:
    (path,) = save_steps(tmp_path, 312)
    as_version_0_1(path, "step_000000156.safetensors", 156)
    state = make()
    checkpoint.load_latest(tmp_path, state)
    assert (state.step, checkpoint.find(tmp_path)[0].step) == (312, 312)
    assert checkpoint.save(tmp_path, make(1.0, step=156)).name.startswith("step_000000156_")
    checkpoint.load(tmp_path / "step_000000156.safetensors", state)
    assert state.step == 312


@dataclass
class Launch:
    """What a folder needs of a session."""

    launch: int
    state_source_rank: int = -1
    busy_with: list[str] = field(default_factory=list)
    written: list[tuple[int, int, float]] = field(default_factory=list)

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        self.busy_with.append(what)
        yield
        self.busy_with.append("")

    def report_checkpoint(self, step: int, *, size_bytes: int, seconds: float) -> None:
        self.written.append((step, size_bytes, seconds))


def folder_of(directory: Path, launch: int, step: int = 0) -> tuple[checkpoint.Folder, TrainingState]:
    """A folder, and a state as the loop leaves it when it has begun in this launch."""
    state = make(float(step), step)
    return checkpoint.Folder(str(directory), state, Launch(launch)), state


def begin(state: TrainingState, launch: int) -> None:
    state.launch = f"{launch:016x}"
    state.run = state.run or state.launch


def test_a_new_launch_beside_an_older_run_saves_elsewhere_and_names_resume(tmp_path: Path) -> None:
    first, state = folder_of(tmp_path, 1, step=7)
    said = list[str]()
    first.resume("", say=said.append)
    begin(state, 1)
    first.save()
    assert said == []
    second, state = folder_of(tmp_path, 2)
    second.resume("", say=said.append)
    assert (state.step, len(said)) == (0, 2)
    assert "up to step 7, which --resume" in said[0]
    assert all(len(line) - len(str(tmp_path)) < 80 for line in said)  # on a terminal, with its directory
    begin(state, 2)
    state.step = 3
    second.save()
    (own,) = tmp_path.glob("run_*")
    assert str(own) in said[1]
    assert [one.step for one in checkpoint.find(own)] == [3]
    third, state = folder_of(tmp_path, 3)
    third.resume("latest", say=said.append)  # the last saved, wherever it is; and there it goes on
    assert (state.step, said[2:]) == (3, [f"resumed after step 3 from {own}/step_000000003.safetensors"])
    begin(state, 3)
    state.step = 4
    third.save()
    assert [one.step for one in checkpoint.find(own)] == [4, 3]


def test_a_save_that_takes_long_is_no_standstill_to_the_scheduler(tmp_path: Path) -> None:
    session, state = Launch(1), make(1.0, 7)
    begin(state, 1)
    during: list[list[str]] = []

    def for_checkpoint() -> Any:
        during.append(list(session.busy_with))
        return TrainingState.for_checkpoint(state)

    state.for_checkpoint = for_checkpoint  # type: ignore[method-assign]
    checkpoint.Folder(str(tmp_path), state, session).save()
    assert during == [["saves a checkpoint"]] and session.busy_with == ["saves a checkpoint", ""]
    [(step, size_bytes, seconds)] = session.written
    assert size_bytes > 100 and seconds >= 0.0 and step == state.step


def test_replacements_take_the_furthest_sound_checkpoint_of_their_own_launch(tmp_path: Path) -> None:
    older, state = folder_of(tmp_path, 1, step=90)
    begin(state, 1)
    older.save()
    lost, state = folder_of(tmp_path, 2)
    begin(state, 2)
    for step in (10, 20, 30):
        state.step = step
        lost.save()
    damage(next(tmp_path.glob("run_*/step_000000030*")), "a bit of the data")
    said = list[str]()
    replacement, state = folder_of(tmp_path, 2)
    replacement.resume("", say=said.append)
    assert state.step == 20
    assert "is damaged" in said[0]
    assert said[1].startswith("no member holds the state: resumed after step 20")
    holders = checkpoint.Folder(str(tmp_path), new := make(), Launch(2, state_source_rank=0))
    holders.resume("", say=said.append)
    assert new.step == 0


# ---------------------------------------------------------------- which of two files is the later one

HOUR = 3600.0
JUMPS = {"an hour back": -HOUR, "an hour ahead": HOUR, "to 1970": -2e9}


def in_launch(launch: int, step: int, *, generation: int = 1, run: str = "") -> TrainingState:
    """A member's state after so many steps of a launch."""
    state = make(float(step), step)
    begin(state, launch)
    state.generation = generation
    state.run = run or state.run
    return state


def save_at(folder: Path, state: TrainingState, time_s: float, **more: Any) -> Path:
    path = checkpoint.save(folder, state, clock=lambda: time_s, **more)
    assert path.exists(), "what was just written is gone"
    return path


def latest_step(folder: Path) -> int:
    state = make()
    path = checkpoint.load_latest(folder, state)
    assert path == checkpoint.find(folder)[0].path
    return state.step


@pytest.mark.parametrize("jump", JUMPS)
@pytest.mark.parametrize("when", ["during a launch", "on restart", "on another host"])
def test_a_clock_that_jumps_loses_no_checkpoint(tmp_path: Path, jump: str, when: str) -> None:
    """One hour back, and each new file was deleted as it was written; step 40 of 80 was resumed."""
    for step in (10, 20, 30, 40):
        save_at(tmp_path, in_launch(1, step), 2e9 + step)
    launch = 2 if when == "on restart" else 1
    generation = 2 if when == "on another host" else 1  # rank 0 is elsewhere after the loss of the first
    for step in (50, 60, 70, 80):
        state = in_launch(launch, step, generation=generation, run=f"{1:016x}")
        save_at(tmp_path, state, 2e9 + JUMPS[jump] + step)
        assert latest_step(tmp_path) == step
    assert [one.step for one in checkpoint.find(tmp_path)] == [80, 70, 60]


@pytest.mark.parametrize("step", [30, 190, 200])
def test_an_expelled_worker_that_saves_late_neither_wins_nor_takes_anything_away(
    tmp_path: Path, step: int
) -> None:
    """It had been expelled, and wrote its file a minute after the job had ended."""
    for good in (180, 190, 200):
        save_at(tmp_path, in_launch(1, good, generation=4), 1000.0 + good)
    late = in_launch(1, step, generation=3)
    late.arrays["w"][...] = -1.0
    path = save_at(tmp_path, late, 9000.0)
    assert latest_step(tmp_path) == 200
    assert {one.step for one in checkpoint.find(tmp_path)} >= {180, 190, 200}
    for good in (180, 190, 200):
        state = make()
        checkpoint.load(tmp_path / f"step_{good:09d}.safetensors", state)
        assert (state.arrays["w"] == good).all()
    checkpoint.load(path, late)
    assert (late.arrays["w"] == -1.0).all()


def test_two_hosts_that_write_one_step_at_the_same_moment_keep_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was expelled had found the name free, and replaced the file that came under it meanwhile."""
    link, newer = os.link, list[Path]()

    def late(source: Path, target: Path) -> None:
        if Path(target).name.startswith("step_") and not newer:
            newer.append(Path(target))
            save_at(tmp_path, in_launch(1, 200, generation=4), 1000.0)
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    stale = in_launch(1, 200, generation=3)
    stale.arrays["w"][...] = -1.0
    path = save_at(tmp_path, stale, 9000.0)
    assert newer and path not in newer
    state = make()
    assert checkpoint.load_latest(tmp_path, state) == newer[0]
    assert (state.arrays["w"] == 200).all()
    checkpoint.load(path, state)
    assert (state.arrays["w"] == -1.0).all()


def test_what_goes_on_from_a_named_file_is_later_than_what_was_further(tmp_path: Path) -> None:
    for step in (20, 40, 60, 80):
        save_at(tmp_path, in_launch(1, step), 9e9 + step, keep=0)
    folder, state = folder_of(tmp_path, 2)
    folder.resume(str(tmp_path / "step_000000040.safetensors"), say=lambda sentence: None)
    begin(state, 2)
    state.step = 45
    folder.save()
    assert latest_step(tmp_path) == 45


def test_a_launch_that_goes_back_to_a_file_is_later_than_it_was_on_all_its_ranks(tmp_path: Path) -> None:
    """A loss that is no number, say: all ranks load a file, and go on from there."""
    ranks = [in_launch(1, 80), in_launch(1, 80)]
    for step in (40, 80):
        save_at(tmp_path, in_launch(1, step), 1000.0 + step)
    expelled = in_launch(1, 90)
    for state in ranks:
        checkpoint.load(tmp_path / "step_000000040.safetensors", state)
    for state, step in zip(ranks, (45, 50), strict=True):  # the second is rank 0 after the loss of the first
        state.step = step
        save_at(tmp_path, state, 900.0)
        assert latest_step(tmp_path) == step
    save_at(tmp_path, expelled, 5000.0)
    assert latest_step(tmp_path) == 50
    newcomer = make()
    newcomer.restore(ranks[1].describe())
    begin(newcomer, 1)
    newcomer.step, newcomer.generation = 55, 2
    save_at(tmp_path, newcomer, 800.0)
    assert latest_step(tmp_path) == 55
    replacement, state = folder_of(tmp_path, 1)  # all are dead; it began with what the launch began with
    replacement.resume("", say=lambda sentence: None)
    assert (state.step, float(state.arrays["w"][0, 0])) == (55, 0.0)
    begin(state, 1)
    state.step, state.generation = 56, 3
    save_at(tmp_path, state, 700.0)
    assert latest_step(tmp_path) == 56


def test_replacements_prefer_what_their_launch_saved_to_the_file_that_it_began_from(tmp_path: Path) -> None:
    """It had gone on from step 80, and back to 40: that is the latest, though 80 is further."""
    save_at(tmp_path, in_launch(1, 80), 1000.0)
    save_at(tmp_path, in_launch(2, 45), 900.0)
    said = list[str]()
    replacement, state = folder_of(tmp_path, 2)
    replacement.resume(str(tmp_path / "step_000000080.safetensors"), say=said.append)
    assert state.step == 80
    replacement.take_up(say=said.append)
    assert state.step == 45
    replacement.take_up(say=said.append)  # is there already
    assert len(said) == 2


def test_a_launch_of_before_that_saves_its_first_file_late_is_of_before(tmp_path: Path) -> None:
    """Cut off from all others, it had not saved yet when the next launch began."""
    old, _ = folder_of(tmp_path, 1)
    old.resume("", say=lambda sentence: None)
    new, state = folder_of(tmp_path, 2)
    new.resume("latest", say=lambda sentence: None)
    begin(state, 2)
    state.step = 10
    new.save()
    save_at(tmp_path, in_launch(1, 500, generation=9), 9e9)
    assert latest_step(tmp_path) == 10


def test_a_folder_of_version_0_2_goes_by_its_clock_and_is_before_all_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copytree(GOLDEN / "checkpoints-0.2", tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(sys, "argv", ["train.py"])

    def of_then(step: int = 0) -> TrainingState:
        state = TrainingState({"w": np.zeros(2)}, ShardedSampler(8, 4, seed=7), step=step)
        state.launch, state.run = f"{3:016x}", f"{1:016x}"
        return state

    assert [(one.step, one.attempt) for one in checkpoint.find(tmp_path)] == [(20, 0), (70, 0), (60, 0)]
    state = of_then()
    checkpoint.load_latest(tmp_path, state)
    assert (state.step, state.run, state.arrays["w"].tolist()) == (20, f"{1:016x}", [20.0, 20.0])
    save_at(tmp_path, of_then(25), 1000.0)  # the clock is decades back
    assert [one.step for one in checkpoint.find(tmp_path)] == [25, 20, 70, 60]
    for step in (60, 75, 80):
        save_at(tmp_path, of_then(step), 1000.0)
    assert [one.step for one in checkpoint.find(tmp_path)] == [80, 75, 60]


@pytest.mark.parametrize("links", [True, False])
def test_workers_of_one_launch_agree_on_its_number_and_no_two_launches_share_one(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All begin in one moment, also where the file system has no hard links."""
    if not links:
        monkeypatch.setattr(attempts, "TAKEN_WITHIN_S", 60.0)  # the machine may be slow

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOTSUP, "Operation not supported")

        monkeypatch.setattr(os, "link", refuse)
    begun = threading.Barrier(16)

    def work(number: int) -> None:
        launch = 1 + number % 4
        folder, state = folder_of(tmp_path, launch, step=1 + number)
        begun.wait(60)
        folder.resume("", say=lambda sentence: None)
        begin(state, launch)
        folder.save()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    numbers = {(one.launch, one.attempt) for one in checkpoint.find(tmp_path)}
    assert sorted(number for _, number in numbers) == [1, 2, 3, 4]
    assert len({launch for launch, _ in numbers}) == 4


def test_a_number_has_its_name_from_its_first_moment_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or workers of one launch, on a machine that stands still for seconds, would take two numbers."""
    seen: list[str] = []
    link = os.link

    def linked(source: Path, target: Path) -> None:
        link(source, target)
        if Path(target).parent.name == ".attempts":
            seen.append(Path(target).read_text())

    monkeypatch.setattr(os, "link", linked)
    save_at(tmp_path, in_launch(1, 10), 1000.0)
    assert seen and seen[0]
    assert [each.name for each in (tmp_path / ".attempts").iterdir()] == ["000001"]


def test_a_worker_killed_as_it_took_a_number_keeps_nobody_from_the_next(tmp_path: Path) -> None:
    save_at(tmp_path, in_launch(1, 10), 1000.0)
    (tmp_path / ".attempts" / "000002").touch()
    save_at(tmp_path, in_launch(2, 5), 900.0)
    assert [(one.step, one.attempt) for one in checkpoint.find(tmp_path)] == [(5, 3), (10, 1)]


def test_a_folder_whose_numbers_were_not_copied_goes_on_from_its_files(tmp_path: Path) -> None:
    for launch in (1, 2, 3):
        save_at(tmp_path, in_launch(launch, 10 * launch), 1000.0)
    rmtree(tmp_path / ".attempts")
    save_at(tmp_path, in_launch(4, 5), 900.0)
    assert latest_step(tmp_path) == 5


def test_a_folder_that_may_only_be_read_is_resumed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_at(tmp_path, in_launch(1, 10), 1000.0)
    folder, state = folder_of(tmp_path, 2)

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    folder.resume("latest", say=lambda sentence: None)
    assert state.step == 10


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
    with pytest.raises(DamagedCheckpointError, match=r"All checkpoints in .* are damaged"):
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
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == [path.name]
    assert path.read_bytes() == before


def test_amid_a_step_nothing_is_saved(tmp_path: Path) -> None:
    """The step would be done twice: once before the file, and once after it is read."""
    state = make(1.0, step=4)
    state.begin()
    with pytest.raises(CheckpointError, match="Save after the block of `with step`"):
        checkpoint.save(tmp_path, state)
    state.commit()
    assert checkpoint.save(tmp_path, state).exists()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="choose another directory with --checkpoint-dir"):
        checkpoint.save(tmp_path / "file", make())


def test_a_checkpoint_of_version_0_1_loads() -> None:
    arrays = {"w": np.zeros((2, 3), np.float32), "momentum.w": np.zeros((2, 3), np.float32)}
    state = TrainingState(arrays, ShardedSampler(40, 4, seed=7, shuffle=True))
    checkpoint.load(GOLDEN / "checkpoint-0.1.safetensors", state)
    assert (state.step, state.extra) == (13, {"losses": [1.5, 0.75]})
    assert arrays["w"].tolist() == [[-11.375, -10.375, -9.375], [-8.375, -7.375, -6.375]]
    assert (state.sampler.epoch, state.sampler.state()["position"]) == (1, 12)


def test_a_run_of_version_0_1_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "step_000000013.safetensors").write_bytes(
        (GOLDEN / "checkpoint-0.1.safetensors").read_bytes()
    )
    arrays = {"w": np.zeros((2, 3), np.float32), "momentum.w": np.zeros((2, 3), np.float32)}
    state = TrainingState(arrays, ShardedSampler(40, 4, seed=7, shuffle=True))
    lines: list[str] = []
    assert checkpoint.load_latest(tmp_path, state, say=lines.append) is not None
    assert state.step == 13
