"""Writes checkpoints in a process of its own, while the training goes on."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from muster.forking import not_for_children
from muster.training.shared_room import SharedRoom
from muster.training.writer import take_away
from muster.wire.threads import start_thread

log = logging.getLogger("muster.worker")

LOOK_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """An order to write one checkpoint.

    Attributes:
        call: ``module:function`` that writes it; called with the room's bytes and ``what``.
        what: describes the bytes and where to write them, as JSON values.
        size: how many bytes of the room it takes.
        unfinished: the path of the file or directory until it is complete.
        ready: waits until all bytes are in the room.
        done: called with the function's result.
        room: the room with the bytes; None: the writer's own room.
        over: called when the bytes are no longer needed, however the write has ended.
    """

    call: str
    what: Mapping[str, Any]
    size: int
    unfinished: Path
    ready: Callable[[], None]
    done: Callable[[Any], None]
    room: SharedRoom | None = None
    over: Callable[[], None] = lambda: None


class WriterProcess:
    """Writes one checkpoint at a time in a process that is started once; call it from one thread.

    A write that fails (for example because the disk is full) is logged. So is the end of the writer process;
    the next write then starts another one. At its end, this process waits for a write in progress.

    Attributes:
        room: shared memory for the contents of the next write; take it after :meth:`wait`.
    """

    def __init__(self) -> None:
        self.room = SharedRoom()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._answers: Any = None
        self._thread: threading.Thread | None = None
        self._end: Any = None
        self._given_up = ""
        self._passed: weakref.WeakSet[SharedRoom] = weakref.WeakSet()
        """The rooms that the process has; it gets them when it starts."""
        wait = weakref.WeakMethod(self.wait)  # weak: a writer that is gone has nothing to write
        atexit.register(lambda: (call := wait()) and call())

    @property
    def is_writing(self) -> bool:
        """Whether a write is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def write(self, order: WriteOrder) -> None:
        """Starts a write, after waiting for the previous one."""
        self.wait()
        self._thread = start_thread(partial(self._write, order), name="muster-checkpoint")

    def wait(self) -> None:
        """Waits until no write is in progress."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def give_up(self, reason: str) -> None:
        """Kills the process if it is writing: its file will never be complete.

        Args:
            reason: why, as a half sentence for the log.
        """
        self._given_up = reason
        while self._thread is not None and self._thread.is_alive():
            if self._process is not None:  # None: it may be about to start
                self._process.kill()
            self._thread.join(LOOK_AGAIN_S)
        self.wait()
        self._given_up = ""

    def close(self) -> None:
        """Waits for the write in progress, and ends the process; idempotent."""
        self.wait()
        self._let_go()
        self.room.close()

    def _write(self, order: WriteOrder) -> None:
        try:
            order.ready()
            answer = self._ask(order)
            if "error" in answer:
                log.error("%s Training goes on. %s", answer["error"], answer["remedy"])
            else:
                order.done(answer["found"])
        except Exception as error:
            log.error("The checkpoint could not be written: %r. Training goes on.", error)
        finally:
            order.over()

    def _ask(self, order: WriteOrder) -> dict[str, Any]:
        if self._given_up:
            return {"error": f"A checkpoint was not written: {self._given_up}.", "remedy": ""}
        room = order.room or self.room
        if self._process is None or self._process.poll() is not None or room not in self._passed:
            self._start(room)
        assert self._process is not None
        assert self._channel is not None
        line = json.dumps(
            {
                "call": order.call,
                "what": order.what,
                "size": order.size,
                "room": room.descriptor,
                "unfinished": str(order.unfinished),
            }
        )
        answer = b""
        with contextlib.suppress(OSError):
            self._channel.sendall(line.encode() + b"\n")
            answer = self._answers.readline()
        if answer.endswith(b"\n"):
            found: dict[str, Any] = json.loads(answer)
            return found
        code = self._process.wait()
        self._let_go()
        take_away(str(order.unfinished))
        if self._given_up:
            return {"error": f"A checkpoint was not written: {self._given_up}.", "remedy": ""}
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return {
            "error": f"A checkpoint was not written: the process that writes them was {how}.",
            "remedy": "The next one starts another process.",
        }

    def _start(self, room: SharedRoom) -> None:
        self._let_go()
        rooms = {*self._passed, self.room, room}
        channel, theirs = socket.socketpair()
        not_for_children(channel)  # otherwise a DataLoader's processes would keep the writer alive
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        with theirs:
            descriptors = theirs.fileno(), *(each.descriptor for each in rooms)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "muster.training.writer", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env={
                    **os.environ,
                    "PYTHONPATH": path.rstrip(os.pathsep),
                    "CUDA_VISIBLE_DEVICES": "",
                    "OMP_NUM_THREADS": "1",
                },
            )
        self._passed = weakref.WeakSet(rooms)
        self._channel, self._answers = channel, channel.makefile("rb")
        self._end = weakref.finalize(self, _end, self._process, channel, self._answers)

    def _let_go(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._channel = self._answers = self._end = None


def _end(process: subprocess.Popen[bytes], channel: socket.socket, answers: Any) -> None:
    """Ends a writer process that has nothing to do, by closing its socket."""
    with contextlib.suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)
    for each in (answers, channel):
        with contextlib.suppress(OSError):
            each.close()
    process.wait()
