from __future__ import annotations

from pathlib import Path

import pytest

from muster.certs.pki.authority import create_authority
from muster.certs.pki.identity import Identity
from muster.certs.runtime.store import Credentials, load_credentials
from tests.certs.making import PASSWORD, Pki

HOSTS = ("localhost", "127.0.0.1", "::1")


def make_pki(directory: Path) -> Pki:
    authority = create_authority(directory, PASSWORD)
    for name, identity, hosts in (
        ("server.p12", Identity("job", "scheduler"), HOSTS),
        ("client.p12", Identity("job", "worker"), ()),
        ("node7.p12", Identity("job", "worker", "node7"), ()),
        ("operator.p12", Identity("*", "operator"), ()),
    ):
        (directory / name).write_bytes(authority.issue(identity, hosts).p12(PASSWORD))
    return Pki(authority, directory)


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """The authority that the tests trust. Its files are not to be changed."""
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """An authority that nobody trusts."""
    return make_pki(tmp_path_factory.mktemp("foreign"))


@pytest.fixture(scope="session")
def server(pki: Pki) -> Credentials:
    return load_credentials(pki.path("server.p12"), PASSWORD, pki.ca, purpose="server")


@pytest.fixture(scope="session")
def worker(pki: Pki) -> Credentials:
    return load_credentials(pki.path("client.p12"), PASSWORD, pki.ca, purpose="client")


@pytest.fixture
def own_pki(tmp_path: Path) -> Pki:
    """An authority that the test may change."""
    return make_pki(tmp_path / "own")
