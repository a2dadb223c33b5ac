"""The connection between a torch program that outlives generations and its agent."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from muster.errors import NotInitializedError
from muster.programs.sealed_nccl import take_new_secret
from muster.wire.threads import start_thread
from muster.worker.adopted import line_to_agent
from muster.worker.program_environment import AGENT_PID_VARIABLE

log = logging.getLogger("muster.worker")

_GONE = "The agent of this program has gone."
_MOST_HEARD_BYTES = 65_536
_LOOK_S = 1.0
_END_GRACE_S = 5.0
"""The time between SIGTERM and SIGKILL for a program whose agent was killed, in seconds; as with agents."""


class AgentLine:
    """Tells a program when generations end and begin, and passes its messages to its agent.

    Once it is created, the agent no longer ends the program when a generation ends.

    Args:
        on_over: called with the reason, in the listening thread, when the generation is over.

    Raises:
        NotInitializedError: no agent of ``muster run`` has started this program.
        SystemExit: the agent has ended.
    """

    def __init__(self, on_over: Callable[[str], None]) -> None:
        line = line_to_agent(os.environ)
        if line is None:
            raise NotInitializedError(
                "No agent has started this program.",
                remedy="Start it by muster run, if need be with --program torch.",
            )
        self._line = line
        try:
            self._agent = os.pidfd_open(int(os.environ[AGENT_PID_VARIABLE]))
        except ProcessLookupError:
            raise SystemExit(_GONE) from None
        self._on_over = on_over
        self._changed = threading.Condition()
        self._over = False
        self._first = False
        self._gone = False
        self._next: dict[str, str] | None = None
        start_thread(self._listen, name="muster-agent")
        self.stay()

    def stay(self) -> None:
        """Asks the agent to let this program live when a generation ends; this is the default."""
        self._line.sendall(b"rebuilds\n")

    def do_not_stay(self) -> None:
        """Asks the agent to end this program with the generation, until :meth:`stay` is called."""
        self._line.sendall(b"ends\n")

    def failed_first(self) -> bool:
        """Reports a failure of this program to the agent, and waits for its verdict.

        Returns:
            Whether the failure is this program's own; False if the generation is over.
        """
        with self._changed:
            if not self._over:
                self._line.sendall(b"failed\n")
            self._changed.wait_for(lambda: self._over or self._first or self._gone)
            return not self._over

    @property
    def is_over(self) -> bool:
        """Whether the generation that was entered last is over."""
        with self._changed:
            return self._over

    def restart(self, why: str) -> NoReturn:
        """Asks the agent to end this process and to start the program in the next generation; logs why."""
        log.warning("The program is started again: %s", why)
        self._line.sendall(f"restart {' '.join(why.split())}\n".encode())
        with self._changed:
            self._changed.wait_for(lambda: self._gone)
        raise SystemExit(_GONE)

    def enter_next(self, look: Callable[[], object] = bool) -> None:
        """Waits for the next generation and puts its ranks into the environment.

        Args:
            look: called once a second while it waits; it may raise.

        Raises:
            SystemExit: the agent has ended.
        """
        while not self._has_next():
            look()
        with self._changed:
            if self._next is None:
                raise SystemExit(_GONE)
            os.environ.update(self._next)
            self._next, self._over, self._first = None, False, False

    def _has_next(self) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._next is not None or self._gone, _LOOK_S)

    def _listen(self) -> None:
        try:
            self._hear()
        except ConnectionError:  # the agent was killed before it had read all that this program said
            pass
        finally:
            self._line.close()
            with self._changed:
                self._gone = True
                self._changed.notify_all()
            start_thread(self._end_without_agent, name="muster-agent-end")

    def _hear(self) -> None:
        """Handles the agent's messages until the connection ends."""
        rest = b""
        while True:
            heard, secrets, _, _ = socket.recv_fds(self._line, _MOST_HEARD_BYTES, 1)
            for secret in secrets:  # before the message about its generation
                take_new_secret(secret, os.environ)
            if not heard:
                return
            *lines, rest = (rest + heard).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _end_without_agent(self) -> None:
        """Ends this process if its agent was killed; the next agent starts a process of its own.

        A living agent also closes the connection when it ends the program, but then ends the process itself.
        """
        ended = select.poll()
        ended.register(self._agent, select.POLLIN)
        killed = bool(ended.poll(1000 * (_END_GRACE_S + _LOOK_S)))
        os.close(self._agent)
        if killed:
            log.error(
                "The agent of this program was killed, and its place in the job is lost: the program ends."
            )
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(_END_GRACE_S)
            os.kill(os.getpid(), signal.SIGKILL)

    def _take(self, said: dict[str, Any]) -> None:
        with self._changed:
            if "over" in said:  # it may be about a generation that this program has not entered yet
                self._over, self._next = True, None
            self._first = self._first or "first" in said
            self._next = said.get("variables", self._next)
            self._changed.notify_all()
        if "over" in said:
            log.info("%s", said["over"])
            self._on_over(said["over"])
