"""Writes to the audit log who is a member of which generation, and from which step on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from muster.scheduler.core import records
from muster.scheduler.jobs.driver import JobDriver

FORMED, OVER = "formed", "over"
"""Events of the audit log: a generation was formed; a generation is over, and no next one has been formed."""

Write = Callable[[str, str, str, Mapping[str, object]], None]


def follow(driver: JobDriver, write: Write) -> None:
    """Writes the changes of membership in a job's durable records from now on.

    Args:
        driver: the driver of the job.
        write: called with event, job id, sentence and facts.
    """

    def on_record(record: records.Record) -> None:
        if isinstance(record, records.GenerationFormed):
            write(FORMED, driver.job_id, record.reason, _formed(driver, record))
        elif isinstance(record, records.GenerationEnded | records.JobEnded):
            write(OVER, driver.job_id, record.reason, {"step": _steps_finished(driver)})

    driver.watch_records(on_record)


def _formed(driver: JobDriver, record: records.GenerationFormed) -> dict[str, object]:
    certificates = {
        session.candidate.node_id: session.caller.certificate.fingerprint
        for session in driver.sessions.values()
        if session.candidate is not None and session.caller.certificate is not None
    }
    members: list[dict[str, Any]] = []
    for placed in record.members:
        candidate = placed.candidate
        members.append(
            {
                "rank": placed.rank,
                "node_id": candidate.node_id,
                "host": candidate.host.name,
                "incarnation": f"{candidate.incarnation:016x}",
                "certificate": certificates.get(candidate.node_id, ""),
            }
        )
    step = record.switch_after_step + 1 if record.switch_after_step >= 0 else _steps_finished(driver)
    return {"generation": record.generation, "step": step, "members": members}


def _steps_finished(driver: JobDriver) -> int:
    return max((worker.step for worker in driver.view().workers), default=0)
