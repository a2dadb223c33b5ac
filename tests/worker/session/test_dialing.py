"""Who answers a worker that dials, over real gRPC, and what is said where it is not its scheduler."""

from __future__ import annotations

import socket
from pathlib import Path
from queue import SimpleQueue

import pytest

from muster.certs.pki.identity import Identity
from muster.worker.session.streams import DeniedError
from tests.scheduler.processes import Pki
from tests.worker.session.grpc_servers import answering, connector, serving, welcome_each


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    made = Pki.make(tmp_path_factory.mktemp("pki"))
    made.issue("elsewhere", Identity("elsewhere", "scheduler"), ("127.0.0.1",))
    made.issue("misnamed", Identity("default", "scheduler"), ("10.9.9.9",))
    return made


def test_nobody_there_is_worth_another_try(pki: Pki) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for used in (None, pki):
        with pytest.raises(ConnectionRefusedError):
            connector(port, used)(SimpleQueue())


def test_a_worker_without_tls_is_told_that_the_scheduler_demands_it(pki: Pki) -> None:
    with serving(welcome_each, pki) as port, pytest.raises(DeniedError, match=r"demands TLS.*MS_CONFIG_FILE"):
        connector(port)(SimpleQueue())


def test_a_tls_alert_tells_too() -> None:
    with (
        answering(b"\x15\x03\x01\x00\x02\x02\x46") as port,
        pytest.raises(DeniedError, match="demands TLS"),
    ):
        connector(port)(SimpleQueue())


def test_a_hang_up_is_worth_another_try() -> None:
    with answering(b"") as port, pytest.raises(ConnectionError):
        connector(port)(SimpleQueue())


def test_a_plaintext_scheduler_is_refused_by_a_worker_with_tls(pki: Pki) -> None:
    with serving(welcome_each) as port, pytest.raises(DeniedError, match="does not speak TLS") as caught:
        connector(port, pki)(SimpleQueue())
    assert not caught.value.by_scheduler


@pytest.mark.parametrize(
    ("name", "words"),
    [("client", "role worker"), ("elsewhere", "for the job 'elsewhere'"), ("misnamed", r"for 10\.9\.9\.9")],
)
def test_a_server_that_is_not_this_jobs_scheduler_is_refused(pki: Pki, name: str, words: str) -> None:
    with serving(welcome_each, pki, name) as port, pytest.raises(DeniedError, match=words):
        connector(port, pki)(SimpleQueue())


def test_a_scheduler_of_another_authority_is_refused(pki: Pki, tmp_path: Path) -> None:
    with serving(welcome_each, Pki.make(tmp_path)) as port, pytest.raises(DeniedError, match="not trusted"):
        connector(port, pki)(SimpleQueue())
