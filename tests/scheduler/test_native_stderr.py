"""The pipe at descriptor 2: what C code writes, what Python writes, and how it all ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.scheduler.processes import environment

BEGIN = """
import ctypes, faulthandler, logging, os, subprocess, sys, threading
from scheduler import logs, native_stderr
from scheduler.logs import LOG, Recorder
from tests.scheduler.test_handshakes import HEALTHY, VERIFY, failed
logs.set_up("INFO", {})
C, HOLDING = ctypes.CDLL(None), ctypes.PyDLL(None)  # the second one keeps the interpreter's lock
FAILED = failed(VERIFY + "certificate has expired")
def native(text): C.write(2, text.encode(), len(text.encode()))
"""


def run(code: str, *options: str, code_wanted: int = 0) -> str:
    """Runs Python code in a process of its own; returns its standard error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *options, "-c", BEGIN + code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code_wanted, done.stderr
    return done.stderr


def test_what_is_no_trace_comes_through_and_the_trace_does_not() -> None:
    told = run("""
watch = native_stderr.HandshakeWatch()
native("before\\n" + HEALTHY + "between\\n" + FAILED + "E1121 16:46:26.925122    4965 a.cc:1] wrong\\n")
native("without an end")
watch.close()
native("\\nafterwards\\n")
""")
    assert told == (
        "before\nbetween\nE1121 16:46:26.925122    4965 a.cc:1] wrong\nwithout an end\nafterwards\n"
    )


def test_a_line_without_an_end_is_not_kept_back() -> None:
    code = "watch = native_stderr.HandshakeWatch(); native('Continue? '); sys.stdin.read(); watch.close()"
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + code],
        env=environment(),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stderr is not None
    assert process.stderr.read(100) == b"Continue? "  # while the process still waits
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_what_python_writes_does_not_pass_through_the_pipe() -> None:
    told = run(
        """
watch = native_stderr.HandshakeWatch()
with watch._lock:  # nobody reads the pipe now
    print("printed", file=sys.stderr)
    LOG.warning("logged")
    faulthandler.dump_traceback()
    sys.stderr.write("unfinished")
    sys.stderr.flush()
    os.write(watch._real, b"|")
watch.close()
print("and back", file=sys.stderr)
LOG.warning("again")
assert os.fstat(2).st_ino == os.fstat(watch._real).st_ino
""",
        "-X",
        "faulthandler",
    )
    lines = told.splitlines()
    assert lines[0] == "printed"
    assert lines[1].endswith("WARNING logged")
    assert lines[-2] == "unfinished|and back"
    assert lines[-1].endswith("WARNING again")


@pytest.mark.parametrize("options", [(), ("-u",)])
def test_standard_error_is_buffered_as_before(options: tuple[str, ...]) -> None:
    run(
        """
def facts():
    it = sys.stderr
    return it.encoding, it.errors, it.line_buffering, it.write_through
before = facts()
watch = native_stderr.HandshakeWatch()
assert facts() == before and sys.stderr is not sys.__stderr__
watch.close()
assert sys.stderr is sys.__stderr__
""",
        *options,
    )


def test_failures_are_told_counted_and_audited_until_the_reports_end() -> None:
    told = run("""
recorder = Recorder()
watch = native_stderr.HandshakeWatch()
native(FAILED)  # nobody wants to know yet
with watch._lock: watch._drain()
watch.report_to(recorder)
for _ in range(1000):
    native(FAILED)
    with watch._lock: watch._drain()
watch.finish_reports()
assert recorder.failed_handshakes["expired"] == 1000, recorder.failed_handshakes
native(FAILED)
watch.close()
assert recorder.failed_handshakes["expired"] == 1000
""")
    lines = told.splitlines()
    assert "denied code=expired call=handshake peer=10.0.0.9:41234 text=" in lines[0]
    assert "count=" not in lines[0]
    assert 2 <= len(lines) <= 20  # one in ten seconds
    assert sum(int(line.partition("count=")[2].split()[0]) for line in lines[1:]) == 999


def test_nobody_waits_for_a_pipe_that_is_full() -> None:
    """Whoever held the interpreter's lock meanwhile would wait for ever: the reader needs it, too."""
    run("""
watch = native_stderr.HandshakeWatch()
line = b"x" * 4095 + b"\\n"
with watch._lock:
    full = [HOLDING.write(2, line, len(line)) for _ in range(1 + native_stderr.PIPE_BYTES // len(line))]
assert full[0] == len(line) and full[-1] == -1, full
watch.close()
""")


def test_a_crash_in_c_code_says_where_it_was() -> None:
    told = run(
        """
watch = native_stderr.HandshakeWatch()
def crashes(): HOLDING.abort()
crashes()
""",
        code_wanted=-6,
    )
    assert "Fatal Python error: Aborted" in told
    assert "in crashes" in told


def test_a_child_that_lives_on_keeps_nobody_waiting_for_long() -> None:
    run("""
watch = native_stderr.HandshakeWatch()
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
watch.close()
assert watch._thread.is_alive()
child.stdin.close()
child.wait()
""")


def test_a_fault_in_the_reader_leaves_standard_error_as_it_was() -> None:
    told = run("""
class Broken(Recorder):
    def handshake_failed(self, line, *, quiet): raise RuntimeError("no")
watch = native_stderr.HandshakeWatch()
watch.report_to(Broken())
native(FAILED)
watch._thread.join()
native("still heard\\n")
watch.close()
""")
    assert "fault while reading gRPC's trace" in told
    assert told.endswith("still heard\n")


def test_no_thread_is_left() -> None:
    run("""
watch = native_stderr.HandshakeWatch()
watch.close()
assert threading.active_count() == 1
assert not faulthandler.is_enabled()
""")


@pytest.mark.parametrize(
    ("tls", "own", "watched", "verbosity", "trace"),
    [
        (True, {}, True, "INFO", "handshaker"),
        (False, {}, False, "ERROR", None),
        (True, {"GRPC_VERBOSITY": "DEBUG"}, False, "DEBUG", None),
        (True, {"GRPC_TRACE": "http"}, False, "ERROR", "http"),
    ],
)
def test_who_asks_grpc_himself_gets_what_he_asked_for(
    tls: bool, own: dict[str, str], watched: bool, verbosity: str, trace: str | None
) -> None:
    run(f"""
env = {own!r}
with native_stderr.handshakes_watched(env, tls={tls}) as watch:
    assert (watch is not None) is {watched}
    assert env.get("GRPC_VERBOSITY") == {verbosity!r}
    assert env.get("GRPC_TRACE") == {trace!r}
assert threading.active_count() == 1
""")


def test_without_standard_error_there_is_no_watch() -> None:
    run("""
os.close(2)
env = {}
with native_stderr.handshakes_watched(env, tls=True) as watch:
    assert watch is None
    assert env == {"GRPC_VERBOSITY": "ERROR"}
os._exit(0)
""")
