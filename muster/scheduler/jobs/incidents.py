"""Writes the evidence of each hang into a directory that only its owner can read.

Only the newest :data:`KEPT` directories of each job are kept.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from muster.scheduler.core.events import Bundle, RankEvidence
from muster.wire.files import open_own
from muster.wire.redaction import without_secrets

KEPT = 16
"""How many bundles of a job are kept; the oldest are removed first."""

SUMMARY, COLLECTIVES = "incident.txt", "collectives.txt"
MOST_COLLECTIVES = 100_000
"""The most lines on collectives in one bundle. A large job has room for only the last few of each rank."""

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


class IncidentFiles:
    """The bundles of all jobs of a scheduler.

    Args:
        directory: the directory for the bundles; created with the first bundle.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, job_id: str, bundle: Bundle, when: dt.datetime) -> Path:
        """Writes a bundle; returns its directory.

        Args:
            job_id: the job.
            bundle: the evidence that was gathered.
            when: the date and time, for the directory's name and the summary.

        Raises:
            OSError: the bundle cannot be written.
        """
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        prefix = f"{_fit(job_id)}-"
        path = self._directory / f"{prefix}{when:%Y%m%dT%H%M%S}-{when.microsecond:06d}"
        path.mkdir(mode=0o700)
        _write(path / SUMMARY, _summary(job_id, bundle, when))
        _write(path / COLLECTIVES, _collectives(bundle))
        for rank in bundle.ranks:
            if rank.stacks:
                _write(path / _file_of(rank), [f"{_name(rank)}", "", rank.stacks])
        self._remove_old(prefix)
        return path

    def _remove_old(self, prefix: str) -> None:
        named = re.compile(re.escape(prefix) + r"\d{8}T\d{6}-\d{6}")
        ours = sorted(path for path in self._directory.iterdir() if named.fullmatch(path.name))
        for path in ours[:-KEPT]:
            shutil.rmtree(path, ignore_errors=True)


def _fit(name: str) -> str:
    """Converts a name for use in a file's name."""
    return _UNSAFE.sub("_", name)[:80] or "_"


def _file_of(rank: RankEvidence) -> str:
    return f"rank-{rank.rank}.txt" if rank.rank >= 0 else f"node-{_fit(rank.candidate.node_id)}.txt"


def _name(rank: RankEvidence) -> str:
    who = (
        f"rank {rank.rank} (node {rank.candidate.node_id}"
        if rank.rank >= 0
        else f"node {rank.candidate.node_id} ("
    )
    return f"{who} on host {rank.candidate.host.name})".replace("( on", "(on")


def _write(path: Path, lines: object) -> None:
    text = without_secrets("\n".join(map(str, lines)) + "\n", os.environ)  # type: ignore[call-overload]
    with os.fdopen(open_own(path), "w", encoding="utf-8", errors="replace") as out:
        out.write(text)


def _summary(job_id: str, bundle: Bundle, when: dt.datetime) -> Iterator[str]:
    yield f"Job {job_id}, generation {bundle.generation}, {when:%Y-%m-%dT%H:%M:%SZ}."
    yield bundle.sentence
    yield ""
    yield "rank  steps finished  steps begun  node id, host, and what there is of it"
    for rank in bundle.ranks:
        number = str(rank.rank) if rank.rank >= 0 else "-"
        found = _file_of(rank) if rank.stacks else rank.obstacle or "not asked for stacks"
        where = f"{rank.candidate.node_id} on {rank.candidate.host.name}"
        yield f"{number:>4}  {rank.step:>14}  {rank.started_step:>11}  {where}: {found}"


def _collectives(bundle: Bundle) -> Iterator[str]:
    yield "rank  its last collectives, as far as it has told: number, group, name, bytes, type, state"
    each = max(1, MOST_COLLECTIVES // max(1, len(bundle.ranks)))
    for rank in bundle.ranks:
        for call in rank.recent[-each:]:
            state = "done" if call.done else "not done"
            what = f"{call.sequence} {call.group} {call.name} {call.size_bytes} {call.dtype}"
            yield f"{rank.rank:>4}  {what} {state}"
