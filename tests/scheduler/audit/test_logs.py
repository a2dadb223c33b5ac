"""Log lines and audit entries: complete, on one line, without a way for foreign text to forge one."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.scheduler.access import Caller
from muster.scheduler.audit.audit_log import AuditLog
from muster.scheduler.audit.logs import LOG, LineFormatter, Recorder, fields
from muster.scheduler.jobs.driver import Note
from muster.scheduler.jobs.stream import OutgoingStream
from tests.scheduler.fakes import candidate


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What the scheduler's log would write."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(LineFormatter())
    level = LOG.level
    LOG.addHandler(handler)
    LOG.setLevel("INFO")
    yield text
    LOG.removeHandler(handler)
    LOG.setLevel(level)


def test_fields_are_quoted_where_blanks_would_blur_them() -> None:
    text = fields(node_id="a-1", text='said "no"', peer="[::1]:5", empty="", none=None, rank=0)
    assert text == 'node_id=a-1 text="said \\"no\\"" peer=[::1]:5 rank=0'


def test_foreign_text_cannot_forge_a_line_or_a_field() -> None:
    text = fields(text="x\n2026-01-01 INFO joined\r\x1b[2J", node_id="a rank=7")
    assert "\n" not in text
    assert "\r" not in text
    assert "\x1b" not in text
    assert 'node_id="a rank=7"' in text


def test_a_traceback_stays_on_one_line() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
        record = logging.LogRecord("scheduler", logging.ERROR, "f", 1, "fault", None, info)
    shown = LineFormatter().format(record)
    assert "\n" not in shown
    assert " ERROR fault Traceback" in shown


def test_a_note_becomes_one_line_and_one_audit_entry(lines: io.StringIO, tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl")
    recorder = Recorder(audit)
    session = OutgoingStream(3, Caller("10.0.0.2:7"), candidate=candidate("node-9"), rank=4, generation=2)
    recorder.note(Note("refused", "job", "full\nhouse", session, "job_full"))
    recorder.note(Note("decided", "job", "waiting"))
    audit.close()
    told = lines.getvalue().splitlines()
    assert len(told) == 2
    assert told[0].endswith(
        "WARNING refused code=job_full job_id=job peer=10.0.0.2:7 node_id=node-9 host=host"
        ' host_id=host-id rank=4 generation=2 text="full\\\\nhouse"'
    )
    entries = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [entry["event"] for entry in entries] == ["began", "refused"]
    assert {key: entries[1][key] for key in ("event", "code", "node_id", "rank", "text")} == {
        "event": "refused",
        "code": "job_full",
        "node_id": "node-9",
        "rank": 4,
        "text": "full\\nhouse",
    }
    assert recorder.refusals == {"job_full": 1}


@pytest.mark.parametrize("kind", ["joined", "left", "lost", "refused", "expelled", "expired"])
def test_what_concerns_security_is_in_the_audit_log(kind: str, tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl")
    Recorder(audit).note(Note(kind, "job", "why"))
    audit.close()
    entries = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [entry["event"] for entry in entries] == ["began", kind]


def test_an_operators_drain_is_in_the_audit_log(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl")
    Recorder(audit).drained("job", "node-9", Caller("10.0.0.2:7"), "new disk")
    audit.close()
    entry = json.loads((tmp_path / "audit.jsonl").read_text().splitlines()[1])
    assert {key: entry[key] for key in ("event", "job_id", "node_id", "peer", "text")} == {
        "event": "drained",
        "job_id": "job",
        "node_id": "node-9",
        "peer": "10.0.0.2:7",
        "text": "new disk",
    }
