"""What ``python -m certs`` does."""

from __future__ import annotations

import argparse
import json
import secrets
import shlex
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from certs.authority import Authority, Issued, create_authority, open_authority
from certs.errors import ConfigError, FileError
from certs.files import write_file
from certs.identity import ANY_JOB, Identity
from certs.passwords import password_for, password_from, prompt_on_terminal, read_password

Environment = Mapping[str, str]


def init(options: argparse.Namespace, env: Environment) -> None:
    """Makes an authority, one certificate for each role, and a config.json that names them."""
    password = _password(options, env, new=True)
    parent = None
    if options.parent is not None:
        above = options.parent_password_file
        parent = open_authority(
            options.parent, read_password(above, "--parent-password-file") if above else password
        )
    hosts = [*_own_hosts(), *_hosts(options)]
    directory: Path = options.dir
    identities = {
        "server.p12": Identity(options.job, "scheduler"),
        "client.p12": Identity(options.job, "worker"),
        "operator.p12": Identity(ANY_JOB, "operator"),
    }
    authority = create_authority(
        directory, password, name=options.name, days=options.ca_days, parent=parent, force=options.force
    )
    for name, identity in identities.items():
        issued = authority.issue(identity, hosts if identity.role == "scheduler" else (), days=options.days)
        secret = _role_password(identity.role, env, password)
        _write_p12(directory / name, issued, secret, replace=True)
    config = {
        "server_cert_path": "server.p12",
        "client_cert_path": "client.p12",
        "ca_cert_path": "ca.crt",
        "crl_path": "crl.pem",
        "cert_expire_warning_time_in_day": 90,
    }
    write_file(directory / "config.json", json.dumps(config, indent=2).encode() + b"\n", mode=0o644)
    _explain(options, hosts)


def issue(options: argparse.Namespace, env: Environment) -> None:
    """Makes one certificate."""
    identity = Identity(options.job, options.role, options.node)
    name = options.role if options.node is None else f"{options.role}-{_file_name(options.node)}"
    target: Path = options.out or options.dir / f"{name}.p12"
    if target.exists() and not options.force:
        raise FileError(
            f"{str(target)!r} exists already.", remedy="Choose another with --out, or pass --force."
        )
    hosts = [*(_own_hosts() if options.role == "scheduler" and not options.hosts else ()), *_hosts(options)]
    password = _password(options, env)
    authority = open_authority(options.dir, password)
    issued = authority.issue(identity, hosts, days=options.days)
    _write_p12(target, issued, _role_password(options.role, env, password), replace=options.force)
    print(f"{target}: {identity.uri()}, good until {issued.certificate.not_valid_after_utc:%Y-%m-%d}")


def _write_p12(path: Path, issued: Issued, password: bytes, *, replace: bool) -> None:
    write_file(path, issued.p12(password), replace=replace)


def _explain(options: argparse.Namespace, hosts: Sequence[str]) -> None:
    directory = options.dir
    job = "any job" if options.job == ANY_JOB else f"the job {options.job!r}"
    secret = shlex.quote(str(options.password_file or "FILE"))
    config = shlex.quote(str(directory / "config.json"))
    print(f"{directory}: an authority and certificates for {job}; the scheduler's is for {', '.join(hosts)}.")
    print(f"Scheduler: MS_CONFIG_FILE={config} MS_SERVER_PASSWORD_FILE={secret} python -m scheduler")
    print(f"Workers:   MS_CONFIG_FILE={config} MS_CLIENT_PASSWORD_FILE={secret} python train.py")
    print(
        "Other hosts need config.json, ca.crt, crl.pem and their own .p12; ca.key makes anybody, and stays here."
    )


def _own_hosts() -> list[str]:
    name = socket.gethostname()
    try:
        from certs.authority import host_names

        host_names([name])
    except ConfigError:  # a host name that DNS would not take
        name = "localhost"
    return list(dict.fromkeys(["localhost", "127.0.0.1", "::1", name]))


def _hosts(options: argparse.Namespace) -> list[str]:
    return [host.strip() for entry in options.hosts for host in entry.split(",") if host.strip()]


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in text)


def _password(options: argparse.Namespace, env: Environment, *, new: bool = False) -> bytes:
    """The authority's password; ``new`` makes one where --password-file names a file that is not there."""
    file: Path | None = options.password_file
    if file is None:
        asker = _ask_twice if new else prompt_on_terminal
        return password_from("MS_CERTS_PASSWORD", env, asker, "Password of the authority: ")
    if new and not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(file, secrets.token_urlsafe(24).encode() + b"\n", replace=False)
    return read_password(file, "--password-file")


def _ask_twice(question: str) -> str | None:
    first = prompt_on_terminal(question)
    if first is not None and prompt_on_terminal("Again: ") != first:
        raise ConfigError("The two passwords differ.")
    return first


def _role_password(role: str, env: Environment, default: bytes) -> bytes:
    """A role's own password where one is set, so that its hosts need not know the authority's."""
    variable = "MS_SERVER_PASSWORD" if role == "scheduler" else "MS_CLIENT_PASSWORD"
    if env.get(variable) or env.get(f"{variable}_FILE"):
        return password_for(role, env, None)
    return default


__all__ = ["Authority", "init", "issue"]
