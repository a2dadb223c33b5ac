"""Files of plans and measured machines that are damaged, hostile or no files at all are refused in words."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from muster.errors import SettingsError
from muster.parallel.api import graph_of
from muster.parallel.measure import load_machine
from muster.parallel.planning.costs import Hardware
from muster.parallel.planning.planner import find_plan
from muster.parallel.saved import MAX_BYTES, read_plan
from tests.parallel.models import MODELS, Mlp

READERS = {"plan": read_plan, "machine": load_machine}


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> Any:
    return READERS[request.param]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        (b"{", "it is not JSON"),
        (b"\xff\xfe", "it is not JSON"),
        (b"[" * 100_000, "nested too deep"),
        (b" " * (MAX_BYTES + 1), "more than"),
        (b"[1]", "is no "),
        (b"{}", "is no plan|it has no|is no machine"),
        (b'{"format": 1e999}', "is no "),
    ],
)
def test_files_that_are_none_of_ours_are_refused(
    tmp_path: Path, reader: Any, content: bytes | None, why: str
) -> None:
    path = tmp_path / "saved.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=why) as refused:
        reader(path)
    assert str(path) in str(refused.value) and len(str(refused.value)) < 500


def test_a_fifo_or_a_device_holds_nobody_up(tmp_path: Path, reader: Any) -> None:
    fifo = tmp_path / "saved.json"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero"), tmp_path):
        with pytest.raises(SettingsError, match="cannot be read"):
            reader(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("states", []),
        ("states", {"matmul": 1}),
        ("strategies", None),
        ("mesh", ["2"]),
        ("mesh", [True]),
        ("model", [{}]),
        ("mode", 1),
    ],
)
def test_a_plan_with_something_else_in_a_part_is_named(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "plan.json"
    find_plan(graph_of(Mlp(), MODELS["mlp"][1](0), 2), 2, machine=Hardware()).save(path)
    saved = read_plan(path)
    path.write_text(json.dumps({**saved, key: value}))
    with pytest.raises(SettingsError, match=f"is damaged: it has no {key}"):
        read_plan(path)
    path.write_text(json.dumps({**saved, "mesh": [2, -1]}))
    with pytest.raises(SettingsError, match="its mesh is"):
        read_plan(path)
