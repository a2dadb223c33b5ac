"""Queued work runs in order and carries its error to the one who waits."""

from __future__ import annotations

import threading

import pytest

from muster.worker.communicators.work import FINISHED, WorkQueue


def test_work_runs_in_order_and_is_waited_for_on_close() -> None:
    queue, seen, gate = WorkQueue("test"), list[int](), threading.Event()

    def wait_first() -> None:
        gate.wait(10)
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
