"""Reads failed TLS handshakes from the scheduler's standard error: gRPC reports them only there.

Failed handshakes go to the log, the rest of that trace goes nowhere, and whatever else C code says goes to
the log as well: escaped, few, and marked as what it is (:mod:`muster.wire.grpc_stderr`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, MutableMapping

from muster.scheduler.audit.grpc_trace import HUNG_UP, Failure, Line, Thinner, TraceReader
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
        self._thinners = {False: Thinner(), True: Thinner()}  # those who just hang up apart
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
            for quiet, thinner in self._thinners.items():
                self._tell(thinner.all(), quiet=quiet)
            self._recorder = None

    def close(self) -> None:
        """Puts everything back as it was; nothing that was written is lost."""
        self.native.close()
        self._say(self._sayings.all())

    def written(self, data: bytes) -> None:
        """See :class:`muster.wire.grpc_stderr.Listener`."""
        record, now_s = record_of(data), time.monotonic()
        if record is not None and record.level in "IW" and not self._asked:
            failure = self._reader.read(record)
            if failure is not None:
                self._note(failure, now_s)
            return
        self._say(self._sayings.due(now_s))
        line = self._sayings.add(data, record, now_s)
        if line is not None:
            self._say((line,))

    def tend(self) -> None:
        """See :class:`muster.wire.grpc_stderr.Listener`."""
        now_s = time.monotonic()
        for quiet, thinner in self._thinners.items():
            self._tell(thinner.due(now_s), quiet=quiet)
        self._say(self._sayings.due(now_s))

    def next_s(self) -> float | None:
        """See :class:`muster.wire.grpc_stderr.Listener`."""
        due = [thinner.next_s() for thinner in self._thinners.values()] + [self._sayings.next_s()]
        return min((at for at in due if at is not None), default=None)

    def failed(self) -> None:
        """See :class:`muster.wire.grpc_stderr.Listener`."""
        LOG.exception("fault while reading gRPC's trace; failed handshakes are no longer logged")

    def _note(self, failure: Failure, now_s: float) -> None:
        if self._recorder is None:
            return
        self._recorder.failed_handshakes[failure.reason] += 1
        quiet = failure.reason == HUNG_UP
        self._tell(self._thinners[quiet].due(now_s), quiet=quiet)
        line = self._thinners[quiet].add(failure, now_s)
        if line is not None:
            self._tell((line,), quiet=quiet)

    def _tell(self, lines: Iterable[Line], *, quiet: bool) -> None:
        for line in lines:
            if self._recorder is not None:
                self._recorder.handshake_failed(line, quiet=quiet)

    def _say(self, lines: Iterable[str]) -> None:
        for line in lines:
            LOG.warning("%s", line)
