"""Which scheduler a command asks that names none, and what it says before it changes anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.scheduler.cli.command import find_scheduler, parser, with_password
from muster.scheduler.errors import SchedulerSettingsError
from muster.wire.launches import LaunchDirectory, running
from tests.scheduler.processes import Pki, Stream, channel, join, scheduler

Publish = Callable[..., LaunchDirectory]


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Publishes launches of this user, of ``tmp_path`` or a directory elsewhere, with given ports."""
    for name in ("MS_SCHED_HOST", "MS_SCHED_PORT", "MS_JOB_ID", "MS_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.chdir(tmp_path)

    def made(job: str, port: int, elsewhere: str = "") -> LaunchDirectory:
        launch = LaunchDirectory.begin(job, tmp_path / elsewhere if elsewhere else None)
        launch.publish(host="127.0.0.1", port=str(port), config="", password_file="")
        file = tmp_path / "runtime" / "muster" / f"{os.getpid()}.json"
        file.rename(file.with_name(f"{job}-{port}.json"))  # of this process are all launches here
        return launch

    return made


def port_for(*arguments: str) -> int:
    return find_scheduler(parser().parse_args(arguments), os.environ).address.port


@pytest.mark.parametrize("command", [("status",), ("drain", "1")])
def test_the_launch_of_the_own_directory_is_meant_however_many_run(
    command: tuple[str, ...], publish: Publish
) -> None:
    publish("mine", 1001)
    publish("strangers", 1002, "elsewhere")  # later
    assert port_for(*command) == 1001
    assert port_for(*command, "--job", "strangers") == 1002


def test_the_only_launch_is_meant_where_there_is_one(publish: Publish, tmp_path: Path) -> None:
    assert port_for("status") == 6667
    publish("mine", 1001, "elsewhere")
    (tmp_path / "muster-runs").mkdir()
    (tmp_path / "muster-runs" / "latest").symlink_to("over")  # of a launch that has ended
    assert port_for("status") == 1001


@pytest.mark.parametrize("command", [("drain", "1"), ("admit", "gpu-17")])
def test_what_changes_a_job_takes_no_launch_from_elsewhere_when_the_own_one_is_over(
    command: tuple[str, ...], publish: Publish, tmp_path: Path
) -> None:
    other = publish("strangers", 1001, "elsewhere")
    assert port_for(*command) == 1001
    (tmp_path / "muster-runs").mkdir()
    (tmp_path / "muster-runs" / "latest").symlink_to("over")
    with pytest.raises(SchedulerSettingsError) as caught:
        port_for(*command)
    assert f"job strangers in {other.path}" in str(caught.value) and "--job" in str(caught.value)
    assert port_for(*command, "--job", "strangers") == 1001


@pytest.mark.parametrize("command", [("status",), ("drain", "1")])
def test_of_several_launches_elsewhere_none_is_taken_and_all_are_listed(
    command: tuple[str, ...], publish: Publish
) -> None:
    one, other = publish("night", 1001, "one"), publish("day", 1002, "other")
    with pytest.raises(SchedulerSettingsError) as caught:
        port_for(*command)
    said = str(caught.value)
    assert said.startswith("Several launches of yours run on this host: job ")
    assert f"job night in {one.path}" in said and f"job day in {other.path}" in said and "--job" in said
    assert port_for(*command, "--job", "day") == 1002


def test_the_name_of_a_job_that_has_no_launch_is_written_as_it_was_given(publish: Publish) -> None:
    publish("night", 1001, "one")
    done = muster("status", "--job", "ResNet")
    assert done.returncode == 1 and "No launch of job ResNet runs on this host" in done.stderr, done.stderr


def test_the_page_of_several_launches_is_refused_too(publish: Publish) -> None:
    publish("night", 1001, "one")
    publish("day", 1002, "other")
    done = muster("web")
    assert done.returncode == 2 and "Several launches of yours run on this host" in done.stderr


def test_jobs_lists_what_can_be_asked_and_names_what_cannot(publish: Publish) -> None:
    gone = publish("gone", 1, "one")
    with scheduler(MS_JOB_ID="there") as running_scheduler:
        publish("there", running_scheduler.port, "other")
        done = muster("jobs", "--json")
    assert [job["job_id"] for job in json.loads(done.stdout)] == ["there"]
    assert f"muster: job gone in {gone.path}: No scheduler can be reached" in done.stderr


def muster(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "muster", *arguments]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=100
    )


def on_a_terminal(answer: str, *arguments: str) -> tuple[int, str]:
    """Runs a command on a terminal of its own; returns its exit code and what that shows."""
    ours, end = os.openpty()
    os.write(ours, answer.encode())
    done = subprocess.Popen([sys.executable, "-m", "muster", *arguments], stdin=end, stdout=end, stderr=end)
    code = done.wait(100)
    os.write(end, b"\0")
    shown = b""
    while not shown.endswith(b"\0"):
        shown += os.read(ours, 1 << 16)
    for descriptor in (ours, end):
        os.close(descriptor)
    return code, shown.decode().replace("\r\n", "\n")


def test_a_drain_names_job_and_directory_and_asks_on_a_terminal(publish: Publish) -> None:
    with scheduler(MS_JOB_ID="night", MS_NODE_TIMEOUT="600") as asked, channel(asked.target) as line:
        launch = publish("night", asked.port)
        stream = Stream(line)
        stream.put(join("7", job_id="night"))
        stream.next("welcome")
        assert [each.job_id for each in running(os.environ)] == ["night"]
        what = f"node 7 of job night in {launch.path.absolute()}"
        code, shown = on_a_terminal("n\n", "drain", "7")
        assert code == 1 and f"Drain {what}? [y/N]" in shown and "nothing was changed" in shown
        assert "1 worker without a rank would go: training does not notice." in shown
        code, shown = on_a_terminal("y\n", "drain", "8")
        assert code == 1 and "no node '8'" in shown and "[y/N]" not in shown
        code, shown = on_a_terminal("", "drain", "7", "--at", "02:00", "--yes")
        assert code == 0 and "[y/N]" not in shown and "The drain of node 7 is planned" in shown
        assert "The drain of node 7 is called off." in muster("drain", "7", "--cancel").stdout
        piped = muster("drain", "7")
        assert "[y/N]" not in piped.stderr and f"draining {what}" in piped.stderr


def test_a_password_file_goes_before_the_variables(pki: Pki, tmp_path: Path) -> None:
    """For every command that asks a scheduler, and for the scheduler itself."""
    env = pki.env()
    secret = tmp_path / "password"
    secret.write_text(
        Path(env["MS_CLIENT_PASSWORD_FILE"]).read_text()
        if "MS_CLIENT_PASSWORD_FILE" in env
        else env["MS_CLIENT_PASSWORD"]
    )
    wrong = {name: value for name, value in env.items() if "PASSWORD" not in name}
    wrong |= {"MS_CLIENT_PASSWORD": "wrong", "MS_SERVER_PASSWORD": "wrong"}
    with scheduler("--password-file", str(secret), **wrong) as asked:
        for command in (("status",), ("jobs",), ("health",)):
            done = asked.command(*command, "--password-file", str(secret), **wrong)
            assert done.returncode == 0, done.stderr
            assert asked.command(*command, **wrong).returncode != 0
        drained = asked.command("drain", "7", "--password-file", str(secret), **wrong)
        assert "no node '7'" in drained.stderr
    options = parser().parse_args(["status", "--password-file", "here"])
    assert with_password(options, {"MS_CLIENT_PASSWORD": "x"})["MS_CLIENT_PASSWORD_FILE"] == str(
        Path("here").absolute()
    )
