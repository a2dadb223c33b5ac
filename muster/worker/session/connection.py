"""The connection to the scheduler: a TLS preflight, gRPC streams, and the log lines of gRPC."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from muster.errors import SecurityError, SettingsError
from muster.forking import not_for_children_to
from muster.wire import messages
from muster.wire.codec import WireError, decode_scheduler_message
from muster.wire.grpc_stderr import NativeStderr, Sayings, record_of, write_all
from muster.wire.patience import TRY_S
from muster.wire.threads import start_thread
from muster.worker.config import Settings
from muster.worker.session import events

if TYPE_CHECKING:
    from muster.certs.pki.peer import PeerCertificate
    from muster.certs.runtime.follower import Follower
    from muster.certs.runtime.store import Credentials


log = logging.getLogger("muster.worker")
_grpc = logging.getLogger("muster.grpc")
_LINES = 200
_watches: list[_GrpcLog] = []
"""This process's reader of gRPC's log, once there is one."""


def guard_grpc_log(env: MutableMapping[str, str]) -> None:
    """Keeps what strangers send to gRPC from forging lines; call it before grpc is imported or used.

    What gRPC would say, our own errors say. Who asks for its log by GRPC_VERBOSITY gets its records escaped
    and marked in the worker's own log, and what other C code writes to standard error as it is.
    """
    # A script's own forks, a DataLoader's worker processes say, never use it: without handlers that prepare
    # them, gRPC has nothing to complain of at each.
    env.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
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
    """Reads gRPC's log from standard error and passes all else on; lasts as long as the process."""

    def __init__(self) -> None:
        self._sayings = Sayings(_LINES)
        self._native = NativeStderr(self, (logging.getLogger("muster"),))

    def close(self) -> None:
        """Puts standard error back as it was; nothing that was written is lost."""
        self._native.close()
        self._say(self._sayings.due(float("inf")))

    def written(self, data: bytes) -> None:
        """See :class:`muster.wire.grpc_stderr.OutputReader`."""
        record = record_of(data)
        if record is None:
            write_all(self._native.real, data)
        else:
            self._say(self._sayings.add(data, record, time.monotonic()))

    def tend(self) -> float | None:
        """See :class:`muster.wire.grpc_stderr.OutputReader`."""
        self._say(self._sayings.due(time.monotonic()))
        return self._sayings.next_s()

    def failed(self) -> None:
        """See :class:`muster.wire.grpc_stderr.OutputReader`."""
        _grpc.exception("Fault while reading gRPC's log; it is written as it comes from now on.")

    def _say(self, lines: Iterable[str]) -> None:
        for line in lines:
            _grpc.warning("%s", line)


CONNECT_TIMEOUT_S = 5.0
SESSION_METHOD = "/rendezvous.v1.Rendezvous/Session"
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


class MessageRejectedError(Exception):
    """The scheduler did not understand a message of ours."""


def load_keyring(settings: Settings, env: Mapping[str, str]) -> Follower | None:
    """Loads this worker's certificate and hands the ciphers to gRPC; None without TLS.

    Raises:
        SettingsError: config.json or the password's variable is wrong.
        SecurityError: the certificate, its password or its authority is.
    """
    if settings.config_path is None:
        return None
    from muster.certs.errors import CertificateError, ConfigError
    from muster.certs.runtime.follower import follow_files

    try:
        keyring = follow_files(
            settings.config_path, "worker", env, log, job=settings.job_id, password=settings.client_password
        )
    except ConfigError as error:
        raise SettingsError(error.message, remedy=error.remedy) from error
    except CertificateError as error:
        raise SecurityError(error.message, remedy=error.remedy) from error
    if keyring.config.ignored_ciphers:
        log.warning("cipher_list: no effect have %s", ", ".join(keyring.config.ignored_ciphers))
    return keyring


Stream = tuple[Iterable[bytes], Callable[[], None]]
"""What comes, as serialized SchedulerMessages; and what ends it: idempotent, callable from any thread.

Iterating raises DeniedError or MessageRejectedError where the scheduler turned it down, and OSError
where it broke.
"""

Dial = Callable[[SimpleQueue[bytes | None]], Stream]
"""A function that opens a stream, which sends what is put into the queue; None ends it.

Raises DeniedError where TLS or identity failed, OSError where nobody is there yet.
"""


@functools.cache
def _keep_library_up() -> None:
    """Keeps gRPC's library from shutting down before the process ends.

    Processes were seen, rarely, to wait for ever while the interpreter takes its modules apart, with no other
    thread left: where gRPC shuts itself down, and where a freed call takes its lock, which a thread of gRPC
    held when the interpreter stopped it. Objects that are never freed keep both from being run.
    """
    import ctypes

    from grpc._cython import cygrpc  # type: ignore[attr-defined]

    for kept in (cygrpc.CompletionQueue(), _closed_calls):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


T = TypeVar("T")


class Turns:
    """The order in which schedulers are tried: one that has broken off comes last, as it may hang.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._found = -1

    def order(self) -> list[int]:
        """The numbers of the schedulers, those to be tried first first."""
        begin = self._found + 1
        return [number % self._count for number in range(begin, begin + self._count)]

    def found(self, number: int) -> None:
        """Notes the scheduler that took the connection."""
        self._found = number


class Schedulers:
    """The schedulers of a job, of which one leads and the others do not listen.

    Args:
        settings: of the worker.
    """

    def __init__(self, settings: Settings) -> None:
        self._each = [settings.replaced(scheduler_hosts=(host,)) for host in settings.scheduler_hosts]
        self._turns = Turns(len(self._each))

    def first(self, attempt: Callable[[Settings], T]) -> T:
        """Returns the result of ``attempt`` for the first scheduler with which it succeeds.

        Args:
            attempt: gets the settings with one scheduler; raises DeniedError or OSError.
        """
        failures: list[DeniedError | OSError] = []
        for number in self._turns.order():
            try:
                result = attempt(self._each[number])
            except (DeniedError, OSError) as error:
                failures.append(error)
            else:
                self._turns.found(number)
                return result
        raise next((each for each in failures if isinstance(each, DeniedError)), failures[-1])


def connect_timeout_s(schedulers: int) -> float:
    """How long one of so many schedulers may take to answer."""
    return CONNECT_TIMEOUT_S if schedulers == 1 else TRY_S


def grpc_dial(settings: Settings, keyring: Follower | None, method: str = SESSION_METHOD) -> Dial:
    """Opens streams over gRPC, over mutual TLS where there is a keyring."""
    schedulers, count = Schedulers(settings), len(settings.scheduler_hosts)

    def dial(outbox: SimpleQueue[bytes | None]) -> Stream:
        # Loaded before the scheduler is looked for: while it starts there is time, afterwards there is none.
        guard_grpc_log(os.environ)
        import muster.certs.runtime.grpc_credentials  # noqa: F401

        return schedulers.first(lambda one: _dial_one(one, keyring, outbox, count, method))

    return dial


def _dial_one(
    settings: Settings, keyring: Follower | None, outbox: SimpleQueue[bytes | None], count: int, method: str
) -> Stream:
    if keyring is None:
        _probe_plaintext(settings, connect_timeout_s(count))
        return stream_on(_channel(settings, None, None, count), outbox, method=method)
    channel, scheduler = _secure_channel(settings, keyring(), count)
    return stream_on(channel, outbox, lambda: keyring.has_revoked(scheduler), method)


def _secure_channel(settings: Settings, credentials: Credentials, count: int) -> tuple[Any, PeerCertificate]:
    from muster.certs.errors import CertificateError
    from muster.certs.runtime.preflight import preflight

    try:
        found = preflight(
            settings.scheduler_hosts[0],
            settings.scheduler_port,
            credentials,
            job=settings.job_id,
            timeout_s=connect_timeout_s(count),
        )
    except CertificateError as error:
        raise DeniedError(str(error), by_scheduler=False) from error
    from muster.certs.runtime.grpc_credentials import channel_credentials

    tls = channel_credentials(credentials, found.server_leaf_pem)
    return _channel(settings, tls, found.name_override, count), found.peer


def _channel(settings: Settings, credentials: Any, name: str | None, count: int) -> Any:
    import grpc

    from muster.wire.settings import client_options

    options = [
        *client_options(settings.node_timeout_s, schedulers=count),
        ("grpc.max_receive_message_length", 64 << 20),
    ]
    not_for_children_to(settings.scheduler_hosts[0], settings.scheduler_port)
    address = settings.scheduler_address
    if credentials is None:
        return grpc.insecure_channel(address, options)
    if name is not None:
        options.append(("grpc.ssl_target_name_override", name))  # type: ignore[arg-type]
    return grpc.secure_channel(address, credentials, options)


def _probe_plaintext(settings: Settings, timeout_s: float) -> None:
    """Checks that a plaintext HTTP/2 server answers; one that wants TLS would only hang up."""
    from muster.certs.runtime.probe import Spoken, spoken_at

    spoken = spoken_at(settings.scheduler_hosts[0], settings.scheduler_port, timeout_s)
    if spoken is Spoken.TLS:
        raise DeniedError(
            f"The scheduler at {settings.scheduler_address} demands TLS, and this worker has no"
            " config.json. Set MS_CONFIG_FILE to one with a certificate of this job"
            " (muster certs issue).",
            by_scheduler=False,
        )
    if spoken is Spoken.NOTHING:
        raise ConnectionResetError("the connection was closed before anything was said")


def stream_on(
    channel: Any,
    outbox: SimpleQueue[bytes | None],
    is_revoked: Callable[[], bool] = lambda: False,
    method: str = SESSION_METHOD,
) -> Stream:
    """Opens a stream on a channel of its own; ends it if the scheduler's certificate is revoked."""
    _keep_library_up()

    def requests() -> Iterator[bytes]:
        first = True  # the look before the connection has just checked
        for data in iter(outbox.get, None):
            if not first and is_revoked():
                call.cancel()  # looking for the scheduler again gives the reason in words
                return
            first = False
            yield data

    def replies() -> Iterator[bytes]:
        import grpc

        try:
            yield from call
        except grpc.RpcError as error:
            raise error_of(error.code().name, error.details() or "") from None

    def close() -> None:
        _closed_calls.append(call)
        call.cancel()  # before the requests end, or the scheduler may end the call as a success
        outbox.put(None)
        channel.close()

    call = channel.stream_stream(method)(requests())
    return replies(), close


def error_of(code: str, details: str) -> Exception:
    """The error for a stream that the scheduler has ended with this gRPC status."""
    if code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        return DeniedError(details, by_scheduler=True)
    if code == "INVALID_ARGUMENT":
        return MessageRejectedError(details)
    if code == "UNIMPLEMENTED":
        return MessageRejectedError(f"What answers there is not a scheduler of Muster ({details}).")
    return ConnectionError(f"{code.lower()}: {details}")


JOIN_TIMEOUT_S = 2.0


class SchedulerConnection:
    """Numbered streams to the scheduler, each read by a thread; messages go to the newest.

    Args:
        dial: opens a stream.

    Attributes:
        post: takes the events; called on the streams' threads.
    """

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self.post: Callable[[events.Event], object] = lambda _: None
        self._lock = threading.Lock()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._closers: dict[int, Callable[[], None]] = {}
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
            self._threads = [each for each in self._threads if each.is_alive()]
            self._threads.append(start_thread(partial(self._run, number, outbox), name="muster-stream"))

    def close(self, number: int) -> None:
        """Ends this stream, if it is open."""
        with self._lock:
            end = self._closers.pop(number, None)
        if end is not None:
            end()

    def close_all(self) -> None:
        """Ends all streams for good, and waits for their threads; idempotent."""
        with self._lock:
            self._closed = True
            closers, self._closers = list(self._closers.values()), {}
            threads, self._threads = self._threads, []
        for end in closers:
            end()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_TIMEOUT_S)

    def _run(self, number: int, outbox: SimpleQueue[bytes | None]) -> None:
        try:
            outgoing, end = self._dial(outbox)
            with self._lock:
                self._closers[number] = end
                closed = self._closed
            self.post(events.StreamOpened(number))
            if closed:
                end()
            held: messages.Assignment | None = None
            for data in outgoing:
                message = decode_scheduler_message(data, held)
                held = message if isinstance(message, messages.Assignment) else held
                self.post(events.Received(number, message))
            self.post(events.StreamLost(number, "it closed the stream"))
        except DeniedError as error:
            self.post(events.StreamDenied(number, str(error), error.by_scheduler))
        except MessageRejectedError as error:
            self.post(events.Received(number, messages.Refused(messages.RefusalCode.MALFORMED, str(error))))
        except (OSError, WireError) as error:
            self.post(events.StreamLost(number, str(getattr(error, "strerror", None) or error)))
        except Exception as error:  # a fault of ours must not leave the worker waiting for nobody
            log.exception("fault on the scheduler's stream; connecting again")
            self.post(events.StreamLost(number, f"{type(error).__name__}: {error}"))
        finally:
            self.close(number)
