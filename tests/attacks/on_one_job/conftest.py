"""The job that all of these attacks are on, and who judges it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.field import Field
from tests.attacks.field import field as make_field
from tests.scheduler.processes import Stream
from tests.waiting import wait_for

HERE = Path(__file__).parent
JUDGE = "test_the_job_went_on.py"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the judge's tests after all others on this job, which they end."""
    places = [place for place, item in enumerate(items) if HERE in item.path.parents]
    mine = sorted((items[place] for place in places), key=lambda item: item.path.name == JUDGE)
    for place, item in zip(places, mine, strict=True):
        items[place] = item


@pytest.fixture(scope="package")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    """One job that trains through all the attacks, and no longer."""
    with make_field(tmp_path_factory.mktemp("field")) as made, made.channel("client") as over:
        made.silent = Stream(over)
        yield made
        made.silent.half_close()


@pytest.fixture(autouse=True)
def _remember_attack(field: Field, request: pytest.FixtureRequest) -> None:
    """Also waits until the spare's place is free: after a standstill, who is cut off keeps it for a while."""
    if request.path.name != JUDGE:
        wait_for(lambda: all(worker.rank >= 0 for worker in field.status().workers))
    field.attacks.add(request.node.name)
