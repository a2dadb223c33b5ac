from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.field import Field
from tests.attacks.field import field as make_field
from tests.scheduler.processes import Stream


@pytest.fixture(scope="session")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    """One job that trains through all the attacks."""
    with make_field(tmp_path_factory.mktemp("field")) as made, made.channel("client") as over:
        made.silent = Stream(over)
        yield made
        made.silent.half_close()


@pytest.fixture(autouse=True)
def _remember_attack(field: Field, request: pytest.FixtureRequest) -> None:
    field.attacks.add(request.node.name)
