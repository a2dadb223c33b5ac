"""How many workers one scheduler carries: simulated workers, real TLS sessions, no training.

A load process opens one mutually authenticated connection and one session stream per worker, as a worker
does, and plays the worker's part of the protocol. The scheduler is the product's own, in a process of its
own, and both share this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.bench.scale.reader import slim_reader

WORKERS_PER_HOST = 8
JOIN_PARALLELISM = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--workers", type=int, default=1000, metavar="N", help="simulated workers (1000)")
    parser.add_argument(
        "--heartbeat-s",
        type=float,
        default=10.0,
        metavar="S",
        help="how long to hold heartbeats, one a second",
    )
    parser.add_argument(
        "--dying", type=float, default=1.0, metavar="PERCENT", help="share that dies at once at the end (1)"
    )
    parser.add_argument(
        "--node-timeout-s",
        type=float,
        default=30.0,
        metavar="S",
        help="MS_NODE_TIMEOUT; one process plays all workers, and is late more easily than they are (30)",
    )
    parser.add_argument("--limit-s", type=float, default=300.0, metavar="S", help="give up after this time")
    parser.add_argument(
        "--sweep",
        type=_sizes,
        default=(),
        metavar="N,...",
        help="one run for each of these numbers; writes RESULTS/scale_N.json",
    )
    parser.add_argument(
        "--results", type=Path, default=Path("bench/results"), metavar="DIR", help="default: bench/results"
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
    if args.sweep:
        return _sweep(args)
    print(f"forming {args.workers} simulated workers over mutual TLS ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="muster-scale-") as folder:
        figures = _measure(args, Path(folder))
    for name, value in figures.items():
        print(f"{name:34} {value:,.3f}" if isinstance(value, float) else f"{name:34} {value:,}")
    return {"workers": args.workers, "dying_percent": args.dying, **figures}


def _sweep(args: argparse.Namespace) -> int:
    """Runs each size in a process of its own, so that none inherits the memory of the one before."""
    for size in args.sweep:
        path = args.results / f"scale_{size}.json"
        rest = ("--heartbeat-s", args.heartbeat_s, "--dying", args.dying, "--limit-s", args.limit_s)
        command = [sys.executable, "-m", "muster", "bench", "scale", "--workers", size, *rest, "--json", path]
        code = subprocess.run([str(word) for word in command], check=False).returncode
        if code:
            print(f"bench scale: the run with {size} workers failed", file=sys.stderr)
            return code
    return 0


def _measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    password = secrets.token_hex(16)
    env = {**os.environ, "MS_CERTS_PASSWORD": password, "MS_SERVER_PASSWORD": password}
    subprocess.run(
        [sys.executable, "-m", "muster", "certs", "init", "--dir", str(folder), "--hosts", "127.0.0.1"],
        env=env,
        check=True,
        capture_output=True,
    )
    env |= {
        "MS_ROLE": "MS_SCHED",
        "MS_WORKER_NUM": str(args.workers),
        "MS_WORKER_MIN": "1",
        "MS_CONFIG_FILE": str(folder / "config.json"),
        "MS_LOG_LEVEL": "WARNING",
        "MS_NODE_TIMEOUT": str(args.node_timeout_s),
        "MS_MAX_STREAMS_PER_HOST": "65536",  # all come from loopback
    }
    log = (folder / "scheduler.log").open("w+")
    command = [sys.executable, "-m", "scheduler", "--port", "0"]
    scheduler = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        port = _wait_ready(scheduler, log)
        crowd = Crowd(args, scheduler.pid, port)
        return asyncio.run(asyncio.wait_for(crowd.play(folder, password.encode()), args.limit_s))
    except TimeoutError:
        raise RuntimeError(f"The run did not end within {args.limit_s:g} s.") from None
    finally:
        scheduler.kill()
        scheduler.communicate()
        log.close()


def _wait_ready(scheduler: subprocess.Popen[str], log: Any) -> int:
    assert scheduler.stdout is not None
    line = scheduler.stdout.readline()
    if "ready on" not in line:
        log.seek(0)
        raise RuntimeError(f"The scheduler did not start: {line}{log.read()[-2000:]}")
    return int(line.split("ready on ")[1].split()[0].rsplit(":", 1)[1])


@dataclass
class Simulated:
    """One simulated worker."""

    index: int
    call: Any = None
    channel: Any = None
    generation: int = 0
    rank: int = -1
    welcomed: bool = False
    alive: bool = True
    reader: asyncio.Future[None] | None = None
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    assigned_at: float = 0.0
    built_at: float = 0.0
    ids_at: float = 0.0

    async def send(self, message: Any) -> None:
        """Writes one message; gRPC takes one write at a time, and a dead worker writes none."""
        async with self.writing:
            if self.alive and not self.call.done():
                await self.call.write(message)


@dataclass
class Crowd:
    """All simulated workers and what they saw."""

    args: argparse.Namespace
    scheduler_pid: int
    port: int
    workers: list[Simulated] = field(default_factory=list)
    expected_generation: int = 1
    waiting_for: int = 0
    beats: int = 0
    failure: str = ""
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    async def play(self, folder: Path, password: bytes) -> dict[str, Any]:
        """Forms, holds, breaks and re-forms the group; returns the figures."""
        await self._prepare(folder, password)
        empty_bytes = _resident_bytes(self.scheduler_pid)
        self.workers = [Simulated(index) for index in range(self.args.workers)]
        beating = asyncio.ensure_future(self._keep_beating())
        figures = await self._form()
        grown_bytes = _resident_bytes(self.scheduler_pid) - empty_bytes
        figures["scheduler_bytes_per_worker"] = round(grown_bytes / len(self.workers))
        figures |= await self._hold()
        figures |= await self._break()
        beating.cancel()
        for worker in self.workers:
            worker.call.cancel()
        await asyncio.gather(*(worker.channel.close() for worker in self.workers))
        return figures

    async def _prepare(self, folder: Path, password: bytes) -> None:
        from muster.certs.runtime.grpc_credentials import channel_credentials, client_options
        from muster.certs.runtime.preflight import preflight
        from muster.certs.runtime.store import load_credentials

        credentials = load_credentials(folder / "client.p12", password, folder / "ca.crt")
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            None,
            lambda: preflight(
                "127.0.0.1", self.port, credentials, expect_role="scheduler", job="default", timeout_s=10
            ),
        )
        self.parse = slim_reader()
        self.tls = channel_credentials(credentials, found.server_leaf_pem)
        # Every worker is a connection of its own, as it is for workers in processes of their own.
        self.options = [*client_options(self.args.node_timeout_s), ("grpc.use_local_subchannel_pool", 1)]

    # ------------------------------------------------------------ forming

    async def _form(self) -> dict[str, Any]:
        self._expect(1, len(self.workers))
        gate = asyncio.Semaphore(JOIN_PARALLELISM)
        first = time.perf_counter()
        joined = await asyncio.gather(*(self._join(worker, gate) for worker in self.workers))
        last_join = max(joined)
        await self._settle()
        return {
            "joins_s": last_join - first,
            "last_join_to_all_assigned_s": max(w.assigned_at for w in self.workers) - last_join,
            "last_join_to_all_have_the_id_s": max(w.ids_at for w in self.workers) - last_join,
            "first_join_to_all_built_s": max(w.built_at for w in self.workers) - first,
        }

    async def _join(self, worker: Simulated, gate: asyncio.Semaphore) -> float:
        import grpc.aio

        from muster.rendezvous.v1 import rendezvous_pb2 as pb

        async with gate:
            worker.channel = grpc.aio.secure_channel(f"127.0.0.1:{self.port}", self.tls, self.options)
            session = worker.channel.stream_stream(
                "/rendezvous.v1.Rendezvous/Session",
                request_serializer=pb.WorkerMessage.SerializeToString,
                response_deserializer=self.parse,
            )
            worker.call = session()
            await worker.call.write(pb.WorkerMessage(join=self._join_message(worker.index)))
            sent_at = time.perf_counter()
            first = await worker.call.read()
            if first is grpc.aio.EOF or not first.HasField("welcome"):
                raise RuntimeError(f"Worker {worker.index} was not welcomed: {first}")
        worker.welcomed = True
        worker.reader = asyncio.ensure_future(self._read(worker))
        return sent_at

    def _join_message(self, index: int) -> Any:
        from muster.rendezvous.v1 import rendezvous_pb2 as pb

        host = index // WORKERS_PER_HOST
        return pb.Join(
            protocol_version=1,
            job_id="default",
            node_id=f"node{host}-{index % WORKERS_PER_HOST}",
            incarnation=index + 1,
            worker_num=self.args.workers,
            worker_min=1,
            host=pb.Host(
                id=f"host-{host:08x}", name=f"node{host}", address=f"127.0.{host // 256}.{host % 256}"
            ),
            device=pb.Device(kind="cuda", index=index % WORKERS_PER_HOST),
            local_index=index % WORKERS_PER_HOST,
            data_address=f"127.0.0.1:{20_000 + index}",
            held_rank=-1,
            backend="nccl",
        )

    async def _read(self, worker: Simulated) -> None:
        import grpc.aio

        try:
            while (message := await worker.call.read()) is not grpc.aio.EOF:
                await self._take(worker, message)
        except grpc.aio.AioRpcError as error:
            if worker.alive:
                self.failed(f"Worker {worker.index} lost its stream: {error.details()}")
        else:
            self.failed(f"The scheduler ended the stream of worker {worker.index}.")

    async def _take(self, worker: Simulated, message: Any) -> None:
        from muster.rendezvous.v1 import rendezvous_pb2 as pb

        kind = message.WhichOneof("body")
        now = time.perf_counter()
        if kind == "assignment":
            assignment = message.assignment
            worker.generation, worker.rank, worker.assigned_at = (
                assignment.generation,
                assignment.rank,
                now,
            )
            if worker.rank == 0:
                ids = [secrets.token_bytes(128) for _ in range(assignment.unique_id_count)]
                reply = pb.PublishUniqueIds(generation=worker.generation, unique_ids=ids)
                await worker.send(pb.WorkerMessage(publish_unique_ids=reply))
        elif kind == "unique_ids":
            worker.ids_at = now
            await worker.send(pb.WorkerMessage(built=pb.Built(generation=message.unique_ids.generation)))
        elif kind == "group_built" and message.group_built.generation >= self.expected_generation:
            worker.built_at = now
            self._one_more()
        elif kind == "refused":
            self.failed(f"Worker {worker.index} was refused: {message.refused.sentence}")

    def failed(self, sentence: str) -> None:
        """Ends the run: a worker that should be in is not."""
        if not self.failure:
            self.failure = sentence
        self.settled.set()

    async def _settle(self) -> None:
        await self.settled.wait()
        if self.failure:
            raise RuntimeError(self.failure)

    def _expect(self, generation: int, count: int) -> None:
        self.expected_generation, self.waiting_for = generation, count
        if not self.failure:
            self.settled.clear()

    def _one_more(self) -> None:
        self.waiting_for -= 1
        if self.waiting_for == 0:
            self.settled.set()

    # ------------------------------------------------------------ holding

    async def _keep_beating(self) -> None:
        """Sends one heartbeat a second for every worker that is in, spread over the second."""
        while not self.failure:
            begun = time.perf_counter()
            for worker in self.workers:
                if worker.welcomed and worker.alive:
                    await self._beat(worker)
            await asyncio.sleep(max(0.01, 1.0 - (time.perf_counter() - begun)))

    async def _beat(self, worker: Simulated) -> None:
        from muster.rendezvous.v1 import rendezvous_pb2 as pb

        self.beats += 1
        beat = pb.Heartbeat(
            generation=worker.generation, step=self.beats, started_step=self.beats, samples_per_s=1000.0
        )
        await worker.send(pb.WorkerMessage(heartbeat=beat))

    async def _hold(self) -> dict[str, Any]:
        cpu_s, start, beats = _cpu_s(self.scheduler_pid), time.perf_counter(), self.beats
        await asyncio.sleep(self.args.heartbeat_s)
        elapsed = time.perf_counter() - start
        return {
            "heartbeats_per_s": (self.beats - beats) / elapsed,
            "scheduler_cpu_share_of_one_core": (_cpu_s(self.scheduler_pid) - cpu_s) / elapsed,
        }

    # ------------------------------------------------------------ breaking

    async def _break(self) -> dict[str, Any]:
        count = max(1, round(len(self.workers) * self.args.dying / 100))
        dying = self.workers[:: max(1, len(self.workers) // count)][:count]
        survivors = [worker for worker in self.workers if worker not in dying]
        self._expect(self.workers[0].generation + 1, len(survivors))
        start = time.perf_counter()
        for worker in dying:
            worker.alive = False
            worker.call.cancel()
        while True:  # one generation for each notice of a death; the last one counts
            await self._settle()
            newest = max(worker.generation for worker in survivors)
            behind = [worker for worker in survivors if worker.generation < newest]
            if not behind and len({worker.generation for worker in survivors}) == 1:
                break
            self._expect(newest, len(survivors))
        return {
            "died": len(dying),
            "death_to_all_rebuilt_s": max(worker.built_at for worker in survivors) - start,
            "generation_after": survivors[0].generation,
        }


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
