"""A generation's store for ordinary threads: runs the link and the proxies on an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio

from muster.certs.errors import CertificateError
from muster.certs.runtime.grpc_credentials import channel_credentials
from muster.certs.runtime.preflight import preflight
from muster.errors import SecurityError
from muster.programs.link import StoreEndedError, StoreLink
from muster.programs.proxy import Proxy
from muster.wire.patience import TRY_S
from muster.wire.settings import client_options
from muster.wire.threads import Pool, start_thread
from muster.wire.v1 import store_pb2 as pb
from muster.worker.config import Settings
from muster.worker.session.grpc_log import guard_grpc_log
from muster.worker.session.schedulers import CONNECT_TIMEOUT_S

if TYPE_CHECKING:
    from muster.certs.runtime.follower import Follower

T = TypeVar("T")
CALL_TIMEOUT_S = 300.0


class StoreClient:
    """One member's store of one generation, with the proxies that torch programs connect to.

    Args:
        settings: the worker's settings, with the scheduler's hosts and the job.
        keyring: this worker's credentials; None without TLS.
        node_id: the member's node id.
        incarnation: the incarnation of the member's process.
        generation: the generation whose store this is; 0 for the store that the job's agents share.

    Raises:
        StoreEndedError: from the methods that ask the store: the generation is over, or the store refused
            the operation.
        TimeoutError: from the same methods: no answer came within 300 s.
    """

    def __init__(
        self, settings: Settings, keyring: Follower | None, node_id: str, incarnation: int, generation: int
    ) -> None:
        guard_grpc_log(os.environ)
        self._settings = settings
        self._keyring = keyring
        opening = pb.StoreOpen(
            job_id=settings.job_id, node_id=node_id, incarnation=incarnation, generation=generation
        )
        self._proxies: list[Proxy] = []
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(Pool(1, "muster-store-dial"))
        self._thread = start_thread(self._loop.run_forever, name="muster-store")
        self._link = self._run(self._open(opening))
        self._closed = False

    async def _open(self, opening: pb.StoreOpen) -> StoreLink:
        return StoreLink(opening, self._connect)

    # ------------------------------------------------------------ for agents

    def open_proxy(self, prefix: bytes, own: Mapping[bytes, bytes] | None = None) -> int:
        """Opens a listener on loopback; returns its port.

        Args:
            prefix: put before all keys of the listener in the store.
            own: the keys that the listener answers without the store, with their values.
        """
        proxy = Proxy(self._link, prefix=prefix, own=own)
        self._proxies.append(proxy)
        return self._run(proxy.open())

    @property
    def error(self) -> StoreEndedError | None:
        """Why the store has ended; None if it has not."""
        return self._link.error

    def set(self, key: bytes, value: bytes) -> None:
        """Sets a key."""
        self._ask(pb.STORE_KIND_SET, (key,), (value,))

    def get(self, key: bytes) -> bytes | None:
        """Returns the value of a key; None if it has none."""
        values = self._ask(pb.STORE_KIND_GET, (key,)).values
        return values[0] if values else None

    def add(self, key: bytes, amount: int) -> int:
        """Adds to the number under a key; returns the sum."""
        return self._ask(pb.STORE_KIND_ADD, (key,), amount=amount).amount

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Sets a key if its value is ``expected``, where empty means that it has none.

        Returns:
            The key's value after the operation.
        """
        return self._ask(pb.STORE_KIND_COMPARE_SET, (key,), (expected, desired)).values[0]

    def wait(self, key: bytes, timeout_s: float) -> bool:
        """Waits for a key to be set, at most ``timeout_s`` seconds; returns whether it is."""
        within_s = timeout_s + CALL_TIMEOUT_S
        answer = self._ask(pb.STORE_KIND_WAIT, (key,), timeout_s=timeout_s, within_s=within_s)
        return answer.status == pb.STORE_STATUS_OK

    def close(self, reason: str = "The store was closed.") -> None:
        """Closes the listeners, their connections and the stream; idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TimeoutError):
            self._run(self._close(reason), within_s=5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    # ------------------------------------------------------------ inside

    async def _close(self, reason: str) -> None:
        for proxy in self._proxies:
            await proxy.close()
        await self._link.close(reason)

    def _run(self, work: Coroutine[Any, Any, T], within_s: float = CALL_TIMEOUT_S) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(within_s)

    def _ask(
        self,
        kind: pb.StoreKind,
        keys: tuple[bytes, ...],
        values: tuple[bytes, ...] = (),
        *,
        amount: int = 0,
        timeout_s: float = 0.0,
        within_s: float = CALL_TIMEOUT_S,
    ) -> pb.StoreAnswer:
        async def asked() -> pb.StoreAnswer:
            return await self._link.submit(kind, keys, values, amount=amount, timeout_s=timeout_s)

        answer = self._run(asked(), within_s)
        if answer.status == pb.STORE_STATUS_REFUSED:
            raise StoreEndedError(answer.sentence)
        return answer

    async def _connect(self) -> grpc.aio.Channel:
        failure: OSError | None = None
        for host in self._settings.scheduler_hosts:
            try:
                return await self._connect_to(self._settings.replaced(scheduler_hosts=(host,)))
            except OSError as error:
                failure = error
        assert failure is not None
        raise failure

    async def _connect_to(self, settings: Settings) -> grpc.aio.Channel:
        keyring, count = self._keyring, len(self._settings.scheduler_hosts)
        options: list[tuple[str, Any]] = [
            *client_options(settings.node_timeout_s, schedulers=count),
            ("grpc.max_receive_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        loop = asyncio.get_running_loop()
        if keyring is None:
            if count > 1:
                address = (settings.scheduler_hosts[0], settings.scheduler_port)
                found_one = await loop.run_in_executor(None, socket.create_connection, address, TRY_S)
                found_one.close()
            return grpc.aio.insecure_channel(settings.scheduler_address, options)
        credentials = keyring()
        try:
            found = await loop.run_in_executor(
                None,
                lambda: preflight(
                    settings.scheduler_hosts[0],
                    settings.scheduler_port,
                    credentials,
                    job=settings.job_id,
                    timeout_s=CONNECT_TIMEOUT_S if count == 1 else TRY_S,
                ),
            )
        except CertificateError as error:
            raise SecurityError(error.message, remedy=error.remedy) from error
        if found.name_override is not None:
            options.append(("grpc.ssl_target_name_override", found.name_override))
        tls = channel_credentials(credentials, found.server_leaf_pem)
        return grpc.aio.secure_channel(settings.scheduler_address, tls, options)
