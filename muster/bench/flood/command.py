"""Floods a job's scheduler with TLS ClientHellos from one address, while the job trains under mutual TLS.

Everything runs in a separate network namespace: the flood comes from 127.0.0.9, the workers use 127.0.0.1.
The kernel rules of deploy/nftables protect the scheduler by default; --rules none turns them off.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from muster.bench.launches import ROOT
from muster.bench.recovery.job import MeasuredJob
from muster.wire.process_stat import stat_fields

RULES = ROOT / "deploy" / "nftables" / "handshakes.nft"
SOURCE = "127.0.0.9"
START_TIMEOUT_S = 90.0
PACE_S = 0.05
SAMPLE_S = 0.1
_CLONE_NEWNET = 0x40000000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--workers", type=int, default=6, metavar="N", help="workers of the job (6)")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="how long to flood (20)")
    parser.add_argument(
        "--node-timeout-s", type=float, default=5.0, metavar="S", help="the job's MS_NODE_TIMEOUT (5)"
    )
    parser.add_argument("--joins", type=int, default=3, metavar="N", help="joins during the flood (3)")
    parser.add_argument(
        "--rules",
        choices=("nftables", "none"),
        default="nftables",
        help="kernel rules that protect the scheduler",
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the flood, and returns the results.

    Raises:
        RuntimeError: not root, nft is missing, or the job did not form.
    """
    _enter_namespace()
    with tempfile.TemporaryDirectory(prefix="muster-flood-") as scratch:
        job = MeasuredJob(
            Path(scratch),
            workers=options.workers,
            worker_min=1,
            command=["-m", "muster.bench.recovery.digits", "--epochs=1000", "--checkpoint-dir="],
            env={
                "MS_NODE_TIMEOUT": f"{options.node_timeout_s:g}",
                "MS_SPARES": str(options.joins),
                **_pace(Path(scratch)),
            },
        )
        with job:
            return _measure(options, job)


def report(result: dict[str, Any]) -> None:
    """Shows the result in a few lines."""
    flood = result["flood"]
    print(f"rules: {result['rules']}")
    print(
        f"flood: {flood['tries_per_s']:.0f} connections a second, {flood['hellos_per_s']:.0f} hellos let in"
    )
    print(f"members lost: {result['members_lost']} of {result['workers']}")
    print(f"joins: {', '.join('none' if s is None else f'{s:.2f} s' for s in result['joins_s'])}")
    print(f"scheduler's memory: {result['memory_growth_mb']:+.0f} MB")


def _enter_namespace() -> None:
    """Moves this process into a network of its own, with a loopback that is up."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise RuntimeError(f"no network namespace: {os.strerror(ctypes.get_errno())}; run it as root")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def _pace(directory: Path) -> dict[str, str]:
    from muster.bench.recovery.loop import PACE_VARIABLE

    pace = directory / "pace"
    pace.write_text(str(PACE_S))
    return {PACE_VARIABLE: str(pace)}


def _load_rules(port: int) -> None:
    if shutil.which("nft") is None:
        raise RuntimeError("nft is not installed (package nftables)")
    rules = RULES.read_text(encoding="utf-8").replace("scheduler_port = 6667", f"scheduler_port = {port}")
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)


def _measure(options: argparse.Namespace, job: MeasuredJob) -> dict[str, Any]:
    if options.rules == "nftables":
        _load_rules(job.port)
    job.start_scheduler()
    assert job.scheduler is not None
    for number in range(options.workers):
        job.start_worker(str(number))
    job.wait("all train", lambda: job.training(options.workers, 3), START_TIMEOUT_S)
    log = job.directory / "scheduler.log"
    scheduler = job.scheduler.pid
    before, cpu_before, most = _memory_mb(scheduler), _cpu_s(scheduler), 0.0
    steps_before = min(len(worker.steps()) for worker in job.workers)
    command = [sys.executable, "-m", "muster.bench.flood.hellos", "127.0.0.1", str(job.port), SOURCE]
    flood = subprocess.Popen(
        [*command, str(options.seconds)], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=job.env
    )
    began = time.monotonic()
    joiners = [
        _start_joiner(job, number, options.seconds * (0.2 + 0.6 * number / options.joins))
        for number in range(options.joins)
    ]
    try:
        while flood.poll() is None:
            most = max(most, _memory_mb(scheduler))
            time.sleep(SAMPLE_S)
        done = json.loads(flood.communicate()[0])
        cpu_s = _cpu_s(scheduler) - cpu_before
        taken_s = time.monotonic() - began
        joins_s = [_joined(joiner) for joiner in joiners]
    finally:
        for process in [flood, *joiners]:
            if process.poll() is None:
                process.kill()
            process.wait()
    # By now every worker that would be lost by its node timeout is lost.
    settled = time.monotonic() + options.node_timeout_s + 3
    while time.monotonic() < settled:
        most = max(most, _memory_mb(scheduler))
        time.sleep(SAMPLE_S)
    text = log.read_text(encoding="utf-8")
    steps = [worker.steps() for worker in job.workers]
    return {
        "command": " ".join(sys.orig_argv[1:]),
        "rules": options.rules,
        "workers": options.workers,
        "node_timeout_s": options.node_timeout_s,
        "flood": done,
        "members_lost": len(set(re.findall(r"\(node (\d+) on host [^)]*\) is lost", text))),
        "generations": sorted({step["generation"] for each in steps for step in each}),
        "steps_during": min(len(each) for each in steps) - steps_before,
        "said_that_it_was_behind": text.count("The scheduler is behind"),
        "joins_s": joins_s,
        "memory_before_mb": before,
        "memory_growth_mb": most - before,
        "scheduler_share_of_a_core": cpu_s / taken_s,
        "load_after": os.getloadavg()[0],
    }


def _start_joiner(job: MeasuredJob, number: int, after_s: float) -> subprocess.Popen[str]:
    """Starts a spare worker that joins the flooded job in ``after_s`` seconds."""
    return subprocess.Popen(
        [sys.executable, "-m", "muster.bench.flood.join", str(after_s)],
        cwd=ROOT,
        env={**job.env, "MS_ROLE": "MS_WORKER", "MS_NODE_ID": f"late-{number}", "MS_WORKER_SPARE": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def _joined(joiner: subprocess.Popen[str]) -> float | None:
    """Returns the seconds that a join took; None if it failed."""
    try:
        answer = joiner.communicate(timeout=60)[0].strip()
    except subprocess.TimeoutExpired:
        return None
    return float(answer) if answer else None


def _memory_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    (kib,) = (int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return kib / 1024


def _cpu_s(pid: int) -> float:
    fields = stat_fields(f"/proc/{pid}")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
