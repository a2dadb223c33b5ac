"""``muster certs``: make, show, renew and revoke certificates."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from muster.certs.errors import CertificateError
from muster.certs.pki.identity import ANY_JOB, ROLES

_ABOUT = """\
Muster's certificates. Each names, in its subject alternative name, a job, a role and optionally a node:
  muster://<job>/<role>[/<node>]
The scheduler gives a place only to workers of its job, and a node's place only to that node. A host's
certificate is one for all workers of a machine: it names several nodes, and may take their places alone."""

_EPILOG = """\
passwords: --password-file FILE, else MS_CERTS_PASSWORD or MS_CERTS_PASSWORD_FILE, else a prompt.
  A side's .p12 files may have one of their own: --server-password-file, --client-password-file; without any
  of these options MS_SERVER_PASSWORD and MS_CLIENT_PASSWORD (or those with _FILE).

examples:
  muster certs init --dir certificates --job resnet --hosts sched.example.org,10.0.0.1
  muster certs issue --dir certificates --role worker --job resnet --node node7
  muster certs issue --dir certificates --role host --job resnet --node 8 --node 9 --out host2.p12
  muster certs show certificates/ca.crt certificates/server.p12
  muster certs renew certificates/server.p12
  muster certs revoke --dir certificates --node node7
  muster certs etcd --dir certificates --job resnet --hosts etcd0,etcd1,etcd2"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        the exit code: 0, 1 if something is wrong with a file, 2 if the command line is.
    """
    options = parser().parse_args(arguments)
    from muster.certs.cli import commands  # after parsing: --help stays quick

    try:
        getattr(commands, options.command)(options, os.environ)
    except CertificateError as error:
        print(f"certs {options.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """Makes the parser of ``muster certs``."""
    made = argparse.ArgumentParser(
        prog="muster certs",
        description=_ABOUT,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_init(commands)
    _add_issue(commands)
    _add_show(commands)
    _add_renew(commands)
    _add_revoke(commands)
    _add_etcd(commands)
    return made


def _add_init(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    init = commands.add_parser("init", help="make an authority, certificates for all roles, and config.json")
    _add_directory(init, "to make everything in")
    init.add_argument(
        "--job",
        default=ANY_JOB,
        help="the only job that all three certificates are for (default: any; a worker of one job may then"
        " enter every other job under this authority)",
    )
    _add_hosts(init, "the scheduler is reached by, besides this host's own")
    _add_days(init)
    init.add_argument(
        "--ca-days", type=int, default=3650, metavar="N", help="the authority's validity (3650)"
    )
    init.add_argument("--name", default="", help="the authority's common name")
    init.add_argument(
        "--parent", type=Path, metavar="DIR", help="make an intermediate authority under this one"
    )
    init.add_argument(
        "--parent-password-file", type=Path, metavar="FILE", help="that one's password, if it differs"
    )
    init.add_argument("--force", action="store_true", help="overwrite an authority that is there")
    _add_password(init, "; a new random one is written there if there is none")
    _add_role_passwords(init)


def _add_issue(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    issue = commands.add_parser("issue", help="make one certificate")
    _add_directory(issue, "of the authority")
    issue.add_argument("--role", choices=ROLES, default="worker", help="default: worker")
    issue.add_argument("--job", default=ANY_JOB, help="the only job that it is for (default: any job)")
    issue.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="NODE",
        help="the only node id that it may take (default: any free place); a host's may take several",
    )
    _add_hosts(issue, "a scheduler is reached by")
    _add_days(issue)
    issue.add_argument("--out", type=Path, metavar="FILE", help="default: DIR/<role>[-<node>].p12")
    issue.add_argument("--force", action="store_true", help="overwrite FILE")
    _add_password(issue)
    _add_role_passwords(issue)


def _add_etcd(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    etcd = commands.add_parser(
        "etcd",
        help="make what etcd and the schedulers need to trust each other alone, and print the commands",
    )
    _add_directory(etcd, "of the authority of `muster certs init`")
    etcd.add_argument("--job", default=ANY_JOB, help="the only job whose schedulers it is for (default: any)")
    etcd.add_argument(
        "--prefix", default="muster", metavar="PATH", help="the path in MS_RECOVERY_PATH (muster)"
    )
    _add_hosts(etcd, "etcd's members are reached by")
    _add_days(etcd)
    etcd.add_argument(
        "--ca-days", type=int, default=3650, metavar="N", help="the authority's validity (3650)"
    )
    etcd.add_argument("--force", action="store_true", help="overwrite etcd's authority if there is one")
    _add_password(etcd)
    _add_role_passwords(etcd)


def _add_show(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    show = commands.add_parser("show", help="print what certificates and revocation lists say")
    show.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="PKCS#12 or PEM files (what the SPIFFE Workload API of config.json gives this process)",
    )
    show.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="config.json, whose identity_map says what SPIFFE IDs stand for (MS_CONFIG_FILE where no FILE is"
        " named)",
    )
    show.add_argument("--json", action="store_true", help="one JSON object per certificate")
    _add_password(show)


def _add_renew(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    renew = commands.add_parser(
        "renew", help="replace certificates by new ones with the same identity and hosts"
    )
    _add_directory(renew, "of the authority", beside=True)
    renew.add_argument("files", nargs="*", type=Path, metavar="FILE", help="PKCS#12 files of this authority")
    renew.add_argument(
        "--ca", action="store_true", help="renew the authority's certificate too, keeping its key"
    )
    _add_days(renew)
    renew.add_argument(
        "--ca-days", type=int, default=3650, metavar="N", help="the authority's validity (3650)"
    )
    _add_password(renew)


def _add_revoke(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    revoke = commands.add_parser(
        "revoke",
        help="revoke certificates: write DIR/crl.pem, which a running scheduler notices",
        description="Without a certificate named, the list is signed again for --days more.",
    )
    _add_directory(revoke, "of the authority", beside=True)
    revoke.add_argument("files", nargs="*", type=Path, metavar="FILE", help="PKCS#12 or PEM files to revoke")
    revoke.add_argument("--serial", action="append", default=[], metavar="HEX", help="serial number")
    revoke.add_argument(
        "--node", action="append", default=[], metavar="NODE", help="all certificates bound to it"
    )
    revoke.add_argument(
        "--fingerprint", action="append", default=[], metavar="SHA256", help="as logs show it"
    )
    revoke.add_argument("--days", type=int, default=365, metavar="N", help="how long the list is good (365)")
    _add_password(revoke)


def _add_directory(parser: argparse.ArgumentParser, what: str, *, beside: bool = False) -> None:
    usual = "the directory of FILE, else certificates" if beside else "certificates"
    parser.add_argument(
        "--dir",
        type=Path,
        default=None if beside else Path("certificates"),
        metavar="DIR",
        help=f"directory {what} ({usual})",
    )


def _add_hosts(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--hosts", action="append", default=[], metavar="NAME,IP", help=f"names and addresses that {what}"
    )


def _add_days(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--days", type=int, default=365, metavar="N", help="validity in days (365)")


def _add_role_passwords(parser: argparse.ArgumentParser) -> None:
    for side, files in (("server", "server.p12"), ("client", "client.p12 and operator.p12")):
        parser.add_argument(
            f"--{side}-password-file",
            type=Path,
            metavar="FILE",
            help=f"password of {files}, where it differs from --password-file",
        )


def _add_password(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument(
        "--password-file",
        type=Path,
        metavar="FILE",
        help=f"file that holds the password{more} (MS_CERTS_PASSWORD_FILE)",
    )


if __name__ == "__main__":
    sys.exit(main())
