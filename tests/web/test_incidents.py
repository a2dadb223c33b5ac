"""The evidence of hangs in a report: what happened, and the text of each file, as text."""

from __future__ import annotations

from pathlib import Path

from muster.web.incidents import FILES_SHOWN, MOST_BYTES, SHOWN, hangs_of
from muster.web.report import page
from muster.wire.launches import RunRecord


def evidence(directory: Path, name: str, **files: str) -> None:
    path = directory / "incidents" / name
    path.mkdir(parents=True)
    (path / "incident.txt").write_text("Job red, generation 1.\nRank 1 does not come.\n\nmore\n")
    for file, text in files.items():
        (path / f"{file}.txt").write_text(text)


def test_a_run_without_hangs_has_none(tmp_path: Path) -> None:
    assert hangs_of(tmp_path) == []


def test_each_hang_says_what_happened_and_has_its_files(tmp_path: Path) -> None:
    evidence(tmp_path, "red-1", rank_1="in C", collectives="x" * (MOST_BYTES + 1))
    (hang,) = hangs_of(tmp_path)
    assert hang.sentence == "Job red, generation 1. Rank 1 does not come."
    assert [name for name, _ in hang.files] == ["incident.txt", "collectives.txt", "rank_1.txt"]
    assert "more than" in hang.files[1][1] and hang.files[2][1] == "in C"


def test_the_newest_hangs_are_shown_and_so_many_files(tmp_path: Path) -> None:
    for number in range(SHOWN + 2):
        evidence(tmp_path, f"red-{number:02}", **{f"rank_{n}": "" for n in range(2 * FILES_SHOWN)})
    hangs = hangs_of(tmp_path)
    assert [hang.name for hang in hangs] == [f"red-{number:02}" for number in range(2, SHOWN + 2)]
    assert all(len(hang.files) == FILES_SHOWN for hang in hangs)


def test_the_report_has_them_and_the_stacks_of_killed_workers_as_text(tmp_path: Path) -> None:
    RunRecord(tmp_path, "vm").note("began", job_id="red", host="vm", workers=2, workers_here=2, command="x")
    evidence(tmp_path, "red-1", rank_1="<script>alert(1)</script>")
    (tmp_path / "stacks-2.txt").write_text("in hangs_here")
    html = page(tmp_path)
    assert html is not None
    assert "Rank 1 does not come." in html and "in hangs_here" in html
    assert "&lt;script&gt;alert(1)" in html and "<script" not in html
