"""Schedules Python's garbage collector in a scheduler: rarely, but at least once in a fixed time."""

from __future__ import annotations

import asyncio
import gc

COLLECT_AFTER = (50_000, 50, 100)
"""Thresholds of Python's garbage collector. There are thousands of long-lived sessions, and scanning all of
them finds nothing. With 5,000 workers, the default thresholds took 7 % of the scheduler's time.
"""

COLLECT_EVERY_S = 300.0
"""The longest time between two collections, in seconds. A small job creates so few objects that it reaches no
threshold within hours.
"""


def collect_seldom() -> None:
    """Excludes everything loaded so far from collection, and sets :data:`COLLECT_AFTER`."""
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


async def keep_collecting(every_s: float = COLLECT_EVERY_S) -> None:
    """Collects garbage periodically until cancelled.

    In gRPC, each refused call and its buffers are kept by a reference cycle through the refusal's traceback.
    In 35 minutes of faults this came to some 700 tracebacks and 10 MB, without one collection. With periodic
    collections, memory stayed constant over an hour (muster/bench/results/soak-one-hour.json).

    Args:
        every_s: seconds between two collections.
    """
    while True:
        await asyncio.sleep(every_s)
        gc.collect()
