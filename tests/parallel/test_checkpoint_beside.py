"""Checkpoints of divided models that a process of each rank writes while the training goes on."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from muster.errors import SettingsError
from muster.parallel.checkpoint import load_divided, save_divided
from muster.parallel.checkpoint_beside import DividedWriter
from muster.parallel.elastic import ParallelTrainingState
from tests.parallel.oracle import Case
from tests.parallel.ranks import RankCommunicator, run_ranks
from tests.parallel.test_checkpoint import plan_for, trained, whole
from tests.parallel.test_elastic import NET, SPLIT, Worker
from tests.training.test_writer_process import writers

RANKS = 2


class Both:
    """Two ranks of one process that save beside their training; then their disk is full; then they are lost.

    Args:
        directory: for checkpoints.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.case = Case("gpt_fused_tied")
        self.plan = plan_for(self.case, (RANKS,), 1)
        self.done: list[tuple[int, float]] = []
        self.meeting = threading.Barrier(RANKS, timeout=100.0)
        self.others = set(writers(os.getpid()))  # of another test in this process

    def once(self, rank: int, limit: int, *signals: int) -> None:
        """Bounds the files of all writers, and sends them signals."""
        self.meeting.wait()
        if not rank:
            children = set(writers(os.getpid())) - self.others
            assert len(children) == RANKS
            for child in children:
                resource.prlimit(child, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                for number in signals:
                    os.kill(child, number)
        self.meeting.wait()

    def save(self, communicator: RankCommunicator) -> None:
        model, optimizer = trained(self.case, self.plan, communicator)
        save_divided(self.directory / "sync", model, optimizer, extra={"step": 2})
        writer = DividedWriter(self.directory / "beside", 0.0)

        def begin(step: int) -> None:
            writer.save(model, optimizer, {"step": step}, lambda *figures: self.done.append(figures))

        begin(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)  # the training goes on
        writer.wait()
        self.once(communicator.rank, 100)
        begin(3)
        writer.wait()
        self.once(communicator.rank, resource.RLIM_INFINITY, signal.SIGSTOP)
        begin(4)
        writer.give_up()


def test_what_is_written_beside_is_what_a_synchronous_save_writes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Then the disk is full, and a write is given up: each is a sentence, and what was there stays."""
    both = Both(tmp_path)
    case, plan = both.case, both.plan
    run_ranks(RANKS, both.save)
    ((size_bytes, _),) = both.done
    assert size_bytes == sum(path.stat().st_size for path in (tmp_path / "beside").iterdir())
    assert "could not write its parts of the checkpoint" in caplog.text
    assert "members have changed while it was written" in caplog.text
    assert all("\n" not in each.getMessage() for each in caplog.records if each.name.startswith("muster"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside", "sync"]  # no half one
    names = [sorted(path.name for path in (tmp_path / each).iterdir()) for each in ("beside", "sync")]
    assert names[0] == names[1]

    def load(communicator: RankCommunicator) -> Any:
        found = []
        for name in ("sync", "beside"):
            model, optimizer = trained(case, plan, communicator, steps=1)
            extra = load_divided(tmp_path / name, model, optimizer)
            found.append((extra, whole(model, optimizer), optimizer.param_groups[1]["weight_decay"]))
        return found

    (want, found), _ = run_ranks(RANKS, load)
    assert found[0] == want[0] == {"step": 2}
    assert found[2] == want[2]
    assert found[1].keys() == want[1].keys()
    assert all(torch.equal(found[1][name], tensor) for name, tensor in want[1].items())


class Session:
    """What a state needs, and what is told of its checkpoints."""

    launch = 1

    def __init__(self, communicator: RankCommunicator) -> None:
        self.communicator = communicator
        self.state_source_rank = -1
        self.newcomer_ranks: tuple[int, ...] = ()
        self.written: list[tuple[int, int]] = []
        self.said: list[str] = []

    def busy(self, what: str) -> Any:
        self.said.append(what)
        return contextlib.nullcontext()

    def report_checkpoint(self, step: int, *, size_bytes: int, seconds: float) -> None:
        assert seconds > 0
        self.written.append((step, size_bytes))


def test_a_state_tells_of_its_checkpoints_and_goes_on_from_what_was_written_beside(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"mode": "semi_auto", "strategies": SPLIT, "shard_updates": False}
    saved = tmp_path / "last"

    def run(communicator: RankCommunicator) -> tuple[list[tuple[int, int]], int]:
        worker = Worker(NET, communicator, checkpoint=saved, **settings)
        session = Session(communicator)
        worker.state.share(session)
        worker.train(1, saved=0)
        worker.state.begin()
        worker.state.save_beside()
        worker.state.roll_back()
        worker.train(2)
        for wait in worker.state.writes:
            wait()
        assert "saves a checkpoint" in session.said
        assert "copies the state for a checkpoint" in session.said
        assert worker.state.load()
        return session.written, worker.state.step

    (written, step), (others, _) = run_ranks(RANKS, run)
    assert [each for each, _ in written] == [0, 1]
    assert all(size > 1000 for _, size in written)
    assert others == []
    assert step == 1


def test_a_bound_below_zero_is_refused() -> None:
    with pytest.raises(SettingsError, match="mbytes_per_s is -1"):
        ParallelTrainingState(None, None, None, mbytes_per_s=-1.0)  # type: ignore[arg-type]
