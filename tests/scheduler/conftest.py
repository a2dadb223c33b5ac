from __future__ import annotations

from pathlib import Path

import pytest

from muster.certs.pki.identity import Identity
from tests.scheduler.processes import Pki


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """The certificates of the job ``default``, and some others of the same authority. Not to be changed."""
    pki = Pki.make(tmp_path_factory.mktemp("scheduler-pki"))
    pki.issue("other-job", Identity("other", "worker"))
    pki.issue("node-7", Identity("default", "worker", "node-7"))
    pki.issue("host", Identity("default", "host", nodes=("node-7", "node-8")))
    pki.issue("any-job", Identity("*", "worker"))
    return pki


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """Certificates of an authority that the scheduler does not trust, with the same names in them."""
    return Pki.make(tmp_path_factory.mktemp("foreign-pki"))


@pytest.fixture
def own_pki(tmp_path: Path) -> Pki:
    """Certificates that the test may change."""
    return Pki.make(tmp_path / "pki")
