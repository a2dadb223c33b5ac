"""Durable checkpoints of programs that live on: the latest of which each rank's part is sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.errors import SettingsError
from muster.torch.in_place_checkpoints import InPlaceCheckpoints
from muster.training.part_copy import PartCopy
from muster.training.snapshots.parts import PartKey, SnapshotId
from tests.torch.worlds import end_rank, end_world

SIZE = 2


def _part(rank: int, step: int) -> PartCopy:
    data = torch.full((1000,), 10 * step + rank, dtype=torch.uint8)
    return PartCopy(
        PartKey(SnapshotId(1, step), SIZE, rank), b"", memoryview(data.numpy()), is_own=True
    ).sealed()


def _write_and_load(rank: int, path: str, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=SIZE)
    checkpoints: Any = InPlaceCheckpoints(folder, every=4, device=torch.device("cpu"))
    assert not checkpoints.exists()
    before = torch.get_rng_state()
    for step in range(2, 13, 2):
        checkpoints.write_due(_part(rank, step))
    assert torch.equal(torch.get_rng_state(), before)
    checkpoints.wait()
    torch.distributed.barrier()
    assert checkpoints.exists()
    step, part = checkpoints.load(rank, SIZE)
    assert (step, set(part.data)) == (12, {120 + rank})
    if rank == 1:  # a flipped bit in the part of one rank
        (latest,) = Path(folder).glob("snapshot_*.*.000000012")
        file = latest / "part_1_of_2"
        file.write_bytes(file.read_bytes()[:-1] + b"\0")
    torch.distributed.barrier()
    assert checkpoints.load(rank, SIZE)[0] == 8
    end_rank()


def test_a_damaged_checkpoint_is_passed_over_by_all_ranks(tmp_path: Path) -> None:
    from torch.multiprocessing import spawn

    spawn(_write_and_load, (str(tmp_path / "meeting"), str(tmp_path / "kept")), nprocs=SIZE)


def test_a_disk_that_is_full_or_away_is_a_sentence_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    meeting = f"file://{tmp_path}/meeting"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        checkpoints: Any = InPlaceCheckpoints(tmp_path / "file", every=1, device=torch.device("cpu"))
        checkpoints.write_due(_part(0, 4))
        checkpoints.wait()
    finally:
        end_world()
    assert "The checkpoint of step 4 is not written" in caplog.text


def test_no_steps_between_two_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="checkpoint_every is 0"):
        InPlaceCheckpoints(tmp_path, every=0, device=torch.device("cpu"))


def test_an_address_is_refused() -> None:
    with pytest.raises(SettingsError, match="'s3://bucket/run' is an address"):
        InPlaceCheckpoints("s3://bucket/run", every=1, device=torch.device("cpu"))
