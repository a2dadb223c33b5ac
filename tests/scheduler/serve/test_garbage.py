"""When the scheduler's garbage is collected."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from muster.scheduler.serve.garbage import collect_seldom, keep_collecting


class Cycle:
    """Refers to itself, as a refused call does through its traceback."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.usefixtures("as_before")
def test_few_objects_are_collected_by_the_clock_and_not_by_their_number() -> None:
    async def run() -> None:
        freed = asyncio.Event()
        collect_seldom()
        gc.collect()
        cycle = Cycle()
        weakref.finalize(cycle, freed.set)
        del cycle
        others = [[i] for i in range(5000)]  # by default a collection after 700 would have found it
        assert not freed.is_set() and len(others) == 5000
        collecting = asyncio.create_task(keep_collecting(0.001))
        await asyncio.wait_for(freed.wait(), 60)
        collecting.cancel()

    asyncio.run(run())
