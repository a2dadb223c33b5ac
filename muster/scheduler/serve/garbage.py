"""Makes Python's garbage collector run rarely in a scheduler, but at least once in a fixed time."""

from __future__ import annotations

import asyncio
import gc

COLLECT_AFTER = (50_000, 50, 100)
"""Thresholds of Python's garbage collector. Scanning thousands of long-lived sessions finds no garbage, and
with 5,000 workers and the default thresholds, it took 7 % of the scheduler's time.
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

    In gRPC, a reference cycle through a refusal's traceback keeps each refused call and its buffers in
    memory. In 35 minutes of faults, about 700 tracebacks and 10 MB accumulated without a single collection.
    With periodic collections, memory stayed constant over an hour
    (muster/bench/results/soak-one-hour.json).

    Args:
        every_s: the time between two collections, in seconds.
    """
    while True:
        await asyncio.sleep(every_s)
        gc.collect()
