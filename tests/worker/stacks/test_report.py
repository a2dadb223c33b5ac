"""Where a worker's process stands: all that can be had, what cannot be had in a line, bounded, no secrets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from muster.wire.messages import Collective
from muster.worker.stacks.handler import VARIABLE
from muster.worker.stacks.mailbox import YOUNG_S, Mailbox, age_s
from muster.worker.stacks.report import own_report, program_report
from tests.waiting import LIMIT_S, wait_for

CALL = Collective(7, "all_reduce", "world", "float32", 16, False)


class Patient(Mailbox):
    """Waits as long for an answer as a busy host takes."""

    def ask(self, pid: int, wait_s: float = LIMIT_S) -> str | None:
        return super().ask(pid, wait_s)


def waits_for(over: threading.Event) -> None:
    over.wait()


def test_a_process_says_where_its_threads_are_and_what_is_not_to_be_had() -> None:
    over = threading.Event()
    waiting = threading.Thread(target=waits_for, args=(over,), name="loader")
    waiting.start()
    try:
        text = own_report(64 * 1024, {}, (CALL,))
    finally:
        over.set()
        waiting.join()
    assert ", loader (most recent call first)" in text and "in waits_for" in text
    assert text.index(", MainThread (most recent") < text.index(", loader (most recent")
    assert "7 of group world: all_reduce of 16 B float32, not done" in text
    assert "kernel:\nthread " in text and "system call" in text
    for absent in (
        "native frames: ",
        "NCCL RAS: none: NCCL is not loaded",
        "GPUs: ",
        "torch's flight recorder: ",
    ):
        assert absent in text


def test_a_report_is_bounded_and_each_part_has_room_in_it() -> None:
    text = own_report(1500, {}, (CALL,) * 30)
    assert len(text.encode()) <= 1500
    assert text.endswith("(cut)") and "last collectives" in text


def test_secrets_are_removed() -> None:
    hunter = Collective(7, "hunter2!", "world", "float32", 16, False)
    assert "hunter2!" not in own_report(64 * 1024, {"MS_CLIENT_PASSWORD": "hunter2!"}, (hunter,))


def test_a_program_without_handler_is_described_by_the_kernel_alone_and_lives() -> None:
    mailbox = Mailbox()
    program = subprocess.Popen(["sleep", "600"])
    try:
        while Path(f"/proc/{program.pid}/comm").read_text() != "sleep\n":
            pass  # descriptors are closed before the process has its new name
        text = program_report(mailbox, program.pid, 64 * 1024, {})
        assert "Python stacks: no process of this program has Muster's handler" in text
        assert f"thread {program.pid} (sleep)" in text
        assert "torch's flight recorder: not to be had from outside" in text
        assert program.poll() is None
    finally:
        program.kill()
        program.wait()
        mailbox.close()


def test_a_program_that_a_shell_has_started_is_found() -> None:
    mailbox = Patient()
    script = (
        f"import os, sys, time; sys.path[:0] = {sys.path!r}\n"
        "from muster.worker.stacks.handler import answer_signal\n"
        "answer_signal(os.environ)\nprint(os.getpid(), flush=True)\n"
        "def hangs_here():\n    time.sleep(600)\nhangs_here()"
    )
    program = subprocess.Popen(
        ["sh", "-c", 'env "$@"; :', "sh", sys.executable, "-c", script],
        env={**os.environ, VARIABLE: mailbox.path},
        stdout=subprocess.PIPE,
    )
    assert program.stdout is not None
    pid = int(program.stdout.readline())
    try:
        assert pid != program.pid
        wait_for(lambda: age_s(pid) > YOUNG_S)
        text = program_report(mailbox, program.pid, 64 * 1024, {})
        assert f"process {pid}:" in text and "in hangs_here" in text and f"thread {pid} (" in text
    finally:
        os.kill(pid, signal.SIGKILL)
        program.communicate()
        mailbox.close()


def test_nothing_of_it_is_loaded_before_it_is_needed() -> None:
    script = "import sys, muster.worker.session.session; print('muster.worker.stacks.report' in sys.modules)"
    paths = f"import sys; sys.path[:0] = {sys.path!r}; "
    done = subprocess.run([sys.executable, "-c", paths + script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
