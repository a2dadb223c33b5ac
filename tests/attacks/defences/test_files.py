"""Attacks by somebody who may write the folder of a run, or the file of a rank table."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tracemalloc
from pathlib import Path

import pytest

from muster.scheduler.core.ledger import missing
from muster.web import logs, past, report
from muster.wire import launches, rank_table
from muster.wire.launches import RunRecord, read_records
from muster.wire.rank_table import parse_rank_table
from tests.attacks.defences.attack import Attack, check


@pytest.fixture
def _remember_attack() -> None:
    """In the place of the folder's: these attacks are on no job of processes."""


# ---------------------------------------------------------------- the folder of a run


def run_of(folder: Path, *lines: str) -> Path:
    """The folder of a run in which somebody else has left a record."""
    RunRecord(folder, "a").note("began", job_id="j")
    if lines:
        (folder / "record_b.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def reported(folder: Path) -> tuple[str, str]:
    """What ``muster report`` writes into its file, and what on the terminal; nothing: it has crashed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            assert report.main([str(folder)]) == 0
        except (ValueError, OverflowError):
            return "", said.getvalue()
    return (folder / "report.html").read_text(), said.getvalue()


def name_that_is_no_text(folder: Path) -> bool:
    """A log whose name no file in UTF-8 can hold."""
    Path(os.fsdecode(os.fsencode(run_of(folder)) + b"/\xff.log")).touch()
    return not reported(folder)[0]


def day_after_all_calendars(folder: Path) -> bool:
    run_of(folder)
    text = "9999-12-31T23:59:59.999999Z INFO lost text=x\n"
    (folder / "scheduler.log").write_text(text)
    return not reported(folder)[0]


def name_that_commands_a_terminal(folder: Path) -> bool:
    """The report goes beside the record; its path is said on the terminal."""
    hostile = folder / "\x1b[2J\u202e"
    hostile.mkdir()
    return "\x1b" in reported(run_of(hostile))[1]


def text_that_commands_a_terminal(folder: Path) -> bool:
    """At who looks at the file with ``cat``, or pastes from it."""
    run_of(folder, r'{"time":2,"kind":"said","text":"\u001b[2J\u202e"}')
    return bool(set("\x1b\u202e") & set(reported(folder)[0]))


def log_that_commands_a_terminal(folder: Path) -> bool:
    run_of(folder)
    (folder / "worker_0.log").write_text("\x1b[2J\n")
    return "\x1b" in reported(folder)[0]


def report_of_many_megabytes(folder: Path) -> bool:
    line = '{"time":2,"kind":"said","tone":"warning","text":"' + 100 * "x" + '"}'
    run_of(folder, *[line] * 10_000)
    return len(reported(folder)[0]) > 1_000_000


def text_of_many_megabytes(folder: Path) -> bool:
    run_of(folder, f'{{"time":2,"kind":"said","text":"{"x" * 1_000_000}"}}')
    return len(reported(folder)[0]) > 1_000_000


def peak_of(folder: Path) -> int:
    """Most memory that reading the records of a run takes, in bytes."""
    tracemalloc.start()
    try:
        for _ in read_records(folder):
            pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def line_that_takes_much_memory(folder: Path) -> bool:
    """What three bytes name takes sixty-four."""
    nested = f'{{"time":2,"a":[{"[]," * 400_000}[]]}}'
    return peak_of(run_of(folder, nested)) > 30 * len(nested)


def lines_without_end(folder: Path) -> bool:
    found = read_records(run_of(folder, *['{"time":2}'] * 250_000))
    return sum(1 for _ in found) > 210_000


# ---------------------------------------------------------------- a rank table


def what_is_missing(**device: object) -> str:
    """What waiting workers are told of a table of one line; empty: it is refused."""
    line = {"device_id": 0, "rank_id": 0, **device}
    server = {"server_id": str(device.get("server_id", "a")), "device": [line]}
    try:
        table = parse_rank_table(json.loads(json.dumps({"server_list": [server]})))
    except rank_table.RankTableError as error:
        assert len(str(error)) < 400
        return ""
    [said] = missing((), 1, table)
    return said


def server_of_a_megabyte(_: Path) -> bool:
    """All workers are told again and again who is missing, by the name that the table has."""
    return len(what_is_missing(server_id="x" * 1_000_000)) > 1000


def device_beyond_all(_: Path) -> bool:
    """A job that nobody can ever join, which nobody is told."""
    return bool(what_is_missing(device_id=1 << 40))


def ranks_beyond_all(_: Path) -> bool:
    devices = [{"device_id": 0, "rank_id": rank} for rank in range(70_000)]
    servers = [{"server_id": str(each["rank_id"]), "device": [each]} for each in devices]
    try:
        return len(parse_rank_table({"server_list": servers}).entries) > 65_536
    except rank_table.RankTableError:
        return False


FOLDER, TABLE = "may write the folder of the run", "may write the file"
ENDLESS = 1 << 60
ATTACKS = (
    Attack(
        "a log with a name that is no text", "the report", FOLDER, name_that_is_no_text,
        lambda patch: patch.setattr(logs, "one_line", str),
    ),
    Attack(
        "a log of the day after all calendars", "the report", FOLDER, day_after_all_calendars,
        lambda patch: patch.setattr(past, "LAST_S", float("inf")),
    ),
    Attack(
        "a folder whose name commands a terminal", "the terminal", FOLDER, name_that_commands_a_terminal,
        lambda patch: patch.setattr(report, "one_line", str),
    ),
    Attack(
        "a text that commands a terminal", "the terminal", FOLDER, text_that_commands_a_terminal,
        lambda patch: patch.setattr(past, "one_line", str),
    ),
    Attack(
        "a log that commands a terminal", "the terminal", FOLDER, log_that_commands_a_terminal,
        lambda patch: patch.setattr(logs, "one_line", str),
    ),
    Attack(
        "ten thousand warnings", "the browser's memory", FOLDER, report_of_many_megabytes,
        lambda patch: patch.setattr(report, "SENTENCES", ENDLESS),
    ),
    Attack(
        "a text of a megabyte", "the browser's memory", FOLDER, text_of_many_megabytes,
        lambda patch: patch.setattr(past, "MAX_SHOWN", ENDLESS),
    ),
    Attack(
        "a line of empty lists", "memory", FOLDER, line_that_takes_much_memory,
        lambda patch: patch.setattr(launches, "MAX_LINE", ENDLESS),
    ),
    Attack(
        "lines of nothing", "memory", FOLDER, lines_without_end,
        lambda patch: patch.setattr(launches, "MAX_LINES", ENDLESS),
    ),
    Attack(
        "a server with a name of a megabyte", "the wire, logs", TABLE, server_of_a_megabyte,
        lambda patch: patch.setattr(rank_table, "MAX_NAME", ENDLESS),
    ),
    Attack(
        "a device that no worker can name", "the job's start", TABLE, device_beyond_all,
        lambda patch: patch.setattr(rank_table, "MAX_DEVICES", ENDLESS),
    ),
    Attack(
        "more ranks than a job may have", "memory", TABLE, ranks_beyond_all,
        lambda patch: patch.setattr(rank_table, "MAX_WORKERS", ENDLESS),
    ),
)  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_its_defence_and_nothing_else_stops_it(attack: Attack, tmp_path: Path) -> None:
    check(attack, tmp_path)
