"""Which error a script sees."""

from __future__ import annotations

import pytest

from muster.errors import (
    FormationTimeoutError,
    JobEndedError,
    LeaveGranted,
    MembershipChanged,
    PeerLostError,
    RefusedError,
    SchedulerUnreachableError,
    SecurityError,
    SettingsError,
    WorkerError,
)
from muster.wire.messages import RefusalCode
from muster.worker.session import events
from muster.worker.session.failures import exit_code_of, failure_of, is_consequence, reason_of, sentence


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (events.FailureKind.REFUSED, RefusedError),
        (events.FailureKind.SECURITY, SecurityError),
        (events.FailureKind.UNREACHABLE, SchedulerUnreachableError),
        (events.FailureKind.FORMATION_TIMEOUT, FormationTimeoutError),
        (events.FailureKind.JOB_ENDED, JobEndedError),
    ],
)
def test_each_kind_has_its_error(kind: events.FailureKind, error: type[WorkerError]) -> None:
    found = failure_of(events.Failed(kind, "what happened"))
    assert type(found) is error
    assert str(found).startswith("What happened.")
    assert found.exit_code == 1


def test_a_refusal_names_its_code() -> None:
    found = failure_of(events.Failed(events.FailureKind.REFUSED, "full", RefusalCode.JOB_FULL))
    assert isinstance(found, RefusedError)
    assert found.code == "JOB_FULL"


def test_a_leave_that_waits_for_nobody_is_one_alone() -> None:
    found = failure_of(events.Failed(events.FailureKind.LEAVE, "you leave"))
    assert isinstance(found, LeaveGranted)
    assert (found.alone, found.exit_code) == (True, 0)


def test_a_job_that_ended_well_is_no_failure_of_the_process() -> None:
    assert failure_of(events.Failed(events.FailureKind.JOB_ENDED, "done", ok=True)).exit_code == 0


@pytest.mark.parametrize(("text", "ended"), [("a b", "A b."), ("A.", "A."), ("Why?", "Why?"), ("", ".")])
def test_sentences(text: str, ended: str) -> None:
    assert sentence(text) == ended


def test_a_reason_for_others_leaves_out_what_the_script_could_have_done() -> None:
    error = MembershipChanged("Generation 3 is over:\nrank 1 left.", generation=3)
    assert "Call session.rejoin()" in str(error)
    assert reason_of(error) == "MembershipChanged: Generation 3 is over: rank 1 left."
    assert reason_of(ValueError("out of luck")) == "ValueError: out of luck"


def handled(error: Exception, then: Exception) -> Exception:
    """``then``, raised while ``error`` was handled."""
    try:
        try:
            raise error
        except Exception:
            raise then  # noqa: B904 - as scripts do
    except Exception as raised:
        return raised


CHANGED = MembershipChanged("Over.", generation=1)


@pytest.mark.parametrize(
    ("error", "of_others"),
    [
        (CHANGED, True),
        (PeerLostError("Gone.", rank=1), True),
        (RefusedError("Dead.", code="SUPERSEDED"), True),
        (handled(CHANGED, RuntimeError("training failed")), True),
        (RefusedError("Full.", code="JOB_FULL"), False),
        (ValueError("mine"), False),
        (handled(ValueError("mine"), RuntimeError("training failed")), False),
        (SettingsError("Wrong."), False),
        (None, False),
    ],
)
def test_what_comes_from_others_is_known_by_its_kind(error: Exception | None, of_others: bool) -> None:
    assert is_consequence(error) == of_others


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (SystemExit(3), 3),
        (SystemExit(-1), 255),
        (SystemExit("no data"), 1),
        (SystemExit(), 0),
        (KeyboardInterrupt(), 130),
        (SettingsError("Wrong."), 2),
        (ValueError("mine"), 1),
    ],
)
def test_the_exit_code_is_known_before_the_process_ends(error: BaseException | None, code: int) -> None:
    assert exit_code_of(error) == code
