"""The errors of certificates, keys, revocation lists and the security configuration.

One family: :class:`CertificateError` catches all. No message ever contains a key or a password.
"""

from __future__ import annotations

from muster.wire.errors import RemediedError


class CertificateError(RemediedError):
    """Base of everything that this package raises.

    Args:
        message: a sentence on what is wrong, with the file, peer or certificate.
        remedy: what the user can do about it; appended to the message.
    """


class ConfigError(CertificateError):
    """A key of config.json, a variable or an argument is wrong; the message has the legal range."""

    exit_code = 2


class FileError(CertificateError):
    """A file cannot be read or written, or is of the wrong kind."""


class TruncatedError(FileError):
    """A file ends before its content does."""


class PasswordError(CertificateError):
    """The password does not open the file."""


class MissingKeyError(FileError):
    """A PKCS#12 file holds no private key, or no certificate for it."""


class KeyMismatchError(CertificateError):
    """The private key does not belong to the certificate."""


class WeakCertificateError(CertificateError):
    """A key is too small, or a signature uses a broken hash."""


class UsageError(CertificateError):
    """The certificate was issued for another use (extended key usage, CA or not)."""


class ExpiredError(CertificateError):
    """A certificate has expired."""


class NotYetValidError(CertificateError):
    """A certificate is not valid yet: it is new, or a clock is wrong."""


class UntrustedError(CertificateError):
    """A certificate does not come from a certificate authority that is trusted here."""


class RevokedError(CertificateError):
    """A certificate was revoked by its authority."""


class RevocationListError(CertificateError):
    """A revocation list is expired, unreadable or of an unknown authority, so nobody is accepted."""


class IdentityError(CertificateError):
    """A certificate has no identity, an ambiguous one, or one that must not do this."""


class WorkloadIdentityError(CertificateError):
    """The SPIFFE Workload API gives this process no certificate."""


class NameMismatchError(CertificateError):
    """The server's certificate is good, but not for the address that was dialled."""


class HandshakeError(CertificateError):
    """The TLS handshake failed for another reason than the certificates."""


class PlaintextError(HandshakeError):
    """The other side does not speak TLS."""


class RefusedByPeerError(HandshakeError):
    """The other side refused our certificate."""
