from __future__ import annotations

import gc
import json
import logging
import threading
import time
from pathlib import Path

import pytest
from cryptography import x509

from muster.certs.config import SecurityConfig, load_config
from muster.certs.errors import (
    ConfigError,
    FileError,
    IdentityError,
    PasswordError,
    RevocationListError,
    RevokedError,
    TruncatedError,
    UntrustedError,
)
from muster.certs.files import write_file
from muster.certs.pki.identity import Identity
from muster.certs.runtime import watcher as watching
from muster.certs.runtime.follower import Follower
from muster.certs.runtime.store import Credentials, load_credentials
from muster.certs.runtime.watcher import CredentialsWatcher
from tests.certs.making import DAY, NOW, PASSWORD, Pki, certificate, pem

CONFIG = {
    "server_cert_path": "server.p12",
    "client_cert_path": "client.p12",
    "ca_cert_path": "ca.crt",
    "crl_path": "crl.pem",
}


SCHEDULER = Identity("job", "scheduler")


def configure(pki: Pki, **changes: object) -> Path:
    write_file(pki.path("config.json"), json.dumps(CONFIG | changes).encode())
    return pki.path("config.json")


def watch(pki: Pki, **changes: object) -> CredentialsWatcher:
    return CredentialsWatcher(configure(pki, **changes), "scheduler", {}, password=PASSWORD)


def reissue(pki: Pki, name: str = "server.p12") -> None:
    data = pki.authority.issue(Identity("job", "scheduler"), ["localhost"]).p12(PASSWORD)
    write_file(pki.path(name), data)


def test_nothing_changed_nothing_said(own_pki: Pki) -> None:
    watcher = watch(own_pki)
    assert watcher.poll() is None
    write_file(own_pki.path("server.p12"), own_pki.path("server.p12").read_bytes())  # touched, not changed
    assert watcher.poll() is None


def test_a_new_certificate_is_taken(own_pki: Pki) -> None:
    watcher = watch(own_pki)
    before = watcher.credentials
    reissue(own_pki)
    change = watcher.poll()
    assert change is not None and change.problems == ()
    assert change.new_certificate and not change.new_revocations
    assert change.credentials is watcher.credentials
    assert watcher.credentials.fingerprint != before.fingerprint
    assert watcher.poll() is None


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda data: data[:100], TruncatedError),
        (lambda data: b"", FileError),
        (lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:], PasswordError),
        (None, FileError),
    ],
    ids=["cut off", "empty", "damaged", "gone"],
)
def test_a_bad_certificate_leaves_the_old_in_force_and_says_so(
    own_pki: Pki, damage: object, error: type
) -> None:
    watcher = watch(own_pki)
    before = watcher.credentials
    file = own_pki.path("server.p12")
    good = file.read_bytes()
    if damage is None:
        file.unlink()
    else:
        write_file(file, damage(good))  # type: ignore[operator]
    change = watcher.poll()
    assert change is not None and not change.new_certificate and not change.new_revocations
    [problem] = change.problems
    assert isinstance(problem, error) and "the old ones stay in force" in str(problem)
    assert watcher.credentials == before
    assert watcher.poll() is None  # said once
    write_file(file, good)
    assert watcher.poll() is None and watcher.credentials == before  # as if nothing had been
    reissue(own_pki)
    change = watcher.poll()
    assert change is not None and change.new_certificate and change.problems == ()


def test_a_certificate_of_a_foreign_authority_is_not_taken(own_pki: Pki, foreign: Pki) -> None:
    watcher = watch(own_pki)
    write_file(own_pki.path("server.p12"), foreign.path("server.p12").read_bytes())
    change = watcher.poll()
    assert change is not None and isinstance(change.problems[0], UntrustedError)


def test_a_larger_bundle_of_authorities_is_taken(own_pki: Pki, foreign: Pki) -> None:
    watcher = watch(own_pki)
    write_file(own_pki.ca, own_pki.ca.read_bytes() + foreign.ca.read_bytes())
    change = watcher.poll()
    assert change is not None and change.new_authorities and not change.new_certificate
    assert change.notes == ("new authorities are in force",)
    assert watcher.credentials.ca_pem.count(b"BEGIN CERTIFICATE") == 2


def test_a_revocation_is_noticed(own_pki: Pki) -> None:
    watcher = watch(own_pki)
    joined = load_credentials(own_pki.path("client.p12"), PASSWORD, own_pki.ca).leaf_pem
    peer = watcher.credentials.peer(joined)
    own_pki.authority.write_revocations([x509.load_pem_x509_certificate(joined).serial_number])
    change = watcher.poll()
    assert (
        change is not None and change.new_revocations and not change.new_certificate and change.problems == ()
    )
    with pytest.raises(RevokedError):
        peer.check(watcher.credentials.revocations)
    with pytest.raises(RevokedError):
        watcher.credentials.peer(joined)


@pytest.mark.parametrize("content", [b"", b"junk", b"-----BEGIN X509 CRL-----\nMII", None])
def test_a_bad_revocation_list_fails_closed_until_it_is_mended(own_pki: Pki, content: bytes | None) -> None:
    watcher = watch(own_pki)
    joined = load_credentials(own_pki.path("client.p12"), PASSWORD, own_pki.ca).leaf_pem
    file = own_pki.path("crl.pem")
    good = file.read_bytes()
    if content is None:
        file.unlink()
    else:
        write_file(file, content)
    change = watcher.poll()
    assert change is not None and change.new_revocations
    assert [type(problem) for problem in change.problems] == [RevocationListError]
    with pytest.raises(RevocationListError, match=str(file)):
        watcher.credentials.peer(joined)
    write_file(file, good)
    change = watcher.poll()
    assert change is not None and change.problems == () and change.new_revocations
    assert watcher.credentials.peer(joined)


def test_a_bad_certificate_does_not_hide_a_revocation(own_pki: Pki) -> None:
    watcher = watch(own_pki)
    joined = load_credentials(own_pki.path("client.p12"), PASSWORD, own_pki.ca).leaf_pem
    write_file(own_pki.path("server.p12"), b"junk")
    own_pki.authority.write_revocations([x509.load_pem_x509_certificate(joined).serial_number])
    change = watcher.poll()
    assert change is not None and change.new_revocations and len(change.problems) == 1
    with pytest.raises(RevokedError):
        watcher.credentials.peer(joined)


def test_the_own_certificate_revoked_is_said(own_pki: Pki) -> None:
    watcher = watch(own_pki)
    own_pki.authority.write_revocations(
        [x509.load_pem_x509_certificate(watcher.credentials.leaf_pem).serial_number]
    )
    change = watcher.poll()
    assert change is not None
    assert [type(problem) for problem in change.problems] == [RevokedError]
    assert "its own certificate is no longer valid" in str(change.problems[0])


def serial(credentials: Credentials) -> int:
    return x509.load_pem_x509_certificate(credentials.leaf_pem).serial_number


def stage(pki: Pki, identity: Identity = SCHEDULER) -> Credentials:
    """Another certificate, not yet in the place of server.p12."""
    write_file(pki.path("staged.p12"), pki.authority.issue(identity, ["localhost"]).p12(PASSWORD))
    return load_credentials(pki.path("staged.p12"), PASSWORD, pki.ca)


@pytest.mark.parametrize("at_once", [False, True], ids=["revoked before", "revoked meanwhile"])
def test_a_revoked_certificate_is_not_put_in_force(own_pki: Pki, at_once: bool) -> None:
    watcher = watch(own_pki)
    before, staged = watcher.credentials, stage(own_pki)
    own_pki.authority.write_revocations([serial(staged)])
    if not at_once:
        assert watcher.poll() is not None
    own_pki.path("staged.p12").replace(own_pki.path("server.p12"))
    change = watcher.poll()
    assert change is not None and not change.new_certificate and change.new_revocations == at_once
    [problem] = change.problems
    assert isinstance(problem, RevokedError)
    assert "the old ones stay in force" in str(problem) and "was revoked" in str(problem)
    assert not any("new certificate muster://" in note for note in change.notes)
    assert watcher.credentials.fingerprint == before.fingerprint
    assert watcher.credentials.peer(before.cert_chain_pem)
    with pytest.raises(RevokedError):  # the new lists are in force all the same
        watcher.credentials.peer(staged.cert_chain_pem)
    assert watcher.poll() is None  # said once
    reissue(own_pki)
    change = watcher.poll()
    assert change is not None and change.new_certificate and change.problems == ()


@pytest.mark.parametrize("identity", [Identity("job", "worker"), Identity("other", "scheduler")])
def test_a_certificate_of_another_role_or_job_is_not_put_in_force(own_pki: Pki, identity: Identity) -> None:
    watcher = CredentialsWatcher(configure(own_pki), "scheduler", {}, password=PASSWORD, job="job")
    before = watcher.credentials
    stage(own_pki, identity)
    own_pki.path("staged.p12").replace(own_pki.path("server.p12"))
    change = watcher.poll()
    assert change is not None and not change.new_certificate and change.notes == ()
    [problem] = change.problems
    assert isinstance(problem, IdentityError) and "the old ones stay in force" in str(problem)
    assert watcher.credentials == before


def test_a_renewed_certificate_waits_for_lists_that_can_be_read(own_pki: Pki) -> None:
    """Whether it is revoked cannot be known before."""
    watcher = watch(own_pki)
    before, good = watcher.credentials, own_pki.path("crl.pem").read_bytes()
    write_file(own_pki.path("crl.pem"), b"junk")
    reissue(own_pki)
    change = watcher.poll()
    assert change is not None and not change.new_certificate
    assert {type(problem) for problem in change.problems} == {RevocationListError}
    assert watcher.credentials.fingerprint == before.fingerprint
    write_file(own_pki.path("crl.pem"), good)
    change = watcher.poll()
    assert change is not None and change.new_certificate and change.problems == ()


def test_an_older_list_is_not_taken_back(own_pki: Pki) -> None:
    watcher = watch(own_pki)
    joined = load_credentials(own_pki.path("client.p12"), PASSWORD, own_pki.ca)
    file = own_pki.path("crl.pem")
    old = file.read_bytes()
    own_pki.authority.write_revocations([serial(joined)])
    new = file.read_bytes()
    assert watcher.poll() is not None
    for between in (None, b"junk"):  # what cannot be read does not make it forget
        if between is not None:
            write_file(file, between)
            assert watcher.poll() is not None
        write_file(file, old)
        change = watcher.poll()
        assert change is not None
        [problem] = change.problems
        assert isinstance(problem, RevocationListError) and "the newer one stays in force" in str(problem)
        with pytest.raises(RevokedError):
            watcher.credentials.peer(joined.leaf_pem)
    write_file(file, new)
    assert watcher.poll() is None


def test_a_list_out_of_date_is_said(own_pki: Pki) -> None:
    watcher = watch(own_pki)
    own_pki.authority.write_revocations(days=1, now=NOW - 2 * DAY)
    change = watcher.poll()
    assert change is not None and "went out of date" in str(change.problems[0])


@pytest.mark.parametrize(
    ("key", "value", "note"),
    [
        ("require_identity", False, "require_identity is now false"),
        ("cert_expire_warning_time_in_day", 30, "cert_expire_warning_time_in_day is now 30"),
        ("crl_path", "", "crl_path is now empty"),
    ],
)
def test_settings_count_at_once_and_are_told(own_pki: Pki, key: str, value: object, note: str) -> None:
    watcher = watch(own_pki)
    configure(own_pki, **{key: value})
    change = watcher.poll()
    assert change is not None and change.problems == () and not change.new_certificate
    assert any(each.endswith(note) for each in change.notes)
    weakened = ("require_identity is false:", "no certificate can be revoked")
    assert [any(words in each for words in weakened) for each in change.warnings] == [True] * (
        key != "cert_expire_warning_time_in_day"
    )
    assert getattr(watcher.config, key) == (value or (None if value == "" else False))
    assert watcher.credentials.require_identity is watcher.config.require_identity
    assert watcher.poll() is None
    configure(own_pki)
    change = watcher.poll()
    assert change is not None and len(change.notes) == 1 + change.new_revocations and change.warnings == ()
    assert watcher.credentials.require_identity


def test_ciphers_wait_for_a_restart_and_that_is_said(own_pki: Pki) -> None:
    watcher = watch(own_pki)
    before = watcher.credentials.cipher_list
    configure(own_pki, cipher_list="ECDHE-ECDSA-AES256-GCM-SHA384")
    change = watcher.poll()
    assert change is not None and (change.notes, change.problems) == ((), ())
    [warning] = change.warnings
    assert "cipher_list has changed" in warning and "needs a restart" in warning
    assert watcher.credentials.cipher_list == before


def test_a_configuration_that_says_the_same_in_other_words_is_no_news(own_pki: Pki) -> None:
    watcher = watch(own_pki)
    configure(own_pki, require_identity=True, cert_expire_warning_time_in_day=90)
    assert watcher.poll() is None


def test_stricter_settings_count_even_beside_a_bad_certificate(own_pki: Pki) -> None:
    watcher = watch(own_pki, require_identity=False)
    nobody = pem(certificate(own_pki.authority, uris=()))
    assert watcher.credentials.peer(nobody)
    write_file(own_pki.path("server.p12"), b"junk")
    configure(own_pki)
    change = watcher.poll()
    assert change is not None and len(change.problems) == 1
    with pytest.raises(IdentityError):
        watcher.credentials.peer(nobody)


def test_files_that_a_new_configuration_names_too_early_are_waited_for(own_pki: Pki) -> None:
    watcher = watch(own_pki)
    configure(own_pki, server_cert_path="new.p12")
    change = watcher.poll()
    assert change is not None and not change.new_certificate and "new.p12" in str(change.problems[0])
    assert watcher.poll() is None
    stage(own_pki)
    own_pki.path("staged.p12").replace(own_pki.path("new.p12"))
    change = watcher.poll()
    assert change is not None and change.new_certificate and change.problems == ()


def test_a_new_configuration_is_followed_to_other_files(own_pki: Pki) -> None:
    watcher = watch(own_pki)
    data = own_pki.authority.issue(Identity("job", "scheduler"), ["localhost"]).p12(PASSWORD)
    write_file(own_pki.path("new.p12"), data)
    configure(own_pki, server_cert_path="new.p12", cert_expire_warning_time_in_day=30)
    change = watcher.poll()
    assert change is not None and change.new_certificate
    assert watcher.config.cert_expire_warning_time_in_day == 30
    assert watcher.poll() is None
    write_file(own_pki.path("new.p12"), own_pki.path("server.p12").read_bytes())
    change = watcher.poll()
    assert change is not None and change.new_certificate


def test_a_bad_configuration_leaves_everything(own_pki: Pki) -> None:
    watcher = watch(own_pki)
    config, credentials = watcher.config, watcher.credentials
    configure(own_pki, crl_pth="typo")
    change = watcher.poll()
    assert (
        change is not None
        and isinstance(change.problems[0], ConfigError)
        and "crl_pth" in str(change.problems[0])
        and "the old one stays in force" in str(change.problems[0])
    )
    assert (watcher.config, watcher.credentials) == (config, credentials)
    assert watcher.poll() is None  # said once
    own_pki.authority.write_revocations([5])
    change = watcher.poll()  # the old one is followed on
    assert change is not None and change.new_revocations


def test_a_password_file_is_read_again(own_pki: Pki) -> None:
    secret = own_pki.path("secret")
    secret.write_bytes(PASSWORD)
    watcher = CredentialsWatcher(configure(own_pki), "scheduler", {"MS_SERVER_PASSWORD_FILE": str(secret)})
    secret.write_bytes(b"another")
    data = own_pki.authority.issue(Identity("job", "scheduler"), ["localhost"]).p12(b"another")
    write_file(own_pki.path("server.p12"), data)
    change = watcher.poll()
    assert change is not None and change.new_certificate and change.problems == ()


def test_a_bad_start_is_refused(own_pki: Pki) -> None:
    own_pki.path("crl.pem").unlink()
    with pytest.raises(RevocationListError):
        watch(own_pki)
    with pytest.raises(PasswordError):
        CredentialsWatcher(configure(own_pki, crl_path=""), "worker", {}, password=b"wrong")


def test_a_file_server_that_gives_no_answer_is_reported_once_and_holds_nobody_up(
    own_pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()

    def hang(path: Path) -> SecurityConfig:
        assert answer.wait(30)
        return load_config(path)

    monkeypatch.setattr(watching, "POLL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(watching, "load_config", hang)
    answer.set()
    watcher = watch(own_pki)
    answer.clear()
    reissue(own_pki)
    change = watcher.poll()
    assert change is not None and not change.new_certificate
    assert "Reading these files took longer than" in str(change.problems[0])
    assert str(own_pki.path("server.p12")) in str(change.problems[0])
    assert watcher.poll() is None
    answer.set()
    monkeypatch.setattr(watching, "POLL_TIMEOUT_S", 30.0)
    deadline = time.monotonic() + 30
    while (change := watcher.poll()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert change is not None and change.new_certificate


def test_one_thread_looks_at_the_files_every_time_and_ends_with_the_watcher(
    own_pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def noted(path: Path) -> SecurityConfig:
        threads.append(threading.current_thread())
        return load_config(path)

    watcher = watch(own_pki)
    monkeypatch.setattr(watching, "load_config", noted)
    for _ in range(2):
        reissue(own_pki)
        change = watcher.poll()
        assert change is not None and change.new_certificate
    first, second = threads
    assert first is second is not threading.current_thread()
    del watcher
    deadline = time.monotonic() + 30
    while first.is_alive() and time.monotonic() < deadline:
        gc.collect()  # again, if the thread has not let go of its last look yet
        first.join(0.05)
    assert not first.is_alive()


# ---------------------------------------------------------------- what is shown to etcd


ETCD = {"etcd_cert_path": "etcd.p12", "etcd_ca_cert_path": "ca.crt"}


def shown_to_etcd(pki: Pki) -> Follower:
    reissue(pki, "etcd.p12")
    return Follower(watch(pki, **ETCD), logging.getLogger("muster.certs"))


def test_what_is_shown_to_etcd_is_renewed_and_a_bad_file_changes_nothing(own_pki: Pki) -> None:
    follower = shown_to_etcd(own_pki)
    old = follower.etcd()
    reissue(own_pki, "etcd.p12")
    change = follower.poll()
    assert change is not None and not change.new_certificate
    assert follower.etcd().fingerprint != old.fingerprint
    assert change.notes == (f"new certificate for etcd, or its authorities, {follower.etcd().fingerprint}",)
    good = follower.etcd()
    own_pki.path("etcd.p12").write_bytes(b"no certificate")
    change = follower.poll()
    assert change is not None and change.notes == ()
    assert "What was shown to etcd so far stays in force" in str(change.problems[0])
    assert follower.etcd() is good
    assert follower.poll() is None


def test_no_connection_to_etcd_waits_for_a_file_server_that_gives_no_answer(
    own_pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop of the scheduler that leads asks for each, and would stand still beyond its lease."""
    follower = shown_to_etcd(own_pki)
    old = follower.etcd()

    def read(*arguments: object) -> Credentials:
        raise AssertionError("a file was read for a connection")

    monkeypatch.setattr(watching, "load_for_etcd", read)
    reissue(own_pki, "etcd.p12")
    assert follower.etcd() is old
