"""Kills a job's hosts one after the other: the state must be restored from the others' memory bit for bit."""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from muster.bench.launches import make_keys
from muster.bench.recovery.job import WorkerProcess, median_and_worst
from muster.bench.recovery.loop import PACE_VARIABLE
from muster.bench.snapshots.forked import ForkedJob
from muster.bench.snapshots.namespaces import NamespaceHosts

JOB = "muster.bench.snapshots.job"
RANKS, PER_HOST, HOSTS = 4, 2, 3
START_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 120.0
CUT_NODE_TIMEOUT_S = 5.0
"""MS_NODE_TIMEOUT if hosts are cut off, in seconds: its default."""

Say = Callable[[str], None]


class DividedJob(ForkedJob):
    """Four ranks on two hosts, and two spares on a third; hosts are network namespaces, or names only.

    Args:
        directory: the folder for keys, logs and records, which is created.
        kind: how the state is sharded: "sharded" (ShardedOptimizer) or "parallel" (a model split by a plan).
        every: the number of steps between two snapshots.
        pace_s: the least time of a step, in seconds; 0 for none.
        steps: the total number of steps; 0 for no end.
        say: shows progress.
        hosts: the hosts' network namespaces; None if hosts are names only.
        node_timeout_s: MS_NODE_TIMEOUT.
    """

    def __init__(
        self,
        directory: Path,
        *,
        kind: str,
        every: int,
        pace_s: float,
        steps: int,
        say: Say,
        hosts: NamespaceHosts | None = None,
        node_timeout_s: float = 30.0,
    ) -> None:
        directory.mkdir(parents=True)
        self._hosts = hosts
        more: dict[str, str] = {}
        if hosts is not None:
            address = hosts.address(hosts.scheduler_host)
            more = {"MS_SCHED_HOST": address}
            make_keys(directory / "keys", hosts=address)
            self.scheduler_prefix = "ip", "netns", "exec", hosts.name(hosts.scheduler_host)
        self.pace = directory / "pace"
        if pace_s:
            self.pace.write_text(str(pace_s))
        super().__init__(
            directory,
            JOB,
            workers=RANKS,
            worker_min=RANKS,
            command=[f"--kind={kind}", f"--every={every}", f"--steps={steps}"],
            env={
                PACE_VARIABLE: str(self.pace),
                "MS_TOPO_TIMEOUT": "240",
                "MS_SPARES": "2",
                "MS_NODE_TIMEOUT": f"{node_timeout_s:g}",
                **more,
            },
            say=say,
        )
        self._begun = 0

    def namespace_of(self, name: str) -> str:
        """Returns the network namespace of a worker's host; empty if hosts are names only."""
        return "" if self._hosts is None else self._hosts.name(int(name[1 : name.index("-")]))

    def start_host(self, host: int, *, spare: bool) -> None:
        """Starts two workers on a host."""
        for number in range(PER_HOST):
            self._begun += 1
            more = {"MS_WORKER_SPARE": "1"} if spare else {}
            self.start_worker(f"h{host}-{number}-{self._begun}", MS_HOST_ID=f"host-{host}", **more)

    def begin(self) -> None:
        """Starts everything, and waits until a snapshot counts and the spares wait."""
        self.begin_only()
        self.start_host(HOSTS - 1, spare=True)
        self.wait("all train", self.is_safe, START_TIMEOUT_S)
        self.wait("the spares are in", self.has_spares, START_TIMEOUT_S)

    def begin_only(self) -> None:
        """Starts the ranks, and no spares."""
        self.start_scheduler()
        for host in range(HOSTS - 1):
            self.start_host(host, spare=False)

    def members(self) -> list[WorkerProcess]:
        """Returns the workers that have finished a step in the newest generation."""
        last = {worker.name: worker.steps()[-1:] for worker in self.living()}
        newest = max((steps[0]["generation"] for steps in last.values() if steps), default=0)
        return [
            worker
            for worker in self.living()
            if last[worker.name] and last[worker.name][0]["generation"] == newest
        ]

    def is_safe(self) -> bool:
        """Whether all ranks train, and a snapshot of their generation counts."""
        members = self.members()
        return len(members) == RANKS and all(
            worker.steps()[-1]["counts"] == worker.steps()[-1]["generation"] for worker in members
        )

    def has_spares(self) -> bool:
        """Whether all spares wait for a place."""
        members = self.members()
        others = [worker for worker in self.living() if worker not in members]
        waits = ["waits as a spare" in worker.log.read_text(errors="replace") for worker in others]
        return len(waits) == PER_HOST and all(waits)

    def lose(self, host: int, victims: Sequence[WorkerProcess], *, cut: bool) -> float:
        """Kills a host's workers, or cuts the host off; returns the time on the monotonic clock in s."""
        if not cut:
            return min(worker.kill() for worker in victims)
        assert self._hosts is not None
        now = time.monotonic()
        self._hosts.cut(host)
        for worker in victims:
            worker.killed = True  # lost to the job
        return now

    def kill_host(self, chance: random.Random, *, cut: bool = False) -> dict[str, Any]:
        """Kills or cuts off one host of members at a random moment, and waits for the next good step."""
        members = self.members()
        hosts = sorted({host_of(worker) for worker in members})
        host = chance.choice(hosts)
        time.sleep(chance.uniform(0.0, 0.5))
        victims = [worker for worker in members if host_of(worker) == host]
        survivors = [worker for worker in members if worker not in victims]
        before = max(worker.steps()[-1]["step"] for worker in survivors)
        generation = survivors[0].steps()[-1]["generation"]
        now = self.lose(int(host), victims, cut=cut)
        self.wait(
            "all train again",
            lambda: (
                len(self.members()) == RANKS
                and all(worker.steps()[-1]["generation"] > generation for worker in self.members())
            ),
            STEP_TIMEOUT_S,
        )
        firsts = [
            next(step for step in worker.steps() if step["generation"] > generation)
            for worker in self.members()
        ]
        next_step_s = max(step["t"] for step in firsts) - now
        if cut:
            assert self._hosts is not None
            for worker in victims:
                worker.kill()
            self._hosts.join(int(host))
        self.start_host(int(host), spare=True)
        self.wait("a snapshot counts again", self.is_safe, STEP_TIMEOUT_S)
        self.wait("the next spares are in", self.has_spares, START_TIMEOUT_S)
        lost = before - (firsts[0]["step"] - 1)
        return {"host": host, "next_step_s": round(next_step_s, 3), "steps_done_again": lost}

    def digests(self) -> dict[tuple[int, int], set[str]]:
        """Returns each rank's digest after each step, by (step, rank); several if they differ."""
        found: dict[tuple[int, int], set[str]] = {}
        for worker in self.workers:
            for step in worker.steps():
                found.setdefault((step["step"], step["rank"]), set()).add(step["digest"])
        return found


def host_of(worker: WorkerProcess) -> str:
    """Returns the number of a worker's host, as text."""
    return worker.name[1 : worker.name.index("-")]


def measure(options: argparse.Namespace, directory: Path, say: Say) -> dict[str, Any]:
    """Kills hosts, and compares the states with those of an undisturbed run.

    Raises:
        RuntimeError: the job did not behave as expected, or a state differed.
    """
    if options.loss == "cut" and not options.namespaces:
        raise RuntimeError("a host by name alone cannot be cut off: --namespaces makes hosts of their own")
    with NamespaceHosts(HOSTS) if options.namespaces else contextlib.nullcontext() as hosts:
        return {kind: _one(kind, options, directory / kind, say, hosts) for kind in options.kinds}


def _one(
    kind: str, options: argparse.Namespace, directory: Path, say: Say, hosts: NamespaceHosts | None
) -> dict[str, Any]:
    chance, kills = random.Random(options.seed), []
    cut = options.loss == "cut"
    with DividedJob(
        directory / "killed",
        kind=kind,
        every=options.every,
        pace_s=options.pace_ms / 1000,
        steps=0,
        say=say,
        hosts=hosts,
        node_timeout_s=CUT_NODE_TIMEOUT_S if cut else 30.0,
    ) as job:
        job.begin()
        for number in range(options.kills):
            kills.append(job.kill_host(chance, cut=cut))
            say(f"{kind}: kill {number + 1} of {options.kills}: {kills[-1]}")
        found = job.digests()
    last = max(step for step, _ in found)
    with DividedJob(
        directory / "whole", kind=kind, every=options.every, pace_s=0, steps=last, say=say
    ) as whole:
        whole.begin_only()
        whole.wait(
            "the run that loses nobody",
            lambda: all(worker.process.poll() is not None for worker in whole.workers),
            START_TIMEOUT_S + STEP_TIMEOUT_S,
            may_end=True,
        )
        want = whole.digests()
    others = [place for place, digests in found.items() if digests != want.get(place)]
    if others:
        step, rank = min(others)
        raise RuntimeError(f"{kind}: after step {step} rank {rank} held another state than without kills")
    return {
        "seed": options.seed,
        "loss": options.loss,
        "namespaces": options.namespaces,
        "node_timeout_s": CUT_NODE_TIMEOUT_S if cut else 30.0,
        "checkpoint_files": len(list(directory.rglob(".metadata")) + list(directory.rglob("step_*"))),
        "kills": kills,
        "steps": last,
        "states_compared": len(found),
        "states_different": len(others),
        "summary": median_and_worst(kills, ("next_step_s", "steps_done_again")),
    }
