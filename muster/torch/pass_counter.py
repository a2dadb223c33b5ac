"""Counts training passes that a rank began and never finished, and compares them among ranks.

If a rank catches the error of a step, or skips a step, and continues with the next batch, it starts the same
all_reduces as usual. They would be combined with those of the other ranks' earlier step, and would average
gradients of different steps. So each rank counts such passes, and the count is reduced with the last bucket
of gradients, in a separate element. On a GPU nothing waits for the result: it is copied to the host during
the step, captured or not, and read before a later step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from muster.communicators.base import Communicator
from muster.errors import CollectiveMismatchError

_MODULUS = 64
"""Counts are sent modulo this number: smaller integers differ in bfloat16, also over the world size."""


class UnfinishedPasses:
    """Counts forward passes whose backward pass is missing or broke off."""

    def __init__(self) -> None:
        self.count = 0
        self._waiting: set[int] = set()
        self._under_way: set[int] = set()
        self._made = 0

    @property
    def waiting(self) -> bool:
        """Whether a forward pass still lacks its backward pass."""
        return bool(self._waiting)

    def follow(self, output: Any) -> None:
        """Notes a forward pass: ``output`` is what it returned."""
        self._count_broken()
        leaves = [output] if isinstance(output, torch.Tensor) else tree_leaves(output)
        nodes = {leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor)} - {None}
        if not nodes:
            return
        self._made += 1
        self._waiting.add(self._made)
        for node in nodes:
            node.register_prehook(partial(self._reached, self._made))

    def broke_off(self) -> None:
        """Notes a forward pass that raised an error."""
        self._count_broken()
        self.count += 1

    def settle(self) -> int:
        """Counts forward passes that still lack their backward pass as unfinished; returns the count."""
        self.count += len(self._waiting)
        self._waiting.clear()
        self._count_broken()
        return self.count % _MODULUS

    def forget(self) -> None:
        """Resets the count; all ranks do so together."""
        self.count = 0
        self._waiting.clear()
        self._under_way.clear()

    def _reached(self, number: int, gradients: Any) -> None:
        self._waiting.discard(number)
        self._under_way.add(number)
        Variable._execution_engine.queue_callback(partial(self._under_way.discard, number))

    def _count_broken(self) -> None:
        """Counts passes that a broken backward pass has reached and not finished."""
        if self._under_way and torch._C._current_graph_task_id() == -1:
            self.count += len(self._under_way)
            self._under_way.clear()


class RankNumbers:
    """Exchanges one small number per rank, in the tail of a gradient bucket.

    Args:
        communicator: the communicator that reduces the bucket.
        tail: the bucket's tail, one element per rank, which is reduced with the bucket.
    """

    def __init__(self, communicator: Communicator, tail: Any) -> None:
        self._communicator = communicator
        self._tail = tail
        self._mine = 0
        self._sent = torch.zeros_like(tail)
        # The host may read this memory while a GPU copies into it. So two copies are made, one after
        # the other, and the host reads the later one first. If they agree, neither was half written.
        self._seen = [torch.zeros_like(tail, device="cpu", pin_memory=tail.is_cuda) for _ in range(2)]

    def serve(self, communicator: Communicator, tail: Any) -> bool:
        """Whether these numbers belong to this communicator and bucket tail, which a captured graph holds."""
        return self._communicator is communicator and self._tail is tail

    def set(self, number: int) -> None:
        """Sends this number from now on, also from a captured step; not to be called within a capture."""
        if number != self._mine:
            self._mine = number
            self._sent[self._communicator.rank].fill_(number)

    def forget(self) -> None:
        """Drops the numbers received so far."""
        for seen in self._seen:
            seen.zero_()

    def put(self, tail: Any) -> None:
        """Writes the number into the bucket that is about to be reduced."""
        tail.copy_(self._sent)

    def take(self, tail: Any) -> None:
        """Copies the reduced numbers on the current stream, without blocking the host."""
        for seen in self._seen:
            seen.copy_(tail, non_blocking=True)

    def check(self) -> None:
        """Compares the numbers received so far.

        Raises:
            CollectiveMismatchError: ranks have different numbers; raised on all ranks.
        """
        first, last = self._seen
        seen = last.clone()
        # Equal numbers are rounded equally, and different numbers stay different, so none is missed.
        if bool((seen != seen[0]).any()) and torch.equal(seen, first):
            raise _apart(self._communicator, seen)


def _apart(communicator: Communicator, seen: Any) -> CollectiveMismatchError:
    values = (seen.real if seen.is_complex() else seen).double().tolist()
    usual = max(sorted(set(values)), key=values.count)  # among equally frequent values, the lowest
    ranks = [rank for rank, value in enumerate(values) if value != usual]
    peers = communicator.membership.peers
    named = [f"rank {rank} ({peers[rank].node_id} on {peers[rank].host_name})" for rank in ranks[:4]]
    if len(ranks) > len(named):
        named.append(f"{len(ranks) - len(named)} more")
    who = " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)
    return CollectiveMismatchError(
        f"ranks average gradients of different steps: {who} left a training pass unfinished and began the"
        " next",
        remedy="Let an error within a step end the process, and run forward passes without a backward pass"
        " under torch.no_grad().",
    )
