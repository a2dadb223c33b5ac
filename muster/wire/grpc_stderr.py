"""Reads what gRPC's C code writes to standard error, and turns it into safe log lines."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import logging
import mmap
import os
import re
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TextIO

from muster.wire.log_lines import OTHERS, Budget, one_line
from muster.wire.threads import start_thread

MAX_WRITE_BYTES = 32 * 1024
"""What is longer is cut."""

BUFFER_BYTES = 1 << 20
_BATCH = 512
_BATCHES_A_TURN = 8
_JOIN_S = 1.0
_GATHER_S = 0.02


class Listener(Protocol):
    """The interface of a reader of C code's output, called by one thread at a time."""

    def written(self, data: bytes) -> None:
        """Takes the bytes of one write."""

    def tend(self) -> None:
        """Does what is due; called after each turn of reading."""

    def next_s(self) -> float | None:
        """When something is due next, on the monotonic clock; None: nothing is."""

    def failed(self) -> None:
        """Handles an error in the reading thread, which then ends; called within an exception handler."""


class NativeStderr:
    """The socket at descriptor 2, and the thread that reads its other end.

    Args:
        listener: gets what is written there.
        loggers: those whose handlers write to ``sys.stderr``.

    Attributes:
        lock: its holder has the listener to itself.
        real: where descriptor 2 led before.

    Raises:
        OSError: there is no descriptor 2, no other one left, or it cannot be done on this system.
    """

    def __init__(self, listener: Listener, loggers: Sequence[logging.Logger]) -> None:
        self.lock = threading.Lock()
        self._listener = listener
        self._closed = threading.Event()
        self.real = os.dup(2)
        try:
            self._batch = _Batch()
            self._reading, writing = _make_pair()
        except OSError:
            os.close(self.real)
            raise
        os.dup2(writing.fileno(), 2)
        writing.close()
        try:
            self._streams = _Streams(self.real, loggers)
        except OSError:  # sys.stderr has no descriptor, say
            os.dup2(self.real, 2)
            os.close(self.real)
            self._reading.close()
            raise
        # Should C code abort, its last line may stay unread; faulthandler says where it was all the same.
        self._traced_crashes = faulthandler.is_enabled()
        faulthandler.enable(file=self.real)
        self.thread = start_thread(self._run, name="native-stderr")

    def drain(self, *, gather: bool = False) -> bool:
        """Reads what is there now; returns whether there can be more. The caller holds the lock.

        Args:
            gather: wait a moment for more, and for its end.
        """
        for _ in range(_BATCHES_A_TURN):  # a flood must not keep the lock for ever
            count = self._batch.receive(self._reading, wait=gather)
            for index in range(count):
                data = self._batch.message(index)
                if not data:
                    return False
                self._listener.written(data)
            if count < _BATCH:
                break
        return True

    def close(self) -> None:
        """Puts everything back as it was; nothing that was written is lost."""
        os.dup2(self.real, 2)
        with self.lock:
            self._closed.set()
            self.drain()
            self._listener.tend()
        faulthandler.disable()
        self._streams.restore()
        if self._traced_crashes:
            faulthandler.enable()
        self.thread.join(_JOIN_S)  # it has ended; unless a child inherited it, which may live on
        if not self.thread.is_alive():
            self._reading.close()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        try:
            open_still = True
            while open_still:
                readable = bool(poll.poll(self._patience_ms()))
                with self.lock:
                    if self._closed.is_set():
                        return
                    open_still = self.drain(gather=True) if readable else True
                    self._listener.tend()
        except Exception:
            # Nobody reads any more: what C code has to say must not end there.
            os.dup2(self.real, 2)
            self._listener.failed()
        finally:
            if self._closed.is_set():  # close() may not have waited for this thread's end
                self._reading.close()

    def _patience_ms(self) -> float | None:
        next_s = self._listener.next_s()
        return None if next_s is None else max(0.0, 1000 * (next_s - time.monotonic()))


def _make_pair() -> tuple[socket.socket, socket.socket]:
    """Makes the ends to read and to write; each write arrives as one message.

    Nobody waits to write. A thread of gRPC's that held the interpreter's lock and waited for room would wait
    for its reader, which waits for that lock. So what finds no room is lost instead.
    """
    reading, writing = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    writing.setblocking(False)
    writing.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)  # a wish: the system has its limit
    timeout = struct.pack("ll", 0, int(1e6 * _GATHER_S))
    reading.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    return reading, writing


class _Buffer(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Header(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Message(ctypes.Structure):
    _fields_ = (("header", _Header), ("length", ctypes.c_uint))


class _Moment(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Batch:
    """Room for messages, which the kernel fills in one call (``recvmmsg``)."""

    def __init__(self) -> None:
        try:
            self._recvmmsg = ctypes.CDLL(None, use_errno=True).recvmmsg
        except AttributeError:
            raise OSError("the system has no recvmmsg") from None
        self._room = mmap.mmap(-1, _BATCH * MAX_WRITE_BYTES)  # takes memory only where messages are long
        self._messages = (_Message * _BATCH)()
        self._buffers = (_Buffer * _BATCH)()
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._room))
        for index in range(_BATCH):
            self._buffers[index] = _Buffer(begin + index * MAX_WRITE_BYTES, MAX_WRITE_BYTES)
            self._messages[index].header.buffers = ctypes.pointer(self._buffers[index])
            self._messages[index].header.count = 1

    def receive(self, sock: socket.socket, *, wait: bool) -> int:
        """Receives messages; returns how many. Waits, if at all, until none came for a moment or in all."""
        moment = _Moment(0, int(1e9 * _GATHER_S))
        flags = 0 if wait else socket.MSG_DONTWAIT
        count = self._recvmmsg(sock.fileno(), self._messages, _BATCH, flags, ctypes.byref(moment))
        return max(0, int(count))

    def message(self, index: int) -> bytes:
        """What came in that one; empty: the other end was closed."""
        begin = index * MAX_WRITE_BYTES
        return self._room[begin : begin + self._messages[index].length]


class _Streams:
    """Redirects what Python itself writes to descriptor 2: ``sys.stderr`` and the log."""

    def __init__(self, to: int, loggers: Sequence[logging.Logger]) -> None:
        self._loggers = (*loggers, logging.getLogger())
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
    """Writes all bytes, or gives up silently where nobody reads them."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]


MAX_TEXT = 160
WINDOW_S = 10.0
_RECORD = re.compile(rb"([IWEF])\d{4} \S+ +\d+ ([\w.+-]{1,80}:\d{1,9})\] ")
_PREAMBLE = b"WARNING: All log messages before absl::InitializeLog()"


@dataclass(frozen=True, slots=True)
class Record:
    """One record of gRPC's log.

    Attributes:
        level: I, W, E or F.
        source: the file and line that wrote it.
        data: what it says, as it came.
    """

    level: str
    source: str
    data: bytes


def record_of(written: bytes) -> Record | None:
    """Parses one write as a record of gRPC's log; None if it is none.

    The remark that its log is not set up counts as one of level I.
    """
    found = _RECORD.match(written)
    if found is not None:
        return Record(found[1].decode(), found[2].decode(), written[found.end() :])
    if written.startswith(_PREAMBLE):
        return Record("I", "absl", written)
    return None


def plain(data: bytes) -> str:
    """Text of C code on one line: escaped, and cut where it is long."""
    text = one_line(data.decode("utf-8", "backslashreplace").strip())
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(data)} bytes)"


class Sayings:
    """Limits log lines about C code's output: the first of each place at once, then counts.

    Args:
        lines: of each place in gRPC's sources, or of all else, that are written within ten seconds.
    """

    def __init__(self, lines: int = 1) -> None:
        self._budget = Budget[str](lines=lines, window_s=WINDOW_S, max_callers=32)
        self.next_s = self._budget.next_s

    def add(self, written: bytes, record: Record | None, now_s: float) -> str | None:
        """Notes what was written; returns a line if it is to be logged now. Call :meth:`due` before.

        Args:
            written: what came by one write.
            record: that, read by :func:`record_of`.
            now_s: the time.
        """
        if not written.strip():
            return None
        who, data = ("C code", written) if record is None else (f"gRPC ({record.source})", record.data)
        text = plain(data)
        return f"{who} says: {text}" if self._budget.take(who, "", text, now_s) else None

    def due(self, now_s: float) -> Iterator[str]:
        """Ends the intervals that are over; yields a line for what was suppressed in them."""
        for left in self._budget.due(now_s):
            who, count = left.caller if left.caller != OTHERS else "C code", sum(left.codes.values())
            more = f" {count} more things within {WINDOW_S:.0f} s, the last" if count > 1 else ""
            yield f"{who} says{more}: {left.last}"

    def all(self) -> Iterator[str]:
        """Ends all intervals, at the end of the output."""
        return self.due(float("inf"))
