"""Attacks by another user of the host: real processes of that user, beside a launch in a folder of all."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.wire import launches
from tests.attacks.field import Field
from tests.launch.launching import Place, environment, place
from tests.scheduler.processes import PASSWORD
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

ENEMY = 65534
SECRET = "s3cret-of-the-program"
SCRIPT = f"""
import pathlib, time
print({SECRET!r}, flush=True)
pathlib.Path("started").touch()
while not pathlib.Path("end").exists():
    time.sleep(0.02)
"""
BECOME = f"""
import glob, os, stat, sys
from pathlib import Path
os.setgroups([]); os.setgid({ENEMY}); os.setuid({ENEMY})

def reads(path):
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return os.read(descriptor, 1 << 20)
        finally:
            os.close(descriptor)
    except OSError:
        return b""
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in which everybody may write, and no sticky bit lets the kernel look after links."""
    made = Path(tempfile.mkdtemp(prefix="muster-test-"))
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def here(folder: Path) -> Iterator[Place]:
    with place(folder) as made:
        made.script(SCRIPT)
        yield made


def as_enemy(code: str, *arguments: object) -> str:
    """Runs Python as the other user; returns what it prints."""
    command = [sys.executable, "-c", BECOME + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


PLANT = """
what, path, victim = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
path.parent.mkdir(exist_ok=True)
path.parent.chmod(0o777)
if what == "a link":
    path.symlink_to(victim)
elif what == "a FIFO":
    os.mkfifo(path, 0o666)
else:
    path.touch(0o666)
"""


@pytest.mark.parametrize(
    ("what", "words"),
    [("a link", "it is a link"), ("a FIFO", "FIFO"), ("a file", "it belongs to another user, 65534")],
)
def test_what_another_user_puts_where_a_log_will_be_is_refused_in_words(
    here: Place, what: str, words: str
) -> None:
    """Asset: files of the launcher's user, its logs, availability; position: writes the log directory."""
    victim, log = here.directory / "victim", here.directory / "logs" / "worker_0.log"
    victim.write_text("keep")
    victim.chmod(0o600)
    as_enemy(PLANT, what, log, victim)
    code, out, error = here.run("-n", "1", "--log-dir", "logs", command=(sys.executable, "script.py"))
    assert code == 2 and words in error and "--log-dir" in error, out + error
    assert victim.read_text() == "keep"
    assert as_enemy("print(reads(sys.argv[1]))", log).strip() == "b''"


LOOK = """
for folder, folders, files in os.walk(sys.argv[1]):
    for name in (*folders, *files):
        path = os.path.join(folder, name)
        if name in files and sys.argv[2].encode() in reads(path):
            print("reads", path)
        if os.access(path, os.W_OK) and not os.path.islink(path):
            print("writes", path)
"""
LOOK_AT_PROCESSES = """
for process in sys.argv[2:]:
    for name in ("environ", "mem", "maps", "io", "stack", "syscall"):
        if reads(f"/proc/{process}/{name}"):
            print("reads", process, name)
    for name in ("fd", "fdinfo", "map_files"):
        try:
            print("lists", process, name, os.listdir(f"/proc/{process}/{name}"))
        except OSError:
            pass
    if sys.argv[1].encode() in reads(f"/proc/{process}/cmdline"):
        print("reads arguments of", process)
"""


def test_nothing_that_a_launch_leaves_shows_another_user_what_its_program_printed(here: Place) -> None:
    """Asset: what programs print; position: reads the folder, while they run and later, also the report."""
    launch = here.start("-n", "1", command=(sys.executable, "script.py"))
    run = here.directory / "muster-runs" / "latest"
    wait_for((here.directory / "started").exists)
    wait_for(lambda: SECRET in (run / "worker_0.log").read_text())
    seen = as_enemy(LOOK, here.directory / "muster-runs", SECRET)
    seen += as_enemy(LOOK_AT_PROCESSES, SECRET, *processes_of(launch.pid))
    (here.directory / "end").touch()
    assert launch.wait(100) == 0
    report = [sys.executable, "-m", "muster", "report"]
    subprocess.run(report, cwd=here.directory, check=True, capture_output=True, timeout=100)
    assert SECRET in (run / "report.html").read_text()
    seen += as_enemy(LOOK, here.directory / "muster-runs", SECRET)
    assert seen == ""


def test_the_record_of_a_run_goes_into_no_other_users_file(here: Place) -> None:
    """Asset: who was in, and how it ended; position: writes the log directory."""
    record = here.directory / "logs" / f"record_{os.uname().nodename}.jsonl"
    as_enemy(PLANT, "a file", record, "")
    (here.directory / "end").touch()
    code, _, error = here.run("-n", "1", "--log-dir", "logs", command=(sys.executable, "script.py"))
    assert code == 0, error
    assert record.read_text() == ""


LEAD_ASTRAY = """
directory, link = Path(sys.argv[1]), Path(sys.argv[2])
directory.mkdir(mode=0o777)
directory.chmod(0o777)
(directory / "1.json").write_text(sys.argv[3])
(directory / "1.json").chmod(0o666)
if link != directory:
    link.symlink_to(directory)
"""


@pytest.mark.parametrize("how", ["a folder", "a link"])
def test_nobody_is_led_to_another_users_scheduler(folder: Path, how: str) -> None:
    """Asset: what an operator believes, and does; position: makes /tmp/muster-UID first."""
    listed = folder / f"muster-{os.getuid()}"
    made = listed if how == "a folder" else folder / "mine"
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    with socket.create_server(("127.0.0.1", 0)) as false:
        port = str(false.getsockname()[1])
        lie = launches.Launched("job", "127.0.0.1", port, "", "", str(folder), os.getpid(), began)
        as_enemy(LEAD_ASTRAY, made, listed, json.dumps(dataclasses.asdict(lie)))
        asked = subprocess.run(
            [sys.executable, "-m", "muster", "status"],
            cwd=folder,
            env=environment(TMPDIR=str(folder), XDG_RUNTIME_DIR="", MS_SCHED_PORT=""),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        false.settimeout(0)
        with pytest.raises(BlockingIOError):
            false.accept()
    assert asked.returncode != 0 and "MS_SCHED_PORT" in asked.stderr, asked.stdout + asked.stderr


def test_another_user_sees_nothing_of_the_jobs_processes(field: Field) -> None:
    """Asset: keys, passwords, gradients; position: another user of the host, who looks at /proc."""
    pids = (field.running.process.pid, *(victim.pid for victim in field.victims))
    assert as_enemy(LOOK_AT_PROCESSES, PASSWORD.decode(), *pids) == ""
    kill = "print(*[name for name in sys.argv[1:] if not tried(int(name))])"
    tried = """
def tried(process):
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
"""
    assert as_enemy(tried + kill, *pids).strip() == ""


def processes_of(launcher: int) -> list[int]:
    """A launcher and its children."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [launcher, *map(int, children)]
