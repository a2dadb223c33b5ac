"""What gRPC logs in a worker: nothing, or its records, escaped and marked."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Iterable, MutableMapping

from muster.wire.grpc_stderr import NativeStderr, Sayings, record_of, write_all

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
