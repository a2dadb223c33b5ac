from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.certs import errors
from muster.certs.config import load_config
from muster.certs.pki.authority import create_authority
from muster.certs.pki.certificates import fingerprint, parse_certificates
from muster.certs.pki.identity import Identity
from muster.certs.pki.rounds import count_rounds
from muster.certs.runtime import store
from muster.certs.runtime.store import Credentials, load_configured, load_credentials
from tests.certs.making import DAY, KEY, NOW, PASSWORD, Pki, as_ber, certificate, openssl_p12, p12, pem

RSA_KEY = rsa.generate_private_key(65537, 2048)


def load(path: Path, pki: Pki, password: bytes = PASSWORD, **options: object) -> Credentials:
    return load_credentials(path, password, pki.ca, **options)  # type: ignore[arg-type]


def test_what_is_loaded(pki: Pki) -> None:
    credentials = load(pki.path("node7.p12"), pki)
    leaf = parse_certificates(credentials.leaf_pem, "leaf")[0]
    assert credentials.identity == Identity("job", "worker", "node7")
    assert credentials.fingerprint == fingerprint(leaf)
    assert credentials.not_after == leaf.not_valid_after_utc
    assert credentials.ca_not_after == pki.authority.certificate.not_valid_after_utc
    assert credentials.cert_chain_pem == credentials.leaf_pem
    assert credentials.ca_pem == pki.ca.read_bytes()
    assert load_pem_private_key(credentials.key_pem, None).public_key() == leaf.public_key()
    assert credentials.revocations is None


def test_the_key_is_never_shown(pki: Pki) -> None:
    shown = repr(load(pki.path("client.p12"), pki))
    assert "PRIVATE" not in shown and "key" not in shown
    assert "role='worker'" in shown


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("-legacy", "-keypbe", "PBE-SHA1-3DES", "-certpbe", "PBE-SHA1-RC2-40", "-macalg", "sha1"),
        ("-legacy", "-keypbe", "PBE-SHA1-3DES", "-certpbe", "PBE-SHA1-3DES", "-macalg", "sha1"),
        ("-legacy", "-keypbe", "PBE-SHA1-RC2-128", "-certpbe", "PBE-SHA1-RC2-128", "-macalg", "sha1"),
        ("-keypbe", "AES-256-CBC", "-certpbe", "AES-256-CBC", "-macalg", "sha256"),
        ("-certpbe", "NONE"),
    ],
    ids=lambda options: " ".join(options) or "default",
)
def test_files_made_by_openssl_load_old_ones_included(
    pki: Pki, tmp_path: Path, options: tuple[str, ...]
) -> None:
    file = openssl_p12(tmp_path / "x.p12", certificate(pki.authority), *options)
    assert load(file, pki).identity == Identity("job", "worker")
    with pytest.raises(errors.PasswordError):
        load(file, pki, b"wrong")


_MAC, _KEY, _CERTIFICATE = (
    ("-keypbe", "NONE", "-certpbe", "NONE"),
    ("-certpbe", "NONE", "-nomac"),
    ("-nokeys", "-nomaciter"),
)


@pytest.mark.parametrize("part", [_MAC, _KEY, _CERTIFICATE], ids=["MAC", "key", "certificate"])
@pytest.mark.parametrize("legacy", [(), ("-legacy", "-macalg", "sha1")], ids=["", "legacy"])
@pytest.mark.parametrize("encoding", ["DER", "BER"])
def test_a_file_that_wants_too_many_rounds_is_refused_before_it_gets_them(
    pki: Pki,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    part: tuple[str, ...],
    legacy: tuple[str, ...],
    encoding: str,
) -> None:
    file = openssl_p12(tmp_path / "x.p12", certificate(pki.authority), "-iter", "3000", *legacy, *part)
    if encoding == "BER":
        file.write_bytes(as_ber(file.read_bytes()))
    assert count_rounds(file.read_bytes()) == 3000
    monkeypatch.setattr(store, "MAX_ROUNDS", 2999)
    with pytest.raises(errors.FileError, match=r"in 3,000 rounds; at most 2,999 are accepted\..*Make it"):
        load(file, pki)


@pytest.mark.parametrize("salt", [b"\x30\x06\x02\x05salt", b"\x30\x80salty!", b"\x30\x06\x3f\x04salt"])
def test_a_salt_that_looks_like_a_value_of_its_own_is_a_salt(salt: bytes) -> None:
    parameters = b"\x04\x08" + salt + b"\x02\x02\x08\x00"
    assert count_rounds(b"\x30" + bytes([len(parameters)]) + parameters) == 2048


def test_the_rounds_of_all_parts_count_together(
    pki: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = openssl_p12(tmp_path / "x.p12", certificate(pki.authority), "-iter", "3000")
    monkeypatch.setattr(store, "MAX_ROUNDS", 8999)
    with pytest.raises(errors.FileError, match=r"in 9,000 rounds; at most 8,999 are accepted"):
        load(file, pki)


def test_millions_of_rounds_are_refused_whatever_the_password(pki: Pki, tmp_path: Path) -> None:
    file = openssl_p12(tmp_path / "x.p12", certificate(pki.authority), "-iter", "65536", *_MAC)
    assert load(file, pki).identity == Identity("job", "worker")
    whole = file.read_bytes()
    assert whole.count(b"\x02\x03\x01\x00\x00") == 1
    file.write_bytes(whole.replace(b"\x02\x03\x01\x00\x00", b"\x02\x03\x7f\xff\xff"))
    with pytest.raises(errors.FileError, match="in 8,388,607 rounds; at most 2,000,000 are accepted"):
        load(file, pki, b"wrong")


@pytest.mark.parametrize(
    "content",
    [b"\x30\x80" * 5000, b"\x30\x83\x0f\x42\x40" + b"\x05\x00" * 500_000, b"\x30\x80\x02\x01\x03"],
    ids=["deep", "many", "endless"],
)
def test_what_is_no_end_of_values_is_damaged(pki: Pki, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.p12"
    file.write_bytes(content)
    with pytest.raises(errors.FileError, match="is damaged, or not PKCS#12: "):
        load(file, pki)


def test_rsa_and_legacy_certificates_without_extensions_load_where_allowed(pki: Pki, tmp_path: Path) -> None:
    file = openssl_p12(tmp_path / "x.p12", certificate(pki.authority, uris=(), key=RSA_KEY), key=RSA_KEY)
    assert load(file, pki, require_identity=False).identity.legacy
    with pytest.raises(errors.IdentityError, match="names no job and role"):
        load(file, pki)


@pytest.mark.parametrize("password", [b"", b"wrong", b"correct horse\n", "Pässwörd".encode()])
def test_a_wrong_password_is_a_password_error_that_does_not_show_it(pki: Pki, password: bytes) -> None:
    with pytest.raises(errors.PasswordError, match="does not open with this password") as caught:
        load(pki.path("client.p12"), pki, password)
    assert "wrong" not in str(caught.value) and "horse" not in str(caught.value)


@pytest.mark.parametrize("keep", [1, 2, 10, 100, -1])
def test_a_truncated_file_is_told_from_a_wrong_password(pki: Pki, tmp_path: Path, keep: int) -> None:
    whole = pki.path("client.p12").read_bytes()
    file = tmp_path / "cut.p12"
    file.write_bytes(whole[:keep])
    with pytest.raises(errors.FileError, match=r"cut off|not PKCS#12"):
        load(file, pki)
    if keep > 4:
        with pytest.raises(errors.TruncatedError, match=f"{keep} of {len(whole)} bytes"):
            load(file, pki)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"junk", "not PKCS#12"),
        (b"\x30\x02\x05\x00", "damaged"),
        (b"\x30\x80\x00\x00", "damaged"),
    ],
)
def test_files_of_another_kind(pki: Pki, tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "x.p12"
    file.write_bytes(content)
    with pytest.raises(errors.FileError, match=words):
        load(file, pki)


def test_pem_given_for_p12_is_named(pki: Pki) -> None:
    with pytest.raises(errors.FileError, match=r"is PEM text.*openssl pkcs12 -export"):
        load(pki.ca, pki)


def test_a_missing_file_is_named(pki: Pki, tmp_path: Path) -> None:
    with pytest.raises(errors.FileError, match=r"none\.p12.*No such file"):
        load(tmp_path / "none.p12", pki)
    with pytest.raises(errors.FileError, match=r"CA file.*No such file"):
        load_credentials(pki.path("client.p12"), PASSWORD, tmp_path / "none.crt")


def test_a_missing_file_is_named_with_the_config_json_that_asks_for_it(pki: Pki, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    names = {"server_cert_path": "s.p12", "client_cert_path": "none.p12", "ca_cert_path": str(pki.ca)}
    config.write_text(json.dumps(names))
    with pytest.raises(errors.FileError, match=rf"none\.p12.*No such file.*{config} names it\."):
        load_configured(load_config(config), "worker", {}, password=PASSWORD)


def test_a_file_with_authorities_only_has_no_key(pki: Pki, tmp_path: Path) -> None:
    command = ["openssl", "pkcs12", "-export", "-nokeys", "-in", str(pki.ca), "-out", "ca.p12"]
    subprocess.run([*command, "-passout", f"pass:{PASSWORD.decode()}"], cwd=tmp_path, check=True, timeout=60)
    with pytest.raises(errors.MissingKeyError, match="no private key"):
        load(tmp_path / "ca.p12", pki)


def test_a_key_of_another_certificate_does_not_pass(pki: Pki, tmp_path: Path) -> None:
    # No tool makes such a file, so an open one without a checksum has its key swapped for another.
    file = openssl_p12(
        tmp_path / "x.p12", certificate(pki.authority), "-keypbe", "NONE", "-certpbe", "NONE", "-nomac"
    )
    other = ec.generate_private_key(ec.SECP256R1())
    inside = [key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption()) for key in (KEY, other)]
    data = file.read_bytes()
    assert data.count(inside[0]) == 1
    file.write_bytes(data.replace(inside[0], inside[1]))
    with pytest.raises(errors.KeyMismatchError, match="belong"):
        load(file, pki)
    file.write_bytes(data)
    assert load(file, pki)


def test_an_authoritys_own_certificate_is_no_leaf(pki: Pki, tmp_path: Path) -> None:
    file = p12(tmp_path / "x.p12", pki.authority.certificate, pki.authority.key)
    with pytest.raises(errors.UsageError, match="authority's"):
        load(file, pki)


def test_expired_and_not_yet_valid(pki: Pki, tmp_path: Path) -> None:
    old = p12(tmp_path / "old.p12", certificate(pki.authority, start=NOW - 3 * DAY, end=NOW - DAY))
    new = p12(tmp_path / "new.p12", certificate(pki.authority, start=NOW + DAY, end=NOW + 3 * DAY))
    here = f"here it is ({NOW:%Y-%m-%d}|{datetime.datetime.now(datetime.UTC):%Y-%m-%d})"
    with pytest.raises(errors.ExpiredError, match=f"expired at {NOW - DAY:%Y-%m-%d} .*; {here}"):
        load(old, pki)
    with pytest.raises(errors.NotYetValidError, match=f"not valid before {NOW + DAY:%Y-%m-%d} .*; {here}"):
        load(new, pki)
    assert load(new, pki, now=NOW + 2 * DAY)


def test_an_expired_authority(tmp_path: Path) -> None:
    authority = create_authority(tmp_path, PASSWORD, days=1, now=NOW)
    file = p12(tmp_path / "x.p12", certificate(authority, end=NOW + 9 * DAY))
    pki = Pki(authority, tmp_path)
    assert load(file, pki, now=NOW)
    with pytest.raises(errors.ExpiredError, match="The authority CN=Muster CA"):
        load(file, pki, now=NOW + 2 * DAY)


def test_a_foreign_authority_is_named_with_the_trusted_ones(pki: Pki, foreign: Pki) -> None:
    with pytest.raises(errors.UntrustedError) as caught:
        load(foreign.path("client.p12"), pki)
    assert foreign.authority.certificate.subject.rfc4514_string() in str(caught.value)
    assert pki.authority.certificate.subject.rfc4514_string() in str(caught.value)


def test_an_authority_of_the_same_name_with_another_key_is_told(tmp_path: Path) -> None:
    one = create_authority(tmp_path / "1", PASSWORD, name="CA")
    create_authority(tmp_path / "2", PASSWORD, name="CA")
    file = p12(tmp_path / "x.p12", certificate(one))
    with pytest.raises(errors.UntrustedError, match="another key"):
        load_credentials(file, PASSWORD, tmp_path / "2" / "ca.crt")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (rsa.generate_private_key(65537, 1024), "RSA key of only 1024 bits"),
        (ec.generate_private_key(ec.SECP192R1()), "curve secp192r1"),
        (ec.generate_private_key(ec.SECP256K1()), "curve secp256k1"),
        (ed25519.Ed25519PrivateKey.generate(), "Ed25519"),
    ],
    ids=["rsa1024", "p192", "k256", "ed25519"],
)
def test_weak_and_unusual_keys_are_refused_with_the_least_that_would_do(
    pki: Pki, tmp_path: Path, key: object, words: str
) -> None:
    file = p12(tmp_path / "x.p12", certificate(pki.authority, key=key), key)
    with pytest.raises(errors.WeakCertificateError, match=words) as caught:
        load(file, pki)
    assert "EC P-256 or RSA of 2048" in str(caught.value)


@pytest.mark.parametrize("key", [ec.generate_private_key(ec.SECP384R1()), RSA_KEY], ids=["p384", "rsa2048"])
def test_good_keys_load(pki: Pki, tmp_path: Path, key: object) -> None:
    assert load(p12(tmp_path / "x.p12", certificate(pki.authority, key=key), key), pki)


def test_sha1_signatures_are_refused(tmp_path: Path) -> None:
    """Signed by the openssl program: the library does not sign with SHA-1 any more."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True, timeout=60)

    pair = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *pair, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=ca", "-sha1")
    openssl("req", *pair, "-keyout", "key.pem", "-out", "leaf.csr", "-subj", "/CN=leaf")
    sign = ("x509", "-req", "-in", "leaf.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial")
    for digest in ("-sha1", "-sha256"):
        openssl(*sign, digest, "-out", "leaf.pem")
        openssl(
            "pkcs12",
            "-export",
            "-in",
            "leaf.pem",
            "-inkey",
            "key.pem",
            "-out",
            "x.p12",
            "-passout",
            "pass:pw",
        )
        if digest == "-sha256":  # the root's own SHA-1 signature does not count
            assert load_credentials(tmp_path / "x.p12", b"pw", tmp_path / "ca.crt", require_identity=False)
            continue
        with pytest.raises(errors.WeakCertificateError, match="signed with SHA1"):
            load_credentials(tmp_path / "x.p12", b"pw", tmp_path / "ca.crt", require_identity=False)


def test_a_certificate_for_the_other_side_of_tls_is_refused_where_it_matters(
    pki: Pki, tmp_path: Path
) -> None:
    client_only = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    file = p12(tmp_path / "x.p12", certificate(pki.authority, extensions=(client_only,)))
    assert load(file, pki, purpose="client")
    with pytest.raises(errors.UsageError, match="not issued for use as a TLS server"):
        load(file, pki, purpose="server")


def test_an_intermediate_comes_with_the_leaf_and_is_not_trusted_by_itself(pki: Pki, tmp_path: Path) -> None:
    below = create_authority(tmp_path / "below", PASSWORD, parent=pki.authority)
    file = tmp_path / "x.p12"
    file.write_bytes(below.issue(Identity("job", "worker")).p12(PASSWORD))
    credentials = load(file, pki)
    assert credentials.cert_chain_pem == credentials.leaf_pem + pem(below.certificate)
    assert credentials.ca_pem == pem(pki.authority.certificate)
    bare = p12(tmp_path / "bare.p12", certificate(below))
    with pytest.raises(errors.UntrustedError):
        load(bare, pki)
    # Named in ca_cert_path, it is trusted, with or without its root.
    (tmp_path / "bundle.crt").write_bytes(pem(below.certificate))
    assert load_credentials(bare, PASSWORD, tmp_path / "bundle.crt")


def test_a_leaf_cannot_pose_as_an_intermediate(pki: Pki, tmp_path: Path) -> None:
    class Posing:
        certificate = certificate(pki.authority, key=KEY, common_names=("poser",))
        key = KEY

    forged = certificate(Posing, key=KEY, common_names=("victim",))  # type: ignore[arg-type]
    file = p12(tmp_path / "x.p12", forged, KEY, [Posing.certificate])
    with pytest.raises(errors.UntrustedError):
        load(file, pki)


def test_a_bundle_with_something_else_than_authorities_is_refused(pki: Pki, tmp_path: Path) -> None:
    bundle = tmp_path / "ca.crt"
    bundle.write_bytes(pki.ca.read_bytes() + pem(certificate(pki.authority)))
    with pytest.raises(errors.UsageError, match="not an authority's"):
        load_credentials(pki.path("client.p12"), PASSWORD, bundle)
    bundle.write_bytes(b"no certificate at all")
    with pytest.raises(errors.FileError, match="no PEM certificate"):
        load_credentials(pki.path("client.p12"), PASSWORD, bundle)


def test_a_configuration_picks_file_password_and_rules_by_role(own_pki: Pki, tmp_path: Path) -> None:
    config_file = own_pki.path("config.json")
    config_file.write_text(
        '{"server_cert_path": "server.p12", "client_cert_path": "client.p12", "ca_cert_path": "ca.crt", '
        '"crl_path": "crl.pem", "cipher_list": "ECDHE-ECDSA-AES128-GCM-SHA256"}'
    )
    config = load_config(config_file)
    env = {"MS_SERVER_PASSWORD": PASSWORD.decode(), "MS_CLIENT_PASSWORD": "wrong"}
    server = load_configured(config, "scheduler", env)
    assert server.identity.role == "scheduler"
    assert server.cipher_list == ("ECDHE-ECDSA-AES128-GCM-SHA256",)
    assert server.revocations is not None
    with pytest.raises(errors.PasswordError):
        load_configured(config, "worker", env)
    assert load_configured(config, "worker", env, password=PASSWORD).identity.role == "worker"


def test_a_host_whose_clock_is_an_hour_behind_the_authoritys_takes_its_certificates_and_lists(
    own_pki: Pki, tmp_path: Path
) -> None:
    own_pki.authority.write_revocations()
    behind = NOW - datetime.timedelta(hours=1)
    file = tmp_path / "new.p12"
    file.write_bytes(own_pki.authority.issue(Identity("job", "scheduler"), now=NOW).p12(PASSWORD))
    lists = own_pki.path("crl.pem")
    own = load_credentials(file, PASSWORD, own_pki.ca, crl_path=lists, now=behind)
    issued = own_pki.authority.issue(Identity("job", "worker"), now=NOW).certificate
    assert own.peer(pem(issued), now=behind).identity == Identity("job", "worker")


def test_a_peer_is_judged_by_dates_and_identity(pki: Pki, server: Credentials) -> None:
    peer = server.peer(pem(certificate(pki.authority)))
    assert peer.identity == Identity("job", "worker")
    assert peer.describe().startswith("muster://job/worker (SHA-256 ")
    with pytest.raises(errors.ExpiredError, match="muster://job/worker"):
        server.peer(pem(certificate(pki.authority)), now=NOW + 2 * DAY)
    with pytest.raises(errors.NotYetValidError):
        server.peer(pem(certificate(pki.authority)), now=NOW - 2 * DAY)
    with pytest.raises(errors.IdentityError):
        server.peer(pem(certificate(pki.authority, uris=())))
    with pytest.raises(errors.WeakCertificateError):
        server.peer(pem(certificate(pki.authority, key=rsa.generate_private_key(65537, 1024))))


@pytest.mark.filterwarnings(
    "ignore:PKCS.12 bundle could not be parsed as DER:UserWarning"
)  # read as BER then
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_damage_to_a_p12_is_a_typed_error(pki: Pki, tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(pki.path("client.p12").read_bytes())
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    file = tmp_path / "x.p12"
    file.write_bytes(bytes(whole[: data.draw(st.integers(place, len(whole)))]))
    try:
        load(file, pki)
    except errors.CertificateError:
        return
    # Only what carries no meaning may change without being noticed (an algorithm's optional parameters).
    assert len(file.read_bytes()) == len(whole)
