"""The store of torch programs at scale: rendezvous as NCCL and Gloo do it, over mutual TLS, on one machine.

The scheduler is one process; another one simulates all members. Each member has two connections, as an agent
has: one for its session, with heartbeats, and one for the store. Operations are those that torch performs. A
get after a wait is answered in the member's process, as in agents, because the reply to the wait has the
value.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.bench.scale.command import add_job_arguments, beside_a_job, cpu_s, resident_bytes

if TYPE_CHECKING:
    from muster.bench.scale.load import Load
    from muster.programs.link import StoreLink

OPENING_PARALLELISM = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    add_job_arguments(parser)
    parser.add_argument(
        "--mesh", type=int, default=64, metavar="N", help="ranks that connect as Gloo does (64)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures, and returns the results; times in seconds."""

    async def measure(load: Load, scheduler_pid: int, _: Path) -> dict[str, Any]:
        return await _meet(args, scheduler_pid, load)

    return {"mesh": args.mesh, **beside_a_job(args, 0.0, measure)}


async def _meet(args: argparse.Namespace, scheduler_pid: int, load: Load) -> dict[str, Any]:
    empty_bytes, start = resident_bytes(scheduler_pid), time.perf_counter()
    links = await _open(load)
    opened_s = time.perf_counter() - start
    nccl_s, _ = await _timed(scheduler_pid, _meet_as_nccl(links))
    met_s = time.perf_counter() - start
    grown_bytes = resident_bytes(scheduler_pid) - empty_bytes
    mesh = links[: args.mesh]
    gloo_s, gloo_cpu_s = await _timed(scheduler_pid, _meet_as_gloo(mesh))
    operations = len(mesh) * (1 + 2 * len(mesh))
    counts_s, counts_cpu_s = await _timed(scheduler_pid, _count_together(links))
    for link in links:
        await link.close()
    return {
        "links_opened_s": opened_s,
        "nccl_like_meeting_s": nccl_s,
        "opened_and_met_s": met_s,
        "gloo_like_mesh_s": gloo_s,
        "gloo_like_operations_per_s": operations / gloo_s,
        "gloo_like_scheduler_cpu_us_per_operation": gloo_cpu_s / operations * 1e6,
        "adds_of_all_per_s": 10 * len(links) / counts_s,
        "adds_scheduler_cpu_us_per_operation": counts_cpu_s / (10 * len(links)) * 1e6,
        "scheduler_bytes_per_link": round(grown_bytes / len(links)),
    }


async def _open(load: Load) -> list[StoreLink]:
    from muster.programs.link import StoreLink
    from muster.wire.v1 import store_pb2 as pb

    gate = asyncio.Semaphore(OPENING_PARALLELISM)

    async def opened(index: int) -> StoreLink:
        join = load.join_message(index)
        opening = pb.StoreOpen(
            job_id="default", node_id=join.node_id, incarnation=join.incarnation, generation=1
        )
        async with gate:
            link = StoreLink(opening, load.connect)
            await link.submit(pb.STORE_KIND_CHECK)
            return link

    return list(await asyncio.gather(*map(opened, range(len(load.streams)))))


async def _timed(scheduler_pid: int, work: Awaitable[object]) -> tuple[float, float]:
    """Awaits ``work``; returns the elapsed seconds, and the scheduler's CPU seconds."""
    start, before_s = time.perf_counter(), cpu_s(scheduler_pid)
    await work
    return time.perf_counter() - start, cpu_s(scheduler_pid) - before_s


async def _meet_as_nccl(links: Sequence[StoreLink]) -> None:
    """Rank 0 sets an id of 128 bytes; all others wait for it."""
    from muster.wire.v1 import store_pb2 as pb

    waits = [link.submit(pb.STORE_KIND_WAIT, [b"id"]) for link in links[1:]]
    await links[0].submit(pb.STORE_KIND_SET, [b"id"], [bytes(128)])
    await asyncio.gather(*waits)


async def _meet_as_gloo(links: Sequence[StoreLink]) -> None:
    """Each member sets its addresses, then waits for and gets each other's, one after the other."""
    from muster.wire.v1 import store_pb2 as pb

    async def meet(rank: int) -> None:
        link = links[rank]
        await link.submit(pb.STORE_KIND_SET, [b"mesh/%d" % rank], [bytes(64 * len(links))])
        for peer in range(len(links)):
            came = await link.submit(pb.STORE_KIND_WAIT, [b"mesh/%d" % peer])
            if not came.values:
                await link.submit(pb.STORE_KIND_GET, [b"mesh/%d" % peer])

    await asyncio.gather(*map(meet, range(len(links))))


async def _count_together(links: Sequence[StoreLink]) -> None:
    """Each member adds to a number ten times, one after the other."""
    from muster.wire.v1 import store_pb2 as pb

    async def count(link: StoreLink) -> None:
        for _ in range(10):
            await link.submit(pb.STORE_KIND_ADD, [b"count"], amount=1)

    await asyncio.gather(*map(count, links))
