"""The audit log's budget: nobody floods it, and what is not written is counted."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from muster.scheduler.audit.refusals import LINES, MAX_CALLERS, WINDOW_S, ThinnedAuditLog, caller_of
from tests.scheduler.fakes import FakeClock
from tests.scheduler.processes import Pki, Stream, channel, form, join, scheduler


def by(caller: str, code: str = "job_full") -> dict[str, object]:
    return {"certificate": caller, "peer": "10.0.0.1:5", "code": code}


def test_a_certificate_is_one_caller_wherever_it_comes_from_and_an_address_whatever_its_ports() -> None:
    assert caller_of(by("a")) == "a"
    assert caller_of({"peer": "[::1]:5"}) == caller_of({"peer": "[::1]:6"}) == "[::1]"


def entries(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_count_is_written_when_the_window_is_over_and_at_the_end(tmp_path: Path) -> None:
    path, clock = tmp_path / "audit.jsonl", FakeClock()
    log = ThinnedAuditLog(path, clock)
    for _ in range(LINES + 7):
        log.write("refused", by("a"))
    log.write("joined", by("a"))
    assert [entry["event"] for entry in entries(path)] == ["refused"] * LINES + ["joined"]
    clock.advance(WINDOW_S)
    told = entries(path)[-1]
    assert (told["event"], told["count"], told["certificate"]) == ("refused", 7, "a")
    assert told["code"] == "job_full"
    assert told["text"] == "7 more refusals of this caller within 60 s were not written (7 job_full)."
    assert clock.armed() == []
    for _ in range(LINES + 1):
        log.write("denied", by("b"))
    log.close()
    assert entries(path)[-1]["count"] == 1
    assert clock.armed() == []


def test_callers_beyond_the_most_share_one_budget_and_are_not_named(tmp_path: Path) -> None:
    path, clock = tmp_path / "audit.jsonl", FakeClock()
    log = ThinnedAuditLog(path, clock)
    for number in range(MAX_CALLERS + LINES + 3):
        log.write("refused", by(f"caller {number}"))
    log.close()
    told = entries(path)
    assert len(told) == MAX_CALLERS + LINES + 1
    assert told[-1]["text"] == "3 more refusals of other callers within 60 s were not written (3 job_full)."
    assert "certificate" not in told[-1]


def test_failed_handshakes_have_been_thinned_already(tmp_path: Path) -> None:
    log = ThinnedAuditLog(tmp_path / "audit.jsonl", FakeClock())
    for _ in range(2 * LINES):
        log.write("denied", {"call": "handshake", "peer": "10.0.0.1"})
    log.close()
    assert len(entries(tmp_path / "audit.jsonl")) == 2 * LINES


def test_an_insider_who_keeps_joining_does_not_fill_the_audit_log(pki: Pki, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    with (
        scheduler(**pki.env(), MS_AUDIT_LOG=str(audit)) as running,
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
