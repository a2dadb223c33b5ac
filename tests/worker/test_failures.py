"""Which error a script sees."""

from __future__ import annotations

import pytest

from worker.core import events as e
from worker.core.messages import RefusalCode
from worker.errors import (
    FormationTimeoutError,
    JobEndedError,
    LeaveGranted,
    MembershipChanged,
    RefusedError,
    SchedulerUnreachableError,
    SecurityError,
    WorkerError,
)
from worker.failures import failure_of, reason_of, sentence


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (e.FailureKind.REFUSED, RefusedError),
        (e.FailureKind.SECURITY, SecurityError),
        (e.FailureKind.UNREACHABLE, SchedulerUnreachableError),
        (e.FailureKind.FORMATION_TIMEOUT, FormationTimeoutError),
        (e.FailureKind.JOB_ENDED, JobEndedError),
    ],
)
def test_each_kind_has_its_error(kind: e.FailureKind, error: type[WorkerError]) -> None:
    found = failure_of(e.Failed(kind, "what happened"))
    assert type(found) is error
    assert str(found).startswith("What happened.")
    assert found.exit_code == 1


def test_a_refusal_names_its_code() -> None:
    found = failure_of(e.Failed(e.FailureKind.REFUSED, "full", RefusalCode.JOB_FULL))
    assert isinstance(found, RefusedError)
    assert found.code == "JOB_FULL"


def test_a_leave_that_waits_for_nobody_is_one_alone() -> None:
    found = failure_of(e.Failed(e.FailureKind.LEAVE, "you leave"))
    assert isinstance(found, LeaveGranted)
    assert (found.alone, found.exit_code) == (True, 0)


def test_a_job_that_ended_well_is_no_failure_of_the_process() -> None:
    assert failure_of(e.Failed(e.FailureKind.JOB_ENDED, "done", ok=True)).exit_code == 0


@pytest.mark.parametrize(("text", "ended"), [("a b", "A b."), ("A.", "A."), ("Why?", "Why?"), ("", ".")])
def test_sentences(text: str, ended: str) -> None:
    assert sentence(text) == ended


def test_a_reason_for_others_leaves_out_what_the_script_could_have_done() -> None:
    error = MembershipChanged("Generation 3 is over:\nrank 1 left.", generation=3)
    assert "Call session.rejoin()" in str(error)
    assert reason_of(error) == "MembershipChanged: Generation 3 is over: rank 1 left."
    assert reason_of(ValueError("out of luck")) == "ValueError: out of luck"
