"""Every collective of the backend "muster", with every dtype and several groups, beside Gloo's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scheduler.processes import Pki

pytest.importorskip("torch")

from tests.programs import bodies, ranks


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


def test_all_that_gloo_does_has_gloos_results(pki: Pki, tmp_path: Path) -> None:
    found = ranks.run(3, pki, tmp_path, bodies.against_gloo, 3)
    assert min(count for count, _ in found) > 150
    differ = [each for _, differ in found for each in differ]
    assert not differ, "\n".join(differ)
