"""``muster drain``: prints what a drain costs, asks, and drains workers or hosts, now or later."""

from __future__ import annotations

import argparse
import datetime as dt
import re
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from muster.scheduler.cli.client import RefusedByScheduler, SchedulerClient
from muster.scheduler.errors import SchedulerSettingsError

_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?")


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser, own: str
) -> None:
    """Adds the command's parser."""
    drain = commands.add_parser(
        "drain",
        parents=[common],
        description="Lets workers finish their step and leave, all by one change; the others go on. What it"
        f" costs is said before. {own}",
    )
    drain.add_argument("nodes", metavar="NODE", nargs="*", help="a worker's node id; or several")
    drain.add_argument(
        "--host",
        dest="hosts",
        action="append",
        default=[],
        metavar="HOST[,HOST]",
        help="drain all workers on this host, by its name, id or address; may be repeated",
    )
    drain.add_argument(
        "--at",
        type=moment_of,
        metavar="TIME",
        help="not now but then: 02:00, the next one by this host's clock, or 2026-01-31T02:00[+01:00]",
    )
    drain.add_argument(
        "--cancel",
        action="store_true",
        help="undo what is planned with --at: of these nodes and hosts, or all of it",
    )
    drain.add_argument("--yes", action="store_true", help="do not ask on a terminal whether it is meant")
    drain.add_argument("--reason", default="drained by an operator", help="why, for the log and the workers")


def moment_of(text: str, now: dt.datetime | None = None) -> float:
    """Parses a time of day, or a date and time; returns seconds since 1970.

    Args:
        text: ``02:00`` or ``02:00:30`` for the next such time; otherwise ISO 8601, which without a zone means
            local time.
        now: the current time; None for this host's clock.

    Raises:
        argparse.ArgumentTypeError: the text is not a time, or the time is past.
    """
    here = now or dt.datetime.now().astimezone()
    found = _CLOCK.fullmatch(text)
    if found is not None:
        hour, minute, second = (int(part or 0) for part in found.groups())
        # On a day on which the clocks change, the UTC offset is that of the requested time, not of now.
        today = here.replace(tzinfo=None, hour=hour, minute=minute, second=second, microsecond=0)
        moments = (today, today + dt.timedelta(days=1))
        zone = None if now is None else here.tzinfo
        later = [each.replace(tzinfo=zone) if zone else each.astimezone() for each in moments]
        return next(each for each in later if each > here).timestamp()
    try:
        moment = dt.datetime.fromisoformat(text)
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=here.tzinfo)
        seconds = moment.timestamp()
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is no time: give 02:00, or 2026-01-31T02:00"
        ) from None
    if moment <= here:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is over; it is {here:%Y-%m-%dT%H:%M:%S} here")
    return seconds


def checked_names(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Checks and returns the node ids and hosts to be drained.

    Raises:
        SchedulerSettingsError: neither node ids nor hosts are given, or both are.
    """
    hosts = [name for each in options.hosts for name in each.split(",") if name]
    if options.nodes and hosts:
        raise SchedulerSettingsError(
            "muster drain takes node ids, or --host with hosts to be drained, not both.",
            remedy="The scheduler's address is given by --scheduler.",
        )
    if not options.nodes and not hosts and not options.cancel:
        raise SchedulerSettingsError("muster drain needs node ids, or --host.")
    if options.cancel and options.at is not None:
        raise SchedulerSettingsError("--cancel undoes drains, --at plans one: give one of them.")
    return list(options.nodes), hosts


def run(
    options: argparse.Namespace,
    client: SchedulerClient,
    job: str,
    *,
    confirmed: Callable[[str], bool],
    out: TextIO,
) -> int:
    """Runs the command; returns the exit code."""
    nodes, hosts = checked_names(options)
    if options.cancel:
        print(client.drain_many(nodes, hosts, cancel=True), file=out)
        return 0
    what = f"{describe(nodes, hosts)} of {job}"
    when = "" if options.at is None else f" at {dt.datetime.fromtimestamp(options.at).astimezone():%F %T %z}"
    print(cost(client, nodes, hosts), file=sys.stderr)
    if not options.yes and not confirmed(f"Drain {what}{when}?"):
        print("nothing was changed", file=sys.stderr)
        return 1
    print(f"draining {what}{when}", file=sys.stderr)
    if len(nodes) == 1 and options.at is None:
        print(client.drain(nodes[0], options.reason), file=out)  # Older schedulers know only this.
    else:
        print(client.drain_many(nodes, hosts, options.reason, at_s=options.at or 0.0), file=out)
    return 0


def describe(nodes: Sequence[str], hosts: Sequence[str]) -> str:
    """Names the nodes or hosts, as in ``nodes 3, 4`` or ``host gpu-17``."""
    noun, names = ("host", hosts) if hosts else ("node", nodes)
    return f"{noun}{'' if len(names) == 1 else 's'} {', '.join(names)}"


def cost(client: SchedulerClient, nodes: Sequence[str], hosts: Sequence[str]) -> str:
    """Asks the scheduler what the drain would cost, and says so if an older scheduler cannot tell.

    Raises:
        RefusedByScheduler: a worker does not exist, or the caller may not ask.
    """
    try:
        return client.drain_many(nodes, hosts, preview=True)
    except RefusedByScheduler as error:
        if error.code != "INVALID_ARGUMENT":
            raise
        return "This scheduler is of a version that cannot say what it costs."
