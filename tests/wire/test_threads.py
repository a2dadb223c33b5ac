"""A process that gets no thread, or no memory for one, ends in a sentence: it does not stay, half alive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from muster.wire.threads import NO_THREAD
from tests.scheduler.processes import environment, scheduler

SCARCE = """
import sys, threading
start = threading.Thread.start
def scarce(thread):
    if thread.name == sys.argv[1]:
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = scarce
"""


def ended(script: str, *arguments: str, **env: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", ["muster-timer", "muster-watcher", "muster-stream", "muster-tcp-endpoint"])
def test_a_worker_without_one_of_its_threads_leaves_nobody_waiting(name: str) -> None:
    script = SCARCE + "import time, muster\nmuster.init('tcp')\ntime.sleep(600)"
    with scheduler(MS_WORKER_NUM="1") as running:
        code, words = ended(
            script, name, MS_ROLE="MS_WORKER", MS_WORKER_NUM="1", MS_SCHED_PORT=str(running.port)
        )
    assert code == NO_THREAD
    assert f"its thread '{name}' could not run (can't start new thread). Look at the limits" in words


@pytest.mark.parametrize("name", ["scheduler", "journal"])
def test_a_scheduler_without_one_of_its_threads_does_not_stay(name: str, tmp_path: Path) -> None:
    """Renewed certificates and revocations would count no more, and nobody would know."""
    script = SCARCE + "from muster.scheduler.__main__ import main\nsys.exit(main(['--port', '0']))"
    code, words = ended(
        script,
        f"{name}_0",
        MS_ROLE="MS_SCHED",
        MS_WORKER_NUM="1",
        MS_ENABLE_RECOVERY="1",
        MS_RECOVERY_PATH=str(tmp_path),
    )
    assert code == NO_THREAD
    assert f"its thread '{name}' could not run (can't start new thread). Look at the limits" in words


def test_a_pool_that_is_closed_is_no_lack_of_threads() -> None:
    code, words = ended(
        "from muster.wire.threads import Pool\n"
        "pool = Pool(1, 'x')\n"
        "assert pool.submit(max, 2, 3).result() == 3\n"
        "pool.shutdown()\n"
        "try: pool.submit(print)\n"
        "except RuntimeError: pass\n"
    )
    assert (code, words) == (0, "")


def test_a_thread_without_memory_ends_its_process() -> None:
    code, words = ended(
        "import time\n"
        "from muster.wire.threads import start_thread\n"
        "def body(): raise MemoryError\n"
        "start_thread(body, name='x')\n"
        "time.sleep(600)"
    )
    assert code == NO_THREAD
    assert "its thread 'x' could not run (MemoryError). Look at the limits" in words


def test_at_the_interpreters_end_there_is_nothing_to_say() -> None:
    code, words = ended(
        "import threading\n"
        "from muster.wire.threads import start_thread\n"
        'def late(thread): raise RuntimeError("can\'t create new thread at interpreter shutdown")\n'
        "threading.Thread.start = late\n"
        "try: start_thread(print, name='x')\n"
        "except RuntimeError: pass\n"
    )
    assert (code, words) == (0, "")
