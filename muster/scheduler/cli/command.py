"""``muster status``, ``jobs``, ``health``, ``drain``, ``admit`` and ``stacks``: query a scheduler."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from muster.certs.errors import CertificateError
from muster.scheduler.cli import drain
from muster.scheduler.cli.client import TAKEOVER_S, Following, SchedulerClient, UnreachableError
from muster.scheduler.config import Address, load_address
from muster.scheduler.errors import SchedulerError, SchedulerSettingsError
from muster.wire import launches
from muster.wire.settings import Environment, show_address
from muster.wire.variables import option_help

WATCH_S = 2.0

WHICH = "the launch of ./muster-runs/latest, else of the only launch of yours on this host"
"""The scheduler that is queried if none is named."""


def command(arguments: Sequence[str], env: Mapping[str, str], prog: str = "python -m scheduler") -> int:
    """Runs ``status``, ``jobs``, ``health``, ``drain``, ``admit`` or ``stacks``.

    Returns:
        The exit code. For ``health``, it is 1 if the scheduler does not serve.

    Raises:
        SchedulerError: a setting is wrong, the scheduler cannot be reached, or it refuses the call.
        muster.certs.errors.CertificateError: TLS failed on either side; the message says why.
    """
    options = parser(prog).parse_args(list(arguments))
    env = with_password(options, env)
    if options.command == "jobs":
        return _jobs(options, env)
    target = find_scheduler(options, env)
    try:
        return _ask(options, target)
    except UnreachableError as error:
        if options.command == "health" or target.launch is not None or _is_named(options, env):
            raise
        wanted = options.job or env.get("MS_JOB_ID", "")
        which = f"No launch of job {wanted}" if wanted and launches.running(env) else "No launch of yours"
        raise UnreachableError(f"{which} runs on this host, and: {error}") from None


def _ask(options: argparse.Namespace, target: Target) -> int:
    address, env = target.address, target.env
    certificate, role = _certificate(options, address), _role(options, env)

    def connect(wait_s: float = TAKEOVER_S) -> SchedulerClient:
        return SchedulerClient(address, env, certificate=certificate, role=role, wait_s=wait_s)

    if options.command == "health":
        with connect(wait_s=0.0) as client:
            answer = client.health()
        print(answer)
        return 0 if answer == "SERVING" else 1
    if options.command == "drain":
        drain.checked_names(options)
        with connect() as client:
            return drain.run(options, client, target.describe(), confirmed=confirmed, out=sys.stdout)
    if options.command == "admit":
        with connect() as client:
            print(client.admit(options.name))
        return 0
    if options.command == "stacks":
        from muster.scheduler.cli import stacks

        with connect() as client:
            return stacks.show(client.stacks(options.node), sys.stdout)
    from muster.scheduler.cli import status

    if options.watch is not None:
        with Following(connect, several=len(address.hosts) > 1) as following:
            return status.watch(following.status, sys.stdout, pause=lambda: time.sleep(options.watch))
    with connect() as client:
        reply = client.status()
    if options.json:
        print(json.dumps(status.as_json(reply), indent=2))
    else:
        status.show(reply, sys.stdout)
    return 0


def _jobs(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Lists the jobs of the named scheduler, or of all launches of this user on this host."""
    from muster.scheduler.cli import status

    running = [] if _is_named(options, env) else launches.running(env)
    targets = [_of_launch(launch, options, env) for launch in running] or [find_scheduler(options, env)]
    rows = []
    for target in targets:
        certificate = _certificate(options, target.address)
        try:
            with SchedulerClient(target.address, target.env, certificate=certificate) as client:
                rows += [(client.where, job) for job in client.jobs().jobs]
        except (SchedulerError, CertificateError) as error:
            if len(targets) == 1:
                raise
            print(f"muster: {target.describe()}: {error}", file=sys.stderr)
    if options.json:
        print(json.dumps([status.job_as_json(where, job) for where, job in rows], indent=2))
    else:
        status.show_jobs(rows, sys.stdout)
    return 0


def common_options(*, address: str = "--host") -> argparse.ArgumentParser:
    """Creates the parser of the common options: the scheduler, the job, and the certificate.

    Args:
        address: the name of the option for the scheduler's address.
    """
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", type=Path, metavar="FILE", help=option_help("MS_CONFIG_FILE"))
    common.add_argument("--job", default="", metavar="ID", help=option_help("MS_JOB_ID"))
    common.add_argument(
        "--cert", type=Path, metavar="FILE", help="the .p12 file to use instead of client_cert_path"
    )
    common.add_argument(
        address,
        dest="host",
        default="",
        metavar="ADDRESS",
        help="ask here (or there, of several with commas between) instead of at MS_SCHED_HOST",
    )
    common.add_argument(
        "--password-file",
        type=Path,
        metavar="FILE",
        help="file that holds the password of the .p12 file (MS_CLIENT_PASSWORD_FILE)",
    )
    return common


def parser(prog: str = "python -m scheduler") -> argparse.ArgumentParser:
    """Makes the parser of the commands."""
    common = common_options()
    made = argparse.ArgumentParser(prog=prog)
    commands = made.add_subparsers(dest="command", required=True)
    own = f"Without an address, that of {WHICH}."
    status = commands.add_parser(
        "status", parents=[common], description=f"Shows a job, its workers and how far they are. {own}"
    )
    status.add_argument("--json", action="store_true", help="print JSON instead of a table")
    status.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=WATCH_S,
        metavar="S",
        help=f"show it again every S seconds ({WATCH_S:g}) until Ctrl-C or the job's end",
    )
    jobs = commands.add_parser(
        "jobs",
        parents=[common],
        description="Lists the jobs of a scheduler. Without an address, of all that launches of yours here "
        "have started.",
    )
    jobs.add_argument("--json", action="store_true", help="print JSON instead of a table")
    commands.add_parser(
        "health",
        parents=[common],
        description="For probes: exits with 0 if the scheduler serves, with 1 if not. If MS_ROLE=MS_SCHED, it"
        " uses the scheduler's own certificate and password.",
    )
    drain.add_parser(commands, common_options(address="--scheduler"), own)
    admit = commands.add_parser(
        "admit",
        parents=[common],
        description="Lets GPUs in again that were refused because they had failed a check: all of a host, or"
        f" the one that a node had. status lists them. {own}",
    )
    admit.add_argument(
        "name",
        metavar="HOST|NODE",
        help="a host by its name, id or address, a worker's node id, or a GPU's uuid",
    )
    stacks = commands.add_parser(
        "stacks",
        parents=[common],
        description=f"Shows where the processes of workers stand: the stacks of their threads. {own}",
    )
    stacks.add_argument("node", metavar="NODE", nargs="?", default="", help="a worker's node id; none: all")
    return made


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no number of seconds from 0.1 to 3600")
    return seconds


# ---------------------------------------------------------------- which scheduler to ask, and as who


_CHANGES = ("drain", "admit")
"""Commands that change a job. If this directory's launch is over, they do not act on another launch."""


def _is_named(options: argparse.Namespace, env: Mapping[str, str]) -> bool:
    return bool(options.host or env.get("MS_SCHED_HOST") or env.get("MS_SCHED_PORT"))


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """The scheduler that a command asks, and the job.

    Attributes:
        address: the scheduler's address.
        env: the environment of the command.
        launch: the launch to which the scheduler belongs; None if the scheduler was named, or no launch runs
            here.
    """

    address: Address
    env: Mapping[str, str]
    launch: launches.Launched | None = None

    def describe(self) -> str:
        """Describes the job and where it runs."""
        where = ", ".join(show_address(host, self.address.port) for host in self.address.hosts)
        place = f"at {where}" if self.launch is None else f"in {self.launch.directory}"
        return f"job {self.address.job_id} {place}"


def find_scheduler(options: argparse.Namespace, env: Mapping[str, str]) -> Target:
    """Finds the scheduler that is named, else that of :data:`WHICH`.

    Raises:
        SchedulerSettingsError: no scheduler is named, and several launches run here. Or the command changes
            a job, this directory's launch is over, and only another directory's launch runs.
    """
    command = getattr(options, "command", "")  # The options of muster web have no command.
    if command != "health" and not _is_named(options, env):
        try:
            launch = launches.chosen(env, options.job or env.get("MS_JOB_ID", ""))
        except LookupError as error:
            raise SchedulerSettingsError(
                f"Several launches of yours run on this host: {error}.",
                remedy="Ask from the directory of the one that is meant, or name it: --job, or MS_SCHED_HOST"
                " and MS_SCHED_PORT.",
            ) from None
        if launch is not None:
            if command in _CHANGES and not options.job and launches.is_elsewhere(launch):
                raise SchedulerSettingsError(
                    f"The launch of ./muster-runs/latest has ended. Another one runs on this host: job"
                    f" {launch.job_id} in {launch.directory}.",
                    remedy="Ask from there, or name it: --job, or MS_SCHED_HOST and MS_SCHED_PORT.",
                )
            return _of_launch(launch, options, env)
    address = load_address(env, config_path=options.config, job_id=options.job)
    if options.host:
        address = dataclasses.replace(
            address, hosts=Environment({}, SchedulerSettingsError).checked_hosts("--host", options.host)
        )
    return Target(address, env)


def _of_launch(launch: launches.Launched, options: argparse.Namespace, env: Mapping[str, str]) -> Target:
    own = {
        **env,
        "MS_SCHED_HOST": launch.host,
        "MS_SCHED_PORT": launch.port,
        **({"MS_CONFIG_FILE": launch.config} if launch.config else {}),
    }
    if launch.password_file and not any(
        env.get(name) for name in ("MS_CLIENT_PASSWORD", "MS_CLIENT_PASSWORD_FILE")
    ):
        own["MS_CLIENT_PASSWORD_FILE"] = launch.password_file
    address = load_address(own, config_path=options.config, job_id=options.job or launch.job_id)
    return Target(address, own, launch)


def with_password(options: argparse.Namespace, env: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the environment; if --password-file is given, it replaces the password variables."""
    if options.password_file is None:
        return env
    sides = ("MS_CLIENT_PASSWORD", "MS_SERVER_PASSWORD")  # ``health`` may use the scheduler's own password.
    file = str(options.password_file.absolute())
    own = {name: value for name, value in env.items() if name not in sides}
    return {**own, **{f"{side}_FILE": file for side in sides}}


def confirmed(question: str) -> bool:
    """Asks for confirmation on a terminal; returns True if there is no terminal."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _role(options: argparse.Namespace, env: Mapping[str, str]) -> str:
    """The role whose certificate is used: the scheduler's own if ``health`` runs in its environment."""
    return "scheduler" if options.command == "health" and env.get("MS_ROLE") == "MS_SCHED" else "operator"


def _certificate(options: argparse.Namespace, address: Address) -> Path | None:
    """The certificate file for this command; None to use the one that config.json names."""
    if options.command in ("drain", "admit", "stacks") or options.cert is not None:
        return operator_certificate(options, address)
    return None


def operator_certificate(options: argparse.Namespace, address: Address) -> Path | None:
    """Returns the file of --cert, else the ``operator.p12`` that ``muster certs init`` puts by config.json.

    Returns None if there is neither, so that the certificate in config.json is used.

    Raises:
        SchedulerSettingsError: --cert is given without a config.json.
    """
    if options.cert is not None:
        if address.config_path is None:
            raise SchedulerSettingsError("--cert needs a config.json, by --config or MS_CONFIG_FILE.")
        return Path(os.path.abspath(options.cert))  # noqa: PTH100 - resolve() would follow links
    if address.config_path is None:
        return None
    beside = address.config_path.parent / "operator.p12"
    return beside if beside.exists() else None
