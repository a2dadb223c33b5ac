"""A checkpoint's place that is an address is refused, and no directory of that name is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muster.errors import SettingsError
from muster.training import checkpoint
from muster.training.mounted_path import mounted_path
from muster.training.sampler import ShardedSampler
from muster.training.state import TrainingState

ADDRESSES = ("s3://bucket/run", "gs://bucket", "memory://run", "hf-mount+https://there/x")


def state() -> TrainingState:
    return TrainingState({"w": np.zeros(3)}, ShardedSampler(8, 2))


CALLS: dict[str, Callable[[str], Any]] = {
    "save": lambda directory: checkpoint.save(directory, state()),
    "load": lambda directory: checkpoint.load(directory, state()),
    "load_latest": lambda directory: checkpoint.load_latest(directory, state()),
    "folder": lambda directory: checkpoint.Folder(directory, state()),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_is_refused(
    call: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match="is an address") as refused:
        CALLS[call](address)
    assert address in str(refused.value) and "Mount that store" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["run", "/data/a:b", "C:/x", "./s3:x", "a/b:/c"])
def test_paths_of_this_host_are_left_alone(path: str) -> None:
    assert mounted_path(path) == Path(path)
