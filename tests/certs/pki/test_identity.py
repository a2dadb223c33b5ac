from __future__ import annotations

import base64
import contextlib
import ipaddress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.certs.cli.show import describe
from muster.certs.errors import CertificateError, FileError, IdentityError
from muster.certs.pki.certificates import check_purpose, issued_by, load_authorities, parse_certificates
from muster.certs.pki.identity import LEGACY, ROLES, Identity, parse_uri
from muster.certs.pki.peer import peer_of_pem
from tests.certs.making import NOW, Pki, certificate, pem


@pytest.mark.parametrize(
    ("identity", "uri"),
    [
        (Identity("resnet", "worker", "node7"), "muster://resnet/worker/node7"),
        (Identity("resnet", "scheduler"), "muster://resnet/scheduler"),
        (Identity("*", "operator"), "muster://*/operator"),
        (Identity("a b/c", "worker", "n/1"), "muster://a%20b%2Fc/worker/n%2F1"),
        (Identity("überjob", "worker"), "muster://%C3%BCberjob/worker"),
        (Identity("resnet", "host", nodes=("10", "8", "9")), "muster://resnet/host/10/8/9"),
        (Identity("resnet", "host", nodes=("a/b",)), "muster://resnet/host/a%2Fb"),
    ],
)
def test_an_identity_is_spelt_and_read_as_a_uri(identity: Identity, uri: str) -> None:
    assert identity.uri() == uri
    assert parse_uri(uri) == identity


@pytest.mark.parametrize(
    "uri",
    [
        "muster://job",
        "muster://job/worker/node/more",
        "muster://job/host",
        "muster://job/host/",
        "muster://job/host/b/a",  # canonical is ascending
        "muster://job/host/a/a",
        "muster://job/host/a/*",
        "muster://job/host/" + "/".join(f"{i:03}" for i in range(257)),
        "muster://job/worker/",
        "muster:///worker",
        "muster://job/boss",
        "muster://job/Worker",
        "MUSTER://job/worker",
        "muster://job/worker/%2E%2E",
        "muster://job/worker/..",
        "muster://j%6Fb/worker",  # "job", spelt otherwise
        "muster://a%2fb/worker",  # canonical is %2F
        "muster://job/worker/a%0Ab",
        "muster://job/worker/a%00b",
        "muster://job/worker/%FF",
        "muster://job/worker/*",
        "muster://job/worker?x",
        "muster://%20job/worker",
        f"muster://{'j' * 129}/worker",
        "https://job/worker",
        "",
    ],
)
def test_other_spellings_are_refused(uri: str) -> None:
    with pytest.raises(IdentityError):
        parse_uri(uri)


names = st.text(min_size=1, max_size=128)


@settings(deadline=None)
@given(job=names, role=st.sampled_from(ROLES), node=st.none() | names, more=st.sets(names, max_size=3))
def test_every_legal_identity_survives_its_uri(job: str, role: str, node: str | None, more: set[str]) -> None:
    try:
        identity = Identity(job, role, node, nodes=tuple(sorted(more)) if role == "host" else ())
    except IdentityError:
        return
    try:
        uri = identity.uri()
    except UnicodeEncodeError:
        pytest.fail("a surrogate got in")
    assert uri.isascii()
    assert parse_uri(uri) == identity


@settings(deadline=None)
@given(st.text(max_size=300))
def test_any_text_is_an_identity_or_a_typed_error(text: str) -> None:
    for uri in (text, "muster://" + text):
        with contextlib.suppress(IdentityError):
            assert parse_uri(uri).uri() == uri


def test_may_compares_role_job_and_node() -> None:
    worker = Identity("job", "worker", "node7")
    assert worker.may(role="worker", job="job", node="node7") is None
    assert worker.may() is None
    assert worker.may(role=("operator", "worker")) is None
    wrong_role = worker.may(role="scheduler")
    wrong_job = worker.may(role="worker", job="other")
    wrong_node = worker.may(role="worker", job="job", node="node8")
    assert wrong_role is not None and "needs scheduler" in wrong_role
    assert wrong_job is not None and "for the job 'job', not 'other'" in wrong_job
    assert wrong_node is not None and "bound to the node 'node7', not 'node8'" in wrong_node


def test_an_unbound_certificate_may_take_any_node_and_a_starred_one_any_job() -> None:
    assert Identity("job", "worker").may(role="worker", job="job", node="any") is None
    assert Identity("*", "operator").may(role="operator", job="any") is None
    assert Identity("*", "operator").may(role="worker", job="any") is not None


def test_a_host_acts_as_a_worker_as_each_of_its_own_nodes_and_no_other() -> None:
    host = Identity("job", "host", nodes=("8", "9"))
    assert host.may(role="host") is None
    assert host.may(role="worker", job="job") is None
    assert host.may(role="worker", job="job", node="9") is None
    foreign = host.may(role="worker", job="job", node="7")
    assert foreign is not None and "bound to the nodes '8', '9', not '7'" in foreign
    assert host.may(role=("scheduler", "operator")) is not None
    assert host.may(role="worker", job="other", node="9") is not None


@pytest.mark.parametrize(
    ("role", "node", "nodes"),
    [
        ("host", None, ()),
        ("host", "8", ()),
        ("host", "8", ("9",)),
        ("worker", None, ("8", "9")),
        ("host", None, ("9", "8")),
    ],
)
def test_a_host_and_nobody_else_names_several_nodes(
    role: str, node: str | None, nodes: tuple[str, ...]
) -> None:
    with pytest.raises(IdentityError):
        Identity("job", role, node, nodes=nodes)


def test_the_identity_is_read_from_a_certificate(pki: Pki) -> None:
    text = pem(certificate(pki.authority, uris=("muster://job/worker/node7",)))
    assert peer_of_pem(text).identity == Identity("job", "worker", "node7")
    # As a TLS peer sends it: leaf first, its authority after.
    assert peer_of_pem(text + pem(pki.authority.certificate)).identity.node == "node7"


@pytest.mark.parametrize(
    ("uris", "common_names", "words"),
    [
        ((), ("test",), "names no job and role"),
        (("muster://job/worker", "muster://job/scheduler"), ("test",), "2 URIs"),
        (("spiffe://x/y",), ("test",), "stands for no job and role"),
        (("muster://job/worker",), ("one", "two"), "2 common names"),
        (("muster://job/worker",), ("line\nfeed",), "control character"),
        (("muster://job/worker",), ("nul\0byte",), "control character"),
    ],
)
def test_ambiguous_certificates_are_refused(
    pki: Pki, uris: tuple[str, ...], common_names: tuple[str, ...], words: str
) -> None:
    text = pem(certificate(pki.authority, uris=uris, common_names=common_names))
    with pytest.raises(IdentityError, match=words) as caught:
        peer_of_pem(text)
    assert str(caught.value).isprintable()


def test_a_host_with_a_control_character_is_refused(pki: Pki) -> None:
    text = pem(certificate(pki.authority, hosts=(x509.DNSName("a\nb"),)))
    with pytest.raises(IdentityError, match="control character"):
        peer_of_pem(text)


def test_an_authority_names_nobody(pki: Pki) -> None:
    with pytest.raises(IdentityError, match="authority"):
        peer_of_pem(pem(pki.authority.certificate), require_identity=False)


def test_legacy_certificates_only_where_allowed(pki: Pki) -> None:
    text = pem(certificate(pki.authority, uris=()))
    identity = peer_of_pem(text, require_identity=False).identity
    assert identity == LEGACY and identity.legacy
    assert identity.may(role="scheduler", job="any", node="any") is None
    # Who has an identity is bound to it also there.
    bound = peer_of_pem(pem(certificate(pki.authority)), require_identity=False).identity
    assert bound.may(role="scheduler") is not None
    with pytest.raises(IdentityError):
        peer_of_pem(pem(certificate(pki.authority, uris=("muster://job/boss",))), require_identity=False)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_certificate_or_a_typed_error(data: bytes) -> None:
    for text in (data, b"-----BEGIN CERTIFICATE-----\n" + data + b"\n-----END CERTIFICATE-----\n"):
        with pytest.raises(CertificateError):
            peer_of_pem(text)


def test_not_a_certificate_is_a_file_error() -> None:
    with pytest.raises(FileError, match="no PEM certificate"):
        peer_of_pem(b"hello")


@pytest.mark.filterwarnings("ignore::UserWarning")  # what the library has to say about odd names
@settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
@given(place=st.integers(0, 10_000), change=st.integers(1, 255))
def test_any_damage_to_a_certificate_is_survived(pki: Pki, place: int, change: int) -> None:
    hosts = (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    usage = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
    basic = x509.BasicConstraints(ca=False, path_length=None)
    whole = certificate(pki.authority, hosts=hosts, extensions=(usage, basic))
    der = bytearray(whole.public_bytes(Encoding.DER))
    der[place % len(der)] ^= change
    text = b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(bytes(der)) + b"-----END CERTIFICATE-----\n"
    with contextlib.suppress(CertificateError):
        assert peer_of_pem(text, require_identity=False).describe().isprintable()
    with contextlib.suppress(CertificateError):
        [parsed] = parse_certificates(text, "it")
        if issued_by(parsed, pki.authority.certificate):  # the damage is outside of what is signed
            assert parsed.tbs_certificate_bytes == whole.tbs_certificate_bytes
        describe(parsed, NOW)
        check_purpose(parsed, "client", "it")
        load_authorities(text, "it")
