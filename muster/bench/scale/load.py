"""One of the processes that simulate a scheduler's workers: real handshakes and streams, no training.

It reads commands as lines of JSON from standard input and reports on standard output, with times of the
system's monotonic clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import gc
import json
import secrets
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JOIN_PARALLELISM = 32
LOOK_S = 0.02


@dataclass
class SimulatedWorker:
    """One simulated worker."""

    index: int
    number: int
    alive: bool = True
    welcomed: bool = False
    generation: int = 0
    rank: int = -1
    assigned_at: float = 0.0
    ids_at: float = 0.0
    built: int = 0
    built_at: float = 0.0
    times_at: float = 0.0
    gpu_at: float = 0.0


@dataclass
class Stream:
    """One connection to the scheduler: that of one worker, or of an uplink, which carries a host's workers.

    Messages that are queued on a host's stream together are sent together, as by an uplink.
    """

    load: Load
    workers: list[SimulatedWorker]
    by_host: bool
    call: Any = None
    channel: Any = None
    outgoing: list[Any] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    welcomed: asyncio.Event = field(default_factory=asyncio.Event)
    beats_at: float = 0.0
    interval_s: float = 1.0
    waiting_interval_s: float = 1.0

    async def join(self) -> None:
        """Does two TLS handshakes as a worker does, the preflight's and gRPC's; then all workers join."""

        from muster.wire.v1 import host_pb2
        from muster.wire.v1 import rendezvous_pb2 as pb

        load = self.load
        self.channel = await load.connect()
        kinds: Any
        if self.by_host:
            method, kinds = "/rendezvous.v1.HostStream/Open", (host_pb2.FromHost, host_pb2.ToHost.FromString)
        else:
            method, kinds = "/rendezvous.v1.Rendezvous/Session", (pb.WorkerMessage, load.parse)
        self.call = self.channel.stream_stream(
            method, request_serializer=kinds[0].SerializeToString, response_deserializer=kinds[1]
        )()
        for worker in self.workers:
            self.put(worker, pb.WorkerMessage(join=load.join_message(worker.index)))
        load.tasks += [asyncio.ensure_future(self._write()), asyncio.ensure_future(self._read())]

    def put(self, worker: SimulatedWorker, message: Any) -> None:
        """Sends a worker's message, unless the worker is dead."""
        from muster.wire.v1 import host_pb2

        if not worker.alive:
            return
        if self.by_host:
            message = host_pb2.FromWorker(worker=worker.number, message=message.SerializeToString())
        self.outgoing.append(message)
        self.wake.set()

    def kill(self, worker: SimulatedWorker) -> None:
        """Simulates a killed worker: ends its stream, or sends the uplink's message that it is gone."""
        from muster.wire.v1 import host_pb2

        worker.alive = False
        if self.by_host:
            self.outgoing.append(host_pb2.FromWorker(worker=worker.number, gone=host_pb2.Gone()))
            self.wake.set()
        else:
            self.call.cancel()

    async def _write(self) -> None:
        from muster.wire.v1 import host_pb2

        while not self.call.done():
            await self.wake.wait()
            self.wake.clear()
            batch, self.outgoing = self.outgoing, []
            if self.by_host:
                await self.call.write(host_pb2.FromHost(items=batch))
            else:
                for message in batch:
                    await self.call.write(message)

    async def _read(self) -> None:
        import grpc.aio

        try:
            while (message := await self.call.read()) is not grpc.aio.EOF:
                if self.by_host:
                    self._take_all(message)
                else:
                    self.load.take(self, self.workers[0], message)
        except grpc.aio.AioRpcError as error:
            if any(worker.alive for worker in self.workers):
                self.load.failed(f"lost a stream: {error.details()}")
        else:
            if any(worker.alive for worker in self.workers):
                self.load.failed("the scheduler ended a stream")

    def _take_all(self, message: Any) -> None:
        for item in message.items:
            parsed = None if item.HasField("closed") else self.load.parse(item.message)
            for index, number in enumerate(item.workers):
                worker = self.workers[number - 1]
                if parsed is None:
                    if worker.alive:
                        self.load.failed(f"worker {worker.index} was let go: {item.closed.detail}")
                    continue
                own = self.load.parse(item.own[index]) if item.own else None
                rank = own.assignment.rank if own is not None else None
                self.load.take(self, worker, parsed, rank)


class Load:
    """All workers that this process simulates.

    Args:
        orders: ``port``, ``folder`` of the keys, ``node_timeout_s``, ``world_size``, the ``indices`` of its
            workers, ``per_host``, whether uplinks carry them (``uplinks``), and ``beat_s``, the seconds
            between two heartbeats; 0 for those that the scheduler asks for.
        say: called with each result.

    Attributes:
        standing: set once all workers of this process have established the same generation.
    """

    def __init__(self, orders: dict[str, Any], say: Callable[..., None]) -> None:
        from muster.bench.scale.reader import slim_reader
        from muster.certs.runtime.store import load_credentials
        from muster.wire.settings import client_options

        folder = Path(orders["folder"])
        password = (folder / "password").read_bytes().strip()
        self.credentials = load_credentials(folder / "client.p12", password, folder / "ca.crt")
        self.port: int = orders["port"]
        self.options = [*client_options(orders["node_timeout_s"]), ("grpc.use_local_subchannel_pool", 1)]
        self.options.append(("grpc.max_receive_message_length", 64 << 20))
        self.parse = slim_reader()
        self.threads = ThreadPoolExecutor(4)
        self.tasks: list[Any] = []
        self.beats = self.beat_bytes = 0
        self.standing = asyncio.Event()
        self._say = say
        self._world_size: int = orders["world_size"]
        self._per_host: int = orders["per_host"]
        self._beat_s: float = orders["beat_s"]
        self._carries_figures = False
        self._failed = False
        self._reported = 0
        per_stream = self._per_host if orders["uplinks"] else 1
        indices: list[int] = orders["indices"]
        self.streams = [
            Stream(
                self,
                [
                    SimulatedWorker(index, at + 1)
                    for at, index in enumerate(indices[begin : begin + per_stream])
                ],
                orders["uplinks"],
            )
            for begin in range(0, len(indices), per_stream)
        ]

    async def connect(self) -> Any:
        """Opens a channel to the scheduler as a worker does, after a preflight."""
        import grpc.aio

        from muster.certs.runtime.grpc_credentials import channel_credentials
        from muster.certs.runtime.preflight import preflight

        found = await asyncio.get_running_loop().run_in_executor(
            self.threads,
            lambda: preflight("127.0.0.1", self.port, self.credentials, job="default", timeout_s=30),
        )
        tls = channel_credentials(self.credentials, found.server_leaf_pem)
        return grpc.aio.secure_channel(f"127.0.0.1:{self.port}", tls, self.options)

    async def play(self) -> None:
        """Carries out orders until standard input ends."""
        orders = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
        self._say(ready=True)
        beating = None
        while line := await orders.readline():
            order = json.loads(line)
            if order["do"] == "join":
                beating = asyncio.ensure_future(self.keep_beating())
                await self.join()
            elif order["do"] == "kill":
                self._say(killed_at=time.monotonic())
                for index in order["indices"]:
                    stream, worker = self._find(index)
                    stream.kill(worker)
                self._say_standing()
            elif order["do"] == "figures":
                self._carries_figures = order["carried"]
            elif order["do"] == "count":
                self._say(beats=self.beats, bytes=self.beat_bytes, cpu_s=time.process_time())
        if beating is not None:
            beating.cancel()

    async def join(self) -> None:
        """Lets all workers join."""
        gate = asyncio.Semaphore(JOIN_PARALLELISM)

        async def one(stream: Stream) -> None:
            async with gate:
                await stream.join()
                await stream.welcomed.wait()

        first = time.monotonic()
        await asyncio.gather(*map(one, self.streams))
        self._say(first_join_at=first, last_join_at=time.monotonic())

    def join_message(self, index: int) -> Any:
        """Returns the first message of worker ``index``."""
        from muster.wire.v1 import rendezvous_pb2 as pb

        host = index // self._per_host
        return pb.Join(
            protocol_version=1,
            job_id="default",
            node_id=f"node{host}-{index % self._per_host}",
            incarnation=index + 1,
            worker_num=self._world_size,
            worker_min=1,
            host=pb.Host(
                id=f"host-{host:08x}", name=f"node{host}", address=f"127.0.{host // 256}.{host % 256}"
            ),
            device=pb.Device(kind="cuda", index=index % self._per_host),
            local_index=index % self._per_host,
            data_address=f"127.0.0.1:{20_000 + index}",
            held_rank=-1,
            takes_deltas=True,
            backend="nccl",
        )

    def take(self, stream: Stream, worker: SimulatedWorker, message: Any, rank: int | None = None) -> None:
        """Handles a message to a worker; ``rank`` is its rank if the message is a shared assignment."""
        from muster.wire.v1 import rendezvous_pb2 as pb

        kind = message.WhichOneof("body")
        now = time.monotonic()
        if not worker.alive:
            return
        if kind == "welcome":
            worker.welcomed = True
            stream.welcomed.set()
            stream.interval_s = self._beat_s or message.welcome.heartbeat_interval_s
            stream.waiting_interval_s = (
                self._beat_s or message.welcome.waiting_interval_s or stream.interval_s
            )
            stream.beats_at = now + stream.waiting_interval_s
        elif kind == "assignment":
            assignment = message.assignment
            if not worker.generation:  # heartbeats are spread by rank, as those of real workers
                share = (worker.index + 1) / self._world_size
                stream.beats_at = min(stream.beats_at, now + share * stream.interval_s)
            worker.generation, worker.assigned_at = assignment.generation, now
            worker.rank = assignment.rank if rank is None else rank
            if worker.rank == 0:
                ids = [secrets.token_bytes(128) for _ in range(assignment.unique_id_count)]
                reply = pb.PublishUniqueIds(generation=worker.generation, unique_ids=ids)
                stream.put(worker, pb.WorkerMessage(publish_unique_ids=reply))
        elif kind == "unique_ids":
            worker.ids_at = now
            stream.put(worker, pb.WorkerMessage(built=pb.Built(generation=message.unique_ids.generation)))
        elif kind == "group_built":
            worker.built, worker.built_at = message.group_built.generation, now
            self._say_standing()
        elif kind == "refused":
            self.failed(f"worker {worker.index} was refused: {message.refused.sentence}")

    def _say_standing(self) -> None:
        """Reports, once per generation, that all workers of this process have established it."""
        alive = [worker for stream in self.streams for worker in stream.workers if worker.alive]
        built = {worker.built for worker in alive}
        newest = max(built, default=0)
        if len(built) == 1 and newest > self._reported:
            self._reported = newest
            self.standing.set()
            self._say(
                stands=newest,
                assigned_at=max(worker.assigned_at for worker in alive),
                ids_at=max(worker.ids_at for worker in alive),
                built_at=max(worker.built_at for worker in alive),
            )

    def _find(self, index: int) -> tuple[Stream, SimulatedWorker]:
        for stream in self.streams:
            for worker in stream.workers:
                if worker.index == index:
                    return stream, worker
        raise KeyError(index)

    def _add_figures(self, worker: SimulatedWorker, beat: Any, now: float) -> None:
        """Adds figures of steps, GPU and script to a heartbeat, as often as real workers do."""
        from muster.wire.messages import step_times_apart_s
        from muster.wire.v1 import rendezvous_pb2 as pb
        from muster.worker.gpu_health.watch import EVERY_S
        from muster.worker.session.own_gpu import MEMBERS_A_SECOND

        turn = worker.index / self._world_size
        times_apart_s = step_times_apart_s(self._world_size)
        gpu_apart_s = max(EVERY_S, self._world_size / MEMBERS_A_SECOND)
        worker.times_at = worker.times_at or now + turn * times_apart_s
        worker.gpu_at = worker.gpu_at or now + turn * gpu_apart_s
        if now >= worker.times_at:
            worker.times_at = now + times_apart_s
            computed, waited = 0.09 + 0.001 * (worker.index % 7), 0.01
            beat.times.extend((50, 50 * computed, 2 * computed, 50 * waited, 2 * waited, 0.1, 0.004, 0.5, 1))
        if now >= worker.gpu_at:
            worker.gpu_at = now + gpu_apart_s
            reading: Any = {"busy_percent": 97, "used_mb": 61_000, "total_mb": 81_000, "clock_mhz": 1980}
            beat.gpu.CopyFrom(pb.GpuReport(state="well", celsius=61, nvlink_errors=0, **reading))
        beat.checkpoints_s = 12.5
        beat.steps, beat.epoch, beat.epochs = 1_000_000, 3, 10
        for name in ("accuracy", "grad_norm", "tokens_per_s", "val/loss"):
            beat.numbers[name] = 0.1 * self.beats

    async def keep_beating(self) -> None:
        """Sends the heartbeats of workers that have joined; those of a host together, as an uplink does."""
        from muster.wire.v1 import rendezvous_pb2 as pb

        while True:
            now = time.monotonic()
            for stream in self.streams:
                if not stream.welcomed.is_set() or now < stream.beats_at:
                    continue
                formed = any(worker.generation for worker in stream.workers)
                stream.beats_at = now + (stream.interval_s if formed else stream.waiting_interval_s)
                for worker in stream.workers:
                    if worker.welcomed and worker.alive:
                        self.beats += 1
                        beat = pb.Heartbeat(
                            generation=worker.generation,
                            step=self.beats,
                            started_step=self.beats,
                            samples_per_s=1000.0,
                        )
                        if self._carries_figures and worker.generation:
                            self._add_figures(worker, beat, now)
                        self.beat_bytes += beat.ByteSize()
                        stream.put(worker, pb.WorkerMessage(heartbeat=beat))
            await asyncio.sleep(LOOK_S)

    def failed(self, sentence: str) -> None:
        """Reports, once, that a worker was lost that should not have been."""
        if not self._failed:
            self._failed = True
            self._say(failed=sentence)


def _print(**what: object) -> None:
    """Prints a line for the process that gives the orders."""
    print(json.dumps(what), flush=True)


def main() -> int:
    """Simulates the workers that the first line of standard input orders."""
    gc.disable()  # one process simulates thousands, each of which would have next to nothing to collect

    async def play() -> None:
        await Load(json.loads(sys.stdin.readline()), _print).play()

    asyncio.run(play())
    return 0


if __name__ == "__main__":
    sys.exit(main())
