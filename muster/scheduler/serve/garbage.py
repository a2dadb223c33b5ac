"""When Python's garbage collector looks for cycles in a scheduler: seldom, and yet by the clock."""

from __future__ import annotations

import asyncio
import gc

COLLECT_AFTER = (50_000, 50, 100)
"""Thresholds of Python's garbage collector: sessions live long, there are thousands of them, and a look at
all of them finds nothing. With 5,000 workers the collector's own took 7 % of the scheduler's time."""

COLLECT_EVERY_S = 300.0
"""A small job makes so few objects that it reaches no threshold within hours."""


def collect_seldom() -> None:
    """Leaves out what has been loaded until now, and sets :data:`COLLECT_AFTER`."""
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


async def keep_collecting(every_s: float = COLLECT_EVERY_S) -> None:
    """Collects once in a while, for as long as it runs.

    gRPC keeps each call that was refused, and its buffers, by a cycle through the traceback of the refusal:
    in 35 minutes of faults some 700 tracebacks and 10 MB, and not one collection. An hour with collections
    left the memory flat (muster/bench/results/soak-one-hour.json).

    Args:
        every_s: seconds between two collections.
    """
    while True:
        await asyncio.sleep(every_s)
        gc.collect()
