"""Prints the stacks that workers have sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from muster.wire.v1 import rendezvous_pb2 as pb


def show(reply: pb.StacksReply, out: TextIO) -> int:
    """Prints each worker's stacks under its name. Returns the exit code, which is 1 if no worker answered."""
    if not reply.workers:
        out.write("no workers\n")
    for worker in reply.workers:
        rank = f"rank {worker.rank}, " if worker.rank >= 0 else ""
        out.write(f"---- {rank}node {worker.node_id} on host {worker.host_name}\n")
        out.write(f"{worker.text or f'nothing came: {worker.obstacle}.'}\n\n")
    return 0 if any(worker.text for worker in reply.workers) else 1
