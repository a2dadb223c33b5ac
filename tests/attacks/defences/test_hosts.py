"""Attacks by somebody on the same host, or who writes what Muster reads: files, journals, logs, settings."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.core import Metric

from muster.certs.pki import certificates
from muster.certs.pki.identity import Identity
from muster.certs.pki.revocation import RevocationList, Revocations
from muster.certs.runtime import watcher
from muster.launch import process as launch_process
from muster.launch import rank_table
from muster.scheduler.audit import logs, refusals
from muster.scheduler.audit.audit_log import AuditLog
from muster.scheduler.audit.logs import LOG, LineFormatter
from muster.scheduler.core import events, joining, records
from muster.scheduler.core.machine import Machine as Job
from muster.scheduler.errors import LimitError, SchedulerSettingsError
from muster.scheduler.jobs import adoption, jobs, journal
from muster.scheduler.jobs.journal import Journal, JournalError
from muster.scheduler.serve import metrics
from muster.training import checkpoint
from muster.training.sampler import ShardedSampler
from muster.training.state import TrainingState
from muster.wire import codec, files, grpc_stderr, launches, messages
from muster.wire.grpc_stderr import record_of
from muster.wire.launches import RunRecord
from muster.wire.settings import Environment
from muster.wire.v1 import rendezvous_pb2 as pb
from tests.attacks.defences.attack import Attack, check
from tests.attacks.defences.test_connections import ATTACKS as ON_CONNECTIONS
from tests.attacks.on_one_job.test_transport import FORGED
from tests.ports import free_port
from tests.scheduler.fakes import FakeClock
from tests.scheduler.jobs.test_adoption import SETTINGS, A, B, C, D, adopting, joined
from tests.scheduler.jobs.test_adoption import journal as journal_of
from tests.scheduler.jobs.test_jobs import Rig

# ---------------------------------------------------------------- files


def hold_up_by_a_fifo(folder: Path) -> bool:
    """Puts a FIFO where a file is read: the process waits for a writer, for ever."""
    os.mkfifo(folder / "config.json")
    thread = threading.Thread(
        target=lambda: quietly(files.read_regular, folder / "config.json", 10), daemon=True
    )
    thread.start()
    for _ in range(30):  # short ones: a machine that stands still takes one of them
        thread.join(0.01)
    waits = thread.is_alive()
    while thread.is_alive():  # lets it go
        with contextlib.suppress(OSError):
            os.close(os.open(folder / "config.json", os.O_WRONLY | os.O_NONBLOCK))
        thread.join(0.01)
    return waits


def quietly(call: Callable[..., object], *arguments: object) -> object:
    with contextlib.suppress(Exception):
        return call(*arguments)
    return None


def fill_memory(folder: Path) -> bool:
    """Puts a file of 64 MiB where a password is read."""
    with (folder / "password").open("wb") as stream:
        stream.truncate(64 << 20)
    found = quietly(files.read_regular, folder / "password", 1024)
    return isinstance(found, bytes) and len(found) > 1024


def unbounded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(files, "read_regular", lambda path, limit: Path(path).read_bytes())


def write_through_a_link(folder: Path) -> bool:
    """Makes the audit log a link to another file, which the scheduler may write."""
    (folder / "victim").write_text("")
    (folder / "audit.jsonl").symlink_to(folder / "victim")
    with contextlib.suppress(Exception):
        log = AuditLog(folder / "audit.jsonl")
        log.write("joined", {})
        log.close()
    return (folder / "victim").stat().st_size > 0


def recorded_in_anothers_file(folder: Path) -> bool:
    """Makes the record of a run a link to another file, which the launcher may write."""
    (folder / "victim").write_text("")
    (folder / "record_here.jsonl").symlink_to(folder / "victim")
    RunRecord(folder, "here").note("begun")
    return (folder / "victim").stat().st_size > 0


def write_through_a_guessed_name(folder: Path) -> bool:
    """Puts a link where a file is written before it is renamed."""
    (folder / "victim").write_text("keep")
    (folder / "hccl.json.part").symlink_to(folder / "victim")
    rank_table.write_table(folder / "hccl.json", {"server_list": []}, force=True)
    return (folder / "victim").read_text() != "keep" if (folder / "victim").exists() else True


def flip_a_record(folder: Path) -> bool:
    """Changes a letter of a journal."""
    path = folder / "j"
    with Journal(path) as kept:
        kept.append("job", [records.JobEnded(False, "nobody came")])
    path.write_bytes(path.read_bytes().replace(b"nobody came", b"anybody can"))
    try:
        with Journal(path):
            return True
    except JournalError:
        return False


def take_a_record_away(folder: Path) -> bool:
    """Removes the record that says that a worker may never come back."""
    path = folder / "j"
    with Journal(path) as kept:
        kept.append("job", [*journal_of(A, B, C), records.Removed("a", 1, "lost")])
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM records WHERE record LIKE '%Removed%'")
    try:
        with Journal(path):
            return True
    except JournalError:
        return False


def without_heads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(journal, "heads_agree", lambda connection, heads: True)


def alter_a_checkpoint(folder: Path) -> bool:
    """Changes a weight in a checkpoint."""

    def state() -> TrainingState:
        return TrainingState({"w": np.full(100, 2.0)}, ShardedSampler(8, 8))

    path = checkpoint.save(folder, state())
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    loaded = state()
    quietly(checkpoint.load, path, loaded)
    return bool((loaded.arrays["w"] != 2.0).any())


def put_an_older_list_back(_: Path) -> bool:
    """Puts the revocation list of last week back, which does not have the stolen certificate."""
    new, old = revocations(7), revocations(6)
    kept, _complaints = vars(watcher)["keep_newest"](old, {each.key: (each,) for each in new.lists})
    return bool(kept.lists[0].number == 6)


def revocations(number: int) -> Revocations:
    import datetime

    now = datetime.datetime.now(datetime.UTC)
    fields = {
        "name": "ca",
        "number": number,
        "this_update": now,
        "next_update": now,
        "serials": frozenset(),
    }
    names = {each: fields.get(each, b"x") for each in RevocationList.__dataclass_fields__}
    return Revocations(lists=(RevocationList(**names),))  # type: ignore[arg-type]


def flood_with_authorities(_: Path) -> bool:
    """Makes a file of authorities that takes minutes to read."""
    pem = 2000 * b"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"
    try:
        certificates.load_authorities(pem, "ca.crt")
    except Exception as error:
        return "legal are at most" not in str(error)
    return True


# ---------------------------------------------------------------- logs


def forge_a_log_line(_: Path) -> bool:
    """Joins under a name with a line break and a line of one's own."""
    record = logging.LogRecord("x", logging.INFO, "", 0, "joined node=%s", ("a\n2026 ERROR forged",), None)
    return "\n" in LineFormatter().format(record)


def forge_a_line_by_a_servers_name(_: Path) -> bool:
    """Asks in a TLS hello for a server whose name is a line of the log, or a terminal's command."""
    head = b"E0101 00:00:00.000000       1 ssl_transport_security.cc:1] No match found for server name: "
    lines = [grpc_stderr.Sayings().add(head + name, record_of(head + name), 0.0) for name in FORGED.values()]
    return not all(len(told) == 1 and told[0].isprintable() for told in lines)


def flood_the_log(_: Path) -> bool:
    """Is refused 2,000 times, a line each."""
    stream, before = io.StringIO(), LOG.handlers[:]
    LOG.handlers[:] = [logging.StreamHandler(stream)]
    try:
        recorder = refusals.ThinnedRecorder(None, FakeClock())
        for _number in range(2000):
            recorder.denied("Status", None, "10.0.0.1:5", "not_permitted", "no")
    finally:
        LOG.handlers[:] = before
    return len(stream.getvalue().splitlines()) > 1000


def read_a_password_in_a_log(_: Path) -> bool:
    """Reads the head of a launcher's log, which shows the environment."""
    return "s3cret" in "\n".join(launch_process.environment_dump({"MS_SERVER_PASSWORD": "s3cret"}))


def read_a_unique_id_in_an_error(_: Path) -> bool:
    """Reads a message of the protocol in a traceback."""
    return b"s3cret".decode() in repr(messages.UniqueIds(3, (b"s3cret",)))


# ---------------------------------------------------------------- the scheduler's doors


def half_requests(_: Path) -> bool:
    """Opens 60 connections to the metrics, and says nothing on them."""

    def snapshot() -> list[Metric]:
        return []

    async def run() -> int:
        server = metrics.MetricsServer(snapshot)
        port = free_port()
        await server.start("127.0.0.1", port)
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
        waiting = [asyncio.create_task(reader.read(1)) for reader, _ in opened]
        for _ in range(10):  # short ones: a machine that stands still takes one of them
            _, open_still = await asyncio.wait(waiting, timeout=0.05)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        server.close()
        for _reader, writer in opened:
            writer.close()
        return len(open_still)

    return asyncio.run(run()) > 50


def endless_request(_: Path) -> bool:
    """Sends the metrics a request that has no end."""

    async def run() -> bool:
        server = metrics.MetricsServer(list)
        port = free_port()
        await server.start("127.0.0.1", port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x" * 100_000)
        heard = asyncio.ensure_future(reader.read(1))
        for _ in range(10):
            _, waits = await asyncio.wait([heard], timeout=0.05)
        heard.cancel()
        await asyncio.gather(heard, return_exceptions=True)
        server.close()
        writer.close()
        return bool(waits)

    return asyncio.run(run())


def come_back_from_the_dead(_: Path) -> bool:
    """A worker that was declared lost, and whose place another has, takes its place again."""
    job = Job.recover(
        "job", SETTINGS, [*journal_of(A, B, C), records.Removed("a", 1, "not heard for 5 s")], 0.0
    )
    said = job.step(events.Joined(events.SessionId(7), A, 1, 0, built=True), 1.0).messages
    return not any(isinstance(message, messages.Refused) for _, message in said)


def take_a_full_jobs_place(_: Path) -> bool:
    """One more worker than the job has places for joins as a member."""
    job = Job.recover("job", SETTINGS, journal_of(A, B, C), 0.0)
    for rank, who in enumerate((A, B, C)):
        job.step(events.Joined(events.SessionId(rank), who, 1, rank, built=True), 0.5)
    said = job.step(events.Joined(events.SessionId(7), D), 1.0).messages
    return any(
        isinstance(message, messages.Welcome) for session, message in said if session == events.SessionId(7)
    )


def speak_for_a_generation_that_is_not(_: Path) -> bool:
    """Two members report a generation of three to a scheduler with a lost journal: they would rule it."""
    job = adopting(adopt=True, records=[])
    return any(job.step(joined(who, rank), 1.0).records for rank, who in enumerate((A, B)))


def be_adopted_unasked(_: Path) -> bool:
    """Three liars claim to a scheduler with a sound journal that they are its next generation."""
    job = adopting(adopt=False)
    liars = [who.replaced(incarnation=666) for who in (A, B, C)]
    return any(job.step(joined(who, rank), 1.0).records for rank, who in enumerate(liars))


def by_no_word(patch: pytest.MonkeyPatch) -> None:
    made = adoption.AdoptingJob.__init__

    def always(self: adoption.AdoptingJob, *arguments: object, adopt: bool) -> None:
        made(self, *arguments, adopt=True)  # type: ignore[arg-type]

    patch.setattr(adoption.AdoptingJob, "__init__", always)


def hand_in_too_many_ids(_: Path) -> bool:
    """Rank 0 hands in unique ids of 4 MB, which the scheduler would send to every member."""
    ids = pb.PublishUniqueIds(generation=1, unique_ids=[b"x" * 1000] * 4000)
    data = pb.WorkerMessage(publish_unique_ids=ids).SerializeToString()
    try:
        codec.decode_worker_message(data)
    except codec.WireError:
        return False
    return True


def act_in_another_job(_: Path) -> bool:
    """Shows a certificate of another job."""
    return Identity("theirs", "worker").may(role="worker", job="ours") is None


def open_jobs_without_end(_: Path) -> bool:
    """Joins 300 jobs of a scheduler that serves any job, under one certificate for any job."""

    async def run() -> bool:
        rig = Rig(serve=True)
        try:
            for number in range(300):
                await rig.jobs.for_join(f"job-{number}", fresh=True)
        except LimitError:
            return False
        finally:
            await rig.jobs.close()
        return True

    return asyncio.run(run())


def forge_a_line_by_a_setting(_: Path) -> bool:
    """Sets MS_TOPOLOGY, which is written to the log, to a text with a line of one's own."""
    try:
        text = Environment({"MS_TOPOLOGY": "rack\n2026 ERROR forged"}, SchedulerSettingsError).text(
            "MS_TOPOLOGY"
        )
    except SchedulerSettingsError:
        return False
    return "\n" in text


def as_it_stands(self: Environment, name: str, default: str = "") -> str:
    return self._env.get(name, default)


HOST, INSIDER, STRANGER = (
    "another user of the host",
    "a worker of the job",
    "reaches the port, no certificate",
)
ATTACKS = (
    Attack(
        "hold a process up by a FIFO",
        "availability",
        HOST,
        hold_up_by_a_fifo,
        lambda patch: patch.setattr(files, "open_regular", lambda path: os.open(path, os.O_RDONLY)),
    ),
    Attack("fill the memory by a file", "memory", HOST, fill_memory, unbounded),
    Attack(
        "write through a link",
        "files of the scheduler's user",
        HOST,
        write_through_a_link,
        lambda patch: patch.setattr(os, "O_NOFOLLOW", 0),
    ),
    Attack(
        "have a run recorded elsewhere",
        "files of the launcher's user",
        HOST,
        recorded_in_anothers_file,
        lambda patch: patch.setattr(
            launches, "open_own", lambda path: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        ),
    ),
    Attack(
        "write through a guessed name",
        "files of the launcher's user",
        HOST,
        write_through_a_guessed_name,
        lambda patch: patch.setattr(rank_table, "beside", lambda path: path.with_name(f"{path.name}.part")),
    ),
    Attack(
        "flip a letter of a journal",
        "the membership",
        "writes the disk",
        flip_a_record,
        lambda patch: patch.setattr(journal, "chained_checksum", lambda *parts: "0"),
    ),
    Attack("take a record away", "the membership", "writes the disk", take_a_record_away, without_heads),
    Attack(
        "alter a checkpoint",
        "the parameters",
        "writes the disk",
        alter_a_checkpoint,
        lambda patch: patch.setattr(checkpoint, "digest_of", lambda *parts: "0"),
    ),
    Attack(
        "put an older list back",
        "revocation",
        "writes the list's file",
        put_an_older_list_back,
        lambda patch: patch.setattr(watcher, "keep_newest", lambda new, newest: (new, [])),
    ),
    Attack(
        "flood with authorities",
        "processor time",
        "writes the CA file",
        flood_with_authorities,
        lambda patch: patch.setattr(certificates, "MAX_CERTIFICATES", 1 << 40),
    ),
    Attack(
        "forge a log line",
        "the log",
        INSIDER,
        forge_a_log_line,
        lambda patch: patch.setattr(logs, "one_line", str),
    ),
    Attack(
        "forge a line by a server's name",
        "the log",
        STRANGER,
        forge_a_line_by_a_servers_name,
        lambda patch: patch.setattr(grpc_stderr, "one_line", str),
    ),
    Attack(
        "flood the log",
        "the disk",
        INSIDER,
        flood_the_log,
        lambda patch: patch.setattr(refusals, "LINES", 1 << 40),
    ),
    Attack(
        "read a password in a log",
        "a key's password",
        "reads logs",
        read_a_password_in_a_log,
        lambda patch: patch.setattr(launch_process, "SECRET_WORDS", ()),
    ),
    Attack(
        "read a unique id in an error",
        "the unique id",
        "reads logs",
        read_a_unique_id_in_an_error,
        lambda patch: patch.setattr(messages.UniqueIds, "secret_fields", ()),
    ),
    Attack(
        "half requests for metrics",
        "the scheduler's memory",
        STRANGER,
        half_requests,
        lambda patch: patch.setattr(metrics, "MAX_CONNECTIONS", 1 << 40),
    ),
    Attack(
        "a request for metrics without an end",
        "the scheduler's memory",
        STRANGER,
        endless_request,
        lambda patch: patch.setattr(metrics, "MAX_REQUEST_BYTES", 1 << 40),
    ),
    Attack(
        "come back from the dead",
        "a place",
        "a former member",
        come_back_from_the_dead,
        lambda patch: patch.setattr(joining, "check_process", lambda ledger, event: None),
    ),
    Attack(
        "take a full job's place",
        "a place",
        INSIDER,
        take_a_full_jobs_place,
        lambda patch: patch.setattr(joining, "check_place", lambda ledger, settings, candidate: None),
    ),
    Attack(
        "speak for a generation that is not",
        "the membership",
        INSIDER,
        speak_for_a_generation_that_is_not,
        lambda patch: patch.setattr(adoption, "agreeing_members", list),
    ),
    Attack("be adopted unasked", "the membership", INSIDER, be_adopted_unasked, by_no_word),
    Attack(
        "hand in too many unique ids",
        "memory and network",
        INSIDER,
        hand_in_too_many_ids,
        lambda patch: patch.setattr(codec, "decode_worker_message", pb.WorkerMessage.FromString),
    ),
    Attack(
        "open jobs without end",
        "the scheduler's memory",
        "a certificate for any job",
        open_jobs_without_end,
        lambda patch: patch.setattr(jobs, "MAX_JOBS", 1 << 40),
    ),
    Attack(
        "forge a line by a setting",
        "the log",
        "sets the environment",
        forge_a_line_by_a_setting,
        lambda patch: patch.setattr(Environment, "text", as_it_stands),
    ),
    Attack(
        "act in another job",
        "the job",
        "a certificate of another job",
        act_in_another_job,
        lambda patch: patch.setattr(Identity, "may", lambda self, **what: None),
    ),
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_its_defence_and_nothing_else_stops_it(attack: Attack, tmp_path: Path) -> None:
    check(attack, tmp_path)


def test_attacks_are_thirty_at_least_each_with_its_asset_and_position() -> None:
    attacks = (*ON_CONNECTIONS, *ATTACKS)
    assert len({attack.name for attack in attacks}) == len(attacks) >= 30
    assert all(attack.asset and attack.position for attack in attacks)
