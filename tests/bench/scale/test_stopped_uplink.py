"""The benchmark of a stopped uplink has real sessions, which leave it and keep their places."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muster.bench.__main__ import main

pytestmark = pytest.mark.system


@pytest.mark.parametrize(("direct", "directly"), [("works", 4), ("refused", 0)])
def test_workers_of_a_stopped_uplink_are_there_again(tmp_path: Path, direct: str, directly: int) -> None:
    path = tmp_path / "stopped.json"
    shape = ("--workers", "4", "--processes", "2", "--stops-s", "4", "--times", "1", "--node-timeout-s", "8")
    assert main(["stopped-uplink", *shape, "--direct", direct, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    (trial,) = report["stopped for 4 s"]["trials"]
    assert (trial["left_the_uplink"], trial["directly"], trial["generation"]) == (4, directly, 1)
    assert report["stopped for 4 s"]["all_there_s"]["samples"] == 1


def test_workers_that_do_not_come_are_missed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stopped-uplink", "--workers", "4", "--times", "1", "--limit-s", "0"]) == 1
    assert "4 workers are not there after 0 s" in capsys.readouterr().err
