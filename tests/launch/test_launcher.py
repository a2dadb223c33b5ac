"""The launcher with stand-in scripts: real processes, real signals."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.errors import SettingsError
from muster.launch import options as launch_options
from muster.launch.command import plan_of
from muster.launch.hardware import read_hardware
from muster.launch.launcher import Launcher
from muster.launch.screen import Screen
from tests.launch.launching import Place, environment, gone, place
from tests.scheduler.processes import ROOT
from tests.waiting import wait_for

PYTHON = sys.executable

HELPERS = """
import os, pathlib, signal, sys, time
ME = os.environ["MS_NODE_ID"]
def tell(name, text=""):
    pathlib.Path(name + ".part").write_text(str(text))
    os.rename(name + ".part", name)
def stay():
    while True:
        time.sleep(1)
"""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path) as made:
        yield made


CLOSING = (  # of scripts that do not train
    r"muster: no worker joined the job: the command never called muster\.init\(\)\n"
    r"muster: ended well after \d:\d\d; logs: muster-runs/default-\d{8}-\d{6}(-\d+)?\n"
)

both_starts = pytest.mark.parametrize("start", ["exec", "fork"])


@both_starts
def test_workers_run_and_their_logs_tell_where(here: Place, start: str) -> None:
    script = here.script(HELPERS + "print('I am', ME, 'of', os.environ['MS_WORKER_NUM'])")
    code, out, err = here.run(
        "-n", "3", "--start", start, command=(PYTHON, script), MS_CLIENT_PASSWORD="hunter2"
    )
    assert (code, out) == (0, "[0] I am 0 of 3\n")
    assert re.fullmatch(CLOSING, err)
    assert [here.log(label) for label in "012"] == [f"I am {rank} of 3\n" for rank in "012"]
    whole = (here.directory / "muster-runs" / "latest" / "worker_1.log").read_text()
    assert f"# {PYTHON} script.py\n" in whole
    assert "# MS_NODE_ID=1\n" in whole
    assert "# MS_CLIENT_PASSWORD=(set)\n" in whole
    assert "hunter2" not in whole


@both_starts
def test_logs_are_for_their_owner_only(here: Place, start: str) -> None:
    script = here.script("import os\nos.umask(0)")
    old = os.umask(0)  # the launcher inherits it: the most that a file can be opened to others
    try:
        here.run("-n", "2", "--start", start, command=(PYTHON, script), SLURM_JWT="eyJsecret")
    finally:
        os.umask(old)
    logs = sorted((here.directory / "muster-runs" / "latest").iterdir())
    assert [(log.name, log.stat().st_mode & 0o777) for log in logs] == [
        (f"record_{os.uname().nodename}.jsonl", 0o600),
        ("worker_0.log", 0o600),
        ("worker_1.log", 0o600),
    ]
    assert not any("eyJsecret" in log.read_text() for log in logs)


def test_hosts_that_share_a_directory_write_logs_of_their_own(here: Place) -> None:
    options = ("--nnodes", "2", "--nproc-per-node", "2", "--join", "127.0.0.1:6667")
    code, out, _ = here.run(*options, command=("sh", "-c", "echo I am $MS_LOCAL_INDEX"))
    host = socket.gethostname()
    assert code == 0
    assert sorted(path.name for path in (here.directory / "muster-runs" / "latest").iterdir()) == [
        f"record_{host}.jsonl",
        f"worker_{host}_0.log",
        f"worker_{host}_1.log",
    ]
    assert out == f"[{host}_0] I am 0\n"  # by default the first of each host


def test_a_hostfile_says_how_many_workers_this_host_takes(here: Place) -> None:
    (here.directory / "hosts").write_text("127.0.0.1 slots=3\n192.0.2.1 slots=4\n")
    code, out, err = here.run(
        *("--hostfile", "hosts", "--tail", "all"), command=("sh", "-c", "echo $MS_WORKER_NUM")
    )
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[0] 7", "[1] 7", "[2] 7"]


def test_the_job_id_reaches_the_workers(here: Place) -> None:
    _, out, _ = here.run("-n", "1", "--job-id", "night", command=("sh", "-c", "echo $MS_JOB_ID"))
    assert out == "[0] night\n"


@both_starts
def test_one_failure_ends_all_and_is_shown(here: Place, start: str) -> None:
    script = here.script(
        HELPERS + "tell('pid' + ME, os.getpid())\n"
        "if ME == '1':\n    print('out of luck')\n    sys.exit(7)\n"
        "stay()"
    )
    code, _, err = here.run("-n", "3", "--start", start, command=(PYTHON, script))
    assert code == 7
    assert "worker 1 (pid " in err
    assert re.search(r"exited with code 7; the end of muster-runs/\S+/worker_1.log:\n    out of luck\n", err)
    assert re.search(r"muster: ended with exit code 7 after \d:\d\d; logs: muster-runs/\S+\n$", err)
    assert all(gone(int(path.read_text())) for path in here.directory.glob("pid?"))


def test_death_by_signal_is_told_and_counted_as_the_shell_does(here: Place) -> None:
    script = here.script(HELPERS + "os.kill(os.getpid(), signal.SIGKILL) if ME == '0' else stay()")
    code, _, err = here.run("-n", "2", command=(PYTHON, script))
    assert code == 128 + signal.SIGKILL
    assert "was ended by SIGKILL" in err


@both_starts
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_workers(here: Place, start: str, number: signal.Signals) -> None:
    script = here.script(
        HELPERS + "def leave(number, frame):\n    print('leaving for', number)\n    sys.exit(0)\n"
        f"signal.signal({int(number)}, leave)\ntell('ready' + ME)\nstay()"
    )
    launch = here.start("-n", "2", "--start", start, command=(PYTHON, script))
    for name in ("ready0", "ready1"):
        here.until(name)
    launch.send_signal(number)
    _, err = launch.communicate(timeout=100)
    assert launch.returncode == 128 + number
    assert f"{number.name}: ending the workers" in err.decode()
    assert [here.log(label) for label in "01"] == [f"leaving for {int(number)}\n"] * 2


def test_other_signals_are_passed_on(here: Place) -> None:
    script = here.script(
        HELPERS + "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\ntell('ready' + ME)\nstay()"
    )
    launch = here.start("-n", "2", command=(PYTHON, script))
    for name in ("ready0", "ready1"):
        here.until(name)
    launch.send_signal(signal.SIGUSR1)
    launch.communicate(timeout=100)
    assert launch.returncode == 0


def test_a_worker_that_will_not_end_is_killed_after_the_grace(here: Place) -> None:
    script = here.script(
        HELPERS
        + "if ME == '0':\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    tell('ready')\n    stay()\n"
        "while not os.path.exists('ready'):\n    time.sleep(0.01)\nsys.exit(3)"
    )
    code, _, err = here.run("-n", "2", "--grace", "0.2", command=(PYTHON, script))
    assert code == 3
    assert re.search(r"worker 0 \(pid \d+\) did not end within 0\.2 s; killed; its stacks: ", err)
    assert "kernel:" in (here.directory / "muster-runs/latest/stacks-0.txt").read_text()


def test_a_worker_that_is_stopped_ends_when_it_is_asked_to(here: Place) -> None:
    script = here.script(HELPERS + "tell('ready', os.getpid())\nos.kill(os.getpid(), signal.SIGSTOP)\nstay()")
    launch = here.start("-n", "1", "--grace", "3600", command=(PYTHON, script))
    status = Path("/proc", here.until("ready"), "status")
    wait_for(lambda: "State:\tT" in status.read_text())
    launch.send_signal(signal.SIGTERM)
    _, err = launch.communicate(timeout=100)
    assert launch.returncode == 128 + signal.SIGTERM
    assert b"killed" not in err


def test_the_scheduler_is_not_killed_with_a_worker_that_will_not_end(here: Place) -> None:
    script = here.script(
        HELPERS + "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "while 'ready on' not in open('muster-runs/latest/scheduler.log').read():\n    time.sleep(0.01)\n"
        "tell('ready')\nstay()"
    )
    launch = here.start("-n", "1", "--grace", "5", "--scheduler", command=(PYTHON, script))
    here.until("ready")
    launch.send_signal(signal.SIGINT)
    _, err = launch.communicate(timeout=100)
    assert "worker 0 (pid " in err.decode()
    assert "scheduler" not in err.decode()
    assert "stopping on SIGTERM" in (here.directory / "muster-runs" / "latest" / "scheduler.log").read_text()


def test_a_second_interrupt_kills_at_once(here: Place) -> None:
    script = here.script(
        HELPERS + "signal.signal(signal.SIGINT, lambda *_: tell('asked'))\ntell('ready')\nstay()"
    )
    launch = here.start("-n", "1", "--grace", "3600", command=(PYTHON, script))
    here.until("ready")
    launch.send_signal(signal.SIGINT)
    here.until("asked")
    launch.send_signal(signal.SIGINT)
    launch.communicate(timeout=100)
    assert launch.returncode == 128 + signal.SIGINT


HELPER_PROCESSES = """
import subprocess
IN_ITS_GROUP = subprocess.Popen(["sleep", "600"])
IN_ONE_OF_ITS_OWN = subprocess.Popen(["sleep", "600"], process_group=0)
ORPHAN = int(subprocess.run(["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"], capture_output=True).stdout)
HELPERS = IN_ITS_GROUP.pid, IN_ONE_OF_ITS_OWN.pid, ORPHAN
"""


@both_starts
def test_nothing_survives_a_killed_launcher(here: Place, start: str) -> None:
    script = here.script(
        HELPERS + HELPER_PROCESSES + "tell('pids' + ME, ' '.join(map(str, (os.getpid(), *HELPERS))))\nstay()"
    )
    launch = here.start("-n", "2", "--start", start, command=(PYTHON, script))
    pids = [int(pid) for name in ("pids0", "pids1") for pid in here.until(name).split()]
    assert not any(gone(pid) for pid in pids)
    launch.kill()
    wait_for(lambda: all(gone(pid) for pid in pids))


@both_starts
def test_no_worker_survives_a_launcher_that_is_killed_with_its_guardian(here: Place, start: str) -> None:
    script = here.script(HELPERS + "tell('pid' + ME, os.getpid())\nstay()")
    launch = here.start("-n", "2", "--start", start, command=(PYTHON, script))
    workers = {int(here.until(name)) for name in ("pid0", "pid1")}
    children = Path(f"/proc/{launch.pid}/task/{launch.pid}/children").read_text().split()
    (guardian,) = {int(pid) for pid in children} - workers
    os.kill(guardian, signal.SIGKILL)
    launch.kill()
    wait_for(lambda: all(gone(pid) for pid in workers))


def test_what_a_worker_leaves_behind_ends_with_it(here: Place) -> None:
    script = here.script(HELPERS + HELPER_PROCESSES + "tell('pids', ' '.join(map(str, HELPERS)))")
    code, _, _ = here.run("-n", "1", command=(PYTHON, script))
    assert code == 0
    wait_for(lambda: all(gone(int(pid)) for pid in here.until("pids").split()))  # long before ten minutes


def test_a_killed_worker_is_not_started_again_before_all_that_it_had_started_is_gone(here: Place) -> None:
    script = here.script(
        HELPERS + "if not os.path.exists('pids'):\n"
        f"    exec({HELPER_PROCESSES!r})\n"
        "    tell('pids', ' '.join(map(str, HELPERS)))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "from tests.launch.launching import gone\n"
        "print(*[gone(int(pid)) for pid in open('pids').read().split()])"
    )
    code, _, err = here.run("-n", "1", "--max-restarts", "1", command=(PYTHON, script), PYTHONPATH=str(ROOT))
    assert code == 0, err
    assert here.log("0") == "True True True\n"


@both_starts
def test_a_failed_worker_is_started_again(here: Place, start: str) -> None:
    script = here.script(
        HELPERS + "first = not os.path.exists('tried')\n"
        "if ME == '1' and first:\n    tell('tried')\n    sys.exit(5)\n"
        "while not os.path.exists('tried'):\n    time.sleep(0.01)\nprint('done')"
    )
    code, _, err = here.run("-n", "2", "--start", start, "--max-restarts", "1", command=(PYTHON, script))
    assert code == 0
    assert "worker 1 exited with code 5; starting it again (1 of 1)" in err
    assert here.log("1") == "done\n"


@both_starts
def test_what_was_started_again_leaves_nothing_open_in_the_launcher(here: Place, start: str) -> None:
    script = here.script(
        HELPERS
        + """
counts = pathlib.Path("counts")
begun = counts.read_text().count("\\n") if counts.exists() else 0
print("start", begun, flush=True)
log = pathlib.Path("muster-runs/latest/worker_0.log")
while f"start {begun}" not in log.read_text():  # the launcher reads once it has closed this process's end
    time.sleep(0.01)
def held():  # it opens files for a moment, too
    time.sleep(0.01)
    return len(os.listdir(f"/proc/{os.getppid()}/fd"))
with counts.open("a") as file:
    print(min(held() for _ in range(10)), file=file)
sys.exit(len(counts.read_text().split()) < 6)
"""
    )
    code, _, err = here.run("-n", "1", "--max-restarts", "5", "--start", start, command=(PYTHON, script))
    assert code == 0, err
    assert len(set((here.directory / "counts").read_text().split()[1:])) == 1


def test_restarts_are_limited(here: Place) -> None:
    code, _, err = here.run("-n", "1", "--max-restarts", "2", command=("sh", "-c", "exit 9"))
    assert code == 9
    assert err.count("starting it again") == 2


@pytest.mark.parametrize("exits", ["raise ValueError(SAID)", "print(SAID, file=sys.stderr)"])
def test_a_torch_program_that_was_not_known_to_be_one_is_told_which_option_it_needs(
    here: Place, exits: str
) -> None:
    said = "Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected"
    script = here.script(f"{HELPERS}SAID = '{said}, but not set'\n{exits}")
    code, _, err = here.run("-n", "2", command=(PYTHON, script))
    last, *before = reversed(err.splitlines())
    assert f"code {code}" in last or (not code and "ended well" in last)
    assert ("start it with muster run --program torch" in before[0]) is bool(code)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("sys.exit(4)", "exited with code 4; going on with 2"),
        ("__import__('muster.worker.ending').worker.ending.note(left=True)", "left as it was asked to"),
    ],
)
def test_enough_workers_go_on_and_it_is_said_how_to_start_another(here: Place, end: str, told: str) -> None:
    script = here.script(
        HELPERS + f"if ME == '2':\n    {end}\n"
        "while ME != '2' and not os.path.exists('go'):\n    time.sleep(0.01)\nprint('enough')"
    )
    launch = here.start("-n", "3", "--min-workers", "2", command=(PYTHON, script))
    assert launch.stderr is not None
    said = next(line for line in launch.stderr if b"worker 2" in line).decode()
    assert said.startswith(f"muster: worker 2 {told}. To start another in its place: env "), said
    assert "MS_NODE_ID=2" in said and said.endswith(" script.py\n")
    (here.directory / "go").touch()
    assert launch.wait(timeout=100) == 0
    assert here.log("0") == "enough\n"


def test_a_worker_that_ends_long_before_the_others_is_named_once_unless_asked_to(here: Place) -> None:
    script = here.script(
        HELPERS + "from muster.worker import ending\nif ME == '3':\n    ending.note(left=True)\n"
        "while ME == '0' and not os.path.exists('go'):\n    time.sleep(0.01)"
    )
    launch = here.start("-n", "4", command=(PYTHON, script))
    assert launch.stderr is not None
    note = next(line for line in launch.stderr if b"ended well:" in line).decode()
    assert "ended well: worker 1, 2; still running: worker 0; their logs say" in note
    here.script("", "go")
    assert b"ended well:" not in launch.communicate(timeout=100)[1]
    assert launch.returncode == 0


@pytest.mark.parametrize(("tail", "shown"), [("all", ["0", "1"]), ("none", []), ("1", ["1"])])
def test_tail_chooses_whose_output_is_shown(here: Place, tail: str, shown: list[str]) -> None:
    script = here.script(HELPERS + "print(ME)")
    _, out, _ = here.run("-n", "2", "--tail", tail, command=(PYTHON, script))
    assert sorted(out.splitlines()) == [f"[{rank}] {rank}" for rank in shown]


def test_timestamps_stand_before_every_line(here: Place) -> None:
    script = here.script(HELPERS + "print('a'); print('b', end='')")
    _, out, _ = here.run("-n", "1", "--timestamps", command=(PYTHON, script))
    stamps = [line.split(" ", 1)[0] for line in (*out.splitlines(), *here.log("0").splitlines())]
    assert len(stamps) == 4
    assert all(len(stamp) == len("2024-01-01T00:00:00.000") for stamp in stamps)


@both_starts
def test_much_output_arrives_whole_and_in_order(here: Place, start: str) -> None:
    script = here.script(HELPERS + "for i in range(50000):\n    print(f'{i:060}')\nprint('end', end='')")
    _, out, _ = here.run("-n", "2", "--start", start, command=(PYTHON, script))
    expected = "".join(f"{i:060}\n" for i in range(50000)) + "end"
    assert here.log("1") == expected
    assert out == "".join(f"[0] {line}\n" for line in expected.splitlines())


def test_a_full_disk_costs_the_log_and_not_the_training(here: Place) -> None:
    script = here.script(
        HELPERS + "import resource\nlog = 'muster-runs/latest/worker_0.log'\n"
        "resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (os.path.getsize(log) + 10,) * 2)\n"
        "for i in range(20):\n    print('line', i)"
    )
    code, out, err = here.run("-n", "1", command=(PYTHON, script))
    assert code == 0
    assert out.endswith("[0] line 19\n")
    assert err.count("/worker_0.log cannot be written") == 1


@both_starts
def test_passwords_reach_only_the_role_they_are_for(here: Place, start: str) -> None:
    script = here.script(HELPERS + "print(sorted(name for name in os.environ if 'PASSWORD' in name))")
    here.run(
        *("-n", "2", "--start", start),
        command=(PYTHON, script),
        MS_CLIENT_PASSWORD="c",
        MS_SERVER_PASSWORD="s",
    )
    assert here.log("1") == "['MS_CLIENT_PASSWORD']\n"


@both_starts
def test_bound_workers_keep_to_their_cores(here: Place, start: str) -> None:
    script = here.script(HELPERS + "print(len(os.sched_getaffinity(0)))")
    here.run("-n", "64", "--oversubscribe", "--start", start, "--bind-cores", command=(PYTHON, script))
    assert {here.log(str(rank)) for rank in range(64)} <= {"1\n", "2\n", "3\n", "4\n"}
    assert here.log("0") == "1\n" or here.log("63") != here.log("0")


@both_starts
def test_workers_prefer_the_memory_of_their_node(here: Place, start: str) -> None:
    get = (
        "library.syscall({'x86_64': 239}.get(os.uname().machine, 236), ctypes.byref(mode), None, 0, None, 0)"
    )
    code = f"import ctypes; library = ctypes.CDLL(None); mode = ctypes.c_int(-1); {get}; print(mode.value)"
    script = here.script(HELPERS + code)
    here.run("-n", "2", "--start", start, "--bind", "numa", command=(PYTHON, script))
    preferred, default = "1\n", "0\n"
    may_choose = bool(read_hardware(()).memory)
    assert here.log("0") == here.log("1") == (preferred if may_choose else default)


def test_a_bare_script_is_run_by_this_python(here: Place) -> None:
    code, out, _ = here.run("-n", "1", command=(here.script("import sys; print(sys.executable)"),))
    assert (code, out) == (0, f"[0] {PYTHON}\n")


@pytest.mark.parametrize(
    ("options", "command", "words"),
    [
        ((), (), "No command to run"),
        (("-n", "1"), ("no-such-program",), "'no-such-program' is not found"),
        (("-n", "1", "--config", "none.json"), ("true",), "--config names none.json"),
        (("-n", "1", "--password-file", "none"), ("true",), "--password-file names none"),
        (("-n", "1", "--hostfile", "none"), ("true",), "--hostfile none cannot be read: No such"),
        (("-n", "1", "--log-dir", "/dev/null/logs"), ("true",), "--log-dir /dev/null/logs cannot be written"),
        (("-n", "1", "--grace", "-1"), ("true",), "--grace is -1"),
        (("-n", "1", "--devices", "900"), ("true",), "--devices asks for 900"),
        (("-n", "2", "--min-workers", "3"), ("true",), "--min-workers is 3"),
        (("-n", "2", "--spares", "1025"), ("true",), "--spares 1025 on 1 host makes 1025 spares"),
        (("-n", "60000"), ("true",), "60000 workers are asked for on this host, whose "),
        (("--nnodes", "2", "--nproc-per-node", "1", "--scheduler"), ("true",), "--join HOST:PORT"),
        (("-H", "a..b:1"), ("true",), "not in the host list"),
    ],
)
def test_mistakes_end_with_one_sentence(
    here: Place, options: tuple[str, ...], command: tuple[str, ...], words: str
) -> None:
    code, out, err = here.run(*options, command=command)
    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith("muster: ")
    assert err.count("\n") == 1


FULL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); import muster.__main__ as m"


@pytest.mark.parametrize("options", [("-n", "2", "--join", "127.0.0.1:1"), ("-n", "1", "--scheduler")])
def test_a_disk_that_is_full_at_the_start_is_told_in_one_sentence(
    here: Place, options: tuple[str, ...]
) -> None:
    argv = ["run", *options, "--", "sleep", "600"]
    done = subprocess.run(
        [PYTHON, "-c", f"{FULL_DISK}; raise SystemExit(m.main({argv!r}))"],
        cwd=here.directory,
        env=environment(MS_SCHED_PORT=""),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"muster: The log muster-runs/\S+ cannot be written \(.+\); .*--log-dir\.\n", done.stderr
    )


def test_a_full_disk_costs_a_worker_that_is_started_again_its_log_only(here: Place) -> None:
    script = here.script(
        HELPERS + "import resource\n"
        "if not os.path.exists('tried'):\n"
        "    tell('tried')\n    resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (0, 0))\n"
        "    sys.exit(5)\n"
        "print('done')"
    )
    code, out, err = here.run("-n", "1", "--max-restarts", "1", command=(PYTHON, script))
    assert (code, out) == (0, "[0] done\n")
    assert err.count("/worker_0.log cannot be written") == 1


def test_a_python_of_another_environment_is_refused_where_it_lacks_muster(here: Place) -> None:
    there = here.directory / "other" / "bin"
    there.mkdir(parents=True)
    python = there / "python3"
    python.symlink_to(Path(PYTHON).resolve())
    (there.parent / "pyvenv.cfg").write_text(f"home = {Path(PYTHON).resolve().parent}\n")
    script = here.script("import muster")
    env = {"PYTHONPATH": ""}
    code, out, err = here.run("-n", "2", command=(str(python), script), **env)
    assert (code, out) == (2, "")
    assert f"The command's Python is {python}, which lacks the modules" in err
    assert f"this one is {PYTHON}" in err
    assert err.count("\n") == 1
    assert here.run("-n", "1", command=(str(python), "-c", "print(1)"), PYTHONPATH=":".join(sys.path))[0] == 0


@pytest.mark.parametrize("option", ["--config", "--password-file"])
def test_a_directory_that_may_not_be_entered_is_told(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: Path, **_: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", closed)
    with pytest.raises(
        SettingsError, match=f"{option} names keys/file, which cannot be read: Permission denied"
    ):
        launch_options.parse(["-n", "1", option, "keys/file", "--", "true"])


def test_a_wrong_configuration_is_told_before_workers_are_forked(here: Place) -> None:
    (here.directory / "config.json").write_text("{")
    script = here.script("import muster\nmuster.init()")
    code, _, err = here.run("-n", "2", command=(PYTHON, script), MS_CONFIG_FILE="config.json")
    assert code == 2
    assert err.startswith("muster: ") and "config.json: not valid JSON" in err
    assert err.count("\n") == 1


def test_a_device_named_twice_is_refused_before_anything_starts(here: Place) -> None:
    code, _, err = here.run("-n", "1", command=("true",), CUDA_VISIBLE_DEVICES="2,2")
    assert (code, err) == (2, "muster: CUDA_VISIBLE_DEVICES is '2,2'; it names device '2' twice.\n")
    assert not (here.directory / "muster-runs" / "latest").exists()


@pytest.mark.parametrize("name", ["scheduler.py", "scheduler/__init__.py"])
def test_a_scheduler_of_the_users_own_is_not_taken_for_musters(here: Place, name: str) -> None:
    here.script("RATE = 0.1\n", name)
    script = here.script(
        "import scheduler, time\nprint(scheduler.RATE)\n"
        "while 'ready on' not in open('muster-runs/latest/scheduler.log').read():\n    time.sleep(0.05)\n"
    )
    code, out, err = here.run("-n", "1", "--scheduler", "--grace", "60", command=(PYTHON, script))
    assert code == 0
    assert re.fullmatch(CLOSING, err)
    assert "[0] 0.1\n" in out
    assert "scheduler ready on" in (here.directory / "muster-runs" / "latest" / "scheduler.log").read_text()


def test_without_any_scheduler_nothing_starts(here: Place) -> None:
    code, _, err = here.run("-n", "1", command=("true",), MS_SCHED_PORT="")
    assert code == 2
    assert "No scheduler is known" in err


@pytest.mark.skipif(not Path(PYTHON).with_name("muster").exists(), reason="the package is not installed")
@both_starts
def test_the_console_command_launches_too(here: Place, start: str) -> None:
    script = here.script("import sys\nprint(sys.path[0], sys.argv)")
    muster = str(Path(PYTHON).with_name("muster"))
    launch = subprocess.run(
        [muster, "run", "-n", "2", "--start", start, "--", PYTHON, script],
        cwd=here.directory,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert launch.stdout == f"[0] {here.directory} ['script.py']\n", launch.stderr


def test_only_who_uses_the_door_of_an_uplink_holds_it(here: Place) -> None:
    """Held open by another, a door without an uplink would keep workers waiting before they go directly."""
    script = here.script(HELPERS + "tell('door' + ME, os.environ['MS_UPLINK'].partition(':')[2])\nstay()")
    launch = here.start("-n", "2", "--uplink", "on", command=(PYTHON, script))
    outer = {here.until("door0"), here.until("door1")}
    assert len(outer) == 1
    held = [str(each.readlink()) for each in Path(f"/proc/{_guardian_of(launch.pid)}/fd").iterdir()]
    assert f"socket:[{outer.pop()}]" not in held


def test_a_guardian_that_is_stopped_does_not_keep_the_launch_from_its_end(here: Place) -> None:
    script = here.script(HELPERS + "tell('ready')\nstay()")
    launch = here.start("-n", "1", command=(PYTHON, script))
    here.until("ready")
    os.kill(_guardian_of(launch.pid), signal.SIGSTOP)
    launch.send_signal(signal.SIGTERM)
    launch.communicate(timeout=100)
    assert launch.returncode == 128 + signal.SIGTERM


def _guardian_of(launcher: int) -> int:
    """The child of a launcher that has its name for good; others have it until they run their programs."""

    def found() -> int:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (*children, str(launcher))}
        alike = [int(pid) for pid in children if commands[pid] == commands[str(launcher)]]
        return alike[0] if len(alike) == 1 else 0

    return wait_for(found)


def test_a_launcher_that_is_only_made_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    with contextlib.ExitStack() as held:
        plan = plan_of(["-n", "2", "--scheduler", "--", "true"], {**os.environ, "MS_SCHED_PORT": ""}, held)
        Launcher(plan, Screen(os.environ))
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == handlers
    assert set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()) <= set(children)
    assert not list(tmp_path.iterdir())
