"""Fixtures: the pool, and the backends that can run here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.agents import Agents
from tests.contracts.kits import JOB, KIT_NAMES, PASSWORD, Kit, kit, missing

MAX_WORLD_SIZE = 4


@pytest.fixture(scope="session")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    """Four processes that run what tests send them."""
    directory = tmp_path_factory.mktemp("contract-certificates")
    write_certificates(directory)
    pool = Agents(MAX_WORLD_SIZE, directory)
    yield pool
    pool.close()


def write_certificates(directory: Path) -> None:
    """An authority, and one certificate for all workers of the job."""
    from muster.certs.pki.authority import create_authority
    from muster.certs.pki.identity import Identity

    authority = create_authority(directory / "authority", PASSWORD)
    (directory / "ca.crt").write_bytes((directory / "authority" / "ca.crt").read_bytes())
    (directory / "client.p12").write_bytes(authority.issue(Identity(JOB, "worker")).p12(PASSWORD))


@pytest.fixture(
    params=[pytest.param(n, marks=pytest.mark.gpu) if n.startswith("nccl") else n for n in KIT_NAMES]
)
def backend(request: pytest.FixtureRequest) -> Kit:
    """Each backend that can run here."""
    name = str(request.param)
    reason = missing(name)
    if reason is not None:
        pytest.skip(reason)
    return kit(name)


@pytest.fixture(params=[1, 2, 3, 4])
def size(request: pytest.FixtureRequest, backend: Kit) -> int:
    """World sizes, power of two or not."""
    count = int(request.param)
    if count > backend.max_world_size:
        pytest.skip(f"{backend.name} runs at most {backend.max_world_size} processes here")
    return count
