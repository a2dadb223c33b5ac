"""Handles gRPC's log in a worker: it is suppressed, or its records are escaped and marked."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Iterable, MutableMapping

from muster.wire.grpc_stderr import NativeStderr, Sayings, record_of, write_all

_grpc = logging.getLogger("muster.grpc")
_LINES = 200
_watches: list[_GrpcLog] = []
"""This process's reader of gRPC's log, if there is one."""


def guard_grpc_log(env: MutableMapping[str, str]) -> None:
    """Keeps data that strangers send to gRPC from forging log lines; call it before grpc is imported or used.

    By default gRPC logs nothing, because Muster's errors say the same. If GRPC_VERBOSITY is set, gRPC's
    records go to the worker's own log, escaped and marked. What other C code writes to standard error is
    passed on unchanged.
    """
    # The script's own forks, such as a DataLoader's worker processes, never use gRPC. Without its fork
    # handlers, it has nothing to report at each fork.
    env.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    if env.setdefault("GRPC_VERBOSITY", "NONE").upper() == "NONE" or _watches:
        return
    try:
        watch = _GrpcLog()
    except OSError:  # Standard error cannot be captured here.
        env["GRPC_VERBOSITY"] = "NONE"
    else:
        _watches.append(watch)
        atexit.register(watch.close)


class _GrpcLog:
    """Reads gRPC's log from standard error and passes on everything else; lasts as long as the process."""

    def __init__(self) -> None:
        self._sayings = Sayings(_LINES)
        self._native = NativeStderr(self, (logging.getLogger("muster"),))

    def close(self) -> None:
        """Restores standard error; nothing that was written is lost."""
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
        _grpc.exception("Fault while reading gRPC's log; its lines are written unchanged from now on.")

    def _say(self, lines: Iterable[str]) -> None:
        for line in lines:
            _grpc.warning("%s", line)
