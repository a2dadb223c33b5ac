"""Measures how soon all workers of a host are connected again after their uplink was stopped for a while.

The workers are real sessions over mutual TLS on this machine, without collectives; each asks for a step
every 50 ms. They connect by one uplink, which SIGSTOP stops and SIGCONT continues. While it is stopped,
workers connect to the scheduler directly; ``--direct`` prevents that, as if only the uplink could reach the
scheduler. Each trial is a new job.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.bench.launches import environment, stopwatch
from muster.bench.report import summary
from muster.bench.scale.command import scheduler_for

SETTLED_S = 3.0
"""How long all workers must have been connected for a trial to end, in seconds: longer than any pause between
two attempts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    option = parser.add_argument
    option("--workers", type=int, default=64, metavar="N", help="workers of the host (64)")
    option("--processes", type=int, default=4, metavar="N", help="processes that run the workers (4)")
    option(
        "--stops-s",
        type=float,
        nargs="+",
        default=[2.0, 25.0],
        metavar="S",
        help="how long the uplink is stopped (2 25)",
    )
    option("--times", type=int, default=5, metavar="N", help="trials for each duration (5)")
    option("--node-timeout-s", type=float, default=5.0, metavar="S", help="MS_NODE_TIMEOUT (5)")
    option(
        "--direct",
        choices=("works", "refused", "silent"),
        default="works",
        help="what happens to direct connections to the scheduler (works)",
    )
    option("--limit-s", type=float, default=120.0, metavar="S", help="give up a trial after this time (120)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures, and returns the results: seconds from the moment at which the uplink goes on.

    Raises:
        RuntimeError: workers were not connected in time, or ended.
    """
    say, results = stopwatch(), {}
    for stop_s in args.stops_s:
        trials = []
        for _ in range(args.times):
            trials.append(_trial(args, stop_s))
            say(f"stopped for {stop_s:g} s: {trials[-1]}")
        results[f"stopped for {stop_s:g} s"] = {
            "all_there_s": summary([each["all_there_s"] for each in trials]),
            "all_step_s": summary([each["all_step_s"] for each in trials]),
            "trials": trials,
        }
    return {"workers": args.workers, "node_timeout_s": args.node_timeout_s, "direct": args.direct, **results}


def report(results: dict[str, Any]) -> None:
    """Prints the results for people."""
    for name, each in results.items():
        if isinstance(each, dict) and "trials" in each:
            there, step = each["all_there_s"], each["all_step_s"]
            most = max(trial["all_there_s"] for trial in each["trials"])
            print(f"{name:20} all there after {there['median']:.2f} s, at most {most:.2f} s;", end=" ")
            print(f"all make steps after {step['median']:.2f} s")


def _trial(args: argparse.Namespace, stop_s: float) -> dict[str, Any]:
    """Runs one trial: stops the uplink of a new job once, and returns the times."""
    with (
        tempfile.TemporaryDirectory(prefix="muster-stopped-") as name,
        scheduler_for(args.workers, args.node_timeout_s, Path(name)) as (_, port),
        _Host(args, Path(name), port) as host,
    ):
        host.settle(args.limit_s)
        workers = host.workers.values()
        if any(each.directly for each in workers):
            raise RuntimeError("Not all workers took their uplink, to begin with.")
        host.uplink.send_signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        host.listen(stopped_at + stop_s)
        host.uplink.send_signal(signal.SIGCONT)
        went_on_at = time.monotonic()
        host.settle(args.limit_s)
    return {
        "all_there_s": max(0.0, *(each.there_at - went_on_at for each in workers)),
        "all_step_s": max(0.0, *(each.step_at - went_on_at for each in workers)),
        "left_the_uplink": sum(each.away_at > stopped_at for each in workers),
        "directly": sum(each.directly for each in workers),
        "generation": max(each.generation for each in workers),
    }


@dataclass
class _WorkerSeen:
    """The reports of one worker, with times of the monotonic clock.

    Attributes:
        away: whether it has no stream on which it was welcomed.
        waits: whether it has not made a step since its last long pause.
    """

    away: bool = True
    waits: bool = True
    directly: bool = False
    away_at: float = 0.0
    there_at: float = 0.0
    step_at: float = 0.0
    generation: int = 0


@dataclass
class _Host:
    """The uplink, and the processes that run its workers."""

    args: argparse.Namespace
    folder: Path
    port: int
    workers: dict[int, _WorkerSeen] = field(default_factory=dict)
    uplink: subprocess.Popen[bytes] = field(init=False)
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)
    _hearing: list[threading.Thread] = field(default_factory=list)
    _said: queue.SimpleQueue[dict[str, Any]] = field(default_factory=queue.SimpleQueue)
    _quiet_since: float = 0.0

    def __enter__(self) -> _Host:
        from muster.worker.uplink.door import INNER, OUTER, make_door, named

        env = environment(
            MS_ROLE="MS_WORKER",
            MS_WORKER_NUM=str(self.args.workers),
            MS_WORKER_MIN="1",
            MS_SCHED_PORT=str(self.port),
            MS_CONFIG_FILE=str(self.folder / "config.json"),
            MS_CLIENT_PASSWORD_FILE=str(self.folder / "password"),
            MS_NODE_TIMEOUT=str(self.args.node_timeout_s),
            MS_LOG_LEVEL="ERROR",
        )
        inner, outer = make_door()
        with inner, outer:
            self.uplink = subprocess.Popen(
                [sys.executable, "-m", "muster.worker.uplink"],
                env={**env, INNER: named(inner)},
                pass_fds=[inner.fileno()],
            )
            for first in range(self.args.processes):
                indices = range(first, self.args.workers, self.args.processes)
                self.workers |= {index: _WorkerSeen() for index in indices}
                orders = json.dumps({"indices": list(indices), "direct": self.args.direct})
                process = subprocess.Popen(
                    [sys.executable, "-m", "muster.bench.scale.sessions", orders],
                    env={**env, OUTER: named(outer)},
                    pass_fds=[outer.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                self._processes.append(process)
                self._hearing.append(threading.Thread(target=self._hear, args=(process,), daemon=True))
                self._hearing[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:  # first: without the uplink they would look for the scheduler
            process.kill()
        for thread in self._hearing:
            thread.join()
        self.uplink.kill()
        self.uplink.wait()

    def listen(self, until: float) -> None:
        """Handles the workers' reports until a time on the monotonic clock."""
        while (left_s := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._take(self._said.get(timeout=left_s))

    def settle(self, limit_s: float) -> None:
        """Waits until all workers have been connected and making steps for ``SETTLED_S``.

        Raises:
            RuntimeError: they were not connected within ``limit_s``.
        """
        until = time.monotonic() + limit_s
        self._quiet_since = time.monotonic()
        while (now := time.monotonic()) < self._quiet_since + SETTLED_S:
            self.listen(now + 0.1)
            lacking = [index for index, each in self.workers.items() if each.away or each.waits]
            if lacking:
                self._quiet_since = now
            if now > until:
                named = ", ".join(map(str, lacking[:8]))
                raise RuntimeError(f"{len(lacking)} workers are not there after {limit_s:g} s: {named}.")

    def _hear(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._said.put(json.loads(line))
        self._said.put({"ended": process.wait()})

    def _take(self, said: dict[str, Any]) -> None:
        if "ended" in said:
            raise RuntimeError(f"A process of workers has ended with code {said['ended']}.")
        worker, now = self.workers[said["worker"]], said["at"]
        self._quiet_since = time.monotonic()
        if said["what"] == "away":
            worker.away, worker.away_at = True, now
        elif said["what"] == "there":
            worker.away, worker.there_at, worker.directly = False, now, said["directly"]
        elif said["what"] == "pauses":
            worker.waits = True
        else:
            worker.waits, worker.step_at, worker.generation = False, now, said["generation"]
