"""Which scheduler the benchmark takes for the next leader."""

from __future__ import annotations

import subprocess
import sys

from muster.bench.failover.job import Scheduler, SeveralSchedulers


class Named(Scheduler):
    """A scheduler's place on a host, without a job."""

    def __init__(self, process: subprocess.Popen[bytes], *, listens: bool) -> None:
        self.process = process
        self.heard = listens

    @property
    def listens(self) -> bool:
        return self.heard


class Job(SeveralSchedulers):
    """Three places."""

    def __init__(self, *schedulers: Named) -> None:
        self.schedulers = list(schedulers)


def process() -> subprocess.Popen[bytes]:
    made = subprocess.Popen([sys.executable, "-c", ""])
    made.wait()
    return made


def test_the_next_leader_may_be_the_one_started_again_where_the_last_one_was_killed() -> None:
    killed = process()
    place = Named(killed, listens=False)
    job = Job(place, Named(process(), listens=False))
    assert job.leader(killed) is None
    place.process, place.heard = process(), True
    assert job.leader(killed) is place


def test_a_stopped_leader_whose_kernel_still_takes_connections_is_not_the_next_one() -> None:
    stopped = process()
    place, other = Named(stopped, listens=True), Named(process(), listens=False)
    job = Job(place, other)
    assert job.leader() is place
    assert job.leader(stopped) is None
    other.heard = True
    assert job.leader(stopped) is other
