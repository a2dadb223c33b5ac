"""``muster report --list``: which runs there are, how long they took, how they ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from muster.web.report import main
from muster.wire.launches import RunRecord


def run(folder: Path, name: str, began: float, lasted_s: float, code: int | None) -> Path:
    """A run of two workers; code None: it goes on."""
    directory = folder / name
    directory.mkdir(parents=True)
    now = [began]
    kept = RunRecord(directory, "gpu-1", lambda: now[0])
    kept.note("began", job_id=name, host="gpu-1", workers=2, command="python train.py")
    kept.note("group", generation=1, workers=2, reason="all 2 workers are in")
    now[0] += lasted_s
    kept.figures(step=5, samples_per_s=10.0, loss=0.5)
    if code is not None:
        kept.note("ended", code=code)
    return directory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "muster-runs"
    run(made, "older", 1_000_000.0, 90.0, 0)
    newer = run(made, "newer", 2_000_000.0, 7200.0, 3)
    run(made, "newest", 3_000_000.0, 5.0, None)
    (newer / "report.html").write_text("<p>")
    (made / "latest").symlink_to("newest")
    (made / "notes").mkdir()  # no run
    return made


def test_runs_are_listed_the_newest_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", str(folder)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["DIRECTORY", "BEGAN", "LASTED", "WORKERS", "TRAINING", "OUTCOME"]
    assert [Path(line.split()[0]).name for line in lines] == ["newest", "newer", "older"]
    outcome = head.index("OUTCOME")
    assert [line[outcome:] for line in lines] == [
        "runs, or its launcher was killed",
        "ended with exit code 3",
        "ended well",
    ]


def test_the_list_as_json_says_where_the_report_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--json", str(folder)]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [(row["job"], row["exit_code"], row["generations"]) for row in rows] == [
        ("newest", None, 1),
        ("newer", 3, 1),
        ("older", 0, 1),
    ]
    assert [row["report"] and Path(row["report"]).parent.name for row in rows] == [None, "newer", None]
    assert (rows[2]["began"], rows[2]["ended"]) == (1_000_000.0, 1_000_090.0)


@pytest.mark.parametrize("name", ["notes", "nowhere"])
def test_a_directory_without_runs_is_a_sentence(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--list", str(folder / name)]) == 1
    said = capsys.readouterr().err
    assert name in said and "muster-runs" in said and len(said.splitlines()) == 1


def test_json_is_for_the_list_alone(folder: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--json", str(folder / "older")])
    assert ended.value.code == 2
