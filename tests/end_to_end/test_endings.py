"""How a script ends is what the scheduler hears, and what the person who watches it sees."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scheduler.processes import Scheduler, environment, scheduler
from tests.waiting import LIMIT_S

BEGIN = """
import signal, sys, threading, traceback, muster
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
CTRL_C = "signal.raise_signal(signal.SIGINT)"
DONE = "has completed the training"
LEFT = "left: asked to leave"


@contextlib.contextmanager
def start(running: Scheduler, *command: str, size: int = 1) -> Iterator[subprocess.Popen[str]]:
    """Starts a worker; it is killed at the end, should it live then."""
    process = subprocess.Popen(
        command,
        env=environment(MS_ROLE="MS_WORKER", MS_WORKER_NUM=str(size), MS_SCHED_PORT=str(running.port)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def script(code: str) -> tuple[str, ...]:
    """The command that runs a script with these lines."""
    return (sys.executable, "-W", "error", "-c", BEGIN + code)


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Its exit code and what it wrote to stderr, without the log."""
    _, errors = process.communicate(timeout=LIMIT_S)
    return process.returncode, [line for line in errors.splitlines() if " muster.worker " not in line]


@pytest.mark.parametrize(
    ("code", "exit_code", "told"),
    [
        ("with muster.init(): raise SystemExit(3)", 3, "left: exit code 3"),
        ("with muster.init(): raise SystemExit('no data')", 1, "left: SystemExit: no data"),
        ("with muster.init(): raise SystemExit(0)", 0, DONE),
        ("with muster.init(): raise SystemExit", 0, DONE),
        ("muster.init(); exit(4)", 4, "left: exit code 4"),
        ("muster.init(); quit()", 0, DONE),
        ("muster.init(); sys.exit(5)", 5, "left: exit code 5"),
        ("muster.init(); sys.exit(0)", 0, DONE),
        ("muster.init(); raise muster.LeaveGranted('You leave.')", 0, LEFT),
        ("with muster.init(): raise muster.LeaveGranted('You leave.')", 0, LEFT),
    ],
)
def test_an_exit_with_a_code_has_failed_and_any_other_finished(code: str, exit_code: int, told: str) -> None:
    with scheduler(MS_WORKER_NUM="1") as running, start(running, *script(code)) as process:
        running.await_log(told)
        assert ended(process)[0] == exit_code


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("SystemExit(6)", 6, "left: exit code 6"),
        ("SystemExit(0)", 0, DONE),
    ],
)
def test_the_launcher_sees_the_code_with_which_a_fork_of_it_exits(
    end: str, code: int, told: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(f"import muster\nmuster.init()\nraise {end}\n")
    launch = (
        "-m",
        "muster",
        "run",
        "-n",
        "2",
        "--start",
        "fork",
        "--log-dir",
        str(tmp_path),
        "--",
        sys.executable,
    )
    command = (sys.executable, *launch, str(tmp_path / "train.py"))
    with scheduler() as running, start(running, *command) as process:
        running.await_log(told)
        code_seen, said = ended(process)
        assert code_seen == code
        assert "starting each worker afresh" not in " ".join(said)


SIGTERM = "signal.raise_signal(signal.SIGTERM)"
AT_ITS_END = f"session.backend.close = lambda: {SIGTERM}"


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (f"session = muster.init(); {AT_ITS_END}; muster.release()", 0),
        (f"session = muster.init(); {AT_ITS_END}; sys.exit(0)", 0),
        (f"import atexit; atexit.register(lambda: {SIGTERM}); muster.init(); muster.release()", 0),
        ("muster.init(); sys.end = type('', (), {'__del__': lambda _, f=signal.raise_signal: f(15)})()", 0),
        (f"muster.init(); muster.release(); {SIGTERM}", -signal.SIGTERM),
        (f"session = muster.init(); {AT_ITS_END} or {SIGTERM}; muster.release()", -signal.SIGTERM),
    ],
)
def test_sigterm_does_not_make_a_failure_of_a_worker_that_says_it_has_finished(
    code: str, exit_code: int
) -> None:
    with scheduler(MS_WORKER_NUM="1") as running, start(running, *script(code)) as process:
        running.await_log(DONE)
        assert ended(process)[0] == exit_code


OWN_LOOP = """
session = muster.init()
for step in range(10**9):
    session.step_boundary(step)
    muster.all_reduce(1.0)
    session.report(step + 1, 1.0)
"""


def test_a_loop_of_ones_own_that_is_drained_ends_well_without_catching_anything() -> None:
    with scheduler(MS_WORKER_NUM="1") as running, start(running, *script(OWN_LOOP)) as process:
        running.await_log("Generation 1 stands")
        node_id = running.await_log("has joined").partition("Node ")[2].split()[0]
        assert running.command("drain", node_id, "--reason", "maintenance").returncode == 0
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0
        assert "Traceback" not in errors
        assert errors.endswith("muster.worker INFO This worker leaves the job: maintenance.\n")


WATCHED = """
def watch():
    main = threading.main_thread().ident
    while "all_reduce" not in {frame.name for frame in traceback.extract_stack(sys._current_frames()[main])}:
        threading.Event().wait(0.01)
    print("hangs", flush=True)

session = muster.init()
threading.Thread(target=watch, daemon=True).start()
muster.all_reduce(1.0)
"""


def test_ctrl_c_in_a_collective_says_so_in_one_line() -> None:
    with (
        scheduler() as running,
        start(running, *script(WATCHED), size=2) as first,
        start(running, *script("muster.init(); signal.pause()"), size=2),
    ):
        assert first.stdout is not None and first.stdout.readline() == "hangs\n"
        first.send_signal(signal.SIGINT)
        assert ended(first) == (-signal.SIGINT, ["interrupted"])
        running.await_log("left: interrupted from the keyboard")


def test_ctrl_c_while_others_are_missing_says_so_in_one_line() -> None:
    with scheduler() as running, start(running, *script("muster.init()"), size=2) as process:
        running.await_log("1 of 2 workers is in")
        process.send_signal(signal.SIGINT)
        assert ended(process) == (-signal.SIGINT, ["interrupted"])
        running.await_log("left: interrupted from the keyboard")


@pytest.mark.parametrize(
    ("code", "last"),
    [
        (f"with muster.init(): {CTRL_C}", "interrupted"),
        (f"muster.init(); muster.release(); {CTRL_C}", "KeyboardInterrupt"),
        (f"sys.excepthook = lambda *_: print('mine', file=sys.stderr); muster.init(); {CTRL_C}", "mine"),
        ("muster.init(); raise ValueError('mine')", "ValueError: mine"),
    ],
)
def test_only_what_ctrl_c_does_to_a_session_loses_its_traceback(code: str, last: str) -> None:
    with scheduler(MS_WORKER_NUM="1") as running, start(running, *script(code)) as process:
        _, errors = ended(process)
    assert errors[-1] == last
    assert (errors[0] == "Traceback (most recent call last):") == (last not in ("interrupted", "mine"))
