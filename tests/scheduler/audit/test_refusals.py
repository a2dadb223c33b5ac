"""The audit log's budget: nobody floods it, and what is not written is counted."""

from __future__ import annotations

import io
import json
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.scheduler.access import Caller
from muster.scheduler.audit.audit_log import AuditLog
from muster.scheduler.audit.grpc_trace import Failure
from muster.scheduler.audit.logs import LOG
from muster.scheduler.audit.refusals import (
    DECISIONS,
    LINES,
    MAX_CALLERS,
    WINDOW_S,
    ThinnedRecorder,
    caller_of,
)
from muster.scheduler.jobs.driver import Note
from tests.scheduler.fakes import FakeClock
from tests.scheduler.processes import Pki, Stream, channel, form, join, scheduler


def by(caller: str) -> Caller:
    """Somebody at an address of his own: without a certificate that is who he is."""
    return Caller(f"{caller}:5")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handlers, level = LOG.handlers[:], LOG.level
    LOG.handlers[:] = [logging.StreamHandler(stream)]
    LOG.setLevel(logging.INFO)
    yield stream
    LOG.handlers[:] = handlers
    LOG.setLevel(level)


def deny(recorder: ThinnedRecorder, caller: str, times: int = 1) -> None:
    for _ in range(times):
        recorder.denied("Status", by(caller), "", "not_permitted", "no")


def test_a_certificate_is_one_caller_wherever_it_comes_from_and_an_address_whatever_its_ports() -> None:
    assert caller_of({"certificate": "a", "peer": "10.0.0.1:5"}) == "a"
    assert caller_of({"peer": "[::1]:5"}) == caller_of({"peer": "[::1]:6"}) == "[::1]"


def entries(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]  # the first names the key


def test_the_count_is_written_when_the_window_is_over_and_at_the_end(
    lines: io.StringIO, tmp_path: Path
) -> None:
    path, clock = tmp_path / "audit.jsonl", FakeClock()
    recorder = ThinnedRecorder(AuditLog(path), clock)
    deny(recorder, "a", LINES + 7)
    recorder.drained("job", "node", by("a"), "why")
    assert [entry["event"] for entry in entries(path)] == ["denied"] * LINES + ["drained"]
    clock.advance(WINDOW_S)
    told = entries(path)[-1]
    assert (told["event"], told["count"], told["peer"]) == ("refused", 7, "a:5")
    assert told["code"] == "not_permitted"
    assert told["text"] == "7 more refusals of this caller within 60 s were not written (7 not_permitted)."
    assert clock.armed() == []
    deny(recorder, "b", LINES + 1)
    recorder.close()
    assert entries(path)[-1]["count"] == 1
    assert clock.armed() == []
    assert len(lines.getvalue().splitlines()) == len(entries(path))  # the log has the same


def test_the_log_has_its_budget_without_an_audit_log_too(lines: io.StringIO) -> None:
    clock = FakeClock()
    recorder = ThinnedRecorder(None, clock)
    deny(recorder, "a", 7000)
    recorder.close()
    assert len(lines.getvalue().splitlines()) == LINES + 1
    assert recorder.refusals == {"not_permitted": 7000}
    assert clock.armed() == []


def test_what_a_job_decides_about_a_flood_of_joins_is_thinned(lines: io.StringIO) -> None:
    clock = FakeClock()
    recorder = ThinnedRecorder(None, clock)
    for number in range(DECISIONS + 9):
        recorder.note(Note("decided", "job", f"Node {number} is refused."))
    recorder.note(Note("lost", "job", "killed"))
    clock.advance(10.0)
    told = lines.getvalue().splitlines()
    assert len(told) == DECISIONS + 2
    assert "9 more within 10 s were not written. The last: Node 208 is refused." in told[-1]


def test_callers_beyond_the_most_share_one_budget_and_are_not_named(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    recorder = ThinnedRecorder(AuditLog(path), FakeClock())
    for number in range(MAX_CALLERS + LINES + 3):
        deny(recorder, f"caller {number}")
    recorder.close()
    told = entries(path)
    assert len(told) == MAX_CALLERS + LINES + 1
    assert (
        told[-1]["text"] == "3 more refusals of other callers within 60 s were not written (3 not_permitted)."
    )
    assert "peer" not in told[-1]


def test_failed_handshakes_have_been_thinned_already(tmp_path: Path) -> None:
    recorder = ThinnedRecorder(AuditLog(tmp_path / "audit.jsonl"), FakeClock())
    for _ in range(2 * LINES):
        recorder.handshake_failed(Failure("no_tls", "10.0.0.1:5", "no"))
    recorder.close()
    assert len(entries(tmp_path / "audit.jsonl")) == 2 * LINES


def test_an_insider_who_keeps_joining_does_not_fill_the_audit_log(pki: Pki, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    with (
        scheduler(**pki.env(), MS_AUDIT_LOG=str(audit), MS_NODE_TIMEOUT="600") as running,
        channel(running.target, pki.credentials("client")) as over,
    ):
        members = form(over)
        for number in range(3 * LINES):
            extra = Stream(over)
            extra.put(join(f"extra-{number}"))
            assert extra.end() is not None
        running.signal(signal.SIGTERM)
        for each in members:
            each.end()
        running.wait()
    refused = [entry for entry in entries(audit) if entry["event"] == "refused"]
    assert len(refused) == LINES + 1
    assert refused[-1]["count"] == 2 * LINES
    assert refused[-1]["certificate"] == refused[0]["certificate"]
