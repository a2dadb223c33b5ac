"""Measures the time until the scheduler reports a killed worker to the others, directly and by an uplink.

The processes are real and use mutual TLS: a scheduler, a worker that is killed by SIGKILL, and this process,
which waits for the message. Each loss is measured with workers that have just joined.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from muster.bench.launches import environment
from muster.bench.report import summary
from muster.bench.scale.command import scheduler_for

VICTIM = """
import os, sys
from queue import SimpleQueue
from muster.worker.config import load_settings
from muster.worker.session.credentials import load_keyring
from muster.worker.session.dialing import grpc_dial
from muster.worker.uplink.dialing import dial_by_uplink
settings = load_settings(os.environ)
outbox = SimpleQueue()
direct = grpc_dial(settings, load_keyring(settings, os.environ))
messages, _ = dial_by_uplink(os.environ, direct, settings)(outbox)
outbox.put(bytes.fromhex(sys.argv[1]))
for _ in messages:
    print("heard", flush=True)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--runs", type=int, default=20, metavar="N", help="killed workers, for each way (20)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures both kinds in turns, and returns the results; times in milliseconds."""
    times: dict[str, list[float]] = {"directly": [], "by an uplink": []}
    with (
        tempfile.TemporaryDirectory(prefix="muster-loss-") as name,
        scheduler_for(2, 60.0, Path(name), serve=True) as (_, port),
    ):
        for number in range(2 * args.runs):
            kind = "by an uplink" if number % 2 else "directly"
            times[kind].append(_lose_one(Path(name), port, f"job{number}", by_uplink=kind != "directly"))
    results = {kind: summary(taken) for kind, taken in times.items()}
    for kind, one in results.items():
        print(f"{kind:14} {one['median']:6.1f} ms (least {one['min']:.1f}, 90th percentile {one['p90']:.1f})")
    return {"heard_after_ms": results}


def _lose_one(folder: Path, port: int, job: str, *, by_uplink: bool) -> float:
    from muster.worker.config import load_settings
    from muster.worker.session.credentials import load_keyring
    from muster.worker.session.dialing import grpc_dial
    from muster.worker.uplink.door import INNER, OUTER, make_door, named

    env = environment(
        MS_ROLE="MS_WORKER",
        MS_WORKER_NUM="2",
        MS_JOB_ID=job,
        MS_SCHED_PORT=str(port),
        MS_CONFIG_FILE=str(folder / "config.json"),
        MS_CLIENT_PASSWORD_FILE=str(folder / "password"),
        MS_LOG_LEVEL="ERROR",
    )
    inner, outer = make_door()
    processes = []
    if by_uplink:
        command = [sys.executable, "-m", "muster.worker.uplink"]
        uplink_env = {**env, INNER: named(inner)}
        processes.append(subprocess.Popen(command, env=uplink_env, pass_fds=[inner.fileno()]))
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, _join(job, 1).hex()],
        env={**env, OUTER: named(outer)} if by_uplink else env,
        pass_fds=[outer.fileno()],
        stdout=subprocess.PIPE,
    )
    processes.append(victim)
    settings = load_settings(env)
    outbox: SimpleQueue[bytes | None] = SimpleQueue()
    messages, close = grpc_dial(settings, load_keyring(settings, env))(outbox)
    came: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

    def read() -> None:
        for each in messages:
            came.put((time.monotonic(), each))

    reading = threading.Thread(target=read)
    reading.start()
    outbox.put(_join(job, 0))
    try:
        _next(came, "assignment")
        os.kill(victim.pid, 9)
        killed_at = time.monotonic()
        return 1000 * (_next(came, "suspended") - killed_at)
    finally:
        outbox.put(_leave())
        reading.join(10)
        close()
        for process in processes:
            process.kill()
            process.communicate()
        inner.close()
        outer.close()


def _next(came: SimpleQueue[tuple[float, bytes]], body: str) -> float:
    """Waits for the next message of a kind; returns the time at which it came."""
    from muster.wire.v1 import rendezvous_pb2 as pb

    while True:
        at, data = came.get(timeout=60)
        if pb.SchedulerMessage.FromString(data).WhichOneof("body") == body:
            return at


def _join(job: str, index: int) -> bytes:
    from muster.wire.v1 import rendezvous_pb2 as pb

    join = pb.Join(
        protocol_version=1,
        job_id=job,
        node_id=str(index),
        incarnation=index + 1,
        worker_num=2,
        host=pb.Host(id="host", name="host", address="127.0.0.1"),
        device=pb.Device(kind="cpu", index=index),
        local_index=index,
        held_rank=-1,
        backend="tcp",
    )
    return pb.WorkerMessage(join=join).SerializeToString()


def _leave() -> bytes:
    from muster.wire.v1 import rendezvous_pb2 as pb

    return pb.WorkerMessage(leave=pb.Leave(reason="measured")).SerializeToString()
