"""``muster audit``: checks that an audit log is complete, and lists who was a member in which step."""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from muster.scheduler.audit.anchors import PREFIX
from muster.scheduler.audit.chain import Anchor, AuditVerdict, SignedLine, verify
from muster.scheduler.audit.membership import FORMED, OVER
from muster.scheduler.errors import SchedulerError
from muster.scheduler.jobs.journal import notes_of
from muster.wire.files import open_regular, path_of, read_regular
from muster.wire.log_lines import one_line

MAX_LINE_BYTES = 4 * 1024 * 1024
_HEADS_BYTES = 1024 * 1024

EPILOG = """\
examples:
  muster audit verify /var/log/muster/audit.jsonl* --journal device/scheduler-resnet.sqlite
  muster audit verify audit.jsonl --job resnet --step 1200
  etcdctl get --prefix /muster/resnet/notes/ >heads; muster audit verify audit.jsonl --heads heads

Without --journal, --heads or --key the log's own first line says which key it is of: lines that are missing
in between or changed show, but not what is cut off at the end, nor a log that is forged as a whole.

exit codes: 0 the log is whole; 1 lines are missing or changed; 2 a file cannot be read, or a wrong option."""


class UnreadableError(SchedulerError):
    """A file that the user named cannot be read."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Tenure:
    """The members of one generation, and the steps during which they were members.

    Attributes:
        job_id: the job.
        generation: the generation's number.
        first_step: the first step that the generation executed, from 0.
        end_step: the step after the last one that it executed; None if the log does not say.
        members: the members by rank, each with rank, node_id, host, incarnation and certificate.
    """

    job_id: str
    generation: int
    first_step: int
    end_step: int | None
    members: Sequence[dict[str, Any]]


def main(argv: Sequence[str]) -> int:
    """Runs one command; returns the exit code."""
    options = parser().parse_args(list(argv))
    try:
        return _key(options) if options.command == "key" else _verify(options)
    except UnreadableError as error:
        print(f"muster: {error}", file=sys.stderr)
        return error.exit_code


def parser() -> argparse.ArgumentParser:
    """Makes the parser."""
    made = argparse.ArgumentParser(
        prog="muster audit",
        description="Looks whether an audit log (MS_AUDIT_LOG) is whole, and who was a member when.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser("verify", help="check lines, and list the members of each generation")
    check.add_argument("files", nargs="+", metavar="FILE", help="the log, with its older parts in any order")
    check.add_argument("--journal", metavar="FILE", help="the journal (.sqlite), which knows the end")
    check.add_argument("--heads", metavar="FILE", help="what etcdctl prints of the journal's notes in etcd")
    check.add_argument("--key", default="", metavar="HEX", help="the public key, as muster audit key says")
    check.add_argument("--job", metavar="NAME", help="list the members of this job only")
    check.add_argument("--step", type=int, metavar="N", help="list those in this step only, from 0 on")
    key = commands.add_parser("key", help="print the public key of a log")
    key.add_argument("files", nargs=1, metavar="FILE", help="the log")
    return made


def tenures(lines: Iterable[SignedLine]) -> list[Tenure]:
    """Lists the members of each generation and their steps, by job and generation.

    A step that was redone belongs to the last generation that executed it.
    """
    found: list[Tenure] = []
    for line in sorted(lines, key=lambda line: (str(line.entry.get("time")), line.head.number)):
        entry, event = line.entry, line.entry.get("event")
        if event not in (FORMED, OVER):
            continue
        job_id, step = str(entry.get("job_id")), int(entry.get("step", 0))
        for number, before in enumerate(found):
            if before.job_id == job_id and before.end_step is None:
                found[number] = Tenure(job_id, before.generation, before.first_step, step, before.members)
        if event == FORMED:
            found.append(Tenure(job_id, int(entry["generation"]), step, None, entry["members"]))
    return sorted(found, key=lambda each: (each.job_id, each.generation))


def _key(options: argparse.Namespace) -> int:
    verdict = verify(_lines(options.files))
    for log, key in verdict.keys.items():
        print(f"{key}  log {log}")
    return 0 if verdict.keys else 1


def _verify(options: argparse.Namespace) -> int:
    anchors = [*_journal_anchors(options.journal), *_told_anchors(options.heads)]
    verdict = verify(_lines(options.files), anchors, options.key.lower())
    for each in tenures(verdict.lines):
        if options.job in (None, each.job_id) and _holds(each, options.step):
            _show(each)
    for sentence in verdict.problems:
        print(f"muster: {one_line(sentence)}", file=sys.stderr)
    _sum_up(verdict, bool(anchors))
    return 1 if verdict.problems else 0


def _holds(tenure: Tenure, step: int | None) -> bool:
    if step is None:
        return True
    return tenure.first_step <= step and (tenure.end_step is None or step < tenure.end_step)


def _show(tenure: Tenure) -> None:
    until = "on" if tenure.end_step is None else f"to {max(tenure.first_step, tenure.end_step - 1)}"
    job = f"job {one_line(tenure.job_id)}, generation {tenure.generation}"
    print(f"{job}, steps {tenure.first_step} {until}:")
    for member in tenure.members:
        certificate = str(member.get("certificate", ""))[:23] or "none"
        where = f"node {member['node_id']} on host {member['host']}"
        print(one_line(f"  rank {member['rank']}: {where}, certificate {certificate}"))


def _sum_up(verdict: AuditVerdict, anchored: bool) -> None:
    logs = f"{len(verdict.keys)} log{'' if len(verdict.keys) == 1 else 's'}"
    text = f"{len(verdict.lines)} lines of {logs} are as they were written"
    if verdict.unsigned:
        text += f"; {verdict.unsigned} are of a version that did not sign"
    if not anchored:
        text += "; whether lines are missing at the end is not known without --journal or --heads"
    print(f"{text}.")


def _lines(files: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    for name in files:
        path = path_of(name)
        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise UnreadableError(f"{name} cannot be read: {error.strerror}.") from None
        with os.fdopen(descriptor, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                if line.strip():
                    yield f"{name}:{number}", line.removesuffix(b"\n")


def _journal_anchors(name: str | None) -> Iterator[Anchor]:
    if name is None:
        return
    try:
        found = notes_of(path_of(name))
    except OSError as error:
        raise UnreadableError(f"The journal {name} cannot be read: {error.strerror}.") from None
    except sqlite3.Error as error:
        raise UnreadableError(f"{name} is no journal: {error}.") from None
    yield from _decoded(found.items(), name)


def _told_anchors(name: str | None) -> Iterator[Anchor]:
    """Parses the output of ``etcdctl get --prefix``, in which lines of keys and values alternate."""
    if name is None:
        return
    try:
        lines = read_regular(path_of(name), _HEADS_BYTES).decode("utf-8", "replace").splitlines()
    except OSError as error:
        raise UnreadableError(f"{name} cannot be read: {error.strerror}.") from None
    told = ((key.partition("/notes/")[2], value) for key, value in zip(lines[::2], lines[1::2], strict=False))
    yield from _decoded(told, name)


def _decoded(notes: Iterable[tuple[str, str]], name: str) -> Iterator[Anchor]:
    for key, text in notes:
        if not key.startswith(PREFIX):
            continue
        try:
            yield Anchor.decoded(key.removeprefix(PREFIX), text)
        except ValueError:
            raise UnreadableError(f"{name} has a head of an audit log that makes no sense.") from None
