"""The audit log's budget: nobody floods it, and what is not written is counted."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

from scheduler.refusals import LINES, MAX_CALLERS, WINDOW_S, Budget, ThinnedAuditLog
from tests.scheduler.fakes import FakeClock
from tests.scheduler.processes import Pki, Stream, channel, form, join, scheduler


def by(caller: str, code: str = "job_full") -> dict[str, object]:
    return {"certificate": caller, "peer": "10.0.0.1:5", "code": code}


def test_each_caller_has_a_budget_of_his_own() -> None:
    budget = Budget()
    assert [budget.take(by("a"), 0.0) for _ in range(LINES + 2)] == [True] * LINES + [False] * 2
    assert budget.take(by("b"), 0.0)
    assert budget.take({"peer": "10.0.0.1:5"}, 0.0)
    assert budget.next_s() == WINDOW_S


def test_an_address_is_one_caller_whatever_its_ports() -> None:
    budget = Budget()
    taken = [budget.take({"peer": f"[::1]:{port}"}, 0.0) for port in range(LINES + 1)]
    assert taken == [True] * LINES + [False]


def test_a_window_that_is_over_tells_what_it_did_not_let_through() -> None:
    budget = Budget()
    for code in ["job_full"] * LINES + ["malformed", "job_full", "job_full"]:
        budget.take(by("a", code), 1.0)
    budget.take(by("b"), 2.0)
    assert list(budget.due(WINDOW_S)) == []
    [untold] = budget.due(WINDOW_S + 2.0)
    assert untold.codes == Counter(job_full=2, malformed=1)
    assert untold.who == {"certificate": "a", "peer": "10.0.0.1:5"}
    assert budget.next_s() is None
    assert budget.take(by("a"), WINDOW_S + 2.0)


def test_callers_beyond_the_most_share_one_budget() -> None:
    budget = Budget()
    for number in range(MAX_CALLERS):
        assert budget.take(by(f"known {number}"), 0.0)
    taken = [budget.take(by(f"new {number}"), 0.0) for number in range(LINES + 3)]
    assert taken == [True] * LINES + [False] * 3
    assert budget.take(by("known 0"), 0.0)
    [untold] = budget.due(WINDOW_S)
    assert untold.codes.total() == 3
    assert untold.who == {}


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
