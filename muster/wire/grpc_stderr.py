"""Reads what gRPC's C code writes to standard error, and turns it into safe log lines."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import logging
import os
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TextIO

from muster.wire.log_lines import OTHERS, LogBudget, one_line
from muster.wire.threads import start_thread

MAX_WRITE_BYTES = 32 * 1024
"""The size in bytes at which the data of one write is cut."""

BUFFER_BYTES = 1 << 20
_MOST_A_TURN = 4096
_JOIN_S = 1.0


class OutputReader(Protocol):
    """The interface of a reader of C code's output, called by one thread at a time."""

    def written(self, data: bytes) -> None:
        """Takes the bytes of one write."""

    def tend(self) -> float | None:
        """Does what is due after each turn of reading; returns when it is due again, in monotonic seconds."""

    def failed(self) -> None:
        """Handles an error in the reading thread, which then ends; called within an exception handler."""


class NativeStderr:
    """The socket at descriptor 2, and the thread that reads its other end.

    Args:
        listener: gets the data that is written to descriptor 2.
        loggers: the loggers whose handlers write to ``sys.stderr``.

    Attributes:
        lock: held while the listener is used.
        real: a descriptor of the original standard error.

    Raises:
        OSError: descriptor 2 is closed, no free descriptor is left, or the system does not support such
            sockets.
    """

    def __init__(self, listener: OutputReader, loggers: Sequence[logging.Logger]) -> None:
        self.lock = threading.Lock()
        self._listener = listener
        self._closed = threading.Event()
        # PyDLL keeps the interpreter's lock. Releasing it would cost up to 5 ms per write with busy threads.
        self._receive = ctypes.PyDLL(None).recv
        self._received = ctypes.create_string_buffer(MAX_WRITE_BYTES)
        self.real = os.dup(2)
        try:
            self._reading, writing = _make_pair()
        except OSError:
            os.close(self.real)
            raise
        os.dup2(writing.fileno(), 2)
        writing.close()
        try:
            self._streams = _Streams(self.real, loggers)
        except OSError:  # For example, sys.stderr has no descriptor.
            os.dup2(self.real, 2)
            os.close(self.real)
            self._reading.close()
            raise
        # If C code aborts, its last line may stay unread. faulthandler still shows where it was.
        self._traced_crashes = faulthandler.is_enabled()
        faulthandler.enable(file=self.real)
        self.thread = start_thread(self._run, name="native-stderr")

    def drain(self) -> bool:
        """Reads the data that is available; returns whether more can come. The caller holds the lock."""
        for _ in range(_MOST_A_TURN):  # A flood of data must not keep the lock forever.
            length = self._receive(
                self._reading.fileno(), self._received, MAX_WRITE_BYTES, socket.MSG_DONTWAIT
            )
            if length <= 0:  # No data is available, or the other end was closed.
                return bool(length)
            self._listener.written(ctypes.string_at(self._received, length))
        return True

    def close(self) -> None:
        """Restores descriptor 2; nothing that was written is lost."""
        os.dup2(self.real, 2)
        with self.lock:
            self._closed.set()
            self.drain()
            self._listener.tend()
        faulthandler.disable()
        self._streams.restore()
        if self._traced_crashes:
            faulthandler.enable()
        self.thread.join(_JOIN_S)  # Returns at once, unless a child process still holds the other end.
        if not self.thread.is_alive():
            self._reading.close()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        try:
            open_still, due_s = True, None
            while open_still:
                poll.poll(None if due_s is None else max(0.0, 1000 * (due_s - time.monotonic())))
                with self.lock:
                    if self._closed.is_set():
                        return
                    open_still = self.drain()
                    due_s = self._listener.tend()
        except Exception:
            # Nobody reads the socket any more, so C code must write to the original standard error again.
            os.dup2(self.real, 2)
            self._listener.failed()
        finally:
            if self._closed.is_set():  # close() may have returned before this thread ended.
                self._reading.close()


def _make_pair() -> tuple[socket.socket, socket.socket]:
    """Creates the reading and the writing end of a socket pair; each write arrives as one message.

    Writes never block; data for which there is no room is lost. A blocked gRPC thread that held the
    interpreter's lock would wait for the reader, and the reader would wait for that lock.
    """
    reading, writing = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    writing.setblocking(False)
    writing.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)  # The system may limit the size.
    return reading, writing


class _Streams:
    """Redirects what Python itself writes to descriptor 2: ``sys.stderr`` and the log."""

    def __init__(self, to: int, loggers: Sequence[logging.Logger]) -> None:
        self._loggers = (*loggers, logging.getLogger())
        self._old, self._new = sys.stderr, sys.stderr
        if not isinstance(self._old, io.TextIOWrapper) or self._old.fileno() != 2:
            return  # Its output goes elsewhere already.
        self._new = io.TextIOWrapper(
            open(to, "wb", buffering=0 if self._old.write_through else -1, closefd=False),  # noqa: SIM115
            encoding=self._old.encoding,
            errors=self._old.errors,
            newline="\n",
            line_buffering=self._old.line_buffering,
            write_through=self._old.write_through,
        )
        self._exchange(self._old, self._new)

    def restore(self) -> None:
        """Undoes the redirection."""
        if self._new is not self._old:
            self._exchange(self._new, self._old)

    def _exchange(self, old: TextIO, new: TextIO) -> None:
        old.flush()
        if sys.stderr is old:
            sys.stderr = new
        for logger in self._loggers:
            for handler in logger.handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                    handler.setStream(new)


def write_all(fd: int, data: bytes) -> None:
    """Writes all bytes; ignores errors, for example if nobody reads the other end."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]


MAX_TEXT = 160
WINDOW_S = 10.0
_RECORD = re.compile(rb"([IWEF])\d{4} \S+ +\d+ ([\w.+-]{1,80}:\d{1,9})\] ")
_PREAMBLE = b"WARNING: All log messages before absl::InitializeLog()"


@dataclass(frozen=True, slots=True)
class GrpcRecord:
    """One record of gRPC's log.

    Attributes:
        level: I, W, E or F.
        source: the file and line in gRPC's sources that wrote the record.
        data: the text, as gRPC wrote it.
    """

    level: str
    source: str
    data: bytes


def record_of(written: bytes) -> GrpcRecord | None:
    """Parses the data of one write as a record of gRPC's log; returns None if it is not one.

    The notice that absl's log is not initialized counts as a record of level I.
    """
    found = _RECORD.match(written)
    if found is not None:
        return GrpcRecord(found[1].decode(), found[2].decode(), written[found.end() :])
    if written.startswith(_PREAMBLE):
        return GrpcRecord("I", "absl", written)
    return None


def plain(data: bytes) -> str:
    """Returns text of C code as one line: escaped, and cut if it is too long."""
    text = one_line(data.decode("utf-8", "backslashreplace").strip())
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(data)} bytes)"


class Sayings:
    """Limits the log lines about C code's output: logs the first ones from each place, and counts the rest.

    Args:
        lines: how many lines are logged per ten seconds from each place in gRPC's sources. All other C code
            counts as one place.
    """

    def __init__(self, lines: int = 1) -> None:
        self._budget = LogBudget[str](lines=lines, window_s=WINDOW_S, max_callers=32)
        self.next_s = self._budget.next_s

    def add(self, written: bytes, record: GrpcRecord | None, now_s: float) -> list[str]:
        """Takes the data of one write; returns the lines to log now.

        Args:
            written: the data of one write.
            record: the same data, parsed by :func:`record_of`.
            now_s: the time, in monotonic seconds.
        """
        told = [*self.due(now_s)]
        if not written.strip():
            return told
        who, data = ("C code", written) if record is None else (f"gRPC ({record.source})", record.data)
        text = plain(data)
        return [*told, f"{who} says: {text}"] if self._budget.take(who, "", text, now_s) else told

    def due(self, now_s: float) -> Iterator[str]:
        """Ends the intervals that are over; yields a line for each one in which something was suppressed.

        With ``float("inf")`` as the time, it ends all intervals.
        """
        for left in self._budget.due(now_s):
            who, count = left.caller if left.caller != OTHERS else "C code", sum(left.codes.values())
            more = f" {count} more things within {WINDOW_S:.0f} s, the last" if count > 1 else ""
            yield f"{who} says{more}: {left.last}"
