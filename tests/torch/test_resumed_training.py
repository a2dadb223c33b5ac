"""From which checkpoint a trainer resumes; with ranks that are lost: tests/frameworks/test_in_place.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

from muster.torch import huggingface, lightning
from muster.torch.resumed_training import latest, resumed


def test_without_keep_alive_it_trains_once_from_the_last_checkpoint() -> None:
    assert resumed(lambda name: f"from {name}", lambda: ["one", "two"]) == "from two"
    assert resumed(lambda name: f"from {name}", list) == "from None"


def test_it_is_the_last_one_that_all_ranks_see() -> None:
    assert latest([["1", "2", "3"], ["1", "2"]]) == "2"
    assert latest([["1"], []]) is None


def test_a_checkpoint_of_hugging_face_is_whole_when_its_last_file_is_there(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11", "checkpoint-x"):
        (tmp_path / name).mkdir()
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x"):
        (tmp_path / name / "trainer_state.json").write_text("{}")
    found = huggingface.whole_checkpoints(tmp_path)
    assert [Path(each).name for each in found] == ["checkpoint-9", "checkpoint-10"]


def test_checkpoints_of_lightning_are_in_order_of_time(tmp_path: Path) -> None:
    for name, second in (("b.ckpt", 1), ("a.ckpt", 2), ("other", 3)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (second, second))
    assert [Path(each).name for each in lightning.whole_checkpoints(tmp_path)] == ["b.ckpt", "a.ckpt"]
