"""The connection to the scheduler: a look before gRPC's own, the streams, and what gRPC logs."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from muster.rendezvous.grpc_stderr import NativeStderr, Sayings, record_of, write_all
from muster.worker.config import Settings
from muster.worker.control import events as e
from muster.worker.control import messages as m
from muster.worker.control.wire import WireError, decode

if TYPE_CHECKING:
    from muster.certs.pki.peer import Peer
    from muster.worker.control.credentials import Keyring


_grpc = logging.getLogger("muster.grpc")
_LINES = 200
_watches: list[_GrpcLog] = []
"""The one of this process, once there is one."""


def guard_grpc_log(env: MutableMapping[str, str]) -> None:
    """Keeps what strangers send to gRPC from forging lines; call it before grpc is imported.

    What gRPC would say, our own errors say. Who asks for its log by GRPC_VERBOSITY gets its records escaped
    and marked in the worker's own log, and what other C code writes to standard error as it is.
    """
    if env.setdefault("GRPC_VERBOSITY", "NONE").upper() == "NONE" or _watches:
        return
    try:
        watch = _GrpcLog()
    except OSError:  # there is nothing to read it by
        env["GRPC_VERBOSITY"] = "NONE"
    else:
        _watches.append(watch)
        atexit.register(watch.close)


class _GrpcLog:
    """Logs gRPC's records and passes all else on; lasts as long as the process."""

    def __init__(self) -> None:
        self._sayings = Sayings(_LINES)
        self._native = NativeStderr(self, (logging.getLogger("muster"),))

    def close(self) -> None:
        """Puts standard error back as it was; nothing that was written is lost."""
        self._native.close()
        self._say(self._sayings.all())

    def written(self, data: bytes) -> None:
        """See :class:`muster.rendezvous.grpc_stderr.Listener`."""
        record, now_s = record_of(data), time.monotonic()
        if record is None:
            write_all(self._native.real, data)
            return
        self._say(self._sayings.due(now_s))
        line = self._sayings.add(data, record, now_s)
        if line is not None:
            self._say((line,))

    def tend(self) -> None:
        """See :class:`muster.rendezvous.grpc_stderr.Listener`."""
        self._say(self._sayings.due(time.monotonic()))

    def next_s(self) -> float | None:
        """See :class:`muster.rendezvous.grpc_stderr.Listener`."""
        return self._sayings.next_s()

    def failed(self) -> None:
        """See :class:`muster.rendezvous.grpc_stderr.Listener`."""
        _grpc.exception("Fault while reading gRPC's log; it is written as it comes from now on.")

    def _say(self, lines: Iterable[str]) -> None:
        for line in lines:
            _grpc.warning("%s", line)


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


log = logging.getLogger("muster.worker")

JOIN_TIMEOUT_S = 2.0


class Streams:
    """Opens and closes streams as it is told; messages go to the newest.

    Args:
        connector: opens them.
        post: takes the events; called on the streams' threads.
    """

    def __init__(self, connector: Connector, post: Callable[[e.Event], object]) -> None:
        self._connector = connector
        self._post = post
        self._lock = threading.Lock()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._open: dict[int, Stream] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False

    def send(self, data: bytes) -> None:
        """Sends a message on the newest stream, as soon as that is open."""
        self._outbox.put(data)

    def open(self, number: int) -> None:
        """Begins to open a stream under this number."""
        outbox = self._outbox = SimpleQueue()
        with self._lock:
            if self._closed:
                return
            thread = threading.Thread(
                target=self._run, args=(number, outbox), name="muster-stream", daemon=True
            )
            self._threads = [each for each in self._threads if each.is_alive()]
            self._threads.append(thread)
            thread.start()

    def close(self, number: int) -> None:
        """Ends this stream, if it is open."""
        with self._lock:
            stream = self._open.pop(number, None)
        if stream is not None:
            stream.close()

    def close_all(self) -> None:
        """Ends all streams for good, and waits for their threads; idempotent."""
        with self._lock:
            self._closed = True
            streams, self._open = list(self._open.values()), {}
            threads, self._threads = self._threads, []
        for stream in streams:
            stream.close()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_TIMEOUT_S)

    def _run(self, number: int, outbox: SimpleQueue[bytes | None]) -> None:
        try:
            stream = self._connector.open(outbox)
            with self._lock:
                self._open[number] = stream
                closed = self._closed
            self._post(e.StreamOpened(number))
            if closed:
                stream.close()
            for data in stream:
                self._post(e.Received(number, decode(data)))
            self._post(e.StreamLost(number, "it closed the stream"))
        except DeniedError as error:
            self._post(e.StreamDenied(number, str(error), error.by_scheduler))
        except MalformedError as error:
            self._post(e.Received(number, m.Refused(m.RefusalCode.MALFORMED, str(error))))
        except (OSError, WireError) as error:
            self._post(e.StreamLost(number, str(getattr(error, "strerror", None) or error)))
        except Exception as error:  # a fault of ours must not leave the worker waiting for nobody
            log.exception("fault on the scheduler's stream; connecting again")
            self._post(e.StreamLost(number, f"{type(error).__name__}: {error}"))
        finally:
            self.close(number)
