"""Measures how many workers one scheduler can serve: simulated workers, real TLS sessions, no training.

Load processes perform two TLS handshakes per stream, as workers do, and play the workers' part of the
protocol. Each worker has its own connection or, with --uplinks, all workers of a host share one. The real
scheduler runs in a separate process on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.bench.launches import environment, make_keys
from muster.wire.process_stat import stat_fields

if TYPE_CHECKING:
    from muster.bench.scale.load import Load

WORKERS_PER_HOST = 8


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a job of simulated workers."""
    parser.add_argument("--workers", type=int, default=1000, metavar="N", help="simulated workers (1000)")
    parser.add_argument(
        "--node-timeout-s",
        type=float,
        default=30.0,
        metavar="S",
        help="MS_NODE_TIMEOUT; high, as a few busy processes simulate all workers (30)",
    )
    parser.add_argument(
        "--limit-s", type=float, default=300.0, metavar="S", help="give up after this time (300)"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    add_job_arguments(parser)
    parser.add_argument(
        "--heartbeat-s",
        type=float,
        default=10.0,
        metavar="S",
        help="how long to measure heartbeats, at the interval that the scheduler asks for (10)",
    )
    parser.add_argument(
        "--figures",
        type=int,
        default=0,
        metavar="TURNS",
        help="turns to measure heartbeats without and with the values that they carry: steps, GPUs, "
        "own numbers (0: one turn without)",
    )
    parser.add_argument(
        "--beat-s",
        type=float,
        default=0.0,
        metavar="S",
        help="interval of heartbeats, instead of the scheduler's",
    )
    parser.add_argument(
        "--dying",
        type=float,
        default=1.0,
        metavar="PERCENT",
        help="share of workers that are killed together at the end (1)",
    )
    parser.add_argument(
        "--uplinks", action="store_true", help=f"one stream for each host of {WORKERS_PER_HOST} workers"
    )
    parser.add_argument(
        "--loads", type=int, default=2, metavar="N", help="processes that simulate the workers (2)"
    )
    parser.add_argument(
        "--scheduler-cores",
        type=int,
        default=0,
        metavar="N",
        help="reserve N cores for the scheduler, and the others for the load (0: both share all)",
    )
    parser.add_argument(
        "--sweep",
        type=_sizes,
        default=(),
        metavar="N,...",
        help="one run for each of these numbers of workers; writes DIR/scale_N.json or DIR/uplinks_N.json",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("muster/bench/results"),
        metavar="DIR",
        help="directory for the results of --sweep (muster/bench/results)",
    )


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) if part.strip().isdigit() else 0 for part in text.split(","))
    if min(sizes) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 2")
    return sizes


def run(args: argparse.Namespace) -> dict[str, Any] | int:
    """Runs the benchmark once; returns what it measured (times in seconds), or an exit code."""
    if args.workers < 2:
        print(f"bench scale: --workers must be at least 2; it is {args.workers}.", file=sys.stderr)
        return 2
    if args.scheduler_cores >= len(os.sched_getaffinity(0)):
        there = len(os.sched_getaffinity(0))
        print(f"bench scale: --scheduler-cores must be below {there}, the processors here.", file=sys.stderr)
        return 2
    if args.sweep:
        return _sweep(args)
    print(f"forming {args.workers} simulated workers over mutual TLS ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="muster-scale-") as folder:
        figures = measure(args, Path(folder))
    for name, value in figures.items():
        if name != "turns":
            print(f"{name:34} {value:,.3f}" if isinstance(value, float) else f"{name:34} {value:,}")
    asked = {"uplinks": args.uplinks, "node_timeout_s": args.node_timeout_s, "beat_s": args.beat_s}
    asked |= {"scheduler_cores": args.scheduler_cores}
    return {"workers": args.workers, **asked, "dying_percent": args.dying, **figures}


def _sweep(args: argparse.Namespace) -> int:
    """Runs each size in a process of its own, so that none inherits memory from the previous one."""
    for size in args.sweep:
        path = args.results / f"{'uplinks' if args.uplinks else 'scale'}_{size}.json"
        rest = ["--heartbeat-s", args.heartbeat_s, "--dying", args.dying, "--limit-s", args.limit_s]
        rest += ["--node-timeout-s", args.node_timeout_s, "--loads", args.loads, "--beat-s", args.beat_s]
        rest += ["--scheduler-cores", args.scheduler_cores, "--figures", args.figures]
        rest += ["--uplinks"] if args.uplinks else []
        command = [sys.executable, "-m", "muster", "bench", "scale", "--workers", size, *rest, "--json", path]
        code = subprocess.run([str(word) for word in command], check=False).returncode
        if code:
            print(f"bench scale: the run with {size} workers failed", file=sys.stderr)
            return code
    return 0


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Starts a scheduler and the load processes; returns the results (times in seconds)."""
    cores = args.scheduler_cores
    with scheduler_for(args.workers, args.node_timeout_s, folder, cores=cores) as (pid, port):
        crowd = Crowd(args, pid, port, folder)
        try:
            return crowd.play()
        finally:
            crowd.end()


@contextlib.contextmanager
def scheduler_for(
    workers: int, node_timeout_s: float, folder: Path, *, serve: bool = False, cores: int = 0
) -> Iterator[tuple[int, int]]:
    """Runs a scheduler with its own keys; yields its process id and port.

    Args:
        workers: the number of workers of its job.
        node_timeout_s: MS_NODE_TIMEOUT.
        folder: the folder for keys and log.
        serve: whether it serves any job.
        cores: the number of cores reserved for it; this process's other children get the rest. 0 for none.
    """
    config, password = make_keys(folder)
    env = environment(
        MS_ROLE="MS_SCHED",
        MS_WORKER_NUM=str(workers),
        MS_WORKER_MIN="1",
        MS_CONFIG_FILE=str(config),
        MS_SERVER_PASSWORD_FILE=str(password),
        MS_LOG_LEVEL="WARNING",
        MS_NODE_TIMEOUT=str(node_timeout_s),
        MS_MAX_STREAMS_PER_HOST="65536",  # all come from loopback
    )
    command = [sys.executable, "-m", "scheduler", "--port", "0", *(["--serve"] if serve else [])]
    with (folder / "scheduler.log").open("w+") as log:
        usable = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, usable[:cores] if cores else usable)  # children begin with their parent's
        scheduler = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
        os.sched_setaffinity(0, usable[cores:])
        try:
            yield scheduler.pid, _wait_ready(scheduler, log)
        finally:
            scheduler.kill()
            scheduler.communicate()
            os.sched_setaffinity(0, usable)


def beside_a_job(
    args: argparse.Namespace, beat_s: float, measure: Callable[[Load, int, Path], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """Measures a scheduler with an established generation of workers that this process simulates.

    Args:
        args: the options ``workers``, ``node_timeout_s`` and ``limit_s``.
        beat_s: the pause between two heartbeats in seconds; 0 for the one that the scheduler asks for.
        measure: measures, given the workers, the scheduler's process id and the folder of its keys.

    Returns:
        The figures.

    Raises:
        RuntimeError: a worker was lost, or the measurement did not end within ``limit_s``.
    """
    from muster.bench.scale.load import Load

    def say(**what: object) -> None:
        if "failed" in what:
            raise RuntimeError(f"A worker is lost: {what['failed']}.")

    async def play(pid: int, port: int, folder: Path) -> dict[str, Any]:
        orders = {
            "port": port,
            "folder": str(folder),
            "node_timeout_s": args.node_timeout_s,
            "world_size": args.workers,
            "indices": list(range(args.workers)),
            "per_host": WORKERS_PER_HOST,
            "beat_s": beat_s,
            "uplinks": False,
        }
        load = Load(orders, say)
        beating = asyncio.ensure_future(load.keep_beating())
        try:
            async with asyncio.timeout(args.limit_s):
                await load.join()
                await load.standing.wait()
                return await measure(load, pid, folder)
        except TimeoutError:
            raise RuntimeError(f"The run did not end within {args.limit_s:g} s.") from None
        finally:
            beating.cancel()

    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = Path(name)
        with scheduler_for(args.workers, args.node_timeout_s, folder) as (pid, port):
            figures = asyncio.run(play(pid, port, folder))
    for figure, value in figures.items():
        print(f"{figure:40} {value:,.4f}" if isinstance(value, float) else f"{figure:40} {value:,}")
    return {"workers": args.workers, **figures}


def _wait_ready(scheduler: subprocess.Popen[str], log: Any) -> int:
    assert scheduler.stdout is not None
    line = scheduler.stdout.readline()
    if "ready on" not in line:
        log.seek(0)
        raise RuntimeError(f"The scheduler did not start: {line}{log.read()[-2000:]}")
    return int(line.split("ready on ")[1].split()[0].rsplit(":", 1)[1])


class Crowd:
    """The load processes, and their messages."""

    def __init__(self, args: argparse.Namespace, scheduler_pid: int, port: int, folder: Path) -> None:
        self._args = args
        self._scheduler_pid = scheduler_pid
        self._said: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self._until = time.monotonic() + args.limit_s
        self._indices = [list(part) for part in _parts(args.workers, args.loads)]
        self._loads = [
            subprocess.Popen(
                [sys.executable, "-m", "muster.bench.scale.load"],
                env=environment(GRPC_VERBOSITY="NONE"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in self._indices
        ]
        for at, load in enumerate(self._loads):
            threading.Thread(target=self._listen, args=(at, load.stdout), daemon=True).start()
            self._tell(
                at,
                port=port,
                folder=str(folder),
                node_timeout_s=args.node_timeout_s,
                world_size=args.workers,
                indices=self._indices[at],
                per_host=WORKERS_PER_HOST,
                beat_s=args.beat_s,
                uplinks=args.uplinks,
            )

    def end(self) -> None:
        """Ends the load processes."""
        for load in self._loads:
            load.kill()
            load.wait()
            for pipe in (load.stdin, load.stdout):
                if pipe is not None:
                    pipe.close()

    def play(self) -> dict[str, Any]:
        """Forms, holds, breaks and re-forms the group; returns the figures."""
        self._from_each("ready")
        empty_bytes = resident_bytes(self._scheduler_pid)
        figures = self._form()
        resident = resident_bytes(self._scheduler_pid)
        figures["scheduler_resident_bytes"] = resident
        figures["scheduler_bytes_per_worker"] = round((resident - empty_bytes) / self._args.workers)
        figures |= self._hold()
        figures |= self._break()
        return figures

    # ------------------------------------------------------------ phases

    def _form(self) -> dict[str, Any]:
        busy_s = cpu_s(self._scheduler_pid)
        self._send_all(do="join")
        joined = self._from_each("last_join_at")
        stands = self._until_all_stand(1)
        first = min(each["first_join_at"] for each in joined)
        last = max(each["last_join_at"] for each in joined)
        return {
            "joins_s": last - first,
            "last_join_to_all_assigned_s": max(0.0, max(each["assigned_at"] for each in stands) - last),
            "last_join_to_all_have_the_id_s": max(each["ids_at"] for each in stands) - last,
            "first_join_to_all_built_s": max(each["built_at"] for each in stands) - first,
            "forming_scheduler_cpu_s": cpu_s(self._scheduler_pid) - busy_s,
            "forming_load_cpu_s": sum(each["cpu_s"] for each in self._count()),
        }

    def _count(self) -> list[dict[str, Any]]:
        self._send_all(do="count")
        return self._from_each("beats")

    def _hold(self) -> dict[str, Any]:
        if not self._args.figures:
            return self._hold_once()
        turns = []
        for _ in range(self._args.figures):
            for carries_figures in (False, True):
                self._send_all(do="figures", carried=carries_figures)
                turns.append({"carries_figures": carries_figures, **self._hold_once()})
        per_beat_s = {
            carried: statistics.median(
                turn["scheduler_cpu_share_of_one_core"] / turn["heartbeats_per_s"]
                for turn in turns
                if turn["carries_figures"] == carried
            )
            for carried in (False, True)
        }
        return {
            "scheduler_cpu_us_per_heartbeat": per_beat_s[False] * 1e6,
            "scheduler_cpu_us_per_heartbeat_with_figures": per_beat_s[True] * 1e6,
            "figures_cost_percent": (per_beat_s[True] / per_beat_s[False] - 1.0) * 100.0,
            "turns": turns,
            "false_deaths": 0,
        }

    def _hold_once(self) -> dict[str, Any]:
        before, busy_s, start = self._count(), cpu_s(self._scheduler_pid), time.monotonic()
        while (left_s := start + self._args.heartbeat_s - time.monotonic()) > 0:
            self._refuse_failures(left_s)
        after, busy_s, elapsed = self._count(), cpu_s(self._scheduler_pid) - busy_s, time.monotonic() - start
        beats, sent_bytes, load_s = (
            sum(b[name] - a[name] for a, b in zip(before, after, strict=True))
            for name in ("beats", "bytes", "cpu_s")
        )
        return {
            "held_s": elapsed,
            "heartbeats_per_s": beats / elapsed,
            "bytes_per_heartbeat": sent_bytes / max(beats, 1),
            "scheduler_cpu_share_of_one_core": busy_s / elapsed,
            "load_cpu_share_of_one_core": load_s / elapsed,
            "false_deaths": 0,  # one would have ended the run
        }

    def _break(self) -> dict[str, Any]:
        count = max(1, round(self._args.workers * self._args.dying / 100))
        dying = set(range(0, self._args.workers, max(1, self._args.workers // count)))
        dying = set(sorted(dying)[:count])
        for at, indices in enumerate(self._indices):
            self._tell(at, do="kill", indices=sorted(dying & set(indices)))
        start = min(each["killed_at"] for each in self._from_each("killed_at"))
        stands = self._until_all_stand(2)  # one generation for each notice of a death; the last one counts
        return {
            "died": count,
            "death_to_all_rebuilt_s": max(each["built_at"] for each in stands) - start,
            "generation_after": stands[0]["stands"],
        }

    # ------------------------------------------------------------ talk

    def _until_all_stand(self, generation: int) -> list[dict[str, Any]]:
        """Waits until all processes have had the same established generation for a moment.

        Returns:
            Each process's message about it.
        """
        newest: dict[int, dict[str, Any]] = {}
        while True:
            settled = (
                len(newest) == len(self._loads) and len({each["stands"] for each in newest.values()}) == 1
            )
            try:
                at, said = self._next(1.0 if settled else None)
            except queue.Empty:
                return [newest[at] for at in sorted(newest)]
            if said.get("stands", 0) >= generation:
                newest[at] = said

    def _from_each(self, what: str) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        kept = []
        while len(found) < len(self._loads):
            at, said = self._next()
            if what in said:
                found[at] = said
            else:
                kept.append((at, said))
        for each in kept:
            self._said.put(each)
        return [found[at] for at in sorted(found)]

    def _next(self, patience_s: float | None = None) -> tuple[int, dict[str, Any]]:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise RuntimeError(f"The run did not end within {self._args.limit_s:g} s.")
        try:
            at, said = self._said.get(timeout=left_s if patience_s is None else min(patience_s, left_s))
        except queue.Empty:
            if patience_s is None:
                raise RuntimeError(f"The run did not end within {self._args.limit_s:g} s.") from None
            raise
        if "failed" in said:
            raise RuntimeError(f"A load process says: {said['failed']}.")
        return at, said

    def _refuse_failures(self, seconds: float) -> None:
        """Waits for ``seconds``.

        Raises:
            RuntimeError: a process reported something, which means that the generation has changed.
        """
        try:
            at, said = self._next(seconds)
        except queue.Empty:
            return
        raise RuntimeError(f"Load process {at} says, though nobody has died: {said}.")

    def _listen(self, at: int, lines: Any) -> None:
        for line in lines:
            self._said.put((at, json.loads(line)))
        self._said.put((at, {"failed": "it has ended"}))

    def _send_all(self, **order: Any) -> None:
        for at in range(len(self._loads)):
            self._tell(at, **order)

    def _tell(self, at: int, **order: Any) -> None:
        pipe = self._loads[at].stdin
        assert pipe is not None
        pipe.write(json.dumps(order) + "\n")
        pipe.flush()


def _parts(workers: int, loads: int) -> list[range]:
    """Distributes workers over load processes by whole hosts."""
    hosts = -(-workers // WORKERS_PER_HOST)
    loads = min(loads, hosts)
    ends = [min(workers, WORKERS_PER_HOST * (hosts * (at + 1) // loads)) for at in range(loads)]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def cpu_s(pid: int) -> float:
    """Returns the CPU time of a process so far, in seconds."""
    fields = stat_fields(f"/proc/{pid}")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
