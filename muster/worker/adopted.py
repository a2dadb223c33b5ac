"""The result of ``muster.init()`` in a script that has an agent: the agent is the job's member."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Mapping
from typing import SupportsFloat

from muster.errors import NotInitializedError
from muster.worker.program_environment import (
    AGENT_PID_VARIABLE,
    AGENT_VARIABLE,
    GENERATION_VARIABLE,
    NODE_VARIABLE,
)

_NOT_HERE = frozenset(
    (
        "change_reason",
        "communicator",
        "device_ordinal",
        "group",
        "groups",
        "launch",
        "me",
        "members",
        "newcomer_ranks",
        "rejoin",
        "request_leave",
        "state_source_rank",
    )
)
_PEER = struct.Struct("3i")

data_waits: list[Callable[[float], None]] = []
"""Functions that are called with a step's wait for its data, in seconds, if the script reports it."""


class AdoptedSession:
    """A session whose membership is held by the agent. It has ranks and reports, but no communicator.

    The agent joins before the script starts, and leaves when the script has ended. A change of members ends
    or restarts the script (see :mod:`muster.programs.agent`). So there is nothing to open, and little to
    release.

    Args:
        env: the environment set by the agent; read at each call, because
            :func:`muster.torch.on_new_generation` updates it.
    """

    membership_event = None
    error = None
    leaves = False
    interrupted = False

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._line = line_to_agent(env)
        self._released = False
        self._step = 0

    @property
    def job_id(self) -> str:
        """The job's name."""
        return self._env["TORCHELASTIC_RUN_ID"]

    @property
    def node_id(self) -> str:
        """This worker's stable name."""
        return self._env[NODE_VARIABLE]

    @property
    def generation(self) -> int:
        """Number of the generation."""
        return int(self._env[GENERATION_VARIABLE])

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return int(self._env["RANK"])

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return int(self._env["WORLD_SIZE"])

    @property
    def local_rank(self) -> int:
        """This worker's rank among those of its host."""
        return int(self._env["LOCAL_RANK"])

    @property
    def local_world_size(self) -> int:
        """Number of workers on its host."""
        return int(self._env["LOCAL_WORLD_SIZE"])

    def __getattr__(self, name: str) -> object:
        """Raises an error that names an attribute which only other sessions have."""
        if name in _NOT_HERE:
            raise NotInitializedError(
                f"This program's agent holds its session, which has no {name} for it.",
                remedy="Use torch.distributed, or start the program with muster run --program muster.",
            )
        raise AttributeError(name)

    def step_boundary(self, step: int) -> None:
        """Does nothing: a change of members ends this script, or calls its training function again."""

    def report(
        self,
        step: int | None = None,
        samples_per_s: float | None = None,
        *,
        loss: SupportsFloat | None = None,
        samples: int | None = None,
        steps: int | None = None,
        epoch: int | None = None,
        epochs: int | None = None,
        learning_rate: SupportsFloat | None = None,
        data_s: float = 0.0,
        **numbers: SupportsFloat,
    ) -> None:
        """Reports the training's progress through the agent; see :meth:`muster.Session.report`.

        Reports are dropped if the agent is too slow to read them, or if this is a process that the script has
        started without the connection to the agent.
        """
        for note in data_waits:
            note(data_s)
        said: dict[str, object] = {
            "samples_per_s": samples_per_s,
            "loss": None if loss is None else float(loss),
            "samples": samples,
            "steps": steps,
            "learning_rate": None if learning_rate is None else float(learning_rate),
        }
        beside = {"epoch": epoch, "epochs": epochs, **{name: float(each) for name, each in numbers.items()}}
        if step is not None or {*said.values()} != {None} or {*beside.values()} == {None}:
            self._step = said["step"] = self._step + 1 if step is None else step
        said.update(beside, data_s=data_s)
        if self._line is not None:
            try:
                self._line.send(json.dumps({"report": said}).encode() + b"\n", socket.MSG_DONTWAIT)
            except OSError:
                return

    @property
    def released(self) -> bool:
        """Whether :meth:`release` was called."""
        return self._released

    def release(self, *, finished: bool | None = None, reason: str = "") -> None:
        """Ends the use of the session.

        Whether the worker finished or failed is decided when its script ends.
        """
        self._released = True
        line, self._line = self._line, None
        if line is not None:
            line.close()

    def end(self, error: BaseException | None) -> None:
        """Does the same as :meth:`release`, as the agent sees how the script ends."""
        self.release()

    def __enter__(self) -> AdoptedSession:
        """Does nothing."""
        return self

    def __exit__(self, *_: object) -> None:
        """Releases the session."""
        self.release()


def line_to_agent(env: Mapping[str, str]) -> socket.socket | None:
    """Returns this process's connection to its agent.

    None if a parent process kept it and the descriptor is something else.
    """
    try:
        line = socket.socket(fileno=os.dup(int(env[AGENT_VARIABLE])))
    except (KeyError, ValueError, OverflowError, OSError):
        return None
    try:
        pid, _, _ = _PEER.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if line.family == socket.AF_UNIX and pid == int(env.get(AGENT_PID_VARIABLE, "0")):
            return line
    except (ValueError, OSError):
        pass
    line.close()
    return None
