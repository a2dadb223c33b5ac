from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from muster.training.paced_file import write_safetensors


def test_the_library_reads_what_it_would_have_written(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        each: np.arange(6).reshape(2, 3).astype(each)
        for each in ["b1", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", "c8"]
    }
    arrays |= {"scalar": np.array(3.5), "empty": np.zeros((2, 0), "f4"), "ä\n": np.zeros(1, "i2")}
    write_safetensors(tmp_path / "own", arrays, {"a": 'b"\n'})
    save_file(arrays, tmp_path / "library", {"a": 'b"\n'})
    assert (tmp_path / "own").stat().st_size >= (tmp_path / "library").stat().st_size - 64
    found = load_file(tmp_path / "own")
    for name, want in load_file(tmp_path / "library").items():
        assert (found[name].dtype, found[name].shape) == (want.dtype, want.shape)
        np.testing.assert_array_equal(found[name], want)


def test_a_kind_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="x is of complex128"):
        write_safetensors(tmp_path / "file", {"x": np.zeros(1, "c16")}, {})


def test_no_more_is_written_than_the_bound_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    # The module's own clock, not the process's: threads of other tests sleep, too.
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr("muster.training.paced_file.time", clock)
    write_safetensors(tmp_path / "file", {"x": np.zeros(10_000_000, "u1")}, {}, mbytes_per_s=5.0)
    assert now[0] == pytest.approx(102.0, abs=0.01)
