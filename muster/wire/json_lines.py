"""Log lines as JSON objects, one schema for all processes (``MS_LOG_FORMAT=json``).

Each line has all of :data:`FIELDS`, in that order, and may have more facts after them. A field that is not
known, or does not apply to a line, is null. docs/operating.md describes the fields to users.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

FIELDS = (
    "time",
    "level",
    "component",
    "job",
    "generation",
    "rank",
    "incident",
    "node_id",
    "host",
    "pid",
    "logger",
    "event",
    "text",
)
"""The fields of each line. ``time`` is UTC in the format of RFC 3339, with milliseconds."""

VARIABLE = "MS_LOG_FORMAT"
MOST_LINE_BYTES = 15_000
"""The largest number of bytes of a line; container runtimes cut a line at 16 KiB."""

FACTS = "muster_facts"
"""The attribute of a log record that holds additional facts for its line."""

_SHORTEST = 16


def wanted(env: Mapping[str, str]) -> bool:
    """Whether the environment asks for JSON; invalid values are refused later, by the settings."""
    return env.get(VARIABLE, "").strip().lower() == "json"


def incident_of(job: str, generation: int) -> str:
    """Returns the name of the incident that ended a generation; every process gives it the same name."""
    return f"{job}-g{generation}"


@dataclass(slots=True)
class LineContext:
    """The facts that all log lines of a process share: its job, its role and its state.

    Attributes:
        component: scheduler, worker, agent, program, launcher, uplink or web.
        job: the job; None if the process has several jobs, or none yet.
        generation: the newest generation of which this process has been a member.
        rank: its rank in that generation.
        incident: the name of the incident that has ended that generation, until the job goes on.
        node_id: the worker's stable name.
        host: this host's name.
    """

    component: str
    job: str | None = None
    generation: int | None = None
    rank: int | None = None
    incident: str | None = None
    node_id: str | None = None
    host: str | None = None

    def begin(self, component: str, job: str | None = None) -> None:
        """Starts over for this process; drops the state that a forked child inherited."""
        self.component, self.job = component, job
        self.generation = self.rank = self.incident = self.node_id = None

    def stands(self, generation: int, rank: int | None = None) -> None:
        """Records an established generation; the incident that led to it lasts until :meth:`resolved`."""
        self.generation, self.rank = generation, rank

    def resolved(self) -> None:
        """Records that the job goes on, so that later log lines belong to no incident."""
        self.incident = None

    def over(self) -> None:
        """Records that the generation has ended; log lines name this incident until the job goes on."""
        if self.job and self.generation and self.incident is None:
            self.incident = incident_of(self.job, self.generation)


process_lines = LineContext("muster")
"""The context of this process."""


def json_line(level: str, text: str, context: LineContext, **facts: Any) -> str:
    """Renders one line. ``facts`` override the context; facts that are not in FIELDS follow the fields.

    A text or fact that makes the line longer than :data:`MOST_LINE_BYTES` is cut.
    """
    moment = facts.pop("moment", None) or dt.datetime.now(dt.UTC)
    known: dict[str, Any] = {
        "time": f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z",
        "level": level,
        "component": context.component,
        "job": context.job,
        "generation": context.generation,
        "rank": context.rank,
        "incident": context.incident,
        "node_id": context.node_id,
        "host": context.host or os.uname().nodename,
        "pid": os.getpid(),
        "logger": None,
        "event": None,
        "text": text,
    }
    line = json.dumps({**known, **facts}, default=str)
    longest = MOST_LINE_BYTES
    while len(line) > MOST_LINE_BYTES and longest > _SHORTEST:
        longest //= 2
        line = json.dumps({name: _cut(value, longest) for name, value in {**known, **facts}.items()})
    return line


def _cut(value: object, longest: int) -> object:
    """Returns a value that JSON can hold; replaces the middle of a long text by ``...``."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} ... {text[-half:]}"


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object.

    Args:
        context: the context of the process.
    """

    def __init__(self, context: LineContext) -> None:
        super().__init__()
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        """Formats one record."""
        facts: dict[str, Any] = dict(getattr(record, FACTS, {}))
        if record.exc_info:
            facts["traceback"] = self.formatException(record.exc_info)
        return json_line(
            record.levelname,
            facts.pop("text", None) or record.getMessage(),
            self._context,
            moment=dt.datetime.fromtimestamp(record.created, dt.UTC),
            **{"logger": record.name, **facts},
        )


def log_as_json(*loggers: str) -> None:
    """Makes these loggers write JSON lines to standard error, and not pass records on to other handlers.

    A logger that already has handlers of its own keeps them, because a script has set them up.
    """
    for name in loggers:
        logger = logging.getLogger(name)
        if not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(JsonFormatter(process_lines))
            logger.addHandler(handler)
            logger.propagate = False


def log_own_process_as_json(component: str, *loggers: str) -> None:
    """Like :func:`log_as_json`, and also for warnings and uncaught errors; for processes of Muster only."""
    process_lines.begin(component)
    log_as_json(*loggers, "py.warnings")
    logging.captureWarnings(True)
    sys.excepthook = say_uncaught


def say_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Writes an uncaught error as one JSON line that includes its traceback."""
    told = "".join(traceback.format_exception(kind, error, trace))
    say(f"{kind.__name__}: {error}", level="CRITICAL", as_text=told, traceback=told)


def say(sentence: str, *, level: str = "INFO", as_text: str, **facts: Any) -> None:
    """Writes a message of this process to standard error, as JSON if the environment asks for that.

    Args:
        sentence: the message in the JSON line.
        level: the level in the JSON line.
        as_text: the line to write instead if the environment does not ask for JSON.
        facts: further facts for the JSON line.
    """
    line = json_line(level, sentence, process_lines, **facts) if wanted(os.environ) else as_text
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def fields_of(line: bytes) -> dict[str, Any] | None:
    """Parses a line of this schema; returns None if it is not one."""
    if not line.startswith(b'{"time": "'):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.keys() >= set(FIELDS) else None


def wrapped(line: bytes, context: LineContext) -> bytes:
    """Returns a program's own line as one of this schema; a line that already has the schema is unchanged."""
    if fields_of(line) is not None:
        return line
    return json_line("INFO", line.decode(errors="replace").rstrip("\r"), context).encode()
