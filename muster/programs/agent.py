"""Runs a script that knows nothing of Muster as a worker: holds the worker's session and the script's store.

``muster run`` starts one agent for each worker whose command is a torch program. The agent joins, waits for
the group, opens the store's listener on loopback, and runs the command with the environment variables that
torchrun would set. It lives as long as its script and no longer:

- The script exits with 0: the worker has finished. The script fails: the worker fails with the same exit code
  or signal, unless another member's script failed first. In that case the failure was a consequence, and the
  script is started again in the next generation.
- The generation ends: the script and all processes that it started are ended (SIGTERM, then SIGKILL), and the
  script is started again in the next generation, with that generation's ranks. A script that has called
  :func:`muster.torch.on_new_generation` or :func:`muster.torch.keep_alive` is told of the end and of the next
  generation instead, and goes on.
- The agent is killed: the launcher kills the rest of the agent's process group, the script included. The
  launcher is killed: its guardian does the same.
- The scheduler is lost: the session and the store's operations wait for it, and the script goes on with its
  established connections. If the scheduler is started again and the store's content is lost, the agents ask
  for a new generation.

Nothing here runs in the script's process, so neither its interpreter's lock nor its end can harm the session.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from muster.communicators.nccl.generation_secret import DESCRIPTOR_VARIABLE, HandedSecret
from muster.errors import SIGTERM_EXIT_CODE, MembershipChanged, SettingsError, WorkerError
from muster.programs.assignment import FINISHED_KEY, handover_of, own_keys
from muster.programs.client import StoreClient
from muster.programs.link import StoreEndedError, StoreLostError
from muster.programs.sealed_nccl import hand_over
from muster.wire.settings import Environment
from muster.worker import ending, runtime
from muster.worker.program_environment import (
    AGENT_PID_VARIABLE,
    AGENT_VARIABLE,
    GLOO_VARIABLE,
    JAX_PROGRAM,
    NODE_VARIABLE,
    place_of,
    torch_variables,
)
from muster.worker.session.credentials import load_keyring
from muster.worker.stacks.handler import VARIABLE as STACKS_VARIABLE
from muster.worker.stacks.mailbox import Mailbox
from muster.worker.stacks.report import program_report

if TYPE_CHECKING:
    from muster.worker.session.session import Session

log = logging.getLogger("muster.worker")

TORCH_PREFIX = b"torch/"
FIRST_FAILURE = b"agent/first-failure"
LOOK_S = 0.05
MOST_HEARD_BYTES = 65536
"""The longest line that is read from the script, in bytes."""

CONSEQUENCE_S = 60.0
"""How long an agent whose script failed after another's waits for the generation to end, in seconds."""

RAISED = 1
"""The exit code of Python after an exception, which the loss of another rank may have caused."""

RAISED_SETTLE_S = 1.0
CAUGHT_SETTLE_S = 10.0
"""How long a failure by an exception waits for an earlier failure of another member, in seconds: the first
after the script has exited, the second while the script goes on.

A process that dies breaks its connections before its agent sees its end, so the others' exceptions may be
known first. The second is longer because a process that goes on has nothing to tear down: on an overloaded
machine, an agent saw its script's end more than two seconds late. MS_NODE_TIMEOUT is added to it: after that
time, an agent that was lost together with its script, for example with its host, is missed.
"""

END_GRACE_S = 5.0
"""The time between SIGTERM and SIGKILL for a script whose generation is over, in seconds."""

_SET_CHILD_SUBREAPER = 36


def main(arguments: Sequence[str]) -> int:
    """Runs ``-- COMMAND [ARGUMENT...]`` as a worker of the job that the environment names.

    Returns:
        The exit code.
    """
    command = list(arguments[1:] if arguments[:1] == ["--"] else arguments)
    sys.argv[0] = next((word for word in command if word.endswith(".py")), command[0])  # for `ps`
    return Agent(command).run()


class Agent:
    """One worker's agent.

    Args:
        command: the script's command line.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._script: subprocess.Popen[bytes] | None = None
        self._session: Session | None = None
        self._line: socket.socket | None = None
        self._heard = b""
        self._lost: StoreClient | None = None
        self._rebuilds = False
        self._asked_to_end: signal.Signals | None = None
        self._watches = False
        self._starts = 0
        self._secret = HandedSecret()
        self._mailbox = Mailbox()

    def run(self) -> int:
        """Joins, and runs the command in each generation until it ends; returns its exit code.

        Raises:
            SettingsError: a setting is wrong.
            WorkerError: this worker cannot join, or has lost its place in the job.
        """
        for each in ("MS_IN_PLACE", "MS_STEP_TIMES"):
            Environment(os.environ, SettingsError).flag(each)  # torch's plug-in cannot refuse a wrong value
        gloo = os.environ.get(GLOO_VARIABLE, "")
        ending.note(encrypts_gloo=gloo == "muster" and JAX_PROGRAM not in self._command)
        ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        session = self._session = runtime.init("torch")
        session.take_stacks = self._take_stacks
        signal.signal(signal.SIGTERM, self._ask_to_end)
        signal.signal(signal.SIGINT, self._ask_to_end)
        try:
            while True:
                code = self._run_generation(session)
                if code is not None:
                    return self._leave(session, code)
                self._rejoin(session)
        finally:
            self._end_script()

    def _ask_to_end(self, number: int, _frame: FrameType | None) -> None:
        self._asked_to_end = signal.Signals(number)
        script, session = self._script, self._session
        if script is not None and ending.NOTES_VARIABLE not in os.environ:  # a launcher signals the group
            script.send_signal(number)
        if not self._watches and session is not None:  # also while a script waits for the next generation
            session.leave_now(self._asked_to_end.name)

    def _rejoin(self, session: Session) -> None:
        if self._asked_to_end is not None:  # the handler has not told the session during a watch
            session.leave_now(self._asked_to_end.name)
        while True:
            try:
                session.rejoin()
                return
            except MembershipChanged as change:
                log.info("%s", change.message)

    def _leave(self, session: Session, code: int) -> int:
        """Ends the session; returns the exit code for the launcher.

        If a signal ended the script, the agent ends itself by the same signal.
        """
        if code == 0:
            session.release(finished=True)
        elif self._asked_to_end and code in (-signal.SIGTERM, SIGTERM_EXIT_CODE):
            session.note_left()
            return SIGTERM_EXIT_CODE
        elif code < 0:
            name = signal.Signals(-code).name
            runtime.abandon(WorkerError(f"its script was ended by {name}"))
            with contextlib.suppress(OSError):  # SIGKILL has no other handler
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        else:  # also if no launcher sees how this process ends
            runtime.abandon(SystemExit(code))
        return code if code > 0 else 0 if code == 0 else 128 - code

    # ------------------------------------------------------------ one generation

    def _run_generation(self, session: Session) -> int | None:
        """Runs the script in this generation; returns its exit code, or None if the generation is over."""
        keyring = load_keyring(session.settings, os.environ)
        me, generation = session.me, session.generation
        store = StoreClient(session.settings, keyring, me.node_id, me.incarnation, generation)
        try:
            place = place_of(session.job_id, generation, session.members, session.rank, self._starts)
            port = store.open_proxy(TORCH_PREFIX, own_keys(handover_of(session)))
            variables = {
                **torch_variables(place, port, os.environ.get(GLOO_VARIABLE, "")),
                NODE_VARIABLE: me.node_id,
                AGENT_PID_VARIABLE: str(os.getpid()),
                **hand_over(session, self._secret),
            }
            if (
                self._script is not None and self._script.poll() == 0
            ):  # the script has ended well between two generations
                return self._ended(session, store, 0)
            session.report(self._starts + 1, 0.0)  # a reported step means that it holds the state
            script = self._begin(variables)
            self._starts += 1
            if self._watch(session, store, script):
                return self._ended(session, store, script.returncode)
            if not self._rebuilds or not self._say(over="The generation is over."):
                self._end_script()
            return None
        except MembershipChanged as change:  # the generation was over before the script could begin
            log.info("%s", change.message)
            return None
        finally:
            self._secret.forget()
            store.close("The generation is over.")

    def _begin(self, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Starts the script, or announces this generation to a script that outlived the previous one."""
        secret = () if self._secret.descriptor < 0 else (self._secret.descriptor,)
        if self._script is not None and self._say(secret, variables=dict(variables)):
            return self._script
        self._end_script()
        self._line, theirs = socket.socketpair()
        with theirs:
            env = {**os.environ, **variables, AGENT_VARIABLE: str(theirs.fileno())}
            env[STACKS_VARIABLE] = self._mailbox.path
            if secret:
                env[DESCRIPTOR_VARIABLE] = str(*secret)
            script = subprocess.Popen(self._command, env=env, pass_fds=(theirs.fileno(), *secret))
        self._script, self._rebuilds, self._heard = script, False, b""
        if self._asked_to_end:  # the signal came just before the script was started
            script.send_signal(signal.SIGTERM)
        return script

    def _take_stacks(self, limit_bytes: int) -> str:
        """Returns the script's stacks, at most ``limit_bytes``; called in a thread of the session."""
        script = self._script
        if script is None or script.poll() is not None:
            return "No program runs here at the moment."
        return program_report(self._mailbox, script.pid, limit_bytes, os.environ)

    def _say(self, descriptors: Sequence[int] = (), **said: object) -> bool:
        """Sends a message and file descriptors to the script; returns whether they could be sent."""
        assert self._line is not None
        text = json.dumps(said).encode() + b"\n"
        try:
            sent = socket.send_fds(self._line, [text], descriptors) if descriptors else 0
            self._line.sendall(text[sent:])
        except OSError:
            return False
        return True

    def _watch(self, session: Session, store: StoreClient, script: subprocess.Popen[bytes]) -> bool:
        """Waits until the script has ended or the generation is over.

        Returns:
            Whether to handle the script's end: it has ended, and if the generation is over, with exit code 0.
        """
        assert self._line is not None
        ended = select.poll()
        handle, line = os.pidfd_open(script.pid), self._line.fileno()
        ended.register(handle, select.POLLIN)
        ended.register(line, select.POLLIN)
        self._watches = True
        try:
            while script.poll() is None:
                if self._is_over(session, store):
                    return script.poll() == 0
                if any(which == line for which, _ in ended.poll(1000 * LOOK_S)):
                    heard = b""
                    with contextlib.suppress(ConnectionResetError):  # the script ended with messages unread
                        heard = self._line.recv(4096)
                    if not heard:
                        ended.unregister(line)
                    self._hear(session, store, heard)
        finally:
            self._watches = False
            os.close(handle)
        return True

    def _hear(self, session: Session, store: StoreClient, heard: bytes) -> None:
        """Handles the script's messages, one per line."""
        *lines, rest = (self._heard + heard).split(b"\n")
        self._heard = rest[:MOST_HEARD_BYTES]
        for line in lines:
            if line in (b"rebuilds", b"ends"):
                self._rebuilds = line == b"rebuilds"
            elif line == b"failed":
                settle_s = CAUGHT_SETTLE_S + session.settings.node_timeout_s
                if self._is_first_failure(session, store, settle_s):
                    self._say(first=True)
            elif line.startswith(b"restart "):
                self._rebuilds = False
                session.ask_for_new_generation(line[len(b"restart ") :].decode(errors="replace"))
            else:
                # The script's line is not trusted: a malformed one is dropped.
                with contextlib.suppress(
                    ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, WorkerError
                ):
                    said = json.loads(line)
                    if "times" in said:
                        session.add_step_times(*said["times"])
                    else:
                        session.report(**said["report"])

    def _is_over(self, session: Session, store: StoreClient) -> bool:
        try:
            if isinstance(store.error, StoreLostError) and self._lost is not store:
                self._lost = store
                session.ask_for_new_generation(store.error.message)
            if session.membership_event is not None:  # a planned change: this worker is ready at any time
                session.step_boundary(self._starts)
            _ = session.communicator
        except MembershipChanged as change:
            log.info("%s", change.message)
            return True
        return False

    def _ended(self, session: Session, store: StoreClient, code: int) -> int | None:
        """Decides whether the script's end ends its worker.

        Returns:
            The worker's exit code; None if another member's script failed first, and the generation is over.
        """
        if code == 0:
            with contextlib.suppress(StoreEndedError, TimeoutError):
                store.set(TORCH_PREFIX + f"/{FINISHED_KEY}".encode(), b"1")
        if code == 0 or self._asked_to_end:
            return code
        if self._is_first_failure(session, store, RAISED_SETTLE_S if code == RAISED else 0.0):
            return code
        deadline = time.monotonic() + CONSEQUENCE_S
        while time.monotonic() < deadline and not self._asked_to_end:
            if self._is_over(session, store):
                log.info("the script ended with %d because another member's did", code)
                return None
            time.sleep(LOOK_S)
        return code

    def _is_first_failure(self, session: Session, store: StoreClient, settle_s: float) -> bool:
        """Whether this is the generation's first failure of a script.

        Args:
            session: this worker's session.
            store: the generation's store.
            settle_s: how long to wait for another member's failure before claiming to be the first.
        """
        me = session.node_id.encode()
        try:
            if settle_s:
                store.wait(FIRST_FAILURE, settle_s)
            return store.compare_set(FIRST_FAILURE, b"", me) == me
        except (StoreEndedError, TimeoutError):  # the generation is over, or about to be
            return False

    def _end_script(self) -> None:
        """Ends the script and all processes that it started.

        Those become children of this process, a subreaper, when their parents end.
        """
        script, self._script = self._script, None
        if script is None:
            return
        if self._line is not None:
            self._line.close()
        if script.poll() is None:
            script.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                script.wait(END_GRACE_S)
        if script.poll() is None:
            script.kill()
            script.wait()
        while left := _children():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def _children() -> list[int]:
    """Returns the ids of this process's children, regardless of the thread that started them."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
