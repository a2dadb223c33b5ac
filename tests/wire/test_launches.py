"""What a launch leaves on its host, and who may read it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from muster.wire.launches import LaunchDirectory, running


@pytest.fixture(autouse=True)
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
