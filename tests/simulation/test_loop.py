"""Processes on simulated time."""

from __future__ import annotations

import asyncio
import inspect

from tests.simulation.loop import Loop, Process


def test_a_killed_process_closes_what_had_not_begun_and_leaves_the_rest_as_it_is() -> None:
    loop, done = Loop(), []

    async def work(seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            done.append(seconds)

    process = Process(loop)
    begun = work(5.0)
    tasks = [asyncio.Task(begun, loop=process.asyncio)]
    loop.run(1.0, lambda: False)
    late = work(1.0)
    tasks.append(asyncio.Task(late, loop=process.asyncio))
    process.kill(tasks)
    loop.run(60.0, lambda: False)
    assert inspect.getcoroutinestate(begun) == inspect.CORO_SUSPENDED
    assert inspect.getcoroutinestate(late) == inspect.CORO_CLOSED
    assert not done
