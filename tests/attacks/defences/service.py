"""A scheduler's gRPC services in this process, so that a test can take a defence away from them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from muster.certs.pki.revocation import Revocations
from muster.certs.runtime.grpc_credentials import RotatingServerCredentials
from muster.scheduler.access import Access
from muster.scheduler.audit.logs import Recorder
from muster.scheduler.config import load_settings
from muster.scheduler.core.machine import Machine
from muster.scheduler.jobs.jobs import Jobs
from muster.scheduler.serve.host_stream import HostStreams
from muster.scheduler.serve.server import grpc_options
from muster.scheduler.serve.service import Service
from muster.scheduler.serve.sessions import Limits, Sessions
from muster.scheduler.store.service import StoreLimits, StoreService
from muster.scheduler.watch.service import WatchLimits, WatchService
from tests.attacks.defences.attack import folder_until_the_end
from tests.attacks.field import make_pki
from tests.scheduler.processes import Pki, channel
from tests.waiting import LIMIT_S

T = TypeVar("T")


@dataclass
class Setup:
    """How the next scheduler is set up; a test changes it to take a defence away.

    Attributes:
        tls: it has certificates.
        options: of gRPC, in the place of the product's.
        limits: on sessions.
        store: on what members hold in the store.
        watch: on watchers.
        more_authorities: PEM, which it trusts beside its own.
        revocations: the lists in force.
        wanted: workers of its job.
    """

    tls: bool = True
    options: dict[str, int] = dataclasses.field(default_factory=dict)
    limits: Limits = dataclasses.field(default_factory=Limits)
    store: StoreLimits = dataclasses.field(default_factory=StoreLimits)
    watch: WatchLimits = dataclasses.field(default_factory=WatchLimits)
    more_authorities: bytes = b""
    revocations: Callable[[], Revocations | None] = lambda: None
    wanted: int = 3


SETUP = Setup()


@functools.cache
def pki() -> Pki:
    """The job's certificates, and those of insiders; made once, and gone with the process."""
    return make_pki(folder_until_the_end() / "pki")


class Served:
    """The services, on a thread of their own.

    Attributes:
        port: theirs.
        sessions: all that are open.
    """

    def __init__(self) -> None:
        self.port = 0
        self.sessions: Sessions
        self._loop = asyncio.new_event_loop()
        self._over: asyncio.Event
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(LIMIT_S) and self.port, "it did not begin"

    def channel(self, name: str = "") -> grpc.Channel:
        """A channel with one of the certificates; none: plaintext."""
        return channel(f"127.0.0.1:{self.port}", pki().credentials(name) if name else None)

    def do(self, action: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs something on the services' thread."""
        return asyncio.run_coroutine_threadsafe(action(), self._loop).result(LIMIT_S)

    def close(self) -> None:
        """Ends all."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(LIMIT_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        env = {"MS_WORKER_NUM": str(SETUP.wanted), "MS_SPARES": "2"}
        settings, recorder = load_settings(env), Recorder()
        jobs = Jobs(settings, self._loop, recorder.note, new_machine=Machine, recover_machine=Machine.recover)
        await jobs.open()
        access = Access(tls=SETUP.tls, revocations=lambda: SETUP.revocations())
        self.sessions = sessions = Sessions(jobs, access, recorder, SETUP.limits)
        options = {**dict(grpc_options(settings.node_timeout_s)), **SETUP.options}
        server = grpc.aio.server(options=list(options.items()))
        store = StoreService(jobs, access, recorder, SETUP.store)
        watching = WatchService(jobs, access, recorder, "default", limits=SETUP.watch)
        services = (Service(sessions, "default"), HostStreams(sessions), store, watching)
        server.add_generic_rpc_handlers(tuple(each.handler() for each in services))
        if SETUP.tls:
            own = pki().credentials("server")
            own = dataclasses.replace(own, ca_pem=own.ca_pem + SETUP.more_authorities)
            self.port = server.add_secure_port("127.0.0.1:0", RotatingServerCredentials(own).credentials)
        else:
            self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._ready.set()
        await self._over.wait()
        store.close()
        await watching.close()
        await server.stop(0)
        await jobs.close()


@contextlib.contextmanager
def served() -> Iterator[Served]:
    """The services, until the context's end."""
    made = Served()
    try:
        yield made
    finally:
        made.close()
