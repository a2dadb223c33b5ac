"""Reads failed TLS handshakes from the scheduler's standard error, the only place where gRPC reports them.

Failed handshakes are logged, and the rest of the trace is dropped. Other output of C code is logged as well:
escaped, marked as such, and with a limited number of lines (:mod:`muster.wire.grpc_stderr`).
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
    """Turns on gRPC's trace of handshakes, and reads its output while the context is open.

    The context must be entered before grpc is imported, because grpc reads the environment at import. If the
    operator has set GRPC_VERBOSITY or GRPC_TRACE, the requested output is logged, escaped and marked, but
    failed handshakes are not. If standard error cannot be captured, gRPC's output is turned off.
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
    """Reads C code's standard error and reports failed handshakes.

    Args:
        asked: whether the operator asked for gRPC's output, which is then logged.
    """

    def __init__(self, *, asked: bool = False) -> None:
        self._asked = asked
        self._reader = TraceReader()
        self._thinner = Thinner()
        self._sayings = Sayings(_ASKED_LINES if asked else 1)
        self._recorder: Recorder | None = None
        self.native = NativeStderr(self, (LOG,))

    def report_to(self, recorder: Recorder) -> None:
        """Sets the recorder that gets the reports from now on."""
        with self.native.lock:
            self._recorder = recorder

    def finish_reports(self) -> None:
        """Reports the handshakes that failed so far; later ones are not reported."""
        with self.native.lock:
            self.native.drain()
            self._tell(self._thinner.due(float("inf")))
            self._recorder = None

    def close(self) -> None:
        """Restores standard error, and logs everything that was written before."""
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
