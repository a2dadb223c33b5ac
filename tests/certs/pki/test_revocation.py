from __future__ import annotations

import base64
import datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.certs.errors import RevocationListError, RevokedError
from muster.certs.pki.authority import Authority, create_authority
from muster.certs.pki.identity import Identity
from muster.certs.pki.peer import peer_of_pem
from muster.certs.pki.revocation import Revocations, keep_newest, lists_by_key, load_revocations
from muster.certs.runtime.store import load_credentials
from tests.certs.making import DAY, NOW, PASSWORD, Pki, certificate, pem


def signed(
    authority: Authority,
    serials: tuple[int, ...] = (),
    *,
    start: datetime.datetime = NOW - DAY,
    end: datetime.datetime = NOW + DAY,
    key: Any = None,
    extension: x509.ExtensionType | None = None,
    number: int | None = None,
) -> bytes:
    draft = x509.CertificateRevocationListBuilder(authority.certificate.subject, start, end)
    for serial in serials:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(NOW - DAY).build()
        draft = draft.add_revoked_certificate(entry)
    if extension is not None:
        draft = draft.add_extension(extension, critical=True)
    if number is not None:
        draft = draft.add_extension(x509.CRLNumber(number), critical=False)
    return draft.sign(key or authority.key, hashes.SHA256()).public_bytes(Encoding.PEM)


def load(text: bytes, *authorities: Authority) -> Revocations:
    return load_revocations(text, [each.certificate for each in authorities], "crl.pem")


def check(revocations: Revocations, *chain: x509.Certificate, now: datetime.datetime | None = None) -> None:
    now = now or datetime.datetime.now(datetime.UTC)
    peer_of_pem(b"".join(pem(each) for each in chain)).check(revocations, now)


def test_only_the_listed_certificate_is_refused(pki: Pki) -> None:
    good, bad = certificate(pki.authority), certificate(pki.authority, common_names=("bad",))
    revocations = load(signed(pki.authority, (bad.serial_number,)), pki.authority)
    check(revocations, good)
    with pytest.raises(
        RevokedError, match=f"CN=bad .serial {bad.serial_number:x}. was revoked by CN=Muster CA"
    ):
        check(revocations, bad)


def test_no_list_at_all_revokes_nothing(pki: Pki) -> None:
    peer_of_pem(pem(certificate(pki.authority))).check(None, NOW)


def test_lists_out_of_date_let_nobody_in(pki: Pki) -> None:
    revocations = load(signed(pki.authority), pki.authority)
    good = certificate(pki.authority, start=NOW - 9 * DAY, end=NOW + 9 * DAY)
    check(revocations, good)
    with pytest.raises(RevocationListError, match=r"went out of date at .*here it is .*nobody is let in"):
        check(revocations, good, now=NOW + 2 * DAY)
    with pytest.raises(RevocationListError, match=r"from the future .*here it is"):
        check(revocations, good, now=NOW - 2 * DAY)
    assert revocations.next_update() == NOW + DAY


def test_the_revoked_are_told_so_even_by_a_list_out_of_date(pki: Pki) -> None:
    bad = certificate(pki.authority, end=NOW + 9 * DAY)
    revocations = load(signed(pki.authority, (bad.serial_number,)), pki.authority)
    with pytest.raises(RevokedError):
        check(revocations, bad, now=NOW + 2 * DAY)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "holds no PEM revocation list"),
        (b"junk", "holds no PEM revocation list"),
        (b"-----BEGIN X509 CRL-----\nMIIB", "cut off"),
        (b"-----BEGIN X509 CRL-----\nMIIB\n-----END X509 CRL-----\n", "cannot be read"),
        (b"-----BEGIN X509 CRL-----\n\xff\xff\n-----END X509 CRL-----\n", "cannot be read"),
    ],
)
def test_unreadable_lists_are_refused(pki: Pki, text: bytes, words: str) -> None:
    with pytest.raises(RevocationListError, match=words):
        load(text, pki.authority)
    with pytest.raises(RevocationListError):  # one bad list spoils the good one beside it
        load(signed(pki.authority) + text, pki.authority) if text.startswith(b"---") else load(
            text, pki.authority
        )


def test_a_list_of_an_unknown_authority_is_refused(pki: Pki, foreign: Pki) -> None:
    with pytest.raises(RevocationListError, match="not trusted here"):
        load(signed(foreign.authority), pki.authority)


def test_a_forged_list_is_refused(pki: Pki) -> None:
    with pytest.raises(RevocationListError, match="wrong signature"):
        load(signed(pki.authority, key=ec.generate_private_key(ec.SECP256R1())), pki.authority)


def test_delta_lists_are_refused_rather_than_half_understood(pki: Pki) -> None:
    with pytest.raises(RevocationListError, match=r"not supported: 2\.5\.29\.27"):
        load(signed(pki.authority, extension=x509.DeltaCRLIndicator(1)), pki.authority)


def test_every_issuer_of_a_leaf_needs_a_list(pki: Pki, foreign: Pki) -> None:
    revocations = load(signed(pki.authority), pki.authority, foreign.authority)
    with pytest.raises(RevocationListError, match="no revocation list of the authority that issued"):
        check(revocations, certificate(foreign.authority))
    both = load(
        signed(pki.authority) + b"a comment\n" + signed(foreign.authority), pki.authority, foreign.authority
    )
    check(both, certificate(foreign.authority))
    check(both, certificate(pki.authority))


def test_several_lists_of_one_authority_add_up(pki: Pki) -> None:
    one, two = certificate(pki.authority), certificate(pki.authority)
    old = signed(pki.authority, (one.serial_number,), end=NOW - DAY / 2)
    new = signed(pki.authority, (two.serial_number,))
    revocations = load(old + new, pki.authority)
    for each in (one, two):
        with pytest.raises(RevokedError):
            check(revocations, each)
    check(revocations, certificate(pki.authority))  # the newer one is in date


@pytest.mark.parametrize(
    ("had", "found", "back"),
    [
        ({"number": 5}, {"number": 4}, True),
        ({"number": 5}, {"number": 5}, False),
        ({"number": 5}, {"number": 6, "start": NOW - 2 * DAY}, False),
        ({"number": 5}, {}, True),
        ({}, {"number": 1}, False),
        ({}, {"start": NOW - 2 * DAY}, True),
        ({"start": NOW - 2 * DAY}, {}, False),
    ],
)
def test_an_older_list_does_not_take_the_place_of_a_newer(
    pki: Pki, had: dict[str, Any], found: dict[str, Any], back: bool
) -> None:
    before = load(signed(pki.authority, (1,), **had), pki.authority)
    after = load(signed(pki.authority, (2,), **found), pki.authority)
    kept, complaints = keep_newest(after, lists_by_key(before))
    assert kept.lists == (before if back else after).lists
    assert len(complaints) == back
    if back:
        assert "older revocation list of CN=Muster CA" in str(complaints[0])
        assert "the newer one stays in force" in str(complaints[0])


def test_each_authority_has_numbers_of_its_own(pki: Pki, foreign: Pki) -> None:
    def lists(own: int, others: int) -> Revocations:
        text = signed(pki.authority, number=own) + signed(foreign.authority, number=others)
        return load(text, pki.authority, foreign.authority)

    kept, complaints = keep_newest(lists(8, 1), lists_by_key(lists(7, 2)))
    assert sorted(each.number for each in kept.lists) == [2, 8]
    assert len(complaints) == 1 and "number 1" in str(complaints[0])
    kept, complaints = keep_newest(lists(9, 2), {})
    assert (len(kept.lists), complaints) == (2, [])


def test_authorities_of_one_name_are_told_apart_by_key(tmp_path: Path) -> None:
    one = create_authority(tmp_path / "1", PASSWORD, name="CA")
    two = create_authority(tmp_path / "2", PASSWORD, name="CA")
    issued = two.issue(Identity("job", "worker")).certificate
    revocations = load(signed(one, (issued.serial_number,)), one, two)
    with pytest.raises(RevocationListError, match="no revocation list"):
        check(revocations, issued)
    check(load(signed(one, (issued.serial_number,)) + signed(two), one, two), issued)


@pytest.mark.parametrize("sent", [True, False], ids=["sent by the peer", "known from ca_cert_path"])
def test_a_revoked_intermediate_takes_what_it_issued_along(pki: Pki, tmp_path: Path, sent: bool) -> None:
    below = create_authority(tmp_path / "below", PASSWORD, parent=pki.authority)
    leaf = certificate(below)
    chain = (leaf, below.certificate) if sent else (leaf,)
    fine = load(signed(pki.authority) + signed(below), pki.authority, below)
    check(fine, *chain)
    revoked = signed(pki.authority, (below.certificate.serial_number,)) + signed(below)
    with pytest.raises(RevokedError, match="was revoked by"):
        check(load(revoked, pki.authority, below), *chain)
    # The leaf's own issuer must have a list; a higher one's is used if there.
    check(load(signed(below), pki.authority, below), *chain)
    with pytest.raises(RevocationListError):
        check(load(signed(pki.authority), pki.authority, below), *chain)


def test_a_broken_list_says_why_to_everybody(pki: Pki) -> None:
    broken = Revocations(problem="crl.pem cannot be read: gone.")
    with pytest.raises(RevocationListError, match=r"crl.pem cannot be read: gone\. .*nobody is let in"):
        check(broken, certificate(pki.authority))


def test_own_revoked_certificate_is_found_at_load(own_pki: Pki) -> None:
    serial = x509.load_pem_x509_certificate(
        load_credentials(own_pki.path("client.p12"), PASSWORD, own_pki.ca).leaf_pem
    ).serial_number
    own_pki.authority.write_revocations([serial])
    with pytest.raises(RevokedError):
        load_credentials(own_pki.path("client.p12"), PASSWORD, own_pki.ca, crl_path=own_pki.path("crl.pem"))
    assert load_credentials(own_pki.path("node7.p12"), PASSWORD, own_pki.ca, crl_path=own_pki.path("crl.pem"))


def test_a_missing_list_fails_closed_at_load(own_pki: Pki) -> None:
    with pytest.raises(RevocationListError, match=r"cannot be read: No such file.*nobody is let in"):
        load_credentials(own_pki.path("client.p12"), PASSWORD, own_pki.ca, crl_path=own_pki.path("none.pem"))


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(place=st.integers(0, 10_000), change=st.integers(1, 255))
def test_any_damage_to_a_list_is_a_typed_error(pki: Pki, place: int, change: int) -> None:
    der = bytearray(x509.load_pem_x509_crl(signed(pki.authority, (5,))).public_bytes(Encoding.DER))
    der[place % len(der)] ^= change
    text = b"-----BEGIN X509 CRL-----\n" + base64.encodebytes(bytes(der)) + b"-----END X509 CRL-----\n"
    try:
        [accepted] = load(text, pki.authority).lists
    except RevocationListError:
        return
    # The name of the algorithm stands there twice, and one of them is outside of what is signed.
    assert accepted.serials == {5} and accepted.next_update == NOW + DAY
