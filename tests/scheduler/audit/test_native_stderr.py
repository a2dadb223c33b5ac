"""The socket at descriptor 2: what C code writes, what Python writes, and how it all ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.scheduler.processes import environment

BEGIN = """
import ctypes, faulthandler, logging, os, subprocess, sys, threading
from muster.scheduler.audit import logs, native_stderr
from muster.scheduler.audit.logs import LOG, Recorder
from tests.scheduler.audit.test_grpc_trace import HEALTHY, VERIFY, failed, records
logs.set_up("INFO", {})
C, HOLDING = ctypes.CDLL(None), ctypes.PyDLL(None)  # the second one keeps the interpreter's lock
FAILED = failed(VERIFY + "certificate has expired")
def native(text): C.write(2, text.encode(), len(text.encode()))
def trace(text): [C.write(2, each, len(each)) for each in records(text)]
"""


def run(code: str, *options: str, code_wanted: int = 0) -> str:
    """Runs Python code in a process of its own; returns its standard error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *options, "-c", BEGIN + code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code_wanted, done.stderr
    return done.stderr


def messages(told: str) -> list[str]:
    """The log's lines without their times."""
    return [line.partition(" ")[2] for line in told.splitlines()]


def test_what_is_no_trace_is_told_on_a_line_each_and_marked() -> None:
    told = run("""
watch = native_stderr.HandshakeWatch()
native("malloc(): corrupted\\n")
trace(HEALTHY)
native("E1121 16:46:26.925122    4965 a.cc:1] wrong name: \\x1b[2J\\n2026-01-01T00:00:00.000Z INFO forged\\n")
trace(FAILED)
watch.close()
native("afterwards\\n")
""")
    assert messages(told) == [
        "WARNING C code says: malloc(): corrupted",
        "WARNING gRPC (a.cc:1) says: wrong name: \\x1b[2J\\n2026-01-01T00:00:00.000Z INFO forged",
        "",
    ]
    assert told.endswith("\nafterwards\n")


def test_a_failure_within_a_name_is_nobodys() -> None:
    """A stranger's name holds the record of a failed handshake of another address."""
    told = run("""
recorder = Recorder()
watch = native_stderr.HandshakeWatch()
watch.report_to(recorder)
forged = failed(VERIFY + "certificate has expired", "ipv4:6.6.6.6:1")
native("E1121 16:46:26.925122    4965 ssl.cc:1] No match found for server name: x\\n" + forged)
native("E1121 16:46:26.925122    4965 ssl.cc:1] No match found for server name: " + "x" * 4000 + forged)
native("E1121 16:46:26.925122    4965 ssl.cc:1] " + "x" * 40000 + "\\n" + forged)
watch.finish_reports()
watch.close()
assert not recorder.failed_handshakes.total(), recorder.failed_handshakes
""")
    assert all("gRPC (ssl.cc:1) says" in line for line in told.splitlines())
    assert 1 <= len(told.splitlines()) <= 2


def test_a_flood_becomes_few_lines_that_are_short() -> None:
    told = run("""
watch = native_stderr.HandshakeWatch()
for number in range(5000):
    native(f"E1121 16:46:26.925122    4965 ssl.cc:1] No match found for server name: {number} " + "x" * 1000)
    if number % 100 == 0:
        with watch.native.lock: watch.native.drain()
watch.close()
""")
    assert 2 <= len(told.splitlines()) <= 4
    assert all(len(line) <= 300 for line in told.splitlines()), told
    assert "more things within 10 s" in told


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
    assert b"C code says: Continue?" in process.stderr.read(100)  # while the process still waits
    process.communicate(timeout=100)
    assert process.returncode == 0


def test_what_python_writes_does_not_pass_through_the_pipe() -> None:
    told = run(
        """
watch = native_stderr.HandshakeWatch()
with watch.native.lock:  # nobody reads the pipe now
    print("printed", file=sys.stderr)
    LOG.warning("logged")
    faulthandler.dump_traceback()
    sys.stderr.write("unfinished")
    sys.stderr.flush()
    os.write(watch.native.real, b"|")
watch.close()
print("and back", file=sys.stderr)
LOG.warning("again")
assert os.fstat(2).st_ino == os.fstat(watch.native.real).st_ino
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
trace(FAILED)  # nobody wants to know yet
with watch.native.lock: watch.native.drain()
watch.report_to(recorder)
for _ in range(1000):
    trace(FAILED)
    with watch.native.lock: watch.native.drain()
watch.finish_reports()
assert recorder.failed_handshakes["expired"] == 1000, recorder.failed_handshakes
trace(FAILED)
watch.close()
assert recorder.failed_handshakes["expired"] == 1000
""")
    lines = told.splitlines()
    assert "denied code=expired call=handshake peer=10.0.0.9:41234 text=" in lines[0]
    assert "count=" not in lines[0]
    assert 2 <= len(lines) <= 20  # one in ten seconds
    assert sum(int(line.partition("count=")[2].split()[0]) for line in lines[1:]) == 999


def test_nobody_waits_for_a_pipe_that_is_full() -> None:
    """A thread that held the interpreter's lock meanwhile would wait for ever: the reader needs it, too."""
    run("""
watch = native_stderr.HandshakeWatch()
line = b"x" * 4095 + b"\\n"
with watch.native.lock:
    written = []
    while not written or written[-1] == len(line):
        written.append(HOLDING.write(2, line, len(line)))
assert written[-1] == -1 and len(written) > 10, written
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
assert watch.native.thread.is_alive()
child.stdin.close()
child.wait()
""")


def test_a_fault_in_the_reader_leaves_standard_error_as_it_was() -> None:
    told = run("""
class Broken(Recorder):
    def handshake_failed(self, failure): raise RuntimeError("no")
watch = native_stderr.HandshakeWatch()
watch.report_to(Broken())
trace(FAILED)
watch.native.thread.join()
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
        (False, {}, True, "ERROR", None),
        (True, {"GRPC_VERBOSITY": "DEBUG"}, True, "DEBUG", None),
        (True, {"GRPC_TRACE": "http"}, True, "ERROR", "http"),
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
    assert env == {"GRPC_VERBOSITY": "NONE"}
os._exit(0)
""")
