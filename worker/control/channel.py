"""Opens the stream to the scheduler: a look before gRPC's own connection, then the call.

gRPC says "Socket closed" for whatever goes wrong in TLS, and waits a second and more between attempts.
Therefore a plain socket asks first: is somebody there, does it speak what we speak, is it who it must be.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from muster.worker.config import Settings
from muster.worker.control.grpc_log import guard_grpc_log

if TYPE_CHECKING:
    from muster.certs.pki.peer import Peer
    from muster.worker.control.credentials import Keyring

CONNECT_TIMEOUT_S = 5.0
_METHOD = "/rendezvous.v1.Rendezvous/Session"
_closed_calls: deque[Any] = deque(maxlen=8)
"""The last calls, kept from being freed at the end of the interpreter; see :func:`_keep_library_up`."""


class DeniedError(Exception):
    """TLS or identity failed, or the scheduler turned the stream down; the message says why.

    Args:
        message: a sentence.
        by_scheduler: the scheduler itself said so.
    """

    def __init__(self, message: str, *, by_scheduler: bool) -> None:
        super().__init__(message)
        self.by_scheduler = by_scheduler


class MalformedError(Exception):
    """The scheduler did not understand a message of ours."""


class Stream(Protocol):
    """An open stream. Iterating yields serialized SchedulerMessages; messages to send go to a queue."""

    def __iter__(self) -> Iterator[bytes]:
        """Yields what comes.

        Raises:
            DeniedError, MalformedError: the scheduler turned the stream down.
            OSError: the stream broke.
        """

    def close(self) -> None:
        """Ends the stream; idempotent, callable from any thread."""


class Connector(Protocol):
    """Opens streams."""

    def open(self, outbox: SimpleQueue[bytes | None]) -> Stream:
        """Opens a stream that sends what is put into ``outbox``; None ends it.

        Raises:
            DeniedError: TLS or identity failed.
            OSError: nobody is there yet.
        """


@functools.cache
def _keep_library_up() -> None:
    """Leaves the end of gRPC's library to the system, which ends the process.

    Processes were seen, rarely, to wait for ever while the interpreter takes its modules apart, with no other
    thread left: where gRPC shuts itself down, and where a freed call takes its lock, which a thread of gRPC
    held when the interpreter stopped it. Objects that are never freed keep both from being run.
    """
    import ctypes

    from grpc._cython import cygrpc  # type: ignore[attr-defined]

    for kept in (cygrpc.CompletionQueue(), _closed_calls):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


class GrpcConnector:
    """Opens streams over gRPC, over mutual TLS where there is a keyring."""

    def __init__(self, settings: Settings, keyring: Keyring | None) -> None:
        self._settings = settings
        self._keyring = keyring

    def open(self, outbox: SimpleQueue[bytes | None]) -> Stream:
        """See :class:`Connector`."""
        # Loaded before the scheduler is looked for: while it starts there is time, afterwards there is none.
        guard_grpc_log(os.environ)
        import muster.certs.runtime.grpc_credentials  # noqa: F401

        keyring = self._keyring
        if keyring is None:
            self._probe_plaintext()
            return _GrpcStream(self._channel(None, None), outbox, lambda: False)
        channel, scheduler = self._secure_channel(keyring)
        return _GrpcStream(channel, outbox, lambda: keyring.has_revoked(scheduler))

    def _secure_channel(self, keyring: Keyring) -> tuple[Any, Peer]:
        from muster.certs.errors import CertificateError
        from muster.certs.runtime.preflight import preflight

        settings, credentials = self._settings, keyring()
        try:
            found = preflight(
                settings.scheduler_host,
                settings.scheduler_port,
                credentials,
                job=settings.job_id,
                timeout_s=CONNECT_TIMEOUT_S,
            )
        except CertificateError as error:
            raise DeniedError(str(error), by_scheduler=False) from error
        from muster.certs.runtime.grpc_credentials import channel_credentials

        tls = channel_credentials(credentials, found.server_leaf_pem)
        return self._channel(tls, found.name_override), found.peer

    def _channel(self, credentials: Any, name: str | None) -> Any:
        import grpc

        from muster.certs.runtime.grpc_credentials import client_options

        _keep_library_up()
        options = [
            *client_options(self._settings.node_timeout_s),
            ("grpc.max_receive_message_length", 64 << 20),
        ]
        address = self._settings.scheduler_address
        if credentials is None:
            return grpc.insecure_channel(address, options)
        if name is not None:
            options.append(("grpc.ssl_target_name_override", name))  # type: ignore[arg-type]
        return grpc.secure_channel(address, credentials, options)

    def _probe_plaintext(self) -> None:
        """Checks that a plaintext HTTP/2 server answers; one that wants TLS would only hang up."""
        from muster.certs.runtime.probe import Spoken, spoken_at

        settings = self._settings
        spoken = spoken_at(settings.scheduler_host, settings.scheduler_port, CONNECT_TIMEOUT_S)
        if spoken is Spoken.TLS:
            raise DeniedError(
                f"The scheduler at {settings.scheduler_address} demands TLS, and this worker has no"
                " config.json. Set MS_CONFIG_FILE to one with a certificate of this job"
                " (muster certs issue).",
                by_scheduler=False,
            )
        if spoken is Spoken.NOTHING:
            raise ConnectionResetError("the connection was closed before anything was said")


class _GrpcStream:
    """A call on a channel of its own; it ends at the next message after the scheduler was revoked."""

    def __init__(
        self, channel: Any, outbox: SimpleQueue[bytes | None], is_revoked: Callable[[], bool]
    ) -> None:
        self._channel = channel
        self._outbox = outbox
        self._is_revoked = is_revoked
        self._call: Any = channel.stream_stream(_METHOD)(self._requests())

    def _requests(self) -> Iterator[bytes]:
        first = True  # the look before the connection has just checked
        for data in iter(self._outbox.get, None):
            if not first and self._is_revoked():
                self._call.cancel()  # looking for the scheduler again tells why in words
                return
            first = False
            yield data

    def __iter__(self) -> Iterator[bytes]:
        import grpc

        try:
            yield from self._call
        except grpc.RpcError as error:
            raise _translated(error) from None

    def close(self) -> None:
        _closed_calls.append(self._call)
        self._call.cancel()  # before the requests end, or the scheduler may end the call as a success
        self._outbox.put(None)
        self._channel.close()


def _translated(error: Any) -> Exception:
    import grpc

    code, details = error.code(), error.details() or ""
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return DeniedError(details, by_scheduler=True)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return MalformedError(details)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return MalformedError(f"What answers there is not a scheduler of Muster ({details}).")
    return ConnectionError(f"{code.name.lower()}: {details}")
