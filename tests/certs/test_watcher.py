from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography import x509

from certs.errors import (
    ConfigError,
    FileError,
    PasswordError,
    RevocationListError,
    RevokedError,
    TruncatedError,
    UntrustedError,
)
from certs.files import write_file
from certs.identity import Identity
from certs.store import load_credentials
from certs.watcher import CredentialsWatcher
from tests.certs.making import PASSWORD, Pki

CONFIG = {
    "server_cert_path": "server.p12",
    "client_cert_path": "client.p12",
    "ca_cert_path": "ca.crt",
    "crl_path": "crl.pem",
}


def configure(pki: Pki, **changes: object) -> Path:
    write_file(pki.path("config.json"), json.dumps(CONFIG | changes).encode())
    return pki.path("config.json")


def watch(pki: Pki, **changes: object) -> CredentialsWatcher:
    return CredentialsWatcher(configure(pki, **changes), "scheduler", {}, password=PASSWORD)


def reissue(pki: Pki) -> None:
    data = pki.authority.issue(Identity("job", "scheduler"), ["localhost"]).p12(PASSWORD)
    write_file(pki.path("server.p12"), data)


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
    assert change is not None and change.new_certificate
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
    )
    assert (watcher.config, watcher.credentials) == (config, credentials)


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
