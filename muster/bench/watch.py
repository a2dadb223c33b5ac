"""Measures the costs of watching a scheduler and of rendering a job's page, by simulated workers over mTLS.

Each watcher opens the same streams as ``muster web``: one of all jobs and one of the job. The benchmark
measures the scheduler's CPU time with and without watchers, in turns; the time until a loss of a worker is
seen; and the cost of a page.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.bench.scale.command import add_job_arguments, beside_a_job, cpu_s

if TYPE_CHECKING:
    from muster.bench.scale.load import Load

JOB = "default"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    add_job_arguments(parser)
    parser.add_argument("--watchers", type=int, default=5, metavar="N", help="number of watchers (5)")
    parser.add_argument("--turn-s", type=float, default=12.0, metavar="S", help="length of a turn (12)")
    parser.add_argument(
        "--turns", type=int, default=8, metavar="N", help="turns with watchers, and as many without (8)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures, and returns the results; times in seconds, CPU time as shares of one core."""

    async def measure(load: Load, scheduler_pid: int, folder: Path) -> dict[str, Any]:
        return await WatchedScheduler(args, load, scheduler_pid, folder).play()

    return {"watchers": args.watchers, **beside_a_job(args, 1.0, measure)}


class WatchedScheduler:
    """A scheduler with an established generation, and its watchers.

    Args:
        args: the options.
        load: the simulated workers.
        scheduler_pid: the scheduler's process id.
        folder: the folder with the operator's certificate.
    """

    def __init__(self, args: argparse.Namespace, load: Load, scheduler_pid: int, folder: Path) -> None:
        from muster.certs.runtime.store import load_credentials

        password = (folder / "password").read_bytes().strip()
        self.args, self._load, self._scheduler_pid = args, load, scheduler_pid
        self._operator = load_credentials(folder / "operator.p12", password, folder / "ca.crt")
        self.known: Any = None
        self.shown, self._gone, self._seen_at = asyncio.Event(), asyncio.Event(), 0.0

    async def play(self) -> dict[str, Any]:
        """Measures with and without watchers in turns, then a page, then how soon a loss is seen."""
        without, watched = [], []
        for _ in range(self.args.turns):
            without.append(await self._share())
            async with _Watching(self):
                watched.append(await self._share())
        figures = {
            "scheduler_share_unwatched": statistics.median(without),
            "scheduler_share_watched": statistics.median(watched),
            "watching_costs_share": statistics.median(b - a for a, b in zip(without, watched, strict=True)),
            **self._render(),
        }
        async with _Watching(self):
            start = time.perf_counter()
            stream = self._load.streams[-1]
            stream.kill(stream.workers[-1])
            await self._gone.wait()
        return {**figures, "death_to_seen_s": self._seen_at - start}

    async def _share(self) -> float:
        await asyncio.sleep(1.0)
        begun_s, start = cpu_s(self._scheduler_pid), time.perf_counter()
        await asyncio.sleep(self.args.turn_s)
        return (cpu_s(self._scheduler_pid) - begun_s) / (time.perf_counter() - start)

    async def watch(self, channel: Any, job_id: str, *, keep: bool) -> None:
        """Reads a stream; with ``keep`` into the page's model, otherwise drops the bytes."""
        from muster.wire.v1 import watch_pb2 as pb

        call = channel.unary_stream(
            "/rendezvous.v1.Watching/Watch", request_serializer=pb.WatchRequest.SerializeToString
        )
        async for data in call(pb.WatchRequest(job_id=job_id)):
            if not keep:
                continue
            reply = pb.WatchReply.FromString(data)
            if not job_id:
                self.known.take(reply, time.time())
                continue
            self.known.take_of(job_id, reply, time.time())
            kind = reply.WhichOneof("body")
            if kind == "roster" and len(reply.roster.seats) < self.args.workers:
                self._seen_at = self._seen_at or time.perf_counter()
                self._gone.set()
            elif kind == "progress" and JOB in self.known.jobs:
                self.shown.set()

    async def open(self) -> Any:
        """Opens a watcher's connection."""
        import grpc.aio

        from muster.certs.runtime.grpc_credentials import channel_credentials
        from muster.certs.runtime.preflight import preflight

        found = await asyncio.to_thread(
            lambda: preflight("127.0.0.1", self._load.port, self._operator, job=JOB, timeout_s=30)
        )
        options = [*self._load.options, ("grpc.max_receive_message_length", -1)]
        tls = channel_credentials(self._operator, found.server_leaf_pem)
        return grpc.aio.secure_channel(f"127.0.0.1:{self._load.port}", tls, options)

    def begin(self) -> None:
        """Begins with an empty model of the scheduler."""
        from muster.web.model import Followed

        self.known = Followed("here")
        self.shown.clear()

    def _render(self) -> dict[str, Any]:
        """Measures the web server's CPU time of a page's first rendering, and of each refresh."""
        from muster.web.pages import JobPage

        job = self.known.jobs[JOB]
        page = JobPage(self.known, JOB)
        page.refresh(time.time())  # templates are compiled
        begun_s = time.process_time()
        page.refresh(time.time())
        html = page.html(flash="")
        first_s = time.process_time() - begun_s
        times = []
        for _ in range(10):
            for index in range(len(job.progress.step)):
                job.progress.step[index] += 1
            seen, begun_s = page.live.number, time.process_time()
            page.refresh(time.time())
            news = page.live.since(seen)
            times.append(time.process_time() - begun_s)
        return {
            "page_bytes": len(html.encode()),
            "page_first_s": first_s,
            "page_refresh_s": statistics.median(times),
            "page_refresh_bytes": len(json.dumps(news)),
        }


class _Watching:
    """A context in which the watchers follow the scheduler."""

    def __init__(self, watched: WatchedScheduler) -> None:
        self._watched = watched

    async def __aenter__(self) -> None:
        self._watched.begin()
        self._channels = [await self._watched.open() for _ in range(self._watched.args.watchers)]
        self._tasks = [
            asyncio.ensure_future(self._watched.watch(channel, job_id, keep=index == 0))
            for index, channel in enumerate(self._channels)
            for job_id in ("", JOB)
        ]
        shown = asyncio.ensure_future(self._watched.shown.wait())
        done, _ = await asyncio.wait([shown, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {shown}:
            await task  # raises the error that ended it

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()
