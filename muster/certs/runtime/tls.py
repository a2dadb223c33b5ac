"""TLS for Python's own sockets: mutual, 1.2 or newer, against the configured authorities only.

gRPC has its own TLS (:mod:`muster.certs.runtime.grpc_credentials`). These contexts serve the peer connections
of the CPU communicator and the preflight. Both sides prove that they hold a certificate of the authority;
*who* it is must be asked afterwards: ``credentials.peer(peer_pem(sock)).identity``.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from muster.certs.errors import CertificateError, HandshakeError

if TYPE_CHECKING:
    from muster.certs.runtime.store import Credentials


def server_ssl_context(credentials: Credentials) -> ssl.SSLContext:
    """Returns a context for the accepting side: client certificates required, no session tickets.

    Without tickets every connection is a full handshake (under 1 ms with P-256), in which dates are checked,
    and the server writes nothing of its own after it.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, credentials)
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET | ssl.OP_CIPHER_SERVER_PREFERENCE
    return context


def client_ssl_context(credentials: Credentials) -> ssl.SSLContext:
    """Returns a context for the dialling side. It does not compare names: the caller checks the identity."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, credentials)


def peer_pem(connection: ssl.SSLSocket | ssl.SSLObject) -> bytes:
    """Returns the certificate of the other side, with the intermediates that it sent, leaf first.

    Raises:
        HandshakeError: the handshake is not complete, or the peer showed no certificate.
    """
    leaf = connection.getpeercert(binary_form=True)
    if leaf is None:
        raise HandshakeError("The other side showed no certificate.")
    chain = _sent_chain(connection)
    ders = [leaf, *(der for der in chain if der != leaf)]
    return "".join(ssl.DER_cert_to_PEM_cert(der) for der in ders).encode()


def _sent_chain(connection: ssl.SSLSocket | ssl.SSLObject) -> list[bytes]:
    public = getattr(connection, "get_unverified_chain", None)
    if public is not None:  # Python 3.13
        return list(public())
    # Older Pythons have it on the inner object only. An asyncio transport's SSLObject has the same inside.
    inner: Any = getattr(connection, "_sslobj", None)
    chain = inner.get_unverified_chain() if hasattr(inner, "get_unverified_chain") else None
    return [bytes(ssl.PEM_cert_to_DER_cert(each.public_bytes())) for each in chain or ()]


_ahead: dict[int, tuple[int, Credentials, ssl.SSLContext]] = {}
"""Contexts that this process or its parent made in advance."""


def make_ahead(credentials: Credentials) -> None:
    """Makes a worker's contexts in advance, for this process or a fork to take: reading a key takes a while.

    Connections share nothing through this: the contexts keep no sessions and give no tickets.
    """
    kinds = (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_CLIENT)
    _ahead.update({i: (kind, credentials, _new_context(kind, credentials)) for i, kind in enumerate(kinds)})


def forget_made() -> None:
    """Drops the contexts that were made in advance."""
    _ahead.clear()


def _context(protocol: int, credentials: Credentials) -> ssl.SSLContext:
    """Returns a context for these credentials: one that was made in advance, each used once, or a new one."""
    for number, (kind, of, _) in list(_ahead.items()):
        if kind == protocol and _shown(of) == _shown(credentials):
            taken = _ahead.pop(number, None)  # by one thread only
            if taken is not None:
                return taken[2]
    return _new_context(protocol, credentials)


def _shown(credentials: Credentials) -> tuple[object, ...]:
    """Returns the parts of credentials from which a context is made, to compare two of them."""
    each = credentials
    return each.key_pem, each.cert_chain_pem, each.ca_pem, each.cipher_list


def _new_context(protocol: int, credentials: Credentials) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # As gRPC's TLS library does: an intermediate in ca_cert_path is trusted by itself.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    try:
        context.set_ciphers(":".join(credentials.cipher_list) + ":@SECLEVEL=2")
        context.load_verify_locations(cadata=credentials.ca_pem.decode("ascii"))
        with _as_path(credentials.cert_chain_pem) as chain, _as_path(credentials.key_pem) as key:
            context.load_cert_chain(chain, key)
    except ssl.SSLError as error:
        raise CertificateError(
            f"The TLS library refuses {credentials.identity} (SHA-256 {credentials.fingerprint[:23]}...): "
            f"{error.reason or 'no reason given'}."
        ) from None
    return context


@contextmanager
def _as_path(data: bytes) -> Iterator[str]:
    """Yields a path to the data, because ``load_cert_chain`` takes only files. Nothing is written to disk."""
    if hasattr(os, "memfd_create"):
        reader = os.memfd_create("certificate")
        directory = "/proc/self/fd"
        os.write(reader, data)
    else:  # not Linux: a pipe holds at least 16 KiB, more than any chain that build_chain allows
        reader, writer = os.pipe()
        directory = "/dev/fd"
        os.write(writer, data)
        os.close(writer)
    try:
        yield f"{directory}/{reader}"
    finally:
        os.close(reader)
