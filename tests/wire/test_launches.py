"""What a launch leaves on its host, who may read it, and what is kept of a run: bounded, in order, whole."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from muster.wire import launches
from muster.wire.launches import LaunchDirectory, RunRecord, read_records, running


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path


def test_each_launch_has_a_directory_of_its_own_and_the_latest_is_linked(here: Path) -> None:
    made = [LaunchDirectory.begin("job/1", None) for _ in range(3)]
    assert len({launch.path for launch in made}) == 3
    for launch in made:
        assert launch.path.parent.name == "muster-runs"
        assert launch.path.name.startswith("job_1-2")
    assert (here / "muster-runs" / "latest").resolve() == made[-1].path.resolve()
    assert LaunchDirectory.begin("job", None, shared=True).path.name.endswith(os.uname().nodename)


def test_a_directory_that_is_named_is_taken_as_it_is(here: Path) -> None:
    assert LaunchDirectory.begin("job", here / "a" / "b").path == here / "a" / "b"
    assert LaunchDirectory.begin("job", here / "a" / "b").path == here / "a" / "b"
    (here / "file").touch()
    with pytest.raises(OSError):
        LaunchDirectory.begin("job", here / "file" / "b")


def test_status_finds_what_runs_and_only_its_owner_can_read_it(here: Path) -> None:
    launch = LaunchDirectory.begin("job", None)
    launch.publish(host="127.0.0.1", port="7", config="c.json", password_file="password")
    [file] = (here / "runtime" / "muster").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    [found] = running(os.environ)
    assert (found.job_id, found.host, found.port, found.config, found.pid) == (
        *("job", "127.0.0.1", "7", "c.json"),
        os.getpid(),
    )
    assert found.directory == str(launch.path.absolute())
    facts = json.loads(file.read_text())
    for name, change in (("dead", {"pid": 2**22 - 1}), ("reused", {"began": 1}), ("more", {"x": 1})):
        file.with_name(f"{name}.json").write_text(json.dumps({**facts, **change}))
    file.with_name("broken.json").write_text("{")
    assert running(os.environ) == [found]
    launch.withdraw()
    assert running(os.environ) == []
    launch.withdraw()


def test_a_directory_that_others_may_write_to_is_not_believed(here: Path) -> None:
    launch = LaunchDirectory.begin("job", None)
    launch.publish(host="127.0.0.1", port="7", config="", password_file="")
    (here / "runtime" / "muster").chmod(0o770)
    assert running(os.environ) == []
    LaunchDirectory.begin("job", None).publish(host="127.0.0.1", port="8", config="", password_file="")
    (here / "runtime" / "muster").chmod(0o700)
    assert [found.port for found in running(os.environ)] == ["7"]


def test_what_is_kept_is_read_in_order_of_time(tmp_path: Path) -> None:
    now = [10.0]
    first = RunRecord(tmp_path, "a", lambda: now[0])
    second = RunRecord(tmp_path, "../b c", lambda: now[0])
    first.note("began", job_id="j")
    now[0] = 12.0
    second.note("said", text="later")
    now[0] = 11.0
    first.figures(step=1, loss=math.nan)
    assert [(line["time"], line["kind"]) for line in read_records(tmp_path)] == [
        (10.0, "began"),
        (11.0, "figures"),
        (12.0, "said"),
    ]
    assert [line["loss"] for line in read_records(tmp_path) if line["kind"] == "figures"] == [None]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["record_.._b_c.jsonl", "record_a.jsonl"]


def test_figures_of_a_long_run_grow_apart() -> None:
    now, kept = [0.0], 0
    record = RunRecord(Path("/nonexistent"), "a", lambda: now[0], lambda: now[0])
    for _ in range(300_000):  # three days and a half
        now[0] += 1.0
        if record.wants_figures:
            record.figures(step=1)
            kept += 1
    assert 5000 < kept < 12_000


def test_a_clock_that_is_put_back_by_a_year_keeps_no_figures_away(tmp_path: Path) -> None:
    wall, now = [1e9], [0.0]
    record = RunRecord(tmp_path, "a", lambda: wall[0], lambda: now[0])
    for step in (1, 2):
        assert record.wants_figures
        record.figures(step=step)
        wall[0], now[0] = wall[0] - 3e7, now[0] + 2.0
    assert [line["step"] for line in read_records(tmp_path)] == [2, 1]


def test_the_record_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "MAX_RECORD_BYTES", 1000)
    record = RunRecord(tmp_path, "a")
    for _ in range(100):
        record.note("said", text="x" * 50)
    assert (tmp_path / "record_a.jsonl").stat().st_size <= 1000


def test_what_is_no_line_of_a_record_is_passed_over(tmp_path: Path) -> None:
    RunRecord(tmp_path, "a").note("began", job_id="j")
    path = tmp_path / "record_a.jsonl"
    path.write_bytes(
        b'[1]\n"x"\n{"kind":"said"}\n\xff\xfe\n{"time":1e999}\n{"time":NaN}\n{"time":-1}\n{"time":'
        + b"9" * 400
        + b"}\n"
        + b"[" * 10_000
        + b"\n"
        + path.read_bytes()
        + b'{"ti'
    )
    os.mkfifo(tmp_path / "record_fifo.jsonl")
    assert [line["kind"] for line in read_records(tmp_path)] == ["began"]


def test_a_record_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "record_a.jsonl").mkdir()
    RunRecord(tmp_path, "a").note("began")
    assert list(read_records(tmp_path)) == []
