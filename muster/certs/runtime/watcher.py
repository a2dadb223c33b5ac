"""Rotation of certificates: notices changed files, checks them, and only then uses them."""

from __future__ import annotations

import dataclasses
import datetime
import os
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from muster.certs.config import NO_FILE, SecurityConfig, config_warnings, load_config, settings_changes
from muster.certs.errors import CertificateError, FileError, IdentityError, RevocationListError
from muster.certs.pki.revocation import ListKey, RevocationList, Revocations, keep_newest, lists_by_key
from muster.certs.runtime.passwords import password_for
from muster.certs.runtime.store import (
    CredentialRules,
    Credentials,
    checked,
    load_credentials,
    load_for_etcd,
    revocations_for,
    with_lists,
)
from muster.wire.threads import start_thread

if TYPE_CHECKING:
    from muster.certs.runtime.workload_api import WorkloadApi

POLL_TIMEOUT_S = 5.0
OLD_STAYS = "New certificates are not used, the old ones stay in force"


@dataclass(frozen=True, slots=True)
class InForce:
    """The settings and credentials in force at a moment, with their revocation lists.

    ``etcd``: the credentials that etcd is shown; None if there are none.
    """

    config: SecurityConfig
    credentials: Credentials
    etcd: Credentials | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """The result of a poll.

    Attributes:
        credentials: what is in force now.
        new_certificate: whether another key or certificate was accepted; new connections must use it.
        new_authorities: whether other authorities are trusted now; new connections must use them, too.
        new_revocations: whether the revocation lists, or the rules for SPIFFE IDs, changed; then every joined
            peer must be checked again.
        notes: sentences about what is in force now.
        warnings: sentences about what weakens it, or needs a restart.
        problems: what was wrong with the new files. The old files stay in force, except for
            revocation lists, which fail closed.
    """

    credentials: Credentials
    new_certificate: bool
    new_authorities: bool
    new_revocations: bool
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    problems: tuple[CertificateError, ...] = ()


def same_certificate(one: Credentials, other: Credentials) -> bool:
    """Whether both have the same key and the same chain of certificates."""
    return (one.key_pem, one.cert_chain_pem) == (other.key_pem, other.cert_chain_pem)


def _same_for_etcd(one: Credentials, other: Credentials) -> bool:
    return same_certificate(one, other) and one.ca_pem == other.ca_pem


def refusal(
    new: Credentials, role: str, job: str | None, now: datetime.datetime | None = None
) -> CertificateError | None:
    """Says why a renewed certificate must not replace the one in force: every peer would refuse it.

    Args:
        new: the certificate, with the revocation lists that it would come into force with.
        role: the role that it must have.
        job: the job that it must be for; None for any.
        now: the time to check for; by default the current one.

    Returns:
        None if it may.
    """
    reason = new.identity.may(role=role, job=job)
    error: CertificateError | None = None
    if reason is not None:
        error = IdentityError(reason, remedy="Put a certificate of this role and job there.")
    try:
        new.peer(new.cert_chain_pem, now)
    except CertificateError as found:
        error = error or found
    return None if error is None else unused(error)


def unused(error: CertificateError) -> CertificateError:
    """Returns the error with an additional sentence that says what stays in force."""
    return type(error)(f"{OLD_STAYS}: {error.message}", remedy=error.remedy)


def own_problem(credentials: Credentials, now: datetime.datetime | None = None) -> CertificateError | None:
    """Returns what is wrong with the certificate in force, apart from its revocation lists; None: nothing."""
    if credentials.revocations is not None and credentials.revocations.problem:
        return None
    try:
        credentials.peer(credentials.cert_chain_pem, now)
    except CertificateError as error:
        words = f"Peers refuse this process, because its own certificate is no longer valid. {error.message}"
        return type(error)(words, remedy=error.remedy)
    return None


def kept_under(config: SecurityConfig, credentials: Credentials) -> Credentials:
    """Keeps the old certificate under a new configuration."""
    return dataclasses.replace(
        credentials, require_identity=config.require_identity, identity_map=config.identity_map
    )


def _lists(credentials: Credentials) -> tuple[RevocationList, ...]:
    return credentials.revocations.lists if credentials.revocations is not None else ()


def change_between(before: InForce, after: InForce, problems: list[CertificateError]) -> Change | None:
    """The change between two readings; None if there is none."""
    old, new = before.credentials, after.credentials
    new_certificate = not same_certificate(old, new)
    new_authorities = old.ca_pem != new.ca_pem
    new_revocations = old.revocations != new.revocations or old.identity_map != new.identity_map
    notes, warnings = settings_changes(before.config, after.config)
    known = config_warnings(before.config)
    warnings += [sentence for sentence in config_warnings(after.config) if sentence not in known]
    if new_authorities:
        notes.append("new authorities are in force")
    if new_certificate:
        notes.append(f"new certificate {new.identity} {new.fingerprint}")
    if before.etcd and after.etcd and not _same_for_etcd(before.etcd, after.etcd):
        notes.append(f"new certificate for etcd, or its authorities, {after.etcd.fingerprint}")
    if _lists(new) and _lists(new) != _lists(old):
        notes.append("new revocation lists are in force")
    if not (new_certificate or new_authorities or new_revocations or notes or warnings or problems):
        return None
    return Change(
        credentials=new,
        new_certificate=new_certificate,
        new_authorities=new_authorities,
        new_revocations=new_revocations,
        notes=tuple(notes),
        warnings=tuple(warnings),
        problems=tuple(problems),
    )


class _Look:
    """Reads the files in a separate thread, because a read from a dead file server cannot be ended.

    The thread is kept: if all cores are busy, a new thread waits for milliseconds before it first runs, and a
    woken one does not.
    """

    def __init__(self, look: Callable[[], Change | None]) -> None:
        self._look = look
        self._asked: queue.SimpleQueue[Callable[[], Change | None] | None] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[Change | BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._asked.put, None)

    def begin(self) -> None:
        """Starts reading the files in the thread; :meth:`take` returns the result."""
        if self._thread is None or not self._thread.is_alive():  # a fork leaves threads behind
            self._thread = start_thread(partial(_serve, self._asked, self._found), name="muster-files")
        self._asked.put(self._look)

    def take(self, timeout_s: float) -> Change | None:
        """Waits for the result of :meth:`begin`.

        Raises:
            queue.Empty: the thread is still reading.
            Exception: reading failed with this.
        """
        found = self._found.get(timeout=timeout_s)
        if isinstance(found, BaseException):
            raise found
        return found


def _serve(
    asked: queue.SimpleQueue[Callable[[], Change | None] | None],
    found: queue.SimpleQueue[Change | BaseException | None],
) -> None:
    while (look := asked.get()) is not None:
        try:
            found.put(look())
        except BaseException as error:
            found.put(error)
        del look  # else who looks would live on for the thread, which ends with it


_Signature = tuple[tuple[str, tuple[int, int, int, int] | None], ...]


class CredentialsWatcher:
    """Keeps a role's credentials up to date with its files.

    Call :meth:`poll` twice a second or so, from one thread; unless something changed it costs a few ``stat``.

    Args:
        config_path: config.json.
        role: ``scheduler``, ``worker`` or ``operator``.
        env: the environment in which the password is looked up at every load, so that it may be rotated.
        password: the password, if it is not in the environment.
        job: the job that a renewed certificate must be for, too; None for any.

    Attributes:
        config: the configuration in force, except ``cipher_list``, which takes effect at the next start.
        credentials: the certificate, authorities and revocation lists in force.
        etcd: the credentials that etcd is shown; set by :meth:`follow_etcd`.

    Raises:
        CertificateError: the certificate or its files are wrong at the start; class and message say how.
    """

    def __init__(
        self,
        config_path: str | os.PathLike[str],
        role: str,
        env: Mapping[str, str],
        *,
        password: bytes | None = None,
        job: str | None = None,
    ) -> None:
        self._role = role
        self._env = env
        self._password = password
        self.job = job
        self.config: SecurityConfig = load_config(config_path)
        self._ciphers = self.config.cipher_list
        self.etcd: Credentials | None = None
        self._api: WorkloadApi | None = None
        self._seen = self._signature(self.config)
        base = with_lists(self._load(self.config), self.config.crl_path)
        self.credentials: Credentials = base
        self._look = _Look(self._find_change)
        self._hangs = False
        self._newest: dict[ListKey, tuple[RevocationList, ...]] = lists_by_key(base.revocations)

    def follow_etcd(self) -> Credentials:
        """Reads the credentials that a scheduler shows to etcd, and watches their files from then on.

        Raises:
            CertificateError: its files cannot be read, or a peer would refuse the certificate.
        """
        self._seen += _signature_for_etcd(self.config)
        self.etcd = load_for_etcd(self.config, self._env, self._password)
        return self.etcd

    def poll(self) -> Change | None:
        """Looks for changed files, for at most five seconds, as a file server may not answer.

        Returns:
            None if nothing relevant changed since the last call.
        """
        hung = self._hangs
        if not hung:
            self._look.begin()
        self._hangs = True
        try:
            found = self._look.take(0.0 if hung else POLL_TIMEOUT_S)
        except queue.Empty:
            return None if hung else self._unanswered()
        except BaseException:
            self._hangs = False
            raise
        self._hangs = False
        return found

    def _unanswered(self) -> Change:
        files = ", ".join(name for name, _ in self._seen)
        words = f"Reading these files took longer than {POLL_TIMEOUT_S:g} s: {files}"
        problem = FileError(
            f"{words}. What was read before stays in force.", remedy="Check the disk they are on."
        )
        return Change(self.credentials, False, False, False, problems=(problem,))

    def _find_change(self) -> Change | None:
        seen = self._signature(self.config)
        if seen == self._seen:
            return None
        self._seen = seen
        before = InForce(self.config, self.credentials, self.etcd)
        problems: list[CertificateError] = []
        config = self._read_config(problems)
        # Every signature is taken before its file is read: a change in between is found by the next call.
        self._seen = seen[:1] + self._signature(config)[1:]
        credentials = self._choose(config, problems)
        own = own_problem(credentials)
        if own is not None:
            problems.append(own)
        self._newest |= lists_by_key(credentials.revocations)
        etcd = self._choose_for_etcd(config, problems)
        self.config, self.credentials, self.etcd = config, credentials, etcd
        return change_between(before, InForce(config, credentials, etcd), problems)

    def _signature(self, config: SecurityConfig) -> _Signature:
        shown_to_etcd = _signature_for_etcd(config) if self.etcd is not None else ()
        api = self._workload_api(config)
        told = () if api is None else ((config.spiffe_endpoint_socket, (api.updates(), 0, 0, 0)),)
        return _signature(config, self._role) + shown_to_etcd + told

    def _workload_api(self, config: SecurityConfig) -> WorkloadApi | None:
        """The Workload API that config.json names, if it does."""
        socket = config.spiffe_endpoint_socket
        if self._api is not None and self._api.socket != socket:
            self._api.close()
            self._api = None
        if self._api is None and socket:
            from muster.certs.runtime.workload_api import WorkloadApi  # brings grpc

            self._api = WorkloadApi(socket)
        return self._api

    def _read_config(self, problems: list[CertificateError]) -> SecurityConfig:
        try:
            return load_config(self.config.path)
        except CertificateError as error:
            words = f"The new configuration is not used, the old one stays in force: {error.message}"
            problems.append(type(error)(words, remedy=error.remedy))
            return self.config

    def _choose(self, config: SecurityConfig, problems: list[CertificateError]) -> Credentials:
        """Decides which certificate is in force from now on, with its revocation lists."""
        old = kept_under(config, self.credentials)
        try:
            new = self._load(config)
        except CertificateError as error:
            problems.append(unused(error))
            new = old
        credentials, complaints = self._with_lists(config, new)
        refused = None if same_certificate(new, old) else refusal(credentials, self._role, self.job)
        if refused is not None:
            problems.append(refused)
            # With its own authorities, too: lists of others would not be believed.
            credentials, complaints = self._with_lists(config, old)
        problems.extend(complaints)
        return credentials

    def _choose_for_etcd(
        self, config: SecurityConfig, problems: list[CertificateError]
    ) -> Credentials | None:
        if self.etcd is None:
            return None
        try:
            return load_for_etcd(config, self._env, self._password)
        except CertificateError as error:
            words = f"What was shown to etcd so far stays in force: {error.message}"
            problems.append(type(error)(words, remedy=error.remedy))
            return self.etcd

    def _with_lists(
        self, config: SecurityConfig, base: Credentials
    ) -> tuple[Credentials, list[RevocationListError]]:
        if config.crl_path is None:
            return dataclasses.replace(base, revocations=None), []
        try:
            lists, complaints = keep_newest(revocations_for(base, config.crl_path), self._newest)
        except RevocationListError as error:
            lists, complaints = Revocations(problem=error.message), [error]
        return dataclasses.replace(base, revocations=lists), complaints

    def _load(self, config: SecurityConfig) -> Credentials:
        api = self._workload_api(config)
        if api is not None:
            rules = CredentialRules.of(config, self._role)
            return checked(api.newest(), dataclasses.replace(rules, cipher_list=self._ciphers))
        password = self._password or password_for(self._role, self._env, None)
        return load_credentials(
            config.cert_path(self._role),
            password,
            config.ca_cert_path,
            purpose="server" if self._role == "scheduler" else "client",
            require_identity=config.require_identity,
            identity_map=config.identity_map,
            cipher_list=self._ciphers,  # as gRPC's: those of the start
        )


def _signature(config: SecurityConfig, role: str) -> _Signature:
    """Returns what changes when a file is replaced (device, inode, size, times), config.json's first."""
    crls = [] if config.crl_path is None else [config.crl_path]
    files = [config.path, config.cert_path(role), config.ca_cert_path, *crls]
    return tuple((str(file), _stat(file)) for file in files if file != NO_FILE)


def _signature_for_etcd(config: SecurityConfig) -> _Signature:
    files = [
        config.etcd_cert_path or config.server_cert_path,
        config.etcd_ca_cert_path or config.ca_cert_path,
    ]
    return tuple((str(file), _stat(file)) for file in files)


def _stat(file: Path) -> tuple[int, int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_ctime_ns
