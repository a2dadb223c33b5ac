"""Attacks by somebody who may write the folder of a run, of checkpoints or of launches, or a rank table."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from muster.scheduler.core.ledger import missing
from muster.training import checkpoint
from muster.training.sampler import ShardedSampler
from muster.training.state import TrainingState
from muster.web import logs, past, report
from muster.wire import files, launches, rank_table
from muster.wire.launches import RunRecord, read_records
from muster.wire.rank_table import parse_rank_table
from tests.attacks.defences.attack import Attack, check

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


# ---------------------------------------------------------------- other users of the host

ENEMY = 65534


def record_in_another_users_file(folder: Path) -> bool:
    """Makes the file first in which a run's record will be, and so reads it."""
    mine = folder / "record_here.jsonl"
    mine.touch()
    os.chown(mine, ENEMY, ENEMY)
    RunRecord(folder, "here").note("began", job_id="j")
    return mine.stat().st_size > 0


def read_what_is_anothers(folder: Path) -> bool:
    """Reads the file of a run's record, in a folder that everybody may enter."""
    before = os.umask(0)
    try:
        RunRecord(folder, "here").note("began", job_id="j")
    finally:
        os.umask(before)
    return bool((folder / "record_here.jsonl").stat().st_mode & 0o044)


def readable_by_all(patch: pytest.MonkeyPatch) -> None:
    opened = files.open_regular
    patch.setattr(files, "open_regular", lambda path, flags=os.O_RDONLY: opened(path, flags, 0o666))


def lead_to_another_scheduler(folder: Path) -> bool:
    """Makes the folder first in which this user's launches say where their schedulers are."""
    listed = folder / "muster"
    listed.mkdir(mode=0o700)
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    lie = launches.Launched("job", "127.0.0.1", "5", "", "", str(folder), os.getpid(), began)
    (listed / "1.json").write_text(json.dumps(dataclasses.asdict(lie)))
    for each in (listed / "1.json", listed):
        os.chown(each, ENEMY, ENEMY)
    return bool(launches.running({"XDG_RUNTIME_DIR": str(folder)}))


# ---------------------------------------------------------------- checkpoints


def fifo_among_checkpoints(folder: Path) -> bool:
    """A training that starts again looks for its last checkpoint, and waits for ever."""

    def state() -> TrainingState:
        return TrainingState({"w": np.ones(10)}, ShardedSampler(8, 8))

    checkpoint.save(folder, state())
    fifo = folder / "step_000000009.safetensors"
    os.mkfifo(fifo)

    child = os.fork()  # who opens it here holds the interpreter's lock
    if not child:
        with contextlib.suppress(Exception):
            checkpoint.load_latest(folder, state(), say=lambda _: None)
        os._exit(0)
    waits = False
    while not waits and os.waitpid(child, os.WNOHANG) == (0, 0):
        with contextlib.suppress(OSError):  # there is nobody who reads it
            os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
            waits = True
    if waits:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return waits


FOLDER, TABLE = "may write the folder of the run", "may write the file"
HOST = "another user of the host, who may write the folder"
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
    Attack(
        "a FIFO among checkpoints", "the training", "may write the folder", fifo_among_checkpoints,
        lambda patch: patch.setattr(Path, "is_file", Path.exists),
    ),
)  # fmt: skip
OTHER_USERS = (
    Attack(
        "have a run recorded in one's own file", "who trains what", HOST, record_in_another_users_file,
        lambda patch: patch.setattr(launches, "open_own", lambda path: os.open(path, os.O_WRONLY)),
    ),
    Attack(
        "read the record of a run", "who trains what", "reads the folder", read_what_is_anothers,
        readable_by_all,
    ),
    Attack(
        "lead to another scheduler", "what an operator believes", HOST, lead_to_another_scheduler,
        lambda patch: patch.setattr(os, "getuid", lambda: ENEMY),
    ),
)  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("attack", OTHER_USERS, ids=lambda attack: attack.name)
def test_its_defence_and_nothing_else_stops_another_user(attack: Attack, tmp_path: Path) -> None:
    check(attack, tmp_path)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_its_defence_and_nothing_else_stops_it(attack: Attack, tmp_path: Path) -> None:
    check(attack, tmp_path)
