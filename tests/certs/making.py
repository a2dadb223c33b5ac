"""Certificates of every kind, also those that no honest authority would issue."""

from __future__ import annotations

import datetime
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    pkcs12,
)
from cryptography.x509.oid import NameOID

from muster.certs.pki.authority import Authority

NOW = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
DAY = datetime.timedelta(days=1)
PASSWORD = b"correct horse"
KEY = ec.generate_private_key(ec.SECP256R1())


@dataclass(frozen=True)
class Pki:
    """An authority with one certificate for each role."""

    authority: Authority
    directory: Path

    def path(self, name: str) -> Path:
        return self.directory / name

    @property
    def ca(self) -> Path:
        return self.directory / "ca.crt"


def certificate(
    authority: Authority,
    *,
    uris: tuple[str, ...] = ("muster://job/worker",),
    hosts: tuple[x509.GeneralName, ...] = (),
    common_names: tuple[str, ...] = ("test",),
    start: datetime.datetime = NOW - DAY,
    end: datetime.datetime = NOW + DAY,
    key: Any = KEY,
    extensions: tuple[x509.ExtensionType, ...] = (),
) -> x509.Certificate:
    """A certificate signed by the authority, with whatever in it."""
    names = [x509.UniformResourceIdentifier(uri) for uri in uris]
    draft = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in common_names]))
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
    )
    if names or hosts:
        draft = draft.add_extension(x509.SubjectAlternativeName([*names, *hosts]), critical=False)
    for extension in extensions:
        draft = draft.add_extension(extension, critical=False)
    return draft.sign(authority.key, hashes.SHA256())


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def key_pem(key: Any = KEY) -> bytes:
    text: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return text


def p12(
    path: Path, leaf: x509.Certificate | None, key: Any = KEY, extra: list[x509.Certificate] | None = None
) -> Path:
    encryption = BestAvailableEncryption(PASSWORD)
    path.write_bytes(pkcs12.serialize_key_and_certificates(b"t", key, leaf, extra, encryption))
    return path


def as_ber(der: bytes) -> bytes:
    """The same values as Firefox's tools write them: without lengths, and strings of octets in pieces."""
    result, at = b"", 0
    while at < len(der):
        tag, length, start = der[at], der[at + 1], at + 2
        if length > 0x80:
            start += length & 0x7F
            length = int.from_bytes(der[at + 2 : start], "big")
        content, at = der[start : start + length], start + length
        if tag & 0x20:
            result += bytes([tag, 0x80]) + as_ber(content) + b"\0\0"
        elif tag == 0x04 and content[:1] == b"\x30":
            pieces = [content[each : each + 7] for each in range(0, length, 7)]
            inner = b"".join(b"\x04" + bytes([len(each)]) + each for each in pieces)
            result += b"\x24\x80" + inner + b"\0\0"
        else:
            result += _primitive(tag, content)
    return result


def _primitive(tag: int, content: bytes) -> bytes:
    size = len(content)
    length = bytes([size]) if size < 0x80 else b"\x84" + size.to_bytes(4, "big")
    return bytes([tag]) + length + content


def openssl_p12(path: Path, leaf: x509.Certificate, *options: str, key: Any = KEY) -> Path:
    """A PKCS#12 file as the openssl program makes it."""
    (path.parent / "leaf.pem").write_bytes(pem(leaf))
    (path.parent / "key.pem").write_bytes(key_pem(key))
    command = ["openssl", "pkcs12", "-export", "-in", "leaf.pem", "-inkey", "key.pem", "-out", path.name]
    command += ["-passout", "pass:" + PASSWORD.decode(), *options]
    subprocess.run(command, cwd=path.parent, check=True, capture_output=True, timeout=60)
    return path
