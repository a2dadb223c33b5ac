"""The evidence of hangs on disk: for its owner, without secrets, and no more of it than fits."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from muster.scheduler.core.events import Bundle, RankEvidence
from muster.scheduler.jobs.incidents import KEPT, IncidentFiles
from muster.wire import messages
from tests.scheduler.fakes import candidate

WHEN = dt.datetime(2026, 1, 31, 12, 0, 0, tzinfo=dt.UTC)
CALL = messages.Collective(7, "all_reduce", "world", "float32", 16, False)


def bundle(stacks: str = "in C") -> Bundle:
    first = RankEvidence(candidate("a"), 0, 5, 6, (CALL,))
    second = RankEvidence(candidate("b"), 1, 5, 5, (), stacks)
    return Bundle(
        0, "Rank 1 does not come.", 3, (first, second, RankEvidence(candidate("c"), 2, obstacle="gone"))
    )


def test_a_bundle_is_a_directory_for_its_owner_only(tmp_path: Path) -> None:
    path = IncidentFiles(tmp_path / "incidents").write("red", bundle(), WHEN)
    assert path.parent == tmp_path / "incidents"
    assert sorted(file.name for file in path.iterdir()) == ["collectives.txt", "incident.txt", "rank-1.txt"]
    assert all(file.stat().st_mode & 0o077 == 0 for file in (path, path.parent, *path.iterdir()))
    assert "in C" in (path / "rank-1.txt").read_text()
    summary = (path / "incident.txt").read_text()
    assert "Job red, generation 3, 2026-01-31T12:00:00Z.\nRank 1 does not come." in summary
    assert "rank-1.txt" in summary and "gone" in summary and "not asked for stacks" in summary
    assert "   0  7 world all_reduce 16 float32 not done" in (path / "collectives.txt").read_text()


def test_no_secret_is_written_and_no_name_leaves_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MS_SERVER_PASSWORD", "hunter2!")
    files = IncidentFiles(tmp_path / "incidents")
    path = files.write("../../red", bundle("hunter2! and -----BEGIN KEY-----\nabc"), WHEN)
    text = "".join(file.read_text() for file in path.iterdir())
    assert "hunter2!" not in text and "abc" not in text
    assert path.parent == tmp_path / "incidents"
    assert [each.name for each in tmp_path.iterdir()] == ["incidents"]


def test_the_newest_few_of_each_job_are_kept(tmp_path: Path) -> None:
    files = IncidentFiles(tmp_path)
    other = files.write("red-blue", bundle(), WHEN)
    for number in range(KEPT + 3):
        files.write("red", bundle(), WHEN + dt.timedelta(seconds=number))
    left = sorted(path.name for path in tmp_path.iterdir() if path != other)
    assert other.exists()
    assert left[0].startswith("red-20260131T120003") and len(left) == KEPT
