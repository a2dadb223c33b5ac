"""``muster check``: whether all ranks agree, compute right numbers, and which host is slow.

Run by each worker of a job that does nothing else; rank 0 prints the result. Facts are sent over the embedded
communicator, which is there before NCCL is: NCCL itself may hang on what is to be found here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from muster.communicators.nccl.encryption import OFF
from muster.errors import SettingsError, WorkerError
from muster.launch import fork as launch_fork
from muster.launch.check import rules as rules
from muster.launch.screen import say
from muster.wire.messages import NCCL_FACT, PLAIN, SEALED
from muster.worker.config import translate

if TYPE_CHECKING:
    from muster.launch.check.bandwidth import Plane
    from muster.worker.session.session import Session

REPEATS = 3
COLLECTIVE_TIMEOUT_S = 60
MOST_SHOWN = 300
"""Length limit of the reason why a host cannot encrypt, in characters."""

EPILOG = """\
All other options are the launcher's (muster run --help), and no command follows them:

  muster check -n 8 --scheduler --config keys/config.json --password-file keys/password

On several hosts, type the same line on each. What mpirun, srun, torchrun or an indexed job has started runs
the check itself, as one worker, unless the launcher's options are given.
Exit code: 0 all agree (warnings apart), 1 not, 2 a mistake in the options."""


@dataclass
class Result:
    """The result of the check; the same on every rank.

    Attributes:
        findings: facts in which ranks differ.
        warnings: sentences.
        errors: sentences for which training must not begin.
        speeds: for each measured plane, the bandwidth of each pair of hosts in GB/s.
        wrong: the planes that gave wrong numbers.
    """

    findings: list[rules.Finding] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    speeds: dict[str, dict[tuple[int, int], float]] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)

    @property
    def failed(self) -> bool:
        """Whether training must not begin."""
        return bool(self.errors) or any(finding.refused for finding in self.findings)


def main(argv: Sequence[str]) -> int:
    """Launches the workers that check, or is one of them; returns the exit code."""
    own_parser = parser()
    options, rest = own_parser.parse_known_args(list(argv))
    if not 1 <= options.size_mib <= 4096 or options.partners < 1:
        own_parser.error("--size-mib must be from 1 to 4096, and --partners at least 1")
    # A task of srun, one on each node, may be a launcher: then it has options that only a launcher has.
    if os.environ.get("MS_ROLE") != "MS_WORKER" and (rest or not translate(os.environ)):
        from muster.launch import command as launch_command

        own = ["--size-mib", str(options.size_mib), "--partners", str(options.partners)]
        from muster.launch.fork import own_flags

        return launch_command.main([*rest, "--", sys.executable, *own_flags(), "-m", "muster", "check", *own])
    code = _as_worker(options, rest)
    # All is printed and released. In rare cases, gRPC's own threads make the interpreter hang at its end.
    return launch_fork.leave(code)


def _as_worker(options: argparse.Namespace, rest: Sequence[str]) -> int:
    try:
        if rest:
            raise SettingsError(f"A worker's check has no option {rest[0]!r}; --help shows those there are.")
        return check(options)
    except WorkerError as error:
        say(str(error))
        return error.exit_code


def parser() -> argparse.ArgumentParser:
    """Makes the parser of ``muster check``."""
    made = argparse.ArgumentParser(
        prog="muster check",
        description="Checks a job's hosts before it is trained on: versions, settings, clocks, AllReduce.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "--size-mib", type=int, default=16, metavar="N", help="size of the AllReduce in MiB (16)"
    )
    made.add_argument(
        "--partners",
        type=int,
        default=16,
        metavar="N",
        help="other hosts with which each host is measured, at most (16)",
    )
    return made


def check(options: argparse.Namespace) -> int:
    """Runs the check as one worker of the job; rank 0 prints the result."""
    from muster.worker import runtime as process

    os.environ.setdefault("MS_COLLECTIVE_TIMEOUT", str(COLLECTIVE_TIMEOUT_S))
    try:
        session = process.init("tcp")
    except SystemExit:  # its exit code 0 would mean that all ranks agree
        raise WorkerError("The check was ended before all workers had come.") from None
    try:
        facts = _gather_facts(session)
        result = examine(session, facts)
        if not result.failed:
            _measure(session, options, result)
        if session.rank == 0:
            show(session, facts, result)
        if result.failed:
            _fail_together(session)
    except BaseException as error:
        process.abandon(error)
        raise
    process.release()
    return 1 if result.failed else 0


def _fail_together(session: Session) -> None:
    """Delays this rank's failure until rank 0 has printed why: the first failure ends all workers."""
    from muster.worker.collectives import barrier

    barrier()
    if session.rank:
        say(f"not ready to train: rank 0, on host {session.members[0].host.name}, says why")


# ---------------------------------------------------------------- facts


def _gather_facts(session: Session) -> list[dict[str, str]]:
    """Gathers the facts of all ranks over the embedded communicator; returns them in order of rank."""
    import numpy as np

    from muster.worker.collectives import all_gather, all_reduce
    from muster.worker.host import all_facts

    own = json.dumps({**all_facts(os.environ), **_nccl_facts(session)}).encode()
    length = int(all_reduce(np.array([len(own)]), op="max")[0])
    padded = np.frombuffer(own.ljust(length), np.uint8)
    everyone = all_gather(padded).reshape(session.world_size, length)
    return [json.loads(row.tobytes()) for row in everyone]


def _nccl_facts(session: Session) -> dict[str, str]:
    """Returns whether this host would encrypt NCCL's traffic; empty if that is not asked for."""
    mode = session.settings.nccl_encryption
    if mode == OFF:
        return {}
    from muster.worker.nccl_protection import decide_here, look_at_host

    tls = session.settings.config_path is not None
    decided = decide_here(mode, os.environ, look_at_host(), tls=tls)
    traffic = SEALED if decided.sealed else PLAIN
    return {rules.ENCRYPTION: mode, NCCL_FACT: traffic, rules.WORDS: decided.words[:MOST_SHOWN]}


def examine(
    session: Session, facts: Sequence[Mapping[str, str]], wall_clock: Callable[[], float] = time.time
) -> Result:
    """Compares the facts, names and clocks of all ranks; every rank calls it.

    Args:
        session: the job.
        facts: the facts of each rank, in order of rank.
        wall_clock: this rank's time of day in seconds.
    """
    import numpy as np

    from muster.worker.collectives import all_gather, barrier

    barrier()
    begun = time.monotonic()
    clocks = all_gather(np.array([wall_clock()])).ravel()
    took_s = time.monotonic() - begun
    hosts = [(member.host.id, member.host.name) for member in session.members]
    result = Result(rules.compare(facts))
    result.errors += rules.unsealed(facts)
    result.warnings += rules.name_clashes(hosts)
    result.warnings += rules.clock_skews([float(clock - clocks[0]) for clock in clocks], took_s)
    return result


# ---------------------------------------------------------------- AllReduce


def _measure(session: Session, options: argparse.Namespace, result: Result) -> None:
    from muster.launch.check.bandwidth import planes

    hosts = host_ranks(session)
    for plane in planes(session):
        wrong = plane.wrong_ranks(options.size_mib)
        if wrong:
            result.wrong.add(plane.name)
            result.errors.append(
                f"AllReduce over {plane.name} gave wrong numbers on rank {rules.ranges(wrong)}: "
                "do not train on this."
            )
        speeds = _pair_speeds(plane, list(hosts.values()), options)
        result.speeds[plane.name] = speeds
        names = [session.members[ranks[0]].host.name for ranks in hosts.values()]
        result.warnings += [f"{plane.name}: {text}" for text in rules.slow_sentences(names, speeds)]
        plane.close()


def host_ranks(session: Session) -> dict[str, list[int]]:
    """The ranks of each host, by its identity, in order of rank."""
    found: dict[str, list[int]] = {}
    for member in session.members:
        found.setdefault(member.host.id, []).append(member.rank)
    return found


def _pair_speeds(
    plane: Plane, hosts: Sequence[Sequence[int]], options: argparse.Namespace
) -> dict[tuple[int, int], float]:
    """Measures GB/s between the first ranks of each pair of hosts; disjoint pairs run at the same time."""
    speeds: dict[tuple[int, int], float] = {}
    for meeting in rules.rounds(len(hosts))[: options.partners]:
        pairs = [(hosts[one][0], hosts[other][0]) for one, other in meeting]
        by_rank = plane.speeds(pairs, options.size_mib, REPEATS)
        for pair, ranks in zip(meeting, pairs, strict=True):
            speeds[pair] = min(by_rank[rank] for rank in ranks)
    return speeds


# ---------------------------------------------------------------- telling


def show(session: Session, facts: Sequence[Mapping[str, str]], result: Result) -> None:
    """Shows the result on the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    hosts = host_ranks(session)
    console.print(Text(f"{_count(len(facts), 'rank')} on {_count(len(hosts), 'host')}"))
    differing = {finding.name for finding in result.findings}
    same = [f"{name} {value}" for name, value in facts[0].items() if name not in differing]
    console.print(Text(f"the same everywhere: {', '.join(same)}"))
    if result.findings:
        table = Table("", "differs", "value", "ranks")
        for finding in result.findings:
            for number, (value, ranks) in enumerate(finding.values):
                head = ("refused" if finding.refused else "warning", finding.name) if not number else ("", "")
                table.add_row(*(Text(cell) for cell in (*head, value, rules.ranges(ranks))))
        console.print(table)
    for name, speeds in result.speeds.items():
        if name not in result.wrong:
            console.print(Text(f"AllReduce over {name}: the numbers are right"))
        if speeds:
            console.print(_speed_table(session, list(hosts.values()), name, speeds))
    for sentence in result.warnings:
        console.print(Text(f"warning: {sentence}"))
    for sentence in result.errors:
        console.print(Text(f"refused: {sentence}"))
    verdict = "not ready to train: make equal what is refused above" if result.failed else "ready to train"
    console.print(Text(verdict))
    sys.stdout.flush()


def _speed_table(
    session: Session, hosts: Sequence[Sequence[int]], name: str, speeds: Mapping[tuple[int, int], float]
) -> Any:
    from rich.table import Table
    from rich.text import Text

    def label(host: int) -> Text:
        return Text(session.members[hosts[host][0]].host.name)

    table = Table("host", "host", f"GB/s ({name})")
    slowest_first = sorted(speeds.items(), key=lambda item: item[1])
    for (one, other), speed in slowest_first[:20]:
        table.add_row(label(one), label(other), f"{speed:.3f}")
    if len(slowest_first) > 20:
        table.add_row(Text(f"... and {len(slowest_first) - 20} faster pairs"), "", "")
    return table


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
