"""Credentials that follow their files, and what a bad file does: nothing but a line in the log."""

from __future__ import annotations

import logging
import resource
from pathlib import Path

import pytest
from cryptography import x509

from muster.certs.pki.identity import Identity
from muster.certs.pki.peer import peer_of_pem
from muster.certs.runtime.follower import Follower
from muster.certs.runtime.watcher import Change, CredentialsWatcher
from muster.communicators import tls_policies
from muster.worker.config import Settings
from muster.worker.session.credentials import load_keyring
from tests.scheduler.processes import Pki

HOSTS = ("127.0.0.1",)


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki.make(tmp_path, crl_path="crl.pem")


@pytest.fixture
def keyring(pki: Pki) -> Follower:
    settings = Settings(worker_num=1, worker_min=1, config_path=pki.config)
    loaded = load_keyring(settings, pki.env())
    assert loaded is not None
    return loaded


def replace(pki: Pki, identity: Identity) -> str:
    """Puts another certificate in the worker's place; returns its fingerprint."""
    pki.issue("staged", identity).replace(pki.directory / "client.p12")
    return pki.credentials("client").fingerprint


def serial(pki: Pki, name: str) -> int:
    return x509.load_pem_x509_certificate(pki.credentials(name).leaf_pem).serial_number


def test_nothing_changes_while_no_file_does(keyring: Follower) -> None:
    assert keyring() is keyring()


def test_a_renewed_certificate_is_used(keyring: Follower, pki: Pki) -> None:
    before = keyring().fingerprint
    assert replace(pki, Identity("default", "worker")) == keyring().fingerprint != before


@pytest.mark.parametrize("identity", [Identity("default", "operator"), Identity("other", "worker")])
def test_a_certificate_of_another_role_or_job_is_not(
    keyring: Follower, pki: Pki, identity: Identity, caplog: pytest.LogCaptureFixture
) -> None:
    before = keyring().fingerprint
    replace(pki, identity)
    with caplog.at_level(logging.INFO):
        assert keyring().fingerprint == before
    assert "the old ones stay in force" in caplog.text
    assert "new certificate muster://" not in caplog.text


def test_a_revoked_certificate_is_not_but_the_list_that_says_so_is(
    keyring: Follower, pki: Pki, caplog: pytest.LogCaptureFixture
) -> None:
    before = keyring().fingerprint
    pki.issue("staged", Identity("default", "worker"))
    pki.authority.write_revocations([serial(pki, "staged")])
    revoked = peer_of_pem(pki.credentials("staged").leaf_pem)
    (pki.directory / "staged.p12").replace(pki.directory / "client.p12")
    with caplog.at_level(logging.INFO):
        assert keyring().fingerprint == before
    assert "the old ones stay in force" in caplog.text
    assert "new certificate muster://" not in caplog.text
    assert keyring.has_revoked(revoked)


def test_new_settings_are_in_force_and_told(
    keyring: Follower, pki: Pki, caplog: pytest.LogCaptureFixture
) -> None:
    fingerprint = keyring().fingerprint
    pki.write_config(crl_path="crl.pem", require_identity=False, cipher_list="ECDHE-ECDSA-AES128-GCM-SHA256")
    with caplog.at_level(logging.INFO):
        assert not keyring().require_identity
    assert "require_identity is now false" in caplog.text
    assert "cipher_list has changed" in caplog.text and "needs a restart" in caplog.text
    pki.write_config(crl_path="crl.pem")
    assert keyring().require_identity
    pki.config.write_text("{")
    assert keyring().fingerprint == fingerprint
    assert "the old one stays in force" in caplog.text


def test_a_bad_file_is_said_and_changes_nothing(
    keyring: Follower, pki: Pki, caplog: pytest.LogCaptureFixture
) -> None:
    before = keyring().fingerprint
    (pki.directory / "client.p12").write_bytes(b"junk")
    assert keyring().fingerprint == before
    assert "the old ones stay in force" in caplog.text


class Faulty(CredentialsWatcher):
    def poll(self) -> Change | None:
        raise OSError("the disk is gone")


def test_a_fault_while_reading_changes_nothing_either(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    keyring = Follower(Faulty(pki.config, "worker", pki.env()), logging.getLogger("muster.worker"))
    assert keyring().identity.role == "worker"
    assert "those in force stay" in caplog.text


def test_who_is_revoked_meanwhile(keyring: Follower, pki: Pki) -> None:
    peer = keyring().peer(pki.credentials("server").leaf_pem)
    assert not keyring.has_revoked(peer)
    (pki.directory / "crl.pem").write_text("junk")
    assert not keyring.has_revoked(peer)
    (pki.directory / "crl.pem").unlink()
    pki.authority.write_revocations([serial(pki, "server")])
    assert keyring.has_revoked(peer)


def test_what_ends_soon_is_said(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    issued = pki.authority.issue(Identity("default", "worker"), (), days=3)
    (pki.directory / "client.p12").write_bytes(issued.p12(b"not a secret here"))
    settings = Settings(worker_num=1, worker_min=1, config_path=pki.config)
    keyring = load_keyring(settings, pki.env())
    assert keyring is not None
    with caplog.at_level(logging.WARNING):
        keyring()
    assert "renew" in caplog.text


def test_no_core_file_is_left_once_a_key_is_loaded(keyring: Follower) -> None:
    assert keyring().identity.job == "default"
    assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0


def test_each_peer_connection_asks_for_the_credentials_in_force(keyring: Follower, pki: Pki) -> None:
    policy = tls_policies(keyring, "default")
    before = policy()
    assert policy() is before
    replace(pki, Identity("default", "worker"))
    assert policy() is not before
