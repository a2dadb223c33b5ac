"""Reads failed TLS handshakes from the scheduler's standard error: gRPC reports them only there.

Failed handshakes go to the log, the rest of that trace goes nowhere, and whatever else C code says goes to
the log as well: escaped, few, and marked as what it is (:mod:`muster.wire.grpc_stderr`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, MutableMapping

from muster.scheduler.audit.grpc_trace import Failure, Thinner, TraceReader, earliest
from muster.scheduler.audit.logs import LOG, Recorder
from muster.wire.grpc_stderr import NativeStderr, Sayings, record_of

_ASKED_LINES = 200


@contextlib.contextmanager
def handshakes_watched(env: MutableMapping[str, str], *, tls: bool) -> Iterator[HandshakeWatch | None]:
    """Has gRPC trace handshakes, and reads what it writes, for as long as the context lasts.

    Enter it before grpc is imported, which reads the environment then. An operator who set GRPC_VERBOSITY or
    GRPC_TRACE himself gets what he asked for, escaped and marked, and no lines about handshakes. Where there
    is nothing to read it by, gRPC says nothing.
    """
    asked = bool({"GRPC_VERBOSITY", "GRPC_TRACE"} & env.keys())
    watch = None
    with contextlib.suppress(OSError):
        watch = HandshakeWatch(asked=asked)
    if watch is None:
        env["GRPC_VERBOSITY"] = "NONE"
    elif tls and not asked:
        env.update(GRPC_VERBOSITY="INFO", GRPC_TRACE="handshaker")
    env.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        yield watch
    finally:
        if watch is not None:
            watch.close()


class HandshakeWatch:
    """Reads standard error of C code, and reports.

    Args:
        asked: the trace was asked for by the operator, who gets it in the log.
    """

    def __init__(self, *, asked: bool = False) -> None:
        self._asked = asked
        self._reader = TraceReader()
        self._thinner = Thinner()
        self._sayings = Sayings(_ASKED_LINES if asked else 1)
        self._recorder: Recorder | None = None
        self.native = NativeStderr(self, (LOG,))

    def report_to(self, recorder: Recorder) -> None:
        """Reports to this one from now on."""
        with self.native.lock:
            self._recorder = recorder

    def finish_reports(self) -> None:
        """Reports what has been written until now, and no handshake afterwards."""
        with self.native.lock:
            self.native.drain()
            self._tell(self._thinner.due(float("inf")))
            self._recorder = None

    def close(self) -> None:
        """Puts everything back as it was; nothing that was written is lost."""
        self.native.close()
        self._say(self._sayings.due(float("inf")))

    def written(self, data: bytes) -> None:
        """See :class:`muster.wire.grpc_stderr.OutputReader`."""
        record, now_s = record_of(data), time.monotonic()
        if record is not None and record.level in "IW" and not self._asked:
            failure = self._reader.read(record)
            if failure is not None and self._recorder is not None:
                self._recorder.failed_handshakes[failure.reason] += 1
                self._tell(self._thinner.add(failure, now_s))
        else:
            self._say(self._sayings.add(data, record, now_s))

    def tend(self) -> float | None:
        """See :class:`muster.wire.grpc_stderr.OutputReader`."""
        now_s = time.monotonic()
        self._tell(self._thinner.due(now_s))
        self._say(self._sayings.due(now_s))
        return earliest((self._thinner.next_s(), self._sayings.next_s()))

    def failed(self) -> None:
        """See :class:`muster.wire.grpc_stderr.OutputReader`."""
        LOG.exception("fault while reading gRPC's trace; failed handshakes are no longer logged")

    def _tell(self, failures: Iterable[Failure]) -> None:
        for failure in failures:
            if self._recorder is not None:
                self._recorder.handshake_failed(failure)

    def _say(self, lines: Iterable[str]) -> None:
        for line in lines:
            LOG.warning("%s", line)
