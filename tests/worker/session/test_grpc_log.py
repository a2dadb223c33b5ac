"""What gRPC says in a worker: nothing, or what was asked for, in a form that forges nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.scheduler.processes import environment

BEGIN = """
import ctypes, logging, os, sys
from muster.worker.session.grpc_log import guard_grpc_log
C = ctypes.CDLL(None)
def native(text): C.write(2, text.encode(), len(text.encode()))
logging.basicConfig(format="%(levelname)s %(message)s")
"""
GOAWAY = """
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
def frame(kind, data): return len(data).to_bytes(3, "big") + bytes((kind, 0)) + bytes(4) + data
def serve():
    peer, _ = server.accept()
    with peer:
        debug = b"too_many_pings\\nCRITICAL forged\\x1b[31m"
        peer.sendall(frame(4, b"") + frame(7, bytes(4) + (11).to_bytes(4, "big") + debug))
        while peer.recv(4096): pass
threading.Thread(target=serve, daemon=True).start()
import grpc
with grpc.insecure_channel("127.0.0.1:%d" % server.getsockname()[1]) as channel:
    try: channel.unary_unary("/a/b")(b"", timeout=4)
    except grpc.RpcError: pass
"""


def run(code: str, **env: str) -> str:
    """Runs Python code in a process of its own; returns its standard error."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code],
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_grpc_says_nothing_unless_it_is_asked() -> None:
    assert run("guard_grpc_log(os.environ)" + GOAWAY) == ""
    assert run("guard_grpc_log(os.environ)" + GOAWAY, GRPC_TRACE="http,handshaker") == ""


def test_a_servers_words_are_escaped_and_marked() -> None:
    lines = run("guard_grpc_log(os.environ)" + GOAWAY, GRPC_VERBOSITY="INFO").splitlines()
    assert any("too_many_pings\\nCRITICAL forged\\x1b[31m" in line for line in lines), lines
    assert all(line.startswith("WARNING gRPC (") and line.isprintable() for line in lines), lines


def test_other_c_code_is_heard_as_it_is() -> None:
    """NCCL's lines, say, and the last words of a process that aborts soon."""
    text = "host:1:1 [0] NCCL INFO Bootstrap\n  and more\n"
    told = run(f"guard_grpc_log(os.environ)\nnative({text!r})", GRPC_VERBOSITY="ERROR")
    assert told == text


def test_without_standard_error_grpc_is_silent() -> None:
    run(
        "os.close(2)\nguard_grpc_log(os.environ)\nassert os.environ['GRPC_VERBOSITY'] == 'NONE'\nos._exit(0)",
        GRPC_VERBOSITY="DEBUG",
    )


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="Linux only")
def test_it_is_asked_for_once() -> None:
    told = run(
        "guard_grpc_log(os.environ); guard_grpc_log(os.environ)\nnative('E1121 16:46:26.9 4965 a.cc:1] x')",
        GRPC_VERBOSITY="ERROR",
    )
    assert told == "WARNING gRPC (a.cc:1) says: x\n"


FORKING = """
guard_grpc_log(os.environ)
import grpc, multiprocessing, threading
channel = grpc.insecure_channel("127.0.0.1:1")
stopping = threading.Event()
def watch():
    while not stopping.is_set():
        try: channel.unary_unary("/a/b")(b"", timeout=0.05)
        except grpc.RpcError: pass
threads = [threading.Thread(target=watch) for _ in range(2)]
[thread.start() for thread in threads]
for _ in range(3):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(abs, range(4))
stopping.set()
[thread.join() for thread in threads]
"""


@pytest.mark.parametrize("env", [{}, {"GRPC_VERBOSITY": "INFO"}])
def test_a_scripts_own_forks_are_nothing_that_grpc_complains_of(env: dict[str, str]) -> None:
    assert "fork" not in run(FORKING, **env)
