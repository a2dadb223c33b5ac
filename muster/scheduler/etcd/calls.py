"""Sends requests to etcd over gRPC, to one endpoint. After an unanswered call, the next one is used."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from muster.scheduler.etcd.api import EtcdFullError, EtcdRefusedError, EtcdUnreachableError
from muster.wire.settings import show_address
from muster.wire.v1 import etcd_pb2 as pb

if TYPE_CHECKING:
    from muster.certs.runtime.store import Credentials

CALL_TIMEOUT_S = 0.6
"""Timeout in seconds of one attempt of a call that etcd answers immediately. Large transactions, which may
write 1 MB to disk, have :data:`WRITE_TIMEOUT_S`.
"""

WRITE_TIMEOUT_S = 2.0
MOST_PATIENCE = 4
"""The largest factor by which a transaction's timeout grows while no member of a slow etcd answers in time.

Only transactions get more time. A scheduler that campaigns while etcd has no majority must soon notice when
there is a majority again.
"""

_SERVICE = "/etcdserverpb."
_UNANSWERED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.ABORTED,
)
_NO_SPACE = "database space exceeded"
_FOR_NOW = ("revision of auth store is old", "too many requests")
"""How the messages of temporary refusals end: a role was just changed, or etcd is overloaded."""

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", -1),
)
_REMEDIES = {
    "PERMISSION_DENIED": "Give the scheduler's certificate its role: muster certs etcd prints the commands.",
    "UNAUTHENTICATED": "Give the scheduler's certificate its role: muster certs etcd prints the commands.",
    "RESOURCE_EXHAUSTED": "See to etcd's space: etcdctl compact, defrag, and then alarm disarm.",
}


class _Line:
    """A channel to one member. After :meth:`give_up`, it is closed when its last call ends.

    It is not closed earlier, because closing a channel would end its calls as if the waiting tasks had been
    cancelled.
    """

    def __init__(self, where: str, channel: grpc.aio.Channel) -> None:
        self.where = where
        self.channel = channel
        self._calls = 0
        self._given_up = False

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[grpc.aio.Channel]:
        """Context that lends the channel to one call."""
        self._calls += 1
        try:
            yield self.channel
        finally:
            self._calls -= 1
            await self._close_unused()

    async def give_up(self) -> None:
        """Closes the channel once no call uses it."""
        self._given_up = True
        await self._close_unused()

    async def _close_unused(self) -> None:
        if self._given_up and not self._calls:
            await self.channel.close()


class EtcdCalls:
    """etcd's API over gRPC channels. A broken channel is reopened with the credentials then in force.

    Args:
        endpoints: host and port of each member.
        credentials: returns the certificate to present and the authorities to trust; None for no TLS.
    """

    def __init__(
        self, endpoints: Sequence[tuple[str, int]], credentials: Callable[[], Credentials] | None
    ) -> None:
        self._endpoints = [show_address(*each) for each in endpoints]
        self._credentials = credentials
        self._at = 0
        self._late = 0
        self._lines: dict[int, _Line] = {}

    async def read(self, request: pb.RangeRequest) -> pb.RangeResponse:
        """See :class:`muster.scheduler.etcd.api.Etcd`."""
        reply: pb.RangeResponse = await self._ask("KV/Range", request, pb.RangeResponse, CALL_TIMEOUT_S)
        return reply

    async def transact(self, request: pb.TxnRequest) -> pb.TxnResponse:
        """See :class:`muster.scheduler.etcd.api.Etcd`."""
        limit_s = WRITE_TIMEOUT_S if request.ByteSize() > 100_000 else CALL_TIMEOUT_S
        # The timeout grows after each round in which every member was late.
        patience = min(1 + self._late // len(self._endpoints), MOST_PATIENCE)
        try:
            reply: pb.TxnResponse = await self._ask("KV/Txn", request, pb.TxnResponse, limit_s * patience)
        except EtcdUnreachableError:
            self._late += 1
            raise
        self._late = 0
        return reply

    async def grant(self, ttl_s: int) -> int:
        """See :class:`muster.scheduler.etcd.api.Etcd`."""
        request = pb.LeaseGrantRequest(TTL=ttl_s)
        reply = await self._ask("Lease/LeaseGrant", request, pb.LeaseGrantResponse, CALL_TIMEOUT_S)
        return int(reply.ID)

    async def keep_alive(self, lease: int) -> int:
        """See :class:`muster.scheduler.etcd.api.Etcd`."""
        request = pb.LeaseKeepAliveRequest(ID=lease)
        method = "Lease/LeaseKeepAlive"
        async with self._stream(method, request, pb.LeaseKeepAliveResponse, CALL_TIMEOUT_S) as replies:
            return int((await replies()).TTL)

    async def revoke(self, lease: int) -> None:
        """See :class:`muster.scheduler.etcd.api.Etcd`."""
        request = pb.LeaseRevokeRequest(ID=lease)
        await self._ask("Lease/LeaseRevoke", request, pb.LeaseRevokeResponse, CALL_TIMEOUT_S)

    async def await_deletion(self, key: bytes, revision: int, limit_s: float) -> None:
        """See :class:`muster.scheduler.etcd.api.Etcd`."""
        create = pb.WatchCreateRequest(key=key, start_revision=revision)
        request = pb.WatchRequest(create_request=create)
        deleted = pb.Event.EventType.DELETE
        method, kind = "Watch/Watch", pb.WatchResponse
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s), self._stream(method, request, kind, 2 * limit_s) as replies:
                while True:
                    reply = await replies()
                    if reply.canceled or any(event.type == deleted for event in reply.events):
                        return

    async def close(self) -> None:
        """Closes all channels."""
        lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            await line.give_up()

    # ------------------------------------------------------------ inside

    async def _ask(self, method: str, request: Any, kind: Any, limit_s: float) -> Any:
        async with self._call() as channel:
            call = channel.unary_unary(
                _SERVICE + method,
                request_serializer=type(request).SerializeToString,
                response_deserializer=kind.FromString,
            )
            return await call(request, timeout=limit_s)

    @contextlib.asynccontextmanager
    async def _stream(
        self, method: str, request: Any, kind: Any, limit_s: float
    ) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
        """Context that sends one message on a stream, and lends a function that returns its next reply.

        The channel counts as in use until the context ends.
        """
        async with self._call() as channel:
            call = channel.stream_stream(
                _SERVICE + method,
                request_serializer=type(request).SerializeToString,
                response_deserializer=kind.FromString,
            )(timeout=limit_s)

            async def next_reply() -> Any:
                reply = await call.read()
                if reply is grpc.aio.EOF:
                    raise _ended(await call.code(), await call.details())
                return reply

            try:
                await call.write(request)
                yield next_reply
            except asyncio.InvalidStateError:  # The stream ended before the message was sent.
                raise _ended(await call.code(), await call.details()) from None
            finally:
                call.cancel()

    @contextlib.asynccontextmanager
    async def _call(self) -> AsyncIterator[grpc.aio.Channel]:
        """Context that lends the current channel, and converts gRPC's errors to Muster's."""
        at, line = self._at, self._line()
        try:
            async with line.call() as channel:
                yield channel
        except grpc.aio.AioRpcError as error:
            raise await self._failed(at, line, error.code(), error.details()) from None

    def _line(self) -> _Line:
        at = self._at
        if at not in self._lines:
            where = self._endpoints[at]
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(where, _OPTIONS)
            else:
                mine = self._credentials()
                tls = grpc.ssl_channel_credentials(mine.ca_pem, mine.key_pem, mine.cert_chain_pem)
                channel = grpc.aio.secure_channel(where, tls, _OPTIONS)
            self._lines[at] = _Line(where, channel)
        return self._lines[at]

    async def _failed(
        self, at: int, line: _Line, code: grpc.StatusCode, details: str | None
    ) -> EtcdUnreachableError | EtcdRefusedError:
        answer = (details or "").rpartition("remote host: ")[2][:300]
        if code not in _UNANSWERED and not (details or "").endswith(_FOR_NOW):
            full = (details or "").endswith(_NO_SPACE)
            return (EtcdFullError if full else EtcdRefusedError)(
                f"etcd at {line.where} refuses: {answer or code.name}.",
                code=code.name,
                remedy=_REMEDIES.get(code.name, ""),
            )
        if self._at == at:
            self._at = (at + 1) % len(self._endpoints)
        if code is grpc.StatusCode.UNAVAILABLE and self._lines.get(at) is line:
            del self._lines[at]  # The next channel is opened with the certificate that is valid then.
            await line.give_up()
        return EtcdUnreachableError(
            f"etcd at {line.where} does not answer: {answer or code.name.lower()}.",
            remedy="Check that it runs, MS_RECOVERY_PATH, and etcd_cert_path and etcd_ca_cert_path.",
        )


def _ended(code: grpc.StatusCode, details: str | None) -> grpc.aio.AioRpcError:
    """Converts a stream's end to an error like those that gRPC raises for other calls."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
