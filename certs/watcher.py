"""Rotation: notices changed files, checks them, and only then puts them in force."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from certs.config import SecurityConfig, load_config
from certs.errors import CertificateError, RevocationListError
from certs.passwords import password_for
from certs.revocation import Revocations
from certs.store import Credentials, load_credentials, revocations_for

_Signature = tuple[tuple[str, tuple[int, int, int, int] | None], ...]


@dataclass(frozen=True, slots=True)
class Change:
    """What a poll found.

    Attributes:
        credentials: what is in force now.
        new_certificate: whether key, certificate or authorities changed; then new connections must use them.
        new_revocations: whether the revocation lists changed; then every joined peer must be checked again.
        problems: what was wrong with the new files; what they should have replaced stays in force, except for
            revocation lists, which fail closed.
    """

    credentials: Credentials
    new_certificate: bool
    new_revocations: bool
    problems: tuple[CertificateError, ...] = ()


class CredentialsWatcher:
    """Keeps a role's credentials up to date with its files.

    Call :meth:`poll` twice a second or so, from one thread; unless something changed it costs a few ``stat``.

    Args:
        config_path: config.json.
        role: ``scheduler``, ``worker`` or ``operator``.
        env: where the password is looked for, at every load; a rotated password file works.
        password: the password, if it is not in the environment.

    Raises:
        CertificateError: something is wrong at the start; the kind and the words say what.
    """

    def __init__(
        self,
        config_path: str | os.PathLike[str],
        role: str,
        env: Mapping[str, str],
        *,
        password: bytes | None = None,
    ) -> None:
        self._role = role
        self._env = env
        self._password = password
        self.config: SecurityConfig = load_config(config_path)
        self._seen = self._signature()
        base = self._load(self.config)
        if self.config.crl_path is not None:
            base = dataclasses.replace(base, revocations=revocations_for(base, self.config.crl_path))
        base.peer(base.cert_chain_pem)
        self.credentials: Credentials = base

    def poll(self) -> Change | None:
        """Looks for changed files.

        Returns:
            None if nothing that counts changed since the last call.
        """
        # The signature is taken before the files are read: a change in between is found by the next call.
        seen = self._signature()
        if seen == self._seen:
            return None
        self._seen = seen
        before = self.credentials
        base, problems = self._reload()
        revocations = self._revocations(base, problems)
        self.credentials = dataclasses.replace(base, revocations=revocations)
        try:
            self.credentials.peer(base.cert_chain_pem)
        except RevocationListError:
            pass  # said already
        except CertificateError as error:
            problems.append(error)
        change = Change(
            credentials=self.credentials,
            new_certificate=(base.key_pem, base.cert_chain_pem, base.ca_pem)
            != (before.key_pem, before.cert_chain_pem, before.ca_pem),
            new_revocations=revocations != before.revocations,
            problems=tuple(problems),
        )
        return change if change.new_certificate or change.new_revocations or problems else None

    def _reload(self) -> tuple[Credentials, list[CertificateError]]:
        try:
            config = load_config(self.config.path)
            base = self._load(config)
        except CertificateError as error:
            words = f"New certificates are not used, the old ones stay in force: {error.message}"
            return self.credentials, [type(error)(words, remedy=error.remedy)]
        if _files(config, self._role) != _files(self.config, self._role):
            self._seen = ()  # other files now: the next call looks at them
        self.config = config
        return base, []

    def _revocations(self, base: Credentials, problems: list[CertificateError]) -> Revocations | None:
        if self.config.crl_path is None:
            return None
        try:
            return revocations_for(base, self.config.crl_path)
        except CertificateError as error:
            problems.append(error)
            return Revocations(problem=error.message)

    def _load(self, config: SecurityConfig) -> Credentials:
        password = self._password or password_for(self._role, self._env, None)
        return load_credentials(
            config.cert_path(self._role),
            password,
            config.ca_cert_path,
            purpose="server" if self._role == "scheduler" else "client",
            require_identity=config.require_identity,
            cipher_list=config.cipher_list,
        )

    def _signature(self) -> _Signature:
        return tuple((str(file), _stat(file)) for file in _files(self.config, self._role))


def _files(config: SecurityConfig, role: str) -> list[Path]:
    crls = [] if config.crl_path is None else [config.crl_path]
    return [config.path, config.cert_path(role), config.ca_cert_path, *crls]


def _stat(file: Path) -> tuple[int, int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_ctime_ns
