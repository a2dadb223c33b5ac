"""What Muster's plug-in does within a torch program that Muster has started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from muster.worker.program_environment import AGENT_PID_VARIABLE, AGENT_VARIABLE

LETS_GO = """
import hashlib, os, threading
import torch

named = threading.Event()


def serve():
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
        file.write("pt_gloo_runloop")
    named.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # without the interpreter's lock, which it then needs
    os.write(1, b"has let go")


threading.Thread(target=serve, daemon=True).start()
named.wait()
"""


def test_a_program_ends_when_gloo_s_threads_have_let_go_of_what_is_over() -> None:
    """One that wants the interpreter's lock later aborts the process."""
    command = [sys.executable, "-c", LETS_GO]
    env = os.environ | {"MUSTER_STORE": "127.0.0.1:1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "has let go"


def test_a_helper_of_a_program_that_lives_on_has_no_agent_and_goes_on_without() -> None:
    command = [sys.executable, "-c", "import torch; print('goes on')"]
    env = os.environ | {"MUSTER_STORE": "127.0.0.1:1", "MS_IN_PLACE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "goes on\n", done.stderr


@pytest.mark.parametrize(("said", "is_torchs_own"), [({}, False), ({"MS_STEP_TIMES": "0"}, True)])
def test_torch_s_functions_stay_as_they_are_where_steps_are_not_to_be_measured(
    said: dict[str, str], is_torchs_own: bool
) -> None:
    program = "import torch; print(torch.autograd.backward.__code__.co_filename)"
    mine, its = socket.socketpair()
    with mine, its:
        env = os.environ | {"MUSTER_STORE": "127.0.0.1:1", AGENT_VARIABLE: str(its.fileno())} | said
        env |= {AGENT_PID_VARIABLE: str(os.getpid())}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=env,
            pass_fds=[its.fileno()],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert ("step_times" not in done.stdout) == is_torchs_own, done.stdout + done.stderr
