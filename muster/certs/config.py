"""config.json: the configured certificates, authorities, revocation lists and ciphers.

It imports only the standard library, directly and indirectly, because ciphers must be set in the environment
before ``grpc`` is imported.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from muster.certs.errors import ConfigError, IdentityError
from muster.certs.pki.spiffe import IdentityMap, read_identity_map
from muster.wire.files import read_regular

CIPHERS = (
    "ECDHE-ECDSA-AES128-GCM-SHA256",
    "ECDHE-RSA-AES128-GCM-SHA256",
    "ECDHE-ECDSA-AES256-GCM-SHA384",
    "ECDHE-RSA-AES256-GCM-SHA384",
    "ECDHE-ECDSA-CHACHA20-POLY1305",
    "ECDHE-RSA-CHACHA20-POLY1305",
)
"""TLS 1.2 suites that gRPC's TLS library has and that are sound: forward secret and AEAD."""

GRPC_CIPHERS_VARIABLE = "GRPC_SSL_CIPHER_SUITES"
MAX_CONFIG_BYTES = 1 << 20
WARNING_DAYS = (7, 180)
DEFAULT_WARNING_DAYS = 90
KEYS = {
    "server_cert_path": ("password-protected PKCS#12 file of the scheduler", "required without SPIFFE"),
    "client_cert_path": (
        "password-protected PKCS#12 file of the workers, or of an operator",
        "required without SPIFFE",
    ),
    "ca_cert_path": ("PEM file with the only authorities that are trusted", "required without SPIFFE"),
    "crl_path": ("PEM file with revocation lists, reloaded when it changes", "none"),
    "cipher_list": ("OpenSSL names of TLS 1.2 suites, joined with colons", "ECDHE with AES-GCM or ChaCha20"),
    "cert_expire_warning_time_in_day": (
        f"warn this many days before a certificate ends, {WARNING_DAYS[0]} to {WARNING_DAYS[1]}",
        str(DEFAULT_WARNING_DAYS),
    ),
    "require_identity": ("false: also accept certificates that name no job and role", "true"),
    "etcd_cert_path": ("PKCS#12 file that a scheduler shows to etcd", "`server_cert_path`"),
    "etcd_ca_cert_path": ("PEM file with the authorities of etcd's members", "`ca_cert_path`"),
    "identity_map": ("which SPIFFE IDs stand for which job, role and node", "none"),
    "spiffe_endpoint_socket": (
        "where certificate, key and authorities come from in place of files: `unix:///run/spire/agent.sock`,"
        " or `env` for SPIFFE_ENDPOINT_SOCKET",
        "none",
    ),
}
"""All keys of config.json, each with its meaning and its default in words."""


NO_FILE = Path(os.devnull)
"""The path of files that do not exist because the SPIFFE Workload API takes their place."""


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """A validated config.json. All paths are absolute.

    Attributes:
        path: the file that this was read from.
        server_cert_path: PKCS#12 file of the scheduler.
        client_cert_path: PKCS#12 file of a worker or an operator.
        ca_cert_path: PEM file with the only authorities that are trusted.
        crl_path: PEM file with revocation lists; None for none.
        cipher_list: the TLS 1.2 suites that take effect.
        ignored_ciphers: names from the file that have no effect, worth a warning.
        cert_expire_warning_time_in_day: the days before a certificate's end at which warnings begin.
        require_identity: whether certificates must name job and role.
        etcd_cert_path: PKCS#12 file that a scheduler shows to etcd; None: ``server_cert_path``.
        etcd_ca_cert_path: PEM file with the authorities of etcd's members; None: ``ca_cert_path``.
        identity_map: the map of SPIFFE IDs to identities; None: there is none.
        spiffe_endpoint_socket: the address of the SPIFFE Workload API, which then replaces the three
            files; empty: none.
    """

    path: Path
    server_cert_path: Path
    client_cert_path: Path
    ca_cert_path: Path
    crl_path: Path | None = None
    cipher_list: tuple[str, ...] = CIPHERS
    ignored_ciphers: tuple[str, ...] = ()
    cert_expire_warning_time_in_day: int = DEFAULT_WARNING_DAYS
    require_identity: bool = True
    etcd_cert_path: Path | None = None
    etcd_ca_cert_path: Path | None = None
    identity_map: IdentityMap | None = None
    spiffe_endpoint_socket: str = ""

    def cert_path(self, role: str) -> Path:
        """The PKCS#12 file of a role: ``scheduler``, ``worker`` or ``operator``."""
        return self.server_cert_path if role == "scheduler" else self.client_cert_path


def load_config(path: str | os.PathLike[str]) -> SecurityConfig:
    """Reads and validates config.json.

    Raises:
        ConfigError: the file cannot be read, is not JSON, or has unknown or missing keys or wrong values.
    """
    file = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links that rotation swaps
    values = _read_object(file)
    for key in values:
        if key not in KEYS:
            raise ConfigError(
                f"{file}: the key {key[:100]!r} is unknown.", remedy=f"Keys: {', '.join(KEYS)}."
            )
    socket = _socket(file, values.get("spiffe_endpoint_socket", ""))
    needed = partial(_path, file, values, missing=NO_FILE if socket else None)
    ciphers, ignored = _ciphers(file, values.get("cipher_list", ":".join(CIPHERS)))
    return SecurityConfig(
        path=file,
        server_cert_path=needed("server_cert_path"),
        client_cert_path=needed("client_cert_path"),
        ca_cert_path=needed("ca_cert_path"),
        crl_path=_optional(file, values, "crl_path"),
        cipher_list=ciphers,
        ignored_ciphers=ignored,
        cert_expire_warning_time_in_day=_days(
            file, values.get("cert_expire_warning_time_in_day", DEFAULT_WARNING_DAYS)
        ),
        require_identity=_flag(file, "require_identity", values.get("require_identity", True)),
        etcd_cert_path=_optional(file, values, "etcd_cert_path"),
        etcd_ca_cert_path=_optional(file, values, "etcd_ca_cert_path"),
        identity_map=_identity_map(file, values, socket),
        spiffe_endpoint_socket=socket,
    )


def config_warnings(config: SecurityConfig) -> list[str]:
    """Returns warnings on a configuration that is legal but unsafe, for the log at start."""
    found = []
    if config.ignored_ciphers:
        names = ", ".join(repr(name[:60]) for name in config.ignored_ciphers[:40])
        found.append(f"{config.path}: cipher_list names suites that have no effect here: {names}.")
    if not config.require_identity:
        found.append(f"{config.path}: require_identity is false: any certificate may take any role and rank.")
    if config.crl_path is None:
        found.append(f"{config.path}: crl_path is empty: no certificate can be revoked.")
    return found


def settings_changes(before: SecurityConfig, after: SecurityConfig) -> tuple[list[str], list[str]]:
    """Describes the differences between two readings of the file, for the log.

    Returns:
        Sentences about what is in force now, and sentences about what needs a restart.
    """
    notes = [
        f"{after.path}: {key} is now {_shown_setting(getattr(after, key))}"
        for key in KEYS
        if key != "cipher_list" and getattr(after, key) != getattr(before, key)
    ]
    restart = f"{after.path}: cipher_list has changed; it is read at the start only, so that needs a restart."
    return notes, [restart] if after.cipher_list != before.cipher_list else []


def _shown_setting(value: Path | IdentityMap | str | int | None) -> str:
    if value is None or value == "":
        return "empty"
    if isinstance(value, IdentityMap):
        return f"{len(value.rules)} rules"
    return str(value) if isinstance(value, Path) else json.dumps(value)


def apply_cipher_list(config: SecurityConfig) -> None:
    """Hands the cipher list to gRPC, which reads it only once, when it is imported.

    Raises:
        ConfigError: grpc was imported before with other ciphers in force.
    """
    wanted = ":".join(config.cipher_list)
    present = os.environ.get(GRPC_CIPHERS_VARIABLE)
    # gRPC's own default is a subset of ours: nothing is lost where neither side asked for a list.
    loaded_otherwise = "grpc" in sys.modules and present != wanted
    if loaded_otherwise and not (present is None and config.cipher_list == CIPHERS):
        raise ConfigError(
            f"{config.path}: cipher_list cannot take effect, because grpc was imported before it was read.",
            remedy=f"Import grpc later, or start with {GRPC_CIPHERS_VARIABLE}={wanted}.",
        )
    if "grpc" not in sys.modules:
        os.environ[GRPC_CIPHERS_VARIABLE] = wanted


def _read_object(file: Path) -> dict[str, Any]:
    try:
        data = read_regular(file, MAX_CONFIG_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"MS_CONFIG_FILE (or --config) must name a readable config.json; {str(file)!r}: {reason}.",
            remedy="`muster certs init --dir DIR` makes certificates and a config.json.",
        ) from None
    try:
        values = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_no_duplicates)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: must be a JSON object with the keys {', '.join(KEYS)}.")
    return values


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
        raise ConfigError(f"the key {twice[:100]!r} stands there twice.")
    return values


def _optional(file: Path, values: dict[str, Any], key: str) -> Path | None:
    return _path(file, values, key) if values.get(key, "") != "" else None


def _identity_map(file: Path, values: dict[str, Any], socket: str) -> IdentityMap | None:
    if "identity_map" not in values:
        if socket:
            raise ConfigError(
                f"{file}: spiffe_endpoint_socket needs identity_map, which says what SPIFFE IDs stand for."
            )
        return None
    try:
        return read_identity_map(values["identity_map"])
    except IdentityError as error:
        raise ConfigError(f"{file}: identity_map: {error.message}", remedy=error.remedy) from None


def _socket(file: Path, value: Any) -> str:
    legal = "legal are unix:///PATH, and env for SPIFFE_ENDPOINT_SOCKET"
    if value in ("", "env"):
        if value and not os.environ.get("SPIFFE_ENDPOINT_SOCKET"):
            raise ConfigError(
                f"{file}: spiffe_endpoint_socket is env, and SPIFFE_ENDPOINT_SOCKET is not set."
            )
        return os.environ["SPIFFE_ENDPOINT_SOCKET"] if value else ""
    if not isinstance(value, str) or not value.startswith("unix:///") or "\0" in value:
        raise ConfigError(f"{file}: spiffe_endpoint_socket is {_shown(value)}; {legal}.")
    return value


def _path(file: Path, values: dict[str, Any], key: str, missing: Path | None = None) -> Path:
    value = values.get(key)
    if missing is not None and value in (None, ""):
        return missing
    if value is None or value == "":
        raise ConfigError(
            f"{file}: the key {key} is missing.", remedy="It names a file, relative to config.json."
        )
    if not isinstance(value, str) or "\0" in value:
        raise ConfigError(f"{file}: {key} is {_shown(value)}, and must be a file name.")
    return Path(os.path.abspath(file.parent / value))  # noqa: PTH100 - as above


def _days(file: Path, value: Any) -> int:
    low, high = WARNING_DAYS
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(
            f"{file}: cert_expire_warning_time_in_day is {_shown(value)}; legal are integers {low} to {high}."
        )
    return value


def _flag(file: Path, key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{file}: {key} is {_shown(value)}; legal are true and false.")
    return value


def _ciphers(file: Path, value: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if not isinstance(value, str):
        raise ConfigError(f"{file}: cipher_list is {_shown(value)}, and must be names with colons between.")
    # White space within a name is dropped: the list in MindSpore's documentation has one by mistake.
    names = dict.fromkeys("".join(name.split()) for name in value.split(":"))
    names.pop("", None)
    effective = tuple(name for name in names if name in CIPHERS)
    if not effective:
        raise ConfigError(
            f"{file}: cipher_list is {_shown(value)}, which leaves no cipher for TLS 1.2.",
            remedy=f"Name at least one of {', '.join(CIPHERS)}; TLS 1.3 chooses its own.",
        )
    return effective, tuple(name for name in names if name not in CIPHERS)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
