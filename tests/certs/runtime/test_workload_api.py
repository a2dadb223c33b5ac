"""Certificates from a Workload API: taken, renewed, refused, and kept while it is away."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import spiffe

from muster.bench.identities.agent import AgentEntry, StandInAgent
from muster.certs.config import load_config
from muster.certs.errors import CertificateError, ConfigError, IdentityError, WorkloadIdentityError
from muster.certs.pki.peer import peer_of_pem
from muster.certs.runtime import workload_api
from muster.certs.runtime.follower import Follower, follow_files
from muster.certs.runtime.store import load_configured, load_for_etcd
from muster.certs.runtime.watcher import CredentialsWatcher
from tests.waiting import wait_for

RULES = [
    {"uri": "spiffe://prod.example/{job}/scheduler", "role": "scheduler"},
    {"uri": "spiffe://prod.example/{job}/worker/{node}", "role": "worker"},
]
LOG = logging.getLogger("test.spiffe")


class Workload:
    """One process that an agent knows, and its config.json."""

    def __init__(self, directory: Path, agent: StandInAgent) -> None:
        self.directory, self.agent, self.socket = directory, agent, directory / "agent.sock"
        self.address = agent.serve(self.socket, AgentEntry("job/worker/n1"))
        self.config = directory / "config.json"
        self.configure(RULES)

    def configure(self, rules: list[dict[str, str]]) -> None:
        values = {"spiffe_endpoint_socket": self.address, "identity_map": rules}
        new = self.config.with_suffix(".new")
        new.write_text(json.dumps(values))
        new.replace(self.config)

    def follow(self) -> Follower:
        return Follower(CredentialsWatcher(self.config, "worker", {}, job="job"), LOG)


@pytest.fixture
def workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workload]:
    opened: list[spiffe.X509Source] = []

    class Source(spiffe.X509Source):
        def __init__(self, **settings: Any) -> None:
            opened.append(self)
            super().__init__(**settings)

    monkeypatch.setattr(spiffe, "X509Source", Source)
    with StandInAgent() as agent:
        yield Workload(tmp_path, agent)
    for each in opened:  # a process keeps its source; in one of tests it would start threads for ever
        each.close()


def test_a_process_gets_its_certificate_and_authorities_without_a_file_or_a_password(
    workload: Workload,
) -> None:
    credentials = load_configured(load_config(workload.config), "worker", {})
    assert str(credentials.identity) == "spiffe://prod.example/job/worker/n1 (muster://job/worker/n1)"
    assert follow_files(workload.config, "worker", {}, LOG, job="job").credentials.identity.node == "n1"
    assert b"PRIVATE" not in repr(credentials).encode()


def test_a_new_certificate_comes_into_force_and_so_do_new_authorities(workload: Workload) -> None:
    followed = workload.follow()
    first = followed.credentials
    workload.agent.rotate()
    wait_for(lambda: followed().fingerprint != first.fingerprint)
    assert followed.credentials.ca_pem == first.ca_pem
    workload.agent.rotate_authority()
    wait_for(lambda: followed().ca_pem != first.ca_pem)
    assert first.ca_pem.count(b"BEGIN") == 1 and followed.credentials.ca_pem.count(b"BEGIN") == 2
    workload.agent.forget_old_authorities()
    wait_for(lambda: followed().ca_pem.count(b"BEGIN") == 1)


def test_what_was_in_force_stays_while_the_agent_is_away_and_it_is_found_again(workload: Workload) -> None:
    followed = workload.follow()
    first = followed.credentials
    workload.agent.stop(workload.socket)
    assert followed() == first
    workload.agent.serve(workload.socket, AgentEntry("job/worker/n1"))
    wait_for(lambda: followed().fingerprint != first.fingerprint)


def test_what_is_shown_to_etcd_is_asked_for_by_name(workload: Workload) -> None:
    with pytest.raises(ConfigError, match="etcd_cert_path and etcd_ca_cert_path"):
        load_for_etcd(load_config(workload.config), {}, b"x")


@pytest.mark.parametrize("mode", ["refuse", "rubbish", "silent", "huge"])
def test_an_agent_that_gives_nothing_is_named_at_the_start_and_waited_for(
    workload: Workload, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload_api, "RETRY_S", 0.2)
    monkeypatch.setattr(workload_api, "FIRST_S", 1.5)
    workload.agent.change(workload.socket, mode=mode)
    with pytest.raises(WorkloadIdentityError) as caught:
        workload.follow()
    assert f"Workload API at {workload.address} gave no certificate in 1.5 s: " in caught.value.message
    assert len(caught.value.message) < 400
    workload.agent.change(workload.socket, mode="serve")
    monkeypatch.setattr(workload_api, "FIRST_S", 100.0)
    assert workload.follow().credentials.identity.node == "n1"


def test_a_client_is_closed_long_after_its_attempt_was_given_up(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may only then make its call, and gRPC crashes a process that calls on a closed channel."""
    made: list[spiffe.WorkloadApiClient] = []
    closed: list[spiffe.WorkloadApiClient] = []

    class Client(spiffe.WorkloadApiClient):
        def __init__(self, socket: str) -> None:
            made.append(self)
            super().__init__(socket)

        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr(spiffe, "WorkloadApiClient", Client)
    monkeypatch.setattr(workload_api, "RETRY_S", 0.0)
    workload.agent.change(workload.socket, mode="silent")
    with workload_api.WorkloadApi(workload.address) as api:
        while len(made) < workload_api.CLIENTS_KEPT + 3:
            api.updates()
        assert closed == made[: -workload_api.CLIENTS_KEPT]
        workload.agent.change(workload.socket, mode="serve")
        monkeypatch.setattr(workload_api, "RETRY_S", 10.0)
        assert api.newest()
    assert closed[-1] is made[-1]


@pytest.mark.parametrize("mode", ["refuse", "rubbish", "huge"])
def test_an_agent_that_goes_mad_changes_nothing_and_is_heard_when_it_is_sane_again(
    workload: Workload, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload_api, "RETRY_S", 0.2)
    followed = workload.follow()
    first, asked = followed.credentials, workload.agent.asked
    workload.agent.change(workload.socket, mode=mode)
    wait_for(lambda: followed() == first and workload.agent.asked > asked)
    workload.agent.change(workload.socket, mode="serve")
    wait_for(lambda: followed().fingerprint != first.fingerprint)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"path": "job/operator/n1"}, "stands for no job and role here"),
        ({"path": "other/worker/n1"}, "is for the job 'other', not 'job'"),
        ({"more": ("spiffe://prod.example/job/worker/n2",)}, ""),
        ({"authority": True}, ""),
        ({"usage": False}, ""),
        ({"life_s": -5.0}, ""),
    ],
)
def test_a_certificate_that_peers_would_refuse_is_not_put_in_force(
    workload: Workload, changes: dict[str, object], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    followed = workload.follow()
    first = followed.credentials
    workload.agent.change(workload.socket, **changes)
    if why:
        wait_for(lambda: followed() == first and why in caplog.text)
    for _ in range(3):
        assert followed() == first
    workload.agent.change(workload.socket, **AgentEntry("job/worker/n1").__dict__)
    wait_for(lambda: followed().fingerprint != first.fingerprint)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (AgentEntry("job/worker/n1", more=("spiffe://prod.example/job/worker/n2",)), "has 2 URIs"),
        (AgentEntry("job/worker/n1", more=("muster://job/worker",)), "has 2 URIs"),
        (AgentEntry("job/worker/n1", authority=True), "is an authority's"),
        (AgentEntry("job/worker/n1", usage=False), "is no X.509-SVID"),
        (AgentEntry("job/worker"), "stands for no job and role"),
    ],
)
def test_peers_refuse_what_is_no_svid(workload: Workload, entry: AgentEntry, why: str) -> None:
    from muster.certs.pki.certificates import to_pem

    rules = load_config(workload.config).identity_map
    _, leaf = workload.agent.issue(entry)
    with pytest.raises(IdentityError, match=why):
        peer_of_pem(to_pem([leaf]), identity_map=rules)


def test_without_rules_a_spiffe_id_stands_for_nobody(workload: Workload) -> None:
    from muster.certs.pki.certificates import to_pem

    _, leaf = workload.agent.issue(AgentEntry("job/worker/n1"))
    with pytest.raises(IdentityError, match="stands for no job and role"):
        peer_of_pem(to_pem([leaf]))


def test_who_is_no_longer_mapped_is_treated_as_revoked(workload: Workload) -> None:
    followed = workload.follow()
    peer = followed.credentials.peer(followed.credentials.cert_chain_pem)
    assert not followed.has_revoked(peer)
    workload.configure([{**RULES[1], "uri": "spiffe://prod.example/{job}/worker/{node}/new"}, RULES[0]])
    wait_for(lambda: followed.has_revoked(peer))


def test_warnings_of_an_end_wait_for_the_last_quarter_of_a_short_life(workload: Workload) -> None:
    expiry = workload.follow().expiries()[0]
    assert expiry.what == "certificate"
    assert 0 < expiry.seconds_left() < 3700
    assert (expiry.not_after - expiry.warn_from).total_seconds() < 1000


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"spiffe_endpoint_socket": "unix:///a"}, "needs identity_map"),
        ({"spiffe_endpoint_socket": "/a", "identity_map": RULES}, "legal are unix:///PATH"),
        ({"spiffe_endpoint_socket": "tcp://1.2.3.4:5", "identity_map": RULES}, "legal are unix:///PATH"),
        ({"spiffe_endpoint_socket": 3, "identity_map": RULES}, "legal are unix:///PATH"),
        ({"spiffe_endpoint_socket": "env", "identity_map": RULES}, "SPIFFE_ENDPOINT_SOCKET is not set"),
        ({"spiffe_endpoint_socket": "unix:///a", "identity_map": [{}]}, "identity_map: rule 1: its keys are"),
        ({"identity_map": RULES}, "the key server_cert_path is missing"),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused(
    tmp_path: Path, values: dict[str, object], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPIFFE_ENDPOINT_SOCKET", raising=False)
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=why):
        load_config(tmp_path / "config.json")


def test_the_socket_may_come_from_the_environment(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPIFFE_ENDPOINT_SOCKET", workload.address)
    workload.address = "env"
    workload.configure(RULES)
    assert load_configured(load_config(workload.config), "worker", {}).identity.node == "n1"


def test_without_the_library_it_is_said_what_to_install(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "spiffe", None)
    with pytest.raises(CertificateError, match=r"pip install '\.\[spiffe\]'"):
        workload.follow()
