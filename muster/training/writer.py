"""The process that writes checkpoints while the training goes on; started by ``WriterProcess``.

It receives orders as lines of JSON over a socket, and answers each with a line. The contents are in memory
that it shares with the training's process. When that process ends, in whatever way, the socket closes. This
process then removes an unfinished file, and ends.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import queue
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.errors import WorkerError
from muster.wire.threads import start_thread

NICENESS = 5
"""The process's niceness: if processors are short, the training has priority."""


class Orders:
    """Receives the orders to write checkpoints.

    Args:
        channel: the socket's file.
    """

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._unfinished = ""
        start_thread(self._listen, name="orders")

    def next(self) -> dict[str, Any]:
        """Waits for the next order."""
        return self._waiting.get()

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._channel:
                order = json.loads(line)
                self._unfinished = order["unfinished"]
                self._waiting.put(order)
        take_away(self._unfinished)  # the training's process is gone
        os._exit(0)


def take_away(unfinished: str) -> None:
    """Removes an unfinished file or directory, which does not have its final name yet."""
    if unfinished:
        path = Path(unfinished)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def carry_out(order: Mapping[str, Any]) -> dict[str, Any]:
    """Carries out an order, and returns the answer to it."""
    module, _, name = order["call"].partition(":")
    size, room = int(order["size"]), int(order["room"])
    data = memoryview(mmap.mmap(room, size, prot=mmap.PROT_READ)) if size else memoryview(b"")
    try:
        found = getattr(importlib.import_module(module), name)(data, order["what"])
    except WorkerError as error:
        return {"error": error.message, "remedy": error.remedy}
    except Exception as error:
        return {"error": f"The checkpoint could not be written: {error!r}.", "remedy": ""}
    return {"found": found}


def main() -> int:
    """Carries out orders until the training's process is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the signal is for the training, which waits for this process
    os.nice(NICENESS)
    channel = socket.socket(fileno=int(sys.argv[1]))
    orders = Orders(channel.makefile("rb"))
    while True:
        answer = carry_out(orders.next())
        channel.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
