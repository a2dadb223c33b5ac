"""What gRPC says in a worker: nothing, unless GRPC_VERBOSITY asks; then each record on one log line."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Iterable, MutableMapping

from muster.rendezvous.grpc_lines import Sayings, record_of
from muster.rendezvous.native_stderr import NativeStderr, write_all

log = logging.getLogger("muster.grpc")
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
        """See :class:`muster.rendezvous.native_stderr.Listener`."""
        record, now_s = record_of(data), time.monotonic()
        if record is None:
            write_all(self._native.real, data)
            return
        self._say(self._sayings.due(now_s))
        line = self._sayings.add(data, record, now_s)
        if line is not None:
            self._say((line,))

    def tend(self) -> None:
        """See :class:`muster.rendezvous.native_stderr.Listener`."""
        self._say(self._sayings.due(time.monotonic()))

    def next_s(self) -> float | None:
        """See :class:`muster.rendezvous.native_stderr.Listener`."""
        return self._sayings.next_s()

    def failed(self) -> None:
        """See :class:`muster.rendezvous.native_stderr.Listener`."""
        log.exception("Fault while reading gRPC's log; it is written as it comes from now on.")

    def _say(self, lines: Iterable[str]) -> None:
        for line in lines:
            log.warning("%s", line)
