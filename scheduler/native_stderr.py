"""Standard error of C code, read by this process, because gRPC tells of failed handshakes only there.

Descriptor 2 becomes a pipe. Python's ``sys.stderr``, the log and faulthandler keep writing straight to where
it led before. One thread reads the pipe: failed handshakes go to the log, the rest of gRPC's trace goes
nowhere, and every other line goes to the old descriptor unchanged.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import io
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Iterable, Iterator, MutableMapping
from typing import TextIO

from scheduler.handshakes import HUNG_UP, Failure, TraceReader
from scheduler.logs import LOG, Recorder
from scheduler.thinning import Line, Thinner

PIPE_BYTES = 1024 * 1024
_READ_BYTES = 256 * 1024
_UNFINISHED_LINE_S = 0.2
_JOIN_S = 1.0
_GATHER_S = 0.02


@contextlib.contextmanager
def handshakes_watched(env: MutableMapping[str, str], *, tls: bool) -> Iterator[HandshakeWatch | None]:
    """Has gRPC trace handshakes, and reads that, for as long as the context lasts.

    Enter it before grpc is imported, which reads the environment then. Whoever set GRPC_VERBOSITY or
    GRPC_TRACE himself gets what he asked for, and no watch.
    """
    watch = None
    if tls and not {"GRPC_VERBOSITY", "GRPC_TRACE"} & env.keys():
        with contextlib.suppress(OSError):  # there is no descriptor 2, or no other one left
            watch = HandshakeWatch()
            env.update(GRPC_VERBOSITY="INFO", GRPC_TRACE="handshaker")
    env.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        yield watch
    finally:
        if watch is not None:
            watch.close()


class HandshakeWatch:
    """The pipe at descriptor 2, and the thread that reads it."""

    def __init__(self) -> None:
        self._reader = TraceReader()
        self._thinners = {False: Thinner(), True: Thinner()}  # those who just hang up apart
        self._recorder: Recorder | None = None
        self._lock = threading.Lock()  # whoever holds it may read the pipe and touch the fields above
        self._closed = threading.Event()
        self._real = os.dup(2)
        self._pipe, writing = _make_pipe()
        os.dup2(writing, 2)
        os.close(writing)
        self._streams = _Streams(self._real)
        # Should C code abort, its last line may stay in the pipe; where it was, is told all the same.
        self._traced_crashes = faulthandler.is_enabled()
        faulthandler.enable(file=self._real)
        self._thread = threading.Thread(target=self._run, name="handshakes", daemon=True)
        self._thread.start()

    def report_to(self, recorder: Recorder) -> None:
        """Reports to this one from now on."""
        with self._lock:
            self._recorder = recorder

    def finish_reports(self) -> None:
        """Reports what has been written until now, and nothing afterwards."""
        with self._lock:
            self._drain()
            for quiet, thinner in self._thinners.items():
                self._tell(thinner.all(), quiet=quiet)
            self._recorder = None

    def close(self) -> None:
        """Puts everything back as it was; no line that was written is lost."""
        os.dup2(self._real, 2)
        with self._lock:
            self._closed.set()
            self._drain()
            write_all(self._real, self._reader.rest())
        faulthandler.disable()
        self._streams.restore()
        if self._traced_crashes:
            faulthandler.enable()
        self._thread.join(_JOIN_S)  # the pipe has ended; unless a child inherited it, which may live on
        if not self._thread.is_alive():
            os.close(self._pipe)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        try:
            open_still = True
            while open_still:
                readable = bool(poll.poll(self._patience_ms()))
                if readable:
                    # gRPC writes nine lines for each connection; to wake up for each would cost more
                    # than all the rest.
                    self._closed.wait(_GATHER_S)
                with self._lock:
                    open_still = not self._closed.is_set() and self._turn(readable=readable)
        except Exception:
            # Nobody reads the pipe any more: what C code has to say must not end there.
            os.dup2(self._real, 2)
            LOG.exception("fault while reading gRPC's trace; failed handshakes are no longer told")

    def _patience_ms(self) -> float | None:
        if self._reader.unfinished:
            return 1000 * _UNFINISHED_LINE_S
        ends = [end for thinner in self._thinners.values() if (end := thinner.next_s()) is not None]
        return max(0.0, 1000 * (min(ends) - time.monotonic())) if ends else None

    def _turn(self, *, readable: bool) -> bool:
        """Reads and reports what there is; returns whether there can be more."""
        open_still = self._drain() if readable else True
        if not readable and self._reader.unfinished:
            # No record of gRPC's stops midway: somebody wrote without a line's end.
            write_all(self._real, self._reader.rest())
        for quiet, thinner in self._thinners.items():
            self._tell(thinner.due(time.monotonic()), quiet=quiet)
        return open_still

    def _drain(self) -> bool:
        """Reads what is in the pipe now; returns whether it has not ended."""
        for _ in range(2 * PIPE_BYTES // _READ_BYTES):  # a flood must not keep the lock for ever
            try:
                data = os.read(self._pipe, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            failures, others = self._reader.feed(data)
            write_all(self._real, others)
            for failure in failures:
                self._note(failure)
        return True

    def _note(self, failure: Failure) -> None:
        if self._recorder is None:
            return
        self._recorder.failed_handshakes[failure.reason] += 1
        quiet, now_s = failure.reason == HUNG_UP, time.monotonic()
        self._tell(self._thinners[quiet].due(now_s), quiet=quiet)
        line = self._thinners[quiet].add(failure, now_s)
        if line is not None:
            self._tell((line,), quiet=quiet)

    def _tell(self, lines: Iterable[Line], *, quiet: bool) -> None:
        for line in lines:
            if self._recorder is not None:
                self._recorder.handshake_failed(line, quiet=quiet)


def _make_pipe() -> tuple[int, int]:
    """Makes a pipe; returns the ends to read and to write.

    Neither end blocks. A thread of gRPC's that held the interpreter's lock and waited for room in the pipe
    would wait for its reader, which waits for that lock. So what finds no room is lost instead.
    """
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    with contextlib.suppress(OSError):  # the size is a wish
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reading, writing


class _Streams:
    """What Python itself writes to descriptor 2, led elsewhere: ``sys.stderr`` and the log."""

    def __init__(self, to: int) -> None:
        self._old, self._new = sys.stderr, sys.stderr
        if not isinstance(self._old, io.TextIOWrapper) or self._old.fileno() != 2:
            return  # it goes elsewhere already
        self._new = io.TextIOWrapper(
            open(to, "wb", buffering=0 if self._old.write_through else -1, closefd=False),  # noqa: SIM115
            encoding=self._old.encoding,
            errors=self._old.errors,
            newline="\n",
            line_buffering=self._old.line_buffering,
            write_through=self._old.write_through,
        )
        _exchange(self._old, self._new)

    def restore(self) -> None:
        """Leads it back."""
        if self._new is not self._old:
            _exchange(self._new, self._old)


def _exchange(old: TextIO, new: TextIO) -> None:
    old.flush()
    if sys.stderr is old:
        sys.stderr = new
    for handler in (*LOG.handlers, *logging.getLogger().handlers):
        if isinstance(handler, logging.StreamHandler) and handler.stream is old:
            handler.setStream(new)


def write_all(fd: int, data: bytes) -> None:
    """Writes all of it, or gives up: that nobody reads our errors is no reason to stop."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]
