"""Reads a run from its directory: the records of its launchers, and the scheduler's log if it is there."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.web.model import ObservedGeneration
from muster.web.plots import LARGEST
from muster.web.series import Point, Series
from muster.wire.files import read_regular
from muster.wire.json_lines import fields_of
from muster.wire.launches import LAST_S, read_records
from muster.wire.log_lines import one_line
from muster.wire.messages import MAX_NUMBER_NAME, MAX_NUMBERS
from muster.wire.time_by_cause import CAUSES, spent_of

MAX_LOG_BYTES = 16 * 1024 * 1024
MAX_SHOWN = 4000
"""The largest number of characters of a text that are shown."""

PACED = 10
"""The number of recent intervals between figures from which the remaining time is computed."""

END_LINES = 60
"""The number of lines of a log's end that are shown."""

_SAID = re.compile(r"(\S+Z) [A-Z]+ (\w+) (.*)")
_TEXT = re.compile(r'(?:^|.* )text=("(?:[^"\\]|\\.)*"|\S+)$')
_MORE = re.compile(r"\S+Z [A-Z]+ \+ (.*)")
_WHO = re.compile(r'\b(rank|node_id|host|hosts)=("[^"]*"|\S+)')
_LOSS = re.compile(r"\b(?:(?:is lost|was expelled): |holds? (?:the others|all) up: )")
_CHANGE = re.compile(r"\. Generation \d+ is formed .*", re.DOTALL)
TIME = "time"
"""The name of the scheduler's log event with a job's time by cause."""

NOTED = frozenset(
    ("decided", "joined", "left", "lost", "refused", "denied", "expelled", "drained", "ended", TIME)
)


@dataclass(frozen=True, slots=True)
class Saying:
    """A line that a launcher has shown or a scheduler has logged; ``tone``: error, warning, good or empty."""

    time_s: float
    text: str
    tone: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The last lines of a process that failed."""

    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LastCopy:
    """The last snapshot in peers' memory, or the last checkpoint, that a launcher's first worker has noted.

    Attributes:
        step: the number of steps finished in it.
        at: when it was complete, in seconds since 1970.
        size_bytes: the size of that worker's part.
        seconds: how long copying or writing it took.
        partner: the first rank that held the copy; -1 for none.
    """

    step: int
    at: float
    size_bytes: int
    seconds: float
    partner: int = -1


@dataclass
class Run:
    """A run of one or more launchers.

    Attributes:
        job_id: the job.
        hosts: the launchers' hosts.
        workers: the requested number of workers.
        command: the workers' command.
        began: when it began, in seconds since 1970.
        ended: when it ended, in seconds since 1970; None if it is still running, or its launcher was killed.
        codes: the launchers' exit codes.
        latest: the time of the latest record, in seconds since 1970.
        series: the job's figures over time.
        generations: the generations, the oldest first.
        copies: the last snapshot and checkpoint, by the names ``snapshot`` and ``checkpoint``.
        steps: the total number of steps; 0 if not known.
        epoch: the last epoch, from 1; 0 if not known.
        epochs: the total number of epochs; 0 if not known.
        said: the lines that the launchers have shown.
        scheduler_said: the scheduler's log lines.
        ends: the ends of the logs of processes that failed.
        time_by_cause: seconds by cause, as the run's schedulers have logged them; empty if none has.
    """

    job_id: str = ""
    hosts: list[str] = field(default_factory=list)
    workers: int = 0
    command: str = ""
    began: float | None = None
    ended: float | None = None
    codes: list[int] = field(default_factory=list)
    latest: float = 0.0
    series: Series = field(default_factory=Series)
    generations: list[ObservedGeneration] = field(default_factory=list)
    copies: dict[str, LastCopy] = field(default_factory=dict)
    steps: int = 0
    epoch: int = 0
    epochs: int = 0
    said: list[Saying] = field(default_factory=list)
    scheduler_said: list[Saying] = field(default_factory=list)
    ends: list[LogEnd] = field(default_factory=list)
    time_by_cause: dict[str, float] = field(default_factory=dict)

    @property
    def faults(self) -> list[Saying]:
        """The launchers' warnings and errors, and the losses that the scheduler logged, in order of time.

        Without the scheduler's log, the losses come from the reasons of the generations.
        """
        shown = [each for each in self.said if each.tone in ("warning", "error")]
        seen = [(each.time_s, _CHANGE.sub(".", each.text)) for each in self.scheduler_said]
        if not seen:
            seen = [(each.formed, f"Generation {each.number}: {each.reason}.") for each in self.generations]
        lost = [Saying(time_s, text, "warning") for time_s, text in seen if _LOSS.search(text)]
        return sorted([*shown, *lost], key=lambda each: each.time_s)

    @property
    def remaining_s(self) -> float:
        """The remaining time at the pace of the last steps, in seconds; 0 if not known or none."""
        paces = [step_s for _, step_s in self.series.step_times()[-PACED:]]
        if self.ended is not None or not paces:
            return 0.0
        return max(0, self.steps - self.series.points[-1].step) * sum(paces) / len(paces)

    @property
    def outcome(self) -> str:
        """The run's outcome in words."""
        if self.ended is None:
            return "not ended when this was written, or its launcher was killed"
        return "ended well" if not any(self.codes) else f"ended with exit code {max(self.codes)}"


def load(directory: Path) -> Run:
    """Reads a run.

    Raises:
        OSError: the directory cannot be read.
    """
    run = Run()
    going = 0
    group: Mapping[str, Any] = {}
    for line in read_records(directory):
        kind, now = line.get("kind"), float(line["time"])
        run.latest = now
        if kind == "began":
            going += 1
            run.began = now if run.began is None else run.began
            run.job_id, run.workers = _text(line, "job_id"), _whole(line, "workers")
            run.hosts.append(_text(line, "host"))
            run.command = _text(line, "command")
        elif kind == "ended":
            going -= 1
            run.codes.append(_whole(line, "code"))
            run.ended = now if going <= 0 else None
        elif kind == "group":
            group = line
            _take_group(run, line, now)
        elif kind == "figures":
            _take_figures(run, line, now, max(1, _whole(group, "workers")))
        elif kind == "said":
            run.said.append(Saying(now, _text(line, "text"), _text(line, "tone")))
        elif kind == "end_of_log" and isinstance(line.get("lines"), list):
            run.ends.append(LogEnd(_text(line, "name"), tuple(map(_shown, line["lines"][-END_LINES:]))))
    if run.generations and run.ended is not None:
        run.generations[-1].over = run.ended
    said = list(scheduler_log(directory / "scheduler.log"))
    run.scheduler_said = [each for each in said if each.kind != TIME]
    run.time_by_cause = _spent([spent_of(each.text) for each in said if each.kind == TIME])
    return run


def _spent(told: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums the seconds by cause over a run's schedulers, each of which began at 0.

    Args:
        told: the seconds by cause in the order of the log; a smaller sum marks the next scheduler.
    """
    whole = Counter[str]()
    before: Mapping[str, float] = {}
    for spent in told:
        if sum(spent.values()) < sum(before.values()):
            whole.update(before)
        before = spent
    whole.update(before)
    return {cause: whole[cause] for cause in CAUSES if whole[cause]}


def points_of(directory: Path) -> list[Point]:
    """Returns a run's figures over time; empty if they cannot be read."""
    try:
        return load(directory).series.points
    except OSError:
        return []


def command_of(directory: Path) -> str:
    """Returns the command of a run's workers; empty if it is not known."""
    try:
        began = next((line for line in read_records(directory) if line.get("kind") == "began"), {})
    except OSError:
        return ""
    return _text(began, "command")


def scheduler_log(path: Path) -> Iterable[Saying]:
    """Reads a scheduler's log lines about its jobs."""
    try:
        text = read_regular(path, MAX_LOG_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return
    for line in _whole_lines(text.splitlines()):
        if line.startswith("{"):
            yield from _said_in_json(line)
            continue
        found = _SAID.fullmatch(line)
        if found is None or found[2] not in NOTED:
            continue
        said = _TEXT.fullmatch(found[3])
        try:
            time_s = dt.datetime.fromisoformat(found[1]).timestamp()
            words = "" if said is None else json.loads(said[1]) if said[1][0] == '"' else said[1]
        except (ValueError, OverflowError, RecursionError):
            continue
        if not 0 <= time_s < LAST_S:  # Calendars end soon after that, and begin with the year 1.
            continue
        who = _who(found[3]) if found[2] != "decided" else ""
        yield Saying(time_s, _shown(": ".join(filter(None, (who, words)))), kind=found[2])


def _whole_lines(lines: Iterable[str]) -> Iterator[str]:
    """Joins lines that were broken in the log because they were too long."""
    whole: str | None = None
    for line in lines:
        more = _MORE.fullmatch(line)
        if more is not None and whole is not None and len(whole) < MAX_SHOWN:
            whole = f"{whole} {more[1]}"
            continue
        if whole is not None:
            yield whole
        whole = line
    if whole is not None:
        yield whole


def _who(facts: str) -> str:
    """Returns the worker or hosts that a log line is about: ``rank 2, node 3 on gpu-17``."""
    told = {name: value.strip('"') for name, value in _WHO.findall(facts.partition(" text=")[0])}
    rank = f"rank {told['rank']}" if "rank" in told else ""
    node = f"node {told['node_id']}" if "node_id" in told else ""
    where = f" on {told['host']}" if "host" in told else ""
    hosts = f"hosts {told['hosts']}" if "hosts" in told else ""
    return ", ".join(filter(None, (rank, f"{node}{where}" if node else "", hosts)))


def _said_in_json(line: str) -> Iterable[Saying]:
    """Yields the entry of a log line that the scheduler has written as JSON, if it is one to show."""
    found = fields_of(line.encode())
    if found is None or found["event"] not in NOTED:
        return
    try:
        time_s = dt.datetime.fromisoformat(str(found["time"])).timestamp()
    except (ValueError, OverflowError):
        return
    if 0 <= time_s < LAST_S:
        yield Saying(time_s, _shown(str(found["text"])), kind=str(found["event"]))


def _take_group(run: Run, line: Mapping[str, Any], now: float) -> None:
    number = _whole(line, "generation")
    if run.generations and number <= run.generations[-1].number:
        return  # Another launcher of the job has recorded it.
    if run.generations:
        run.generations[-1].over = now
    run.generations.append(
        ObservedGeneration(number, _whole(line, "workers"), _text(line, "reason") or "formed", now, now)
    )


def _take_figures(run: Run, line: Mapping[str, Any], now: float, workers: int) -> None:
    for name in ("snapshot", "checkpoint"):
        at = _number(line, f"{name}_at")
        if at is not None and 0 <= at < LAST_S:
            run.copies[name] = LastCopy(
                _whole(line, f"{name}_step"),
                at,
                _whole(line, f"{name}_bytes"),
                _number(line, f"{name}_seconds") or 0.0,
                _whole(line, f"{name}_partner") if f"{name}_partner" in line else -1,
            )
    speed = _number(line, "samples_per_s") or 0.0
    step = _whole(line, "step")
    if run.series.points and step < run.series.points[-1].step and len(run.hosts) > 1:
        return  # It is older than the figure of another launcher's worker.
    run.steps, run.epoch, run.epochs = (_whole(line, name) for name in ("steps", "epoch", "epochs"))
    loss, rate = _number(line, "loss"), _number(line, "learning_rate")
    run.series.take(Point(now, step, speed * workers, loss, rate, _numbers(line)))


def _numbers(line: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Returns the script's own numbers as pairs of name and value."""
    given = line.get("numbers")
    if not isinstance(given, dict):
        return ()
    found = ((_shown(name)[:MAX_NUMBER_NAME], _number(given, name)) for name in sorted(given)[:MAX_NUMBERS])
    return tuple((name, value) for name, value in found if value is not None)


def _text(line: Mapping[str, Any], name: str) -> str:
    return _shown(line.get(name) or "")


def _shown(said: object) -> str:
    """Returns a text without unprintable characters, cut to ``MAX_SHOWN`` characters."""
    text = str(said)
    if len(text) > MAX_SHOWN:
        text = f"{text[: MAX_SHOWN - 3]}..."
    return "\n".join(one_line(line) for line in text.split("\n"))


def _whole(line: Mapping[str, Any], name: str) -> int:
    value = line.get(name)
    return value if isinstance(value, int) and abs(value) < 1 << 63 else 0


def _number(line: Mapping[str, Any], name: str) -> float | None:
    value = line.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) <= LARGEST else None
