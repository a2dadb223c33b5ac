"""Durable checkpoints from the copies in memory: what is written, what comes back, and what is not used."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import muster
from muster.errors import SettingsError
from muster.torch import Snapshots, SnapshotTrainingState
from muster.torch.snapshot_copies import PartCopier
from muster.torch.snapshot_folder import SnapshotFolder
from muster.training.shared_room import SharedRoom
from muster.training.state import StateLostError, share_state
from tests.torch.snapshot_ranks import Job, Process
from tests.torch.test_snapshot_state import Objects, equal, settle_at, train, values
from tests.training.test_writer_process import writers


class Saved(Objects):
    """A SnapshotTrainingState of a ShardedOptimizer with a directory."""

    def __init__(self, session: Any, directory: Path, *, mbytes_per_s: float = 0.0) -> None:
        super().__init__(session, checkpoint=directory, mbytes_per_s=mbytes_per_s)

    def finish(self) -> None:
        for wait in self.state.writes:
            wait()


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for each in made:
        each.close()


def begin(process: Process, directory: Path) -> None:
    session: Any = process.session
    process.worker = Saved(session, directory)
    share_state(session, process.worker.state)
    settle_at(process, 0)


def run(jobs: list[Job], directory: Path, body: Any) -> list[Any]:
    """A job of two ranks that ends, with all its memory."""
    job = Job()
    jobs.append(job)
    found = job.form([job.start("x"), job.start("y")], body)
    job.close()
    jobs.remove(job)
    return found


def save_at_2_and_4(directory: Path) -> Any:
    def body(process: Process) -> list[Any]:
        begin(process, directory)
        worker, session = process.worker, process.session
        assert session is not None
        kept = []
        for _ in range(2):
            train(worker, session.rank, 2)
            settle_at(process, worker.state.step)
            kept.append(values(worker))
            assert worker.state.save_beside()
            worker.finish()
        train(worker, session.rank, 1)
        return [*kept, session.checkpoints]

    return body


def resume(jobs: list[Job], directory: Path, size: int) -> list[tuple[int, list[Any]]]:
    job = Job()
    jobs.append(job)

    def body(process: Process) -> tuple[int, list[Any]]:
        process.worker = Saved(process.session, directory)
        share_state(process.session, process.worker.state)  # type: ignore[arg-type]
        assert process.worker.state.sampler.position == 12 * process.worker.state.step
        return process.worker.state.step, values(process.worker)

    return job.form([job.start(f"h{number}") for number in range(size)], body)


def test_a_new_job_goes_on_from_what_was_written_of_the_snapshot(
    jobs: list[Job], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = run(jobs, tmp_path, save_at_2_and_4(tmp_path))
    assert {step for rank in before for step, _ in rank[2]} == {2, 4}  # whoever was last has said so
    assert all(size > 0 for rank in before for _, size in rank[2])
    for (step, found), want in zip(resume(jobs, tmp_path, 2), before, strict=True):
        assert step == 4
        assert equal(found, want[1])
    [(step, whole)] = resume(jobs, tmp_path, 1)  # another number of ranks, too
    assert step == 4
    assert equal(whole[:2], before[0][1][:2])

    latest, earlier = sorted(tmp_path.glob("snapshot_*"), reverse=True)
    part = latest / "part_1_of_2"
    data = bytearray(part.read_bytes())
    data[-9] ^= 1
    part.write_bytes(data)
    with caplog.at_level(logging.WARNING, logger="muster.worker"):
        for (step, found), want in zip(resume(jobs, tmp_path, 2), before, strict=True):
            assert step == 2
            assert equal(found, want[0])
    assert f"{latest} is damaged" in caplog.text
    shutil.copy(earlier / "part_0_of_2", latest / "part_0_of_2")  # an old part passes for no later one
    assert resume(jobs, tmp_path, 1)[0][0] == 2
    (earlier / "part_1_of_2").unlink()
    assert resume(jobs, tmp_path, 1)[0][0] == 0


def test_a_checkpoint_takes_no_copy_and_later_snapshots_leave_it_alone(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    others = set(writers(os.getpid()))

    def counted(kind: Any) -> Any:
        take = kind.take

        def count(*args: Any, **more: Any) -> Any:
            taken.append(kind.__name__)
            return take(*args, **more)

        return count

    for kind in (PartCopier, SharedRoom):
        monkeypatch.setattr(kind, "take", counted(kind))

    def body(process: Process) -> list[Any]:
        begin(process, tmp_path)
        worker, session = process.worker, process.session
        assert session is not None
        assert worker.state.save_beside()  # which starts the processes that write
        worker.finish()
        train(worker, session.rank, 2)
        settle_at(process, 2)
        kept = values(worker)
        session.communicator.barrier()
        before = list(taken)
        writing = set(writers(os.getpid())) - others
        assert len(writing) == 2
        for each in writing:
            os.kill(each, signal.SIGSTOP)
        session.communicator.barrier()
        assert worker.state.save_beside()
        session.communicator.barrier()
        assert taken == before
        for step in (4, 6, 8):
            train(worker, session.rank, 2)
            settle_at(process, step)
        session.communicator.barrier()
        for each in writing if session.rank == 0 else ():
            with contextlib.suppress(ProcessLookupError):  # one that was replaced, as it had not this memory
                os.kill(each, signal.SIGCONT)
        worker.finish()
        return kept

    before = run(jobs, tmp_path, body)
    for (step, found), want in zip(resume(jobs, tmp_path, 2), before, strict=True):
        assert step == 2
        assert equal(found, want)


def test_a_directory_that_cannot_be_written_is_a_sentence(
    jobs: list[Job], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")

    def body(process: Process) -> None:
        begin(process, tmp_path / "file")
        assert process.worker.state.save_beside()
        process.worker.finish()
        assert process.session is not None
        train(process.worker, process.session.rank, 1)

    run(jobs, tmp_path, body)
    assert "could not write its part of a checkpoint" in caplog.text
    assert "Training goes on." in caplog.text


def test_what_cannot_be_is_refused(jobs: list[Job], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="mbytes_per_s"):
        SnapshotFolder(tmp_path, Snapshots(every=1), mbytes_per_s=-1)
    state = SnapshotTrainingState({}, muster.ShardedSampler(96, 12), snapshots=Snapshots(every=1))
    with pytest.raises(StateLostError, match="no place"):
        state.save_beside()
