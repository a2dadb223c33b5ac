"""Queued work runs in order and carries its error to the one who waits."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import pytest

from muster.communicators.tcp.connection import PeerConnection
from muster.communicators.tcp.transfer import Incoming, Multiplexer
from muster.communicators.work import FINISHED, WorkQueue


def test_work_runs_in_order_and_is_waited_for_on_close() -> None:
    queue, seen, gate = WorkQueue("test"), list[int](), threading.Event()

    def wait_first() -> None:
        gate.wait(60)
        seen.append(0)

    first = queue.put(wait_first)
    for number in range(1, 20):
        queue.put(lambda number=number: seen.append(number))  # type: ignore[misc]
    assert not first.done()
    assert not queue.idle
    gate.set()
    queue.close()
    assert seen == list(range(20))
    assert queue.idle
    assert first.done()


def test_an_error_comes_out_of_wait_and_does_not_stop_the_queue() -> None:
    queue = WorkQueue("test")

    def fail() -> None:
        raise ValueError("broken")

    failed, good = queue.put(fail), queue.put(lambda: None)
    with pytest.raises(ValueError, match="broken"):
        failed.wait()
    good.wait()
    queue.close()
    queue.close()


def test_finished_work_is_done() -> None:
    FINISHED.wait()
    assert FINISHED.done()


# ---------------------------------------------------------------- signals


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


class Signalled:
    """Sends SIGUSR1 once Python's main thread waits; another thread takes it. Its handler frees that wait."""

    def __init__(self, free: Callable[[], object]) -> None:
        self._free = free
        self._over, self._handled = threading.Event(), threading.Event()
        self.was_handled = False
        self._taker = threading.Thread(target=self._over.wait, args=(60,), daemon=True)
        self._sender = threading.Thread(target=self._send, daemon=True)

    def __enter__(self) -> Signalled:
        self._before = signal.signal(signal.SIGUSR1, self._handle)
        self._taker.start()
        self._sender.start()
        return self

    def _handle(self, number: int, frame: object) -> None:
        self.was_handled = not self._over.is_set()
        self._handled.set()
        self._free()

    def _send(self) -> None:
        main = threading.main_thread().ident or 0
        while not self._over.wait(0.005):
            if sys._current_frames()[main].f_code.co_name in ("wait", "_wait"):
                break
        signal.pthread_kill(self._taker.ident or 0, signal.SIGUSR1)
        if not self._handled.wait(30):  # a wait that hangs must end for the test to say so
            self._over.set()
            self._free()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._taker.join(20)
        self._sender.join(20)
        signal.signal(signal.SIGUSR1, self._before)


def test_a_wait_ends_with_a_signal_that_another_thread_takes() -> None:
    """Python handles it in the main thread, which a wait without end would never give it."""
    queue, gate = WorkQueue("test"), threading.Event()
    work = queue.put(lambda: assert_set(gate))
    with Signalled(gate.set) as signalled:
        work.wait()
    queue.close()
    assert signalled.was_handled


def test_a_transfer_goes_on_with_a_signal_that_another_thread_takes() -> None:
    ours, theirs = socket.socketpair()
    mover, link = Multiplexer(), PeerConnection(ours, 1)
    mover.watch(link)
    view = memoryview(bytearray(4))
    with ours, theirs, Signalled(lambda: theirs.sendall(b"data")) as signalled:
        mover.run([], [Incoming(link, [view])], time.monotonic() + 60)
    mover.close()
    assert signalled.was_handled and bytes(view) == b"data"
