"""Clocks against leases: the hosts of three schedulers and of their workers are set back and ahead.

Position: sets the time of day, by NTP or as root. Asset: the lead, the membership.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.bench.failover.job import SeveralSchedulers
from muster.bench.soak.clock import CLOCK_VARIABLE, shift
from muster.scheduler.etcd.leadership import STEP_DOWN_S
from tests.attacks.test_clocks_disks_orphans import DAY_S, JUMPING

pytestmark = [
    pytest.mark.system,
    pytest.mark.alone,  # a leader without a processor for seconds loses its lease
    pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed"),
    pytest.mark.timeout(300),
]


def no_words(_: str) -> None:
    """Says nothing."""


@contextlib.contextmanager
def training(folder: Path, clock: str) -> Iterator[SeveralSchedulers]:
    """A job of two on hosts that all have this clock, once it trains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.setenv(CLOCK_VARIABLE, str(folder / "clock"))
        with SeveralSchedulers(folder / "job", workers=2, worker_min=1, pace_s=0.02, say=no_words) as job:
            (folder / "sitecustomize.py").write_text(clock)  # after the keys are made
            job.begin()
            yield job


def step(job: SeveralSchedulers) -> int:
    """The step that all have finished."""
    return min(int(worker.steps()[-1]["step"]) for worker in job.workers)


def test_a_clock_that_jumps_moves_no_lead_and_the_next_leader_is_taken_an_hour_off(tmp_path: Path) -> None:
    """By an hour, and by years, for longer than a lease; then the leader dies on hosts an hour behind.

    Two defences: leases are counted by a clock that nobody sets, and what etcd answers of one counts more.
    """
    with training(tmp_path, JUMPING) as job:
        leader = job.settled()
        process = leader.process
        for seconds in (-3600.0, 3600.0, -3653 * DAY_S, 10_958 * DAY_S):
            shift(tmp_path / "clock", seconds)
            wanted, until = step(job) + 20, time.monotonic() + 1.5 * STEP_DOWN_S
            job.wait("all train on", lambda: step(job) >= wanted and time.monotonic() > until, 60)  # noqa: B023
            assert (found := job.leader()) is not None and found.process is process, seconds
            assert [each.codes for each in job.schedulers] == [[], [], []], seconds
        shift(tmp_path / "clock", -3600.0)
        since, old = job.kill_leader(leader)
        job.takeover(old, since)
        wanted = step(job) + 20
        job.wait("all train on under the next one", lambda: step(job) >= wanted, 60)
        assert job.irregular_steps(-math.inf) == job.group_changes(-math.inf) == 0
