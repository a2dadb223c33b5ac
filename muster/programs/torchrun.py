"""torchrun over Muster: ``torchrun --rdzv-backend=muster --rdzv-endpoint=HOST:PORT --rdzv-id=JOB ...``.

Each torchrun agent is a worker of the job ``JOB``, and a generation holds one or more rounds of its
rendezvous. Its workers are clients of a listener on loopback in the agent's process. If an agent starts its
workers again, the others notice and restart theirs too, as with torchrun's own rendezvous, in the same
generation.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from muster.communicators.nccl.generation_secret import HandedSecret
from muster.errors import (
    FormationTimeoutError,
    JobEndedError,
    LeaveGranted,
    MembershipChanged,
    SchedulerUnreachableError,
    WorkerError,
)
from muster.programs.client import StoreClient
from muster.programs.link import StoreEndedError, StoreLostError
from muster.programs.plugin import TORCHRUN_VARIABLE
from muster.programs.sealed_nccl import hand_over, path_for_workers
from muster.wire.variables import default_of
from muster.worker.config import SecurityContext
from muster.worker.program_environment import HOST, NCCL_SECRET_VARIABLE
from muster.worker.runtime import open_session
from muster.worker.session.credentials import load_keyring
from muster.worker.session.session import Session

CLOSED = b"closed"
LAST_CALL_S = 30.0
"""How long torchrun waits for more agents than it needs, in seconds, unless ``last_call_timeout`` is set."""

STORE_TIMEOUT = dt.timedelta(seconds=300)
LOOK_S = 0.5
_TORCHRUN = re.compile(r"(TORCHELASTIC_|GROUP_|ROLE_|LOCAL_)|(RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$")


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Returns :func:`create_handler`; torchrun calls this by the entry point ``torchrun.handlers``."""
    return create_handler


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Makes the handler of one agent; it joins at the first rendezvous.

    Raises:
        SettingsError: a setting is wrong.
        SecurityError: the certificate cannot be used.
    """
    return MusterRendezvousHandler(parameters, settings_of(parameters, os.environ))


def settings_of(parameters: RendezvousParameters, env: Mapping[str, str]) -> dict[str, str]:
    """Translates torchrun's options into Muster's variables, which take precedence over the environment's.

    Args:
        parameters: torchrun's options. ``--rdzv-conf join_timeout=S`` sets how long to look for the scheduler
            and to wait for the other agents in a round; ``last_call_timeout=S`` sets how long the first round
            waits for more agents than it needs; ``config=PATH`` names config.json.
        env: the agent's environment variables.
    """
    host, _, port = parameters.endpoint.rpartition(":") if ":" in parameters.endpoint else ("", "", "")
    said = {
        "MS_ROLE": "MS_WORKER",
        "MS_WORKER_NUM": str(parameters.max_nodes),
        "MS_WORKER_MIN": str(parameters.min_nodes),
        "MS_JOB_ID": parameters.run_id,
        "MS_SCHED_HOST": (host or parameters.endpoint).strip("[]"),
        "MS_SCHED_PORT": port or str(default_of("MS_SCHED_PORT")),
    }
    said["MS_LAST_CALL_TIMEOUT"] = str(max(0.1, float(parameters.get("last_call_timeout", LAST_CALL_S))))
    for option, variable in (("join_timeout", "MS_TOPO_TIMEOUT"), ("config", "MS_CONFIG_FILE")):
        value = parameters.get(option)
        if value:
            said[variable] = str(value)
    kept = {name: value for name, value in env.items() if not _TORCHRUN.match(name)}
    return {**kept, **said}


class MusterRendezvousHandler(RendezvousHandler):  # type: ignore[misc]  # torch has no types here
    """One torchrun agent as a worker of a job.

    Args:
        parameters: torchrun's options.
        env: Muster's variables, see :func:`settings_of`.
    """

    def __init__(self, parameters: RendezvousParameters, env: Mapping[str, str]) -> None:
        self._parameters = parameters
        self._env = env
        self._session: Session | None = None
        self._store: StoreClient | None = None
        self._agents: StoreClient | None = None
        self._keyring: Any = None
        self._round = (0, 0)
        """The generation, and how often its workers were started in it."""
        self._secret = HandedSecret()

    # ------------------------------------------------------------ what torchrun asks

    def get_backend(self) -> str:
        """See torch."""
        return "muster"

    @property
    def use_agent_store(self) -> bool:
        """True: workers are clients of the agent's listener and open no store themselves."""
        return True

    def get_run_id(self) -> str:
        """See torch."""
        return str(self._parameters.run_id)

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the next generation, or until all agents start their workers again in this one.

        Raises:
            RendezvousClosedError: an agent has closed the job.
            RendezvousGracefulExitError: the job has ended, or this agent was drained.
            RendezvousTimeoutError: the agents did not come in time.
            RendezvousConnectionError: the scheduler cannot be reached.
        """
        try:
            return self._next()
        except (JobEndedError, LeaveGranted) as error:
            raise RendezvousGracefulExitError(error.message) from error
        except FormationTimeoutError as error:
            raise RendezvousTimeoutError(str(error)) from error
        except SchedulerUnreachableError as error:
            raise RendezvousConnectionError(str(error)) from error

    def num_nodes_waiting(self) -> int:
        """Returns 1 if workers must be started again: other agents do so, or the members change; else 0."""
        session, store = self._session, self._store
        if session is None or store is None:
            return 0
        try:
            _ = session.communicator
            if session.membership_event is not None:
                return 1
            return int(store.get(self._arrivals(self._round[1] + 1)) is not None)
        except (MembershipChanged, StoreEndedError):
            return 1
        except (WorkerError, TimeoutError):
            return 0

    def is_closed(self) -> bool:
        """Whether an agent has closed the job."""
        if self._agents is None:
            return False
        try:
            return self._agents.get(CLOSED) is not None
        except (WorkerError, TimeoutError):
            return False

    def set_closed(self) -> None:
        """Closes the job, so that no agent begins another round."""
        if self._agents is not None:
            try:
                self._agents.set(CLOSED, b"1")
            except (WorkerError, TimeoutError):
                return

    def shutdown(self) -> bool:
        """Leaves the job, as finished unless this agent was asked to leave; returns True."""
        self._close_stores()
        self._secret.forget()
        if self._session is not None:
            self._session.release()
        return True

    # ------------------------------------------------------------ rounds

    def _next(self) -> RendezvousInfo:
        if self._session is None:
            self._join()
        session = self._session
        assert session is not None
        while True:
            if self.is_closed():
                raise RendezvousClosedError(f"The job {session.job_id} is closed.")
            self._enter(session)
            try:
                return self._meet(session)
            except MembershipChanged:
                continue
            except StoreEndedError as error:  # the session will report it, unless only the store is lost
                if isinstance(error, StoreLostError):
                    session.ask_for_new_generation(error.message)
                time.sleep(LOOK_S)

    def _join(self) -> None:
        session = open_session(self._env, SecurityContext(), "torch")
        session.open()
        self._session = session
        self._keyring = load_keyring(session.settings, self._env)
        self._agents = self._client(session, 0)

    def _enter(self, session: Session) -> None:
        """Enters the newest generation, if this one is over."""
        while True:
            try:
                if session.membership_event is not None:
                    session.step_boundary(1)
                _ = session.communicator
                break
            except MembershipChanged:
                self._close_store()
                self._secret.forget()
                try:
                    session.rejoin()
                except MembershipChanged:
                    continue
        if self._round[0] != session.generation:
            self._close_store()
            self._round = (session.generation, 0)
            self._store = self._client(session, session.generation)
            session.report(session.generation, 0.0)

    def _meet(self, session: Session) -> RendezvousInfo:
        """Waits until all members start their workers for this round; opens the round's listener.

        Raises:
            FormationTimeoutError: not all agents have come in time.
            MembershipChanged: the generation is over.
            StoreEndedError: the store has ended, or the members are about to change.
        """
        store, count = self._store, self._round[1] + 1
        assert store is not None
        arrivals, full = self._arrivals(count), b"agent/full/%d" % count
        if store.add(arrivals, 1) == session.world_size:
            store.set(full, b"1")
        deadline = time.monotonic() + session.settings.topo_timeout_s
        while not store.wait(full, LOOK_S):
            _ = session.communicator
            if session.membership_event is not None:
                raise StoreEndedError("The members are about to change.")
            if time.monotonic() > deadline:
                raise FormationTimeoutError("Not all agents have come to start their workers again.")
        self._round = (session.generation, count)
        port = store.open_proxy(b"torch/%d/" % count)
        os.environ[TORCHRUN_VARIABLE] = f"{HOST}:{port}"  # its workers inherit it
        os.environ.update(hand_over(session, self._secret))
        if self._secret.descriptor >= 0:
            os.environ[NCCL_SECRET_VARIABLE] = path_for_workers(self._secret)
        client = TCPStore(HOST, port, None, False, timeout=STORE_TIMEOUT, wait_for_workers=False)
        return RendezvousInfo(
            PrefixStore("agents", client), session.rank, session.world_size, RendezvousStoreInfo(HOST, port)
        )

    def _arrivals(self, count: int) -> bytes:
        return b"agent/arrived/%d" % count

    # ------------------------------------------------------------ stores

    def _client(self, session: Session, generation: int) -> StoreClient:
        me = session.me
        return StoreClient(session.settings, self._keyring, me.node_id, me.incarnation, generation)

    def _close_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _close_stores(self) -> None:
        self._close_store()
        agents, self._agents = self._agents, None
        if agents is not None:
            agents.close()
