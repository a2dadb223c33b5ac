"""Kills and stops schedulers, etcd and workers of a job, and measures how long the job is disturbed.

The job has three schedulers, three members of etcd and six workers that train, all on this host.

muster bench failover --json results.json              # leader, etcd, quorum, worker and stopped
muster bench failover --only leader --kills 20         # kill the leading scheduler: when does another lead?
muster bench failover --only etcd --etcd-kills 3       # kill etcd's own leader
muster bench failover --only quorum --outage-s 30      # stop two of etcd's three members for a while
muster bench failover --only mourning --outage-s 150   # the same, and kill a worker when they stop
muster bench failover --only worker --times 3          # kill a worker while no scheduler leads
muster bench failover --only together --times 10       # kill leader and worker at once; workers in launchers
muster bench failover --only stopped --stops 10        # stop the leader past its lease, self-check disabled
muster bench failover --only leader quorum             # several parts, on one job
muster bench failover --only space --shortages 10 60   # fill etcd's quota for 10 s and 60 s; kill a worker
muster bench failover --only disk --shortages 10 60    # the same with one scheduler's disk; requires root
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from muster.bench.failover import space
from muster.bench.failover.job import DEPOSED, WORKER, SeveralSchedulers
from muster.bench.launches import stopwatch
from muster.bench.recovery.job import longest_pause

NODE_TIMEOUT_S = 5.0
SCHEDULER, UNGUARDED = "scheduler", "muster.bench.failover.unguarded"
LAUNCHED = ("together", "mourning")
"""Parts that share a job whose workers run under launchers."""

IMPATIENT = "muster.bench.failover.impatient"

SPACE = ("space", "disk")
"""Parts that each have a job of their own."""

PARTS = {
    "leader": SCHEDULER,
    "etcd": SCHEDULER,
    "quorum": SCHEDULER,
    "worker": SCHEDULER,
    "stopped": UNGUARDED,
}
"""The module that runs as a scheduler, by part; parts with the same module share one job."""

Say = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    option = parser.add_argument
    parts = (*PARTS, *LAUNCHED, *SPACE)
    option("--only", choices=parts, nargs="+", metavar="PART", help=f"only these: {', '.join(parts)}")
    option("--workers", type=int, default=6, metavar="N", help="workers of the job (6)")
    option("--kills", type=int, default=20, metavar="N", help="leaders to kill (20)")
    option("--stops", type=int, default=10, metavar="N", help="leaders to stop and continue (10)")
    option(
        "--times",
        type=int,
        default=3,
        metavar="N",
        help="workers to kill while nobody leads, or with the leader (3)",
    )
    option("--etcd-kills", type=int, default=3, metavar="N", help="leaders of etcd to kill (3)")
    option("--outage-s", type=float, default=30.0, metavar="S", help="seconds without a quorum in etcd (30)")
    option(
        "--shortages",
        type=float,
        nargs="+",
        default=[10.0],
        metavar="S",
        help="seconds without space for the journal, one test for each (10)",
    )
    option("--impatient", action="store_true", help="use 1 s as the default of MS_RECONNECT_TIMEOUT")
    option(
        "--serve",
        choices=("with", "without", "both"),
        default="both",
        help="space and disk: schedulers with --serve, without, or both in turn (both)",
    )
    option("--pace-ms", type=float, default=50.0, help="least time of a step in ms (50)")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures and returns the results.

    Raises:
        RuntimeError: the job did not behave as expected; the message says how.
    """
    say = stopwatch()

    results: dict[str, Any] = {"workers": options.workers, "schedulers": 3, "etcd_members": 3}
    results["load_at_start"] = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="muster-failover-") as scratch:
        for module in (SCHEDULER, UNGUARDED):
            parts = [part for part in options.only or PARTS if PARTS.get(part) == module]
            if not parts:
                continue
            with SeveralSchedulers(
                Path(scratch) / module,
                workers=options.workers,
                worker_min=2,
                pace_s=options.pace_ms / 1000,
                say=say,
                module=module,
            ) as job:
                job.begin()
                for part in parts:
                    say(f"{part}: {options.workers} workers train")
                    results[part] = _MEASURES[part](job, options)
        if under_launchers := [part for part in LAUNCHED if part in (options.only or ())]:
            with SeveralSchedulers(
                Path(scratch) / "launched",
                workers=options.workers,
                worker_min=2,
                pace_s=options.pace_ms / 1000,
                say=say,
                launched=True,
                worker=IMPATIENT if options.impatient else WORKER,
            ) as job:
                job.begin()
                for part in under_launchers:
                    say(f"{part}: {options.workers} workers train, each under a launcher")
                    results[part] = _MEASURES[part](job, options)
        for part in (part for part in SPACE if part in (options.only or ())):
            for serve in (False, True):
                if options.serve not in ("both", "with" if serve else "without"):
                    continue
                name = f"{part}, --serve" if serve else part
                with space.job_without_much_space(
                    part,
                    Path(scratch) / name.replace(", ", ""),
                    workers=options.workers,
                    pace_s=options.pace_ms / 1000,
                    say=say,
                    serve=serve,
                ) as tight:
                    say(f"{name}: {options.workers} workers train")
                    results[name] = space.measure(tight, options.shortages)
    results["load_at_end"] = os.getloadavg()
    measured = {part: each for part, each in results.items() if isinstance(each, dict)}
    results["summary"] = {part: each["summary"] for part, each in measured.items()}
    return results


def report(results: dict[str, Any]) -> None:
    """Prints the results for people."""
    for part, summary in results["summary"].items():
        print(f"{part:8} {summary}")


def _worst_and_median(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 2), "worst": round(max(values), 2)}


def _undisturbed(job: SeveralSchedulers, since: float) -> dict[str, int]:
    """Returns the counts that must be 0 for a training whose schedulers fail."""
    return {"steps_lost_or_doubled": job.irregular_steps(since), "group_changes": job.group_changes(since)}


def _leader_kills(job: SeveralSchedulers, options: argparse.Namespace) -> dict[str, Any]:
    rows, start = [], time.monotonic()
    for number in range(options.kills):
        old = job.settled()
        time.sleep(0.5 + 0.07 * number)  # any place between two renewals
        began, killed = job.kill_leader(old)
        _, led_s, back_s = job.takeover(killed, began)
        rows.append({"takeover_s": led_s, "all_back_s": back_s})
        job.say(
            f"kill {number + 1}: the next one leads after {led_s:.2f} s, all are back after {back_s:.2f} s"
        )
        job.wait("the killed one stands by", lambda: old.process.poll() is None, 10)  # noqa: B023 - called at once
        time.sleep(1.0)
    summary = {
        "kills": len(rows),
        "takeover_s": _worst_and_median([row["takeover_s"] for row in rows]),
        "all_back_s": _worst_and_median([row["all_back_s"] for row in rows]),
        "steps": sum(step["t"] > start for worker in job.workers for step in worker.steps()),
        **_undisturbed(job, start),
    }
    return {"kills": rows, "summary": summary}


def _stopped_leaders(job: SeveralSchedulers, options: argparse.Namespace) -> dict[str, Any]:
    refused, rows, start = 0, [], time.monotonic()
    for number in range(options.stops):
        old = job.settled()
        time.sleep(1.0)
        log_size, codes = old.log.stat().st_size, len(old.codes)
        began, stopped = time.monotonic(), old.process
        stopped.send_signal(signal.SIGSTOP)
        _, led_s, back_s = job.takeover(stopped, began)
        stopped.send_signal(signal.SIGCONT)
        woke = time.monotonic()
        job.wait("the fence ends the old one", lambda: len(old.codes) > codes, 60)  # noqa: B023
        text = old.log.read_bytes()[log_size:].decode(errors="replace")
        by_fence = old.codes[-1] == DEPOSED and "etcd says that" in text
        refused += by_fence
        rows.append(
            {
                "takeover_s": led_s,
                "all_back_s": back_s,
                "refused_after_s": round(time.monotonic() - woke, 2),
                "by_fence": by_fence,
            }
        )
        job.say(f"stop {number + 1}: led after {led_s:.2f} s, back after {back_s:.2f} s, refused: {by_fence}")
    summary = {
        "stops": options.stops,
        "late_decisions_refused": refused,
        "takeover_s": _worst_and_median([row["takeover_s"] for row in rows]),
        "all_back_s": _worst_and_median([row["all_back_s"] for row in rows]),
        **_undisturbed(job, start),
    }
    return {"stops": rows, "summary": summary}


def _worker_kills(job: SeveralSchedulers, options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for number in range(options.times):
        old = job.settled()
        time.sleep(1.0)
        began, leader = job.kill_leader(old)
        time.sleep(0.2)
        victim = job.living()[number % job.size]
        killed = victim.kill()
        _, led_s, _ = job.takeover(leader, began)
        job.wait("the others train", lambda: job.training(job.size - 1), 60)
        firsts = [
            next(step["t"] for step in worker.steps() if step["t"] > killed and step["world"] == job.size - 1)
            for worker in job.living()
        ]
        next_step_s = max(firsts) - began
        limit_s = led_s + NODE_TIMEOUT_S + 2.5
        rows.append({"takeover_s": led_s, "next_step_s": round(next_step_s, 2), "limit_s": round(limit_s, 2)})
        job.say(f"worker {victim.name}: the next step after {next_step_s:.2f} s, of {limit_s:.2f} s allowed")
        job.start_worker(victim.name)
        job.wait("all train again", lambda: job.training(job.size, 3), 60)
    within = sum(row["next_step_s"] <= row["limit_s"] for row in rows)
    worst = max(row["next_step_s"] - row["takeover_s"] for row in rows)
    return {
        "kills": rows,
        "summary": {"times": len(rows), "within_limit": within, "worst_after_takeover_s": round(worst, 2)},
    }


def _both_killed(job: SeveralSchedulers, options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for number in range(options.times):
        old = job.settled()
        time.sleep(1.0 + 0.07 * number)  # any place between two renewals
        victim = job.living()[number % job.size]
        began, leader = job.kill_leader(old)
        victim.kill()
        _, led_s, _ = job.takeover(leader, began)
        job.wait("the others train", lambda: job.training(job.size - 1), 60)
        firsts = [
            next(step["t"] for step in worker.steps() if step["t"] > began and step["world"] == job.size - 1)
            for worker in job.living()
        ]
        rows.append({"takeover_s": led_s, "next_step_s": round(max(firsts) - began, 2)})
        job.say(f"worker {victim.name} and the leader: {rows[-1]}")
        job.start_worker(victim.name)
        job.wait("all train again", lambda: job.training(job.size, 3), 60)
    summary = {
        "times": len(rows),
        "takeover_s": _worst_and_median([row["takeover_s"] for row in rows]),
        "next_step_s": _worst_and_median([row["next_step_s"] for row in rows]),
    }
    return {"kills": rows, "summary": summary}


def _etcd_leader(job: SeveralSchedulers, options: argparse.Namespace) -> dict[str, Any]:
    rows, start = [], time.monotonic()
    for _ in range(options.etcd_kills):
        leader = job.settled()
        codes, pid = sum(len(each.codes) for each in job.schedulers), leader.process.pid
        number, began = job.etcd.leader(), time.monotonic()
        job.etcd.kill(number)
        least = job.size
        while time.monotonic() < began + 5:
            job.check()
            least = min(least, leader.sessions())
            time.sleep(0.1)
        same = leader.process.pid == pid and codes == sum(len(each.codes) for each in job.schedulers)
        rows.append({"same_leader": same, "fewest_sessions": least})
        job.say(f"etcd's leader killed: same leader {same}, at least {least} workers connected")
        job.etcd.start_member(number)
        time.sleep(3)
    return {
        "kills": rows,
        "summary": {
            "nothing_happened": all(
                row["same_leader"] and row["fewest_sessions"] == job.size for row in rows
            ),
            "times": len(rows),
            **_undisturbed(job, start),
        },
    }


def _quorum(job: SeveralSchedulers, options: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    steps = sum(len(worker.steps()) for worker in job.workers)
    for number in (0, 1):
        job.etcd.kill(number)
    down_s = 0.0
    while time.monotonic() < began + options.outage_s:
        job.check()
        if not down_s and job.leader() is None:
            down_s = time.monotonic() - began
        time.sleep(0.1)
    trained = sum(len(worker.steps()) for worker in job.workers) - steps
    back = time.monotonic()
    for number in (0, 1):
        job.etcd.start_member(number)
    job.wait("somebody leads", job.leader, 60)
    led_s = time.monotonic() - back
    job.settled()
    all_s = time.monotonic() - back
    summary = {
        "outage_s": options.outage_s,
        "stepped_down_after_s": round(down_s, 2),
        "steps_meanwhile": trained,
        "longest_pause_s": round(max(longest_pause(worker, began) for worker in job.workers), 2),
        "leader_back_s": round(led_s, 2),
        "all_back_s": round(all_s, 2),
        **_undisturbed(job, began),
    }
    job.say(f"quorum lost: {summary}")
    return {"summary": summary}


def _mourning(job: SeveralSchedulers, options: argparse.Namespace) -> dict[str, Any]:
    """Kills a worker while no scheduler can lead: the others must wait for a leader, and then go on."""
    job.settled()
    began = time.monotonic()
    for number in (0, 1):
        job.etcd.kill(number)
    job.wait("nobody leads", lambda: job.leader() is None, 30)
    victim = job.living()[0]
    died = victim.kill()
    while time.monotonic() < died + options.outage_s:
        job.check()  # that no other worker has ended
        time.sleep(0.1)
    waited = [died + options.outage_s - worker.steps()[-1]["t"] for worker in job.living()]
    back = time.monotonic()
    for number in (0, 1):
        job.etcd.start_member(number)
    job.wait("the others train", lambda: job.training(job.size - 1), 60)
    firsts = [
        next(step["t"] for step in worker.steps() if step["t"] > back and step["world"] == job.size - 1)
        for worker in job.living()
    ]
    summary = {
        "outage_s": round(back - began, 1),
        "waited_for_a_scheduler_s": round(min(waited), 1),
        "ended": job.size - 1 - len(job.living()),
        "next_step_after_etcd_s": round(max(firsts) - back, 2),
        "steps_lost_or_doubled": job.irregular_steps(died),
    }
    job.say(f"a death without a majority: {summary}")
    return {"summary": summary}


_MEASURES = {
    "leader": _leader_kills,
    "stopped": _stopped_leaders,
    "worker": _worker_kills,
    "etcd": _etcd_leader,
    "quorum": _quorum,
    "together": _both_killed,
    "mourning": _mourning,
}
