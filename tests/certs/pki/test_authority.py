from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from muster.certs import errors
from muster.certs.pki.authority import create_authority, open_authority, renew_authority
from muster.certs.pki.certificates import build_chain, check_purpose, issued_by
from muster.certs.pki.identity import Identity
from muster.certs.pki.peer import peer_of_pem
from muster.certs.pki.records import find_issued, read_lists
from muster.certs.pki.templates import host_names
from muster.certs.runtime.store import load_credentials
from tests.certs.making import DAY, NOW, PASSWORD, Pki, pem


def test_the_authoritys_files(own_pki: Pki) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in own_pki.directory.iterdir()}
    assert modes["ca.key"] == 0o600
    assert modes["issued"] == 0o700
    assert stat.S_IMODE(own_pki.directory.stat().st_mode) == 0o700
    assert "chain.crt" not in modes
    assert b"ENCRYPTED PRIVATE KEY" in own_pki.path("ca.key").read_bytes()


def test_the_openssl_program_accepts_what_is_issued(own_pki: Pki) -> None:
    issued = own_pki.authority.issue(Identity("job", "scheduler"), ["localhost", "10.0.0.1"])
    own_pki.path("leaf.pem").write_bytes(pem(issued.certificate))
    own_pki.path("leaf.p12").write_bytes(issued.p12(PASSWORD))
    for command in (
        ["verify", "-x509_strict", "-crl_check", "-CAfile", "ca.crt", "-CRLfile", "crl.pem", "leaf.pem"],
        [
            "verify",
            "-x509_strict",
            "-purpose",
            "sslserver",
            "-verify_ip",
            "10.0.0.1",
            "-CAfile",
            "ca.crt",
            "leaf.pem",
        ],
        ["pkcs12", "-in", "leaf.p12", "-nokeys", "-passin", f"pass:{PASSWORD.decode()}"],
    ):
        ended = subprocess.run(
            ["openssl", *command],
            cwd=own_pki.directory,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("role", ["scheduler", "worker", "operator"])
def test_what_a_certificate_says(pki: Pki, role: str) -> None:
    identity = Identity("resnet", role, "node 7" if role == "worker" else None)
    issued = pki.authority.issue(identity, days=10, now=NOW)
    leaf = issued.certificate
    assert peer_of_pem(pem(leaf)).identity == identity
    assert leaf.not_valid_after_utc == NOW + 10 * DAY
    assert leaf.not_valid_before_utc == NOW - DAY
    assert issued_by(leaf, pki.authority.certificate)
    assert isinstance(issued.key.curve, ec.SECP256R1)
    usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert ExtendedKeyUsageOID.CLIENT_AUTH in usage
    assert (ExtendedKeyUsageOID.SERVER_AUTH in usage) == (role != "operator")
    check_purpose(leaf, "client", "it")
    assert leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False


def test_hosts_stand_in_it_as_names_and_addresses(pki: Pki) -> None:
    hosts = ["Node7.example.org", "10.0.0.1", "[::1]", "10.0.0.1", "bücher.example", "*.pods.example"]
    peer = peer_of_pem(pem(pki.authority.issue(Identity("job", "scheduler"), hosts).certificate))
    assert peer.hosts == ("node7.example.org", "xn--bcher-kva.example", "*.pods.example")
    assert peer.addresses == ("10.0.0.1", "::1")


@pytest.mark.parametrize(
    "host", ["", "a b", "a/b", "-a", "a..b", "a\nb", "x" * 64, "10.0.0.1:80", "a.*.b", "ü" * 80]
)
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(errors.ConfigError, match="neither a host name nor an address"):
        host_names([host])


@pytest.mark.parametrize("days", [0, -1, 36501])
def test_days_out_of_range(pki: Pki, days: int) -> None:
    with pytest.raises(errors.ConfigError, match="legal are 1 to 36500"):
        pki.authority.issue(Identity("job", "worker"), days=days)


def test_a_leaf_never_outlives_its_authority(tmp_path: Path) -> None:
    authority = create_authority(tmp_path, PASSWORD, days=5, now=NOW)
    assert (
        authority.issue(Identity("job", "worker"), days=99, now=NOW).certificate.not_valid_after_utc
        == NOW + 5 * DAY
    )
    with pytest.raises(errors.ExpiredError):
        authority.issue(Identity("job", "worker"), now=NOW + 6 * DAY)


def test_an_authority_is_not_overwritten_by_mistake(own_pki: Pki) -> None:
    before = own_pki.ca.read_bytes()
    with pytest.raises(errors.FileError, match=r"holds an authority already.*--force"):
        create_authority(own_pki.directory, PASSWORD)
    assert own_pki.ca.read_bytes() == before
    create_authority(own_pki.directory, PASSWORD, force=True)
    assert own_pki.ca.read_bytes() != before


def test_opening(own_pki: Pki, foreign: Pki, tmp_path: Path) -> None:
    again = open_authority(own_pki.directory, PASSWORD)
    assert issued_by(again.issue(Identity("job", "worker")).certificate, own_pki.authority.certificate)
    assert "PRIVATE" not in repr(again) and "key=" not in repr(again)
    with pytest.raises(errors.PasswordError, match=r"ca\.key"):
        open_authority(own_pki.directory, b"wrong")
    with pytest.raises(errors.FileError, match=r"no authority.*certs init"):
        open_authority(tmp_path / "nothing", PASSWORD)
    own_pki.ca.write_bytes(foreign.ca.read_bytes())
    with pytest.raises(errors.KeyMismatchError):
        open_authority(own_pki.directory, PASSWORD)


def test_an_intermediate_and_one_below_it(pki: Pki, tmp_path: Path) -> None:
    middle = create_authority(tmp_path / "middle", PASSWORD, parent=pki.authority)
    create_authority(tmp_path / "low", PASSWORD, parent=middle)
    low = open_authority(tmp_path / "low", PASSWORD)
    assert (tmp_path / "low" / "ca.crt").read_bytes() == pki.ca.read_bytes()
    issued = low.issue(Identity("job", "worker"))
    chain = build_chain(issued.certificate, issued.chain, [pki.authority.certificate], "it")
    assert chain == [issued.certificate, low.certificate, middle.certificate, pki.authority.certificate]
    (tmp_path / "x.p12").write_bytes(issued.p12(PASSWORD))
    # The new authority's list stands beside those above it, and all are taken.
    credentials = load_credentials(
        tmp_path / "x.p12", PASSWORD, pki.ca, crl_path=tmp_path / "low" / "crl.pem"
    )
    assert credentials.revocations is not None and len(credentials.revocations.lists) == 3


def test_the_list_grows_and_keeps_its_dates_and_others_lists(own_pki: Pki, tmp_path: Path) -> None:
    own = own_pki.authority
    assert own.write_revocations([5], now=NOW) == 1
    assert own.write_revocations([6, 5], now=NOW + DAY) == 2
    [crl] = read_lists(own_pki.path("crl.pem"))
    assert {entry.serial_number: entry.revocation_date_utc for entry in crl} == {5: NOW, 6: NOW + DAY}
    assert crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number == 3
    below = create_authority(tmp_path / "below", PASSWORD, parent=own)
    below.write_revocations([9])
    assert [len(list(crl)) for crl in read_lists(tmp_path / "below" / "crl.pem")] == [1, 2]


def test_an_altered_list_is_not_carried_on(own_pki: Pki, foreign: Pki) -> None:
    named = create_authority(
        own_pki.directory / "twin", PASSWORD, name=own_pki.authority.certificate.subject.rfc4514_string()[3:]
    )
    own_pki.path("crl.pem").write_bytes((named.directory / "crl.pem").read_bytes())
    with pytest.raises(errors.FileError, match="wrong signature"):
        own_pki.authority.write_revocations([7])


def test_what_was_issued_is_found_again(own_pki: Pki) -> None:
    bound = peer_of_pem(load_credentials(own_pki.path("node7.p12"), PASSWORD, own_pki.ca).leaf_pem)
    [by_node] = find_issued(own_pki.directory, ["node7"], [])
    [by_print] = find_issued(own_pki.directory, [], [bound.fingerprint[:23] + "..."])
    assert by_node == by_print and by_node.serial_number == bound.links[0].serial
    assert find_issued(own_pki.directory, ["node7"], [bound.fingerprint]) == [by_node]
    with pytest.raises(errors.ConfigError, match="no certificate bound to the node 'node8'"):
        find_issued(own_pki.directory, ["node8"], [])
    with pytest.raises(errors.ConfigError, match="16 hexadecimal digits"):
        find_issued(own_pki.directory, [], ["AB:CD"])


def test_a_renewed_authority_keeps_what_it_issued(own_pki: Pki, tmp_path: Path) -> None:
    renewed = renew_authority(own_pki.authority, days=7, now=NOW)
    assert renewed.certificate.not_valid_after_utc == NOW + 7 * DAY
    assert renewed.certificate.serial_number != own_pki.authority.certificate.serial_number
    assert load_credentials(
        own_pki.path("client.p12"), PASSWORD, own_pki.ca, crl_path=own_pki.path("crl.pem")
    )
    assert open_authority(own_pki.directory, PASSWORD).certificate == renewed.certificate
    below = create_authority(tmp_path / "below", PASSWORD, parent=renewed)
    with pytest.raises(errors.ConfigError, match="under another authority"):
        renew_authority(below)
