"""Probes: who answers them, and who is not taken for the worker that is meant."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from unittest import mock

import pytest

from muster.communicators import create_backend, tls_policies
from muster.communicators.tcp import probe as tcp_probe
from muster.communicators.tcp.backend import TcpBackend
from muster.communicators.tcp.endpoint import Endpoint
from muster.communicators.tcp.probe import Prober, answer_probes
from tests.communicators.tcp.world import JOB, Office
from tests.waiting import threads_end


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Office:
    return Office(tmp_path_factory.mktemp("office"))


@pytest.fixture(autouse=True)
def few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel connects at once; an answer is waited for as long as a loaded machine may take."""
    monkeypatch.setattr(tcp_probe, "CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(tcp_probe, "ANSWER_TIMEOUT_S", 60.0)


def expecting_no_answer() -> AbstractContextManager[object]:
    """Within it none is waited for long."""
    return mock.patch.object(tcp_probe, "ANSWER_TIMEOUT_S", 0.5)


@pytest.fixture
def backend(office: Office) -> Iterator[TcpBackend]:
    made = create_backend("tcp", tls=office.credentials(node="n0"), job_id=JOB)
    assert isinstance(made, TcpBackend)
    yield made
    made.close()


def probes(office: Office, job: str = JOB) -> Prober:
    return Prober(tls_policies(office.credentials(node="n1"), job), job)


def answering(office: Office) -> tuple[Endpoint, str]:
    """A worker whose backend has no endpoint."""
    asked, address = answer_probes(tls_policies(office.credentials(node="n1"), JOB), "127.0.0.1")
    assert asked is not None
    return asked, address


def test_an_endpoint_answers_probes_of_many_and_goes_on(office: Office, backend: TcpBackend) -> None:
    address = backend.open_endpoint("127.0.0.1")
    for _ in range(3):
        assert probes(office)({"n0": address}) == {}
    threads_end("muster-probe")


def test_a_worker_whose_backend_has_no_endpoint_answers_at_one_of_its_own(office: Office) -> None:
    asked, address = answering(office)
    assert probes(office)({"n1": address}) == {}
    asked.close()
    assert "refused" in probes(office)({"n1": address})["n1"]


def test_a_members_probe_does_not_wait_for_a_turn_among_strangers(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_probe, "Endpoint", partial(Endpoint, max_strangers_per_s=1e-6))
    asked, address = answering(office)
    assert probes(office)({"n1": address}) == {}  # there is a turn to begin with
    with expecting_no_answer():
        assert probes(office)({"n1": address}).keys() == {"n1"}
    asked.know(["127.0.0.1", "a name"])
    assert probes(office)({"n1": address}) == {}
    asked.close()


def test_whoever_answers_must_be_the_worker_that_is_meant(office: Office, backend: TcpBackend) -> None:
    address = backend.open_endpoint("127.0.0.1")
    assert "n7" in probes(office)({"n7": address})["n7"]
    assert "another" in probes(office, job="another")({"n0": address})["n0"]


def test_who_shows_no_certificate_gets_no_answer(backend: TcpBackend) -> None:
    address = backend.open_endpoint("127.0.0.1")
    with expecting_no_answer():
        assert Prober(None, JOB)({"n0": address}).keys() == {"n0"}


def test_without_tls_probes_stay_on_this_host() -> None:
    assert answer_probes(None, "192.0.2.1") == (None, "")
    asked, address = answer_probes(None, "127.0.0.1")
    assert asked is not None
    assert Prober(None, JOB)({"n1": address}) == {}
    asked.close()


def test_one_that_is_connected_to_and_never_answers_is_not_reached(office: Office) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, expecting_no_answer():
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert "timed out" in probes(office)({"n0": address})["n0"]


def test_an_address_that_is_none_is_not_reached(office: Office) -> None:
    assert "not host:port" in probes(office)({"n0": "nonsense"})["n0"]
