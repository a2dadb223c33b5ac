"""The commands of ``muster certs``."""

from __future__ import annotations

import argparse
import datetime
import json
import secrets
import shlex
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes

from muster.certs.cli.show import as_text, describe, describe_file
from muster.certs.config import SecurityConfig, load_config
from muster.certs.errors import ConfigError, FileError, IdentityError, PasswordError, UntrustedError
from muster.certs.files import read_file, write_file
from muster.certs.pki.authority import (
    Authority,
    Issued,
    create_authority,
    make_directory,
    open_authority,
    renew_authority,
)
from muster.certs.pki.certificates import common_name, issued_by, name_of, parse_certificates, to_pem, utc_now
from muster.certs.pki.identity import ANY_JOB, Identity
from muster.certs.pki.peer import peer_of_pem
from muster.certs.pki.records import find_issued
from muster.certs.pki.templates import check_days, host_names
from muster.certs.runtime.passwords import password_for, password_from, prompt_on_terminal, read_password
from muster.certs.runtime.store import is_pem, read_p12

Environment = Mapping[str, str]
MAX_SERIAL = (1 << 159) - 1  # 20 octets, the first bit 0: RFC 5280


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
        "server.p12": _identity(options.job, "scheduler"),
        "client.p12": _identity(options.job, "worker"),
        "operator.p12": _identity(options.job, "operator"),
    }
    secrets_by_role = {
        each.role: _role_password(each.role, options, env, password) for each in identities.values()
    }
    host_names(hosts), check_days(options.days)  # whatever is wrong shows before anything is written
    authority = create_authority(
        directory, password, name=options.name, days=options.ca_days, parent=parent, force=options.force
    )
    for name, identity in identities.items():
        issued = authority.issue(identity, hosts if identity.role == "scheduler" else (), days=options.days)
        _write_p12(directory / name, issued, secrets_by_role[identity.role], replace=True)
    config = {
        "server_cert_path": "server.p12",
        "client_cert_path": "client.p12",
        "ca_cert_path": "ca.crt",
        "crl_path": "crl.pem",
        "cert_expire_warning_time_in_day": 90,
    }
    write_file(directory / "config.json", json.dumps(config, indent=2).encode() + b"\n", mode=0o644)
    _explain(options, env, hosts)


def etcd(options: argparse.Namespace, env: Environment) -> None:
    """Makes an authority for etcd, with certificates of its members and the scheduler; prints what to run."""
    password = _password(options, env)
    open_authority(options.dir, password)  # only who may issue here names the files in config.json
    hosts, job = [*_own_hosts(), *_hosts(options)], options.job
    scheduler = _identity(job, "scheduler")
    host_names(hosts), check_days(options.days)
    directory: Path = options.dir / "etcd"
    authority = create_authority(
        directory, password, name="Muster etcd", days=options.ca_days, force=options.force
    )
    member = authority.issue(Identity("etcd-member", "scheduler"), hosts, days=options.days)
    write_file(directory / "member.crt", to_pem([member.certificate]), mode=0o644)
    write_file(directory / "member.key", member.key_pem())
    issued = authority.issue(scheduler, days=options.days)
    secret = _role_password("scheduler", options, env, password)
    _write_p12(options.dir / "etcd.p12", issued, secret, replace=True)
    config = json.loads(read_file(options.dir / "config.json", "The configuration"))
    config |= {"etcd_cert_path": "etcd.p12", "etcd_ca_cert_path": "etcd/ca.crt"}
    write_file(options.dir / "config.json", json.dumps(config, indent=2).encode() + b"\n", mode=0o644)
    _explain_etcd(directory, options.prefix, job, common_name(issued.certificate))


def _explain_etcd(directory: Path, path: str, job: str, user: str) -> None:
    folder = shlex.quote(str(directory))
    prefix = f"/{path.strip('/')}/" + ("" if job == ANY_JOB else f"{job}/")
    role = "muster" if job == ANY_JOB else f"muster-{job}"
    ask = f"etcdctl --cacert {folder}/ca.crt --cert {folder}/member.crt --key {folder}/member.key"
    tls = "".join(
        f" --{peer}client-cert-auth --{peer}trusted-ca-file {folder}/ca.crt"
        f" --{peer}cert-file {folder}/member.crt --{peer}key-file {folder}/member.key"
        for peer in ("", "peer-")
    )
    print(
        f"{directory}: an authority for etcd alone: no worker's certificate opens a connection to it.\n"
        "Each member of etcd needs, of that folder, ca.crt, member.crt and member.key:\n"
        f"  etcd{tls} --auto-compaction-mode revision --auto-compaction-retention 1000 ...\n"
        "The schedulers need etcd.p12 and etcd/ca.crt, which config.json names.\n"
        "Once, when etcd runs, so that the schedulers of this job can write nothing else"
        " (the password is root's, for you):\n"
        f"  {ask} role add {role}\n"
        f"  {ask} role grant-permission --prefix=true {role} readwrite {prefix}\n"
        f"  {ask} user add {user} --no-password\n"
        f"  {ask} user grant-role {user} {role}\n"
        f"  {ask} user add root\n"
        f"  {ask} auth enable"
    )


def issue(options: argparse.Namespace, env: Environment) -> None:
    """Makes one certificate."""
    nodes: list[str] = options.node
    identity = _identity(options.job, options.role, *nodes)
    name = "-".join((options.role, *map(_file_name, nodes[:1])))
    target: Path = options.out or options.dir / f"{name}.p12"
    if target.exists() and not options.force:
        raise FileError(
            f"{str(target)!r} exists already.", remedy="Choose another with --out, or pass --force."
        )
    hosts = [*(_own_hosts() if options.role == "scheduler" and not options.hosts else ()), *_hosts(options)]
    password = _password(options, env)
    authority = open_authority(options.dir, password)
    issued = authority.issue(identity, hosts, days=options.days)
    _write_p12(target, issued, _role_password(options.role, options, env, password), replace=options.force)
    print(f"{target}: {identity.uri()}, good until {issued.certificate.not_valid_after_utc:%Y-%m-%d}")


def show(options: argparse.Namespace, env: Environment) -> None:
    """Prints the facts in certificates and revocation lists, and the identities of SPIFFE IDs."""
    now = utc_now()
    named = options.config or (not options.files and env.get("MS_CONFIG_FILE"))
    config = load_config(named) if named else None
    identity_map = config.identity_map if config is not None else None
    found: list[dict[str, object]] = []
    if not options.files:
        found = _from_workload_api(config, now)
    for path in options.files:
        certificates = None
        if not is_pem(path):
            _, leaf, extra, _ = _open_p12(path, _passwords(options, env))
            certificates = [leaf, *extra]
        found += describe_file(path, certificates, now, identity_map)
    for facts in found:
        print(json.dumps(facts) if options.json else as_text(facts))


def _from_workload_api(config: SecurityConfig | None, now: datetime.datetime) -> list[dict[str, object]]:
    """Returns facts about the certificates and authorities that the SPIFFE Workload API gives this process.

    Raises:
        ConfigError: config.json names no such API.
        WorkloadIdentityError: the API gave no identity.
    """
    if config is None or not config.spiffe_endpoint_socket:
        raise ConfigError(
            "Nothing to show.",
            remedy="Name .p12 or PEM files, or with --config a config.json that has spiffe_endpoint_socket.",
        )
    from muster.certs.runtime.workload_api import WorkloadApi

    with WorkloadApi(config.spiffe_endpoint_socket) as api:
        given = api.newest()
    return [
        {"file": config.spiffe_endpoint_socket, **describe(each, now, config.identity_map)}
        for each in (given.leaf, *given.extra, *given.roots)
    ]


def renew(options: argparse.Namespace, env: Environment) -> None:
    """Replaces certificates by new ones with new keys and the same identity and hosts."""
    if not options.files and not options.ca:
        raise ConfigError("Nothing to renew.", remedy="Name .p12 files, or pass --ca.")
    options.dir = _directory_of_authority(options)
    password = _password(options, env)
    authority = open_authority(options.dir, password)
    if options.ca:
        authority = renew_authority(authority, days=options.ca_days)
        until = authority.certificate.not_valid_after_utc
        print(f"{options.dir / 'ca.crt'}: good until {until:%Y-%m-%d}; copy it to all hosts.")
    for path in options.files:
        _, leaf, _, secret = _open_p12(path, _passwords(options, env, password))
        if not issued_by(leaf, authority.certificate):
            raise UntrustedError(f"{str(path)!r} was not issued by the authority in {str(options.dir)!r}.")
        peer = peer_of_pem(to_pem([leaf]))
        issued = authority.issue(peer.identity, [*peer.hosts, *peer.addresses], days=options.days)
        _write_p12(path, issued, secret, replace=True)
        print(f"{path}: {peer.identity.uri()}, good until {issued.certificate.not_valid_after_utc:%Y-%m-%d}")


def revoke(options: argparse.Namespace, env: Environment) -> None:
    """Revokes certificates, or signs the list again if none is named."""
    options.dir = _directory_of_authority(options)
    password = _password(options, env)
    authority = open_authority(options.dir, password)
    chosen = [_leaf(path, _passwords(options, env, password)) for path in options.files]
    chosen += find_issued(options.dir, options.node, options.fingerprint)
    for certificate in chosen:
        _check_revocable(certificate, authority)
    serials = [each.serial_number for each in chosen] + [_serial(text) for text in options.serial]
    for each in (authority.certificate, *authority.roots):
        if each.serial_number in serials:
            raise _own_authority(each)
    count = authority.write_revocations(serials, days=options.days)
    for certificate in chosen:
        print(f"revoked: {name_of(certificate)}, serial {certificate.serial_number:x}")
    crl = options.dir / "crl.pem"
    print(f"{crl}: {count} revoked, good for {options.days} days; copy it to crl_path on all hosts.")


def _directory_of_authority(options: argparse.Namespace) -> Path:
    """Returns the authority's directory: --dir, else that of the named files, else the default.

    Raises:
        FileError: no such directory has a ``ca.key``. No new authority is made, as no peer would trust it.
    """
    beside = dict.fromkeys(path.parent for path in options.files)
    looked = [options.dir] if options.dir is not None else [*beside, Path("certificates")]
    for directory in looked:
        if (directory / "ca.key").exists():
            return Path(directory)
    places = " or ".join(repr(str(directory)) for directory in dict.fromkeys(looked))
    raise FileError(
        f"There is no authority (no ca.key) in {places}.",
        remedy="Name the directory of the authority that issued these certificates with --dir; its key may be"
        " on another host.",
    )


def _check_revocable(certificate: x509.Certificate, authority: Authority) -> None:
    if certificate.issuer != authority.certificate.subject:
        raise UntrustedError(
            f"{name_of(certificate)} was not issued by the authority in {str(authority.directory)!r}."
        )
    if certificate.subject == certificate.issuer:
        raise _own_authority(certificate)


def _own_authority(certificate: x509.Certificate) -> ConfigError:
    """Returns the error for a revocation of the authority itself, which its own list cannot express."""
    return ConfigError(
        f"{name_of(certificate)} is the authority itself, and no list of its own can revoke it.",
        remedy="Take a root out of ca_cert_path on all hosts; the authority above revokes any other.",
    )


def _leaf(path: Path, passwords: Iterable[bytes]) -> x509.Certificate:
    if is_pem(path):
        return parse_certificates(read_file(path, "The certificate"), f"The file {str(path)!r}")[0]
    return _open_p12(path, passwords)[1]


def _serial(text: str) -> int:
    try:
        serial = int(text.replace(":", ""), 16)
    except ValueError:
        serial = 0
    if not 1 <= serial <= MAX_SERIAL:
        raise ConfigError(f"--serial is {text[:100]!r}; legal are hexadecimal numbers from 1 to 2^159-1.")
    return serial


def _open_p12(
    path: Path, passwords: Iterable[bytes]
) -> tuple[CertificateIssuerPrivateKeyTypes, x509.Certificate, list[x509.Certificate], bytes]:
    """Opens a file with the first password that fits, and returns that too."""
    failure: PasswordError | None = None
    for password in passwords:
        try:
            return (*read_p12(path, password), password)
        except PasswordError as error:
            failure = error
    said = failure.message if failure else f"The PKCS#12 file {str(path)!r} needs a password."
    raise PasswordError(
        said, remedy="Name the file that holds it: --password-file, or MS_CERTS_PASSWORD_FILE."
    )


def _passwords(options: argparse.Namespace, env: Environment, known: bytes | None = None) -> Iterator[bytes]:
    """Yields the passwords that may open a .p12 file; the one that the user must type comes last."""
    if known is not None:
        yield known
    elif (
        options.password_file is not None or env.get("MS_CERTS_PASSWORD") or env.get("MS_CERTS_PASSWORD_FILE")
    ):
        yield _password(options, env)
    for role, variable in (("scheduler", "MS_SERVER_PASSWORD"), ("worker", "MS_CLIENT_PASSWORD")):
        if env.get(variable) or env.get(f"{variable}_FILE"):
            yield password_for(role, env, None)
    answer = prompt_on_terminal("Password of the PKCS#12 file: ")
    if answer is not None:
        yield answer.encode()


def _identity(job: str, role: str, *nodes: str) -> Identity:
    try:
        if role == "host" or len(nodes) > 1:
            return Identity(job, role, nodes=tuple(sorted(set(nodes))))
        return Identity(job, role, nodes[0] if nodes else None)
    except IdentityError as error:
        raise ConfigError(error.message, remedy=error.remedy) from None


def _write_p12(path: Path, issued: Issued, password: bytes, *, replace: bool) -> None:
    write_file(path, issued.p12(password), replace=replace)


def _explain(options: argparse.Namespace, env: Environment, hosts: Sequence[str]) -> None:
    directory = options.dir
    job = "any job" if options.job == ANY_JOB else f"the job {options.job!r}"
    config = shlex.quote(str(directory / "config.json"))
    server = _source("MS_SERVER_PASSWORD", options, env)
    client = _source("MS_CLIENT_PASSWORD", options, env)
    print(f"{directory}: an authority and certificates for {job}; the scheduler's is for {', '.join(hosts)}.")
    if options.server_password_file is None and options.client_password_file is None:
        chosen = "" if options.job == ANY_JOB else f" --job-id {shlex.quote(options.job)}"
        file = options.password_file
        named = "" if file is None else f" --password-file {shlex.quote(str(file))}"
        print(f"All here:  muster run -n 2 --scheduler --config {config}{named}{chosen} -- python train.py")
    both = f"MS_WORKER_NUM=2 {'' if options.job == ANY_JOB else f'MS_JOB_ID={shlex.quote(options.job)} '}"
    print(f"Scheduler: {both}MS_CONFIG_FILE={config} {server} python -m scheduler")
    print(f"Workers:   MS_ROLE=MS_WORKER {both}MS_CONFIG_FILE={config} {client} python train.py")
    print("Other hosts need config.json, ca.crt, crl.pem and their own .p12; ca.key stays here.")
    if options.job == ANY_JOB:
        print("Their holders may enter every job under this authority; --job NAME binds them to one.")


def _source(variable: str, options: argparse.Namespace, env: Environment) -> str:
    """Returns the option or variable of a role's password for an example, as this command was given it."""
    file = _role_file(variable, options) or options.password_file
    if file is None and env.get(variable):
        return f"{variable}=... (as set here)"
    file = file or env.get(f"{variable}_FILE") or "FILE"
    return f"{variable}_FILE={shlex.quote(str(file))}"


def _role_file(variable: str, options: argparse.Namespace) -> Path | None:
    """Returns the file that an option names for a role's password."""
    scheduler = variable == "MS_SERVER_PASSWORD"
    named: Path | None = options.server_password_file if scheduler else options.client_password_file
    return named


def _own_hosts() -> list[str]:
    name = socket.gethostname()
    try:
        host_names([name])
    except ConfigError:  # a host name that DNS would not take
        name = "localhost"
    return list(dict.fromkeys(["localhost", "127.0.0.1", "::1", name]))


def _hosts(options: argparse.Namespace) -> list[str]:
    return [host.strip() for entry in options.hosts for host in entry.split(",") if host.strip()]


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in text)


def _password(options: argparse.Namespace, env: Environment, *, new: bool = False) -> bytes:
    """Returns the authority's password; with ``new``, makes one if the file of --password-file is missing."""
    file: Path | None = options.password_file
    if file is None:
        asker = _ask_twice if new else prompt_on_terminal
        return password_from("MS_CERTS_PASSWORD", env, asker, "Password of the authority: ")
    if new and not file.exists():
        make_directory(file.parent)
        write_file(file, secrets.token_urlsafe(24).encode() + b"\n", replace=False)
    return read_password(file, "--password-file")


def _ask_twice(question: str) -> str | None:
    first = prompt_on_terminal(question)
    if first is not None and prompt_on_terminal("Again: ") != first:
        raise ConfigError("The two passwords differ.")
    return first


def _role_password(role: str, options: argparse.Namespace, env: Environment, default: bytes) -> bytes:
    """Returns a role's own password if one is given: its hosts then need not know the authority's.

    Options, --password-file included, take precedence over the environment: a variable that was set for
    another job would otherwise encrypt files that the named password file does not open.
    """
    variable = "MS_SERVER_PASSWORD" if role == "scheduler" else "MS_CLIENT_PASSWORD"
    file = _role_file(variable, options)
    if file is not None:
        return read_password(
            file, "--server-password-file" if role == "scheduler" else "--client-password-file"
        )
    if options.password_file is not None:
        return default
    if env.get(variable) or env.get(f"{variable}_FILE"):
        return password_for(role, env, None)
    return default
