"""Copies of each rank's state in its own memory and in the next rank's, for who takes a lost rank's place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

Key = tuple[int, int]
"""Generation and step of a copy; the greater is the later."""

_CPU = torch.device("cpu")


def newest_whole(holds: Sequence[Sequence[Sequence[int]]]) -> tuple[Key, list[int]] | None:
    """The latest copy of which some rank holds each rank's part, and who that is; None: there is none.

    Args:
        holds: what each rank holds, in order of rank: owner, generation and step of each part.
    """
    holders: dict[Key, dict[int, int]] = {}
    for holder, parts in enumerate(holds):
        for owner, generation, step in parts:
            found = holders.setdefault((generation, step), {})
            if owner == holder or owner not in found:
                found[owner] = holder
    whole = [key for key, found in holders.items() if len(found) == len(holds)]
    if not whole:
        return None
    return max(whole), [holders[max(whole)][owner] for owner in range(len(holds))]


class PeerCopies:
    """What this rank holds: its own state at some steps, and that of the rank before it.

    Args:
        rank: this one.
        size: how many ranks there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._parts: dict[tuple[int, Key], Any] = {}

    @property
    def holds(self) -> list[list[int]]:
        """Owner, generation and step of each part, for :func:`newest_whole`."""
        return [[owner, *key] for owner, key in self._parts]

    def take(self, key: Key, part: Any) -> None:
        """Keeps this rank's part, at the next rank too; all ranks call it, and all hold it when it returns.

        Args:
            key: of the copy.
            part: uint8, in the host's memory.
        """
        self._parts[self._rank, key] = part
        if self._size > 1:
            before, after = (self._rank - 1) % self._size, (self._rank + 1) % self._size
            self._parts[before, key] = _exchange(part, to=after, source=before)
            dist.barrier()  # who has passed it knows that all have come to it
        self._parts = {each: part for each, part in self._parts.items() if each[1] == key}

    def restore(self, key: Key, holders: Sequence[int]) -> Any:
        """This rank's part of a copy; those who have lost theirs get it; all ranks call it.

        Args:
            key: of the copy.
            holders: who has each rank's part.
        """
        for owner, holder in enumerate(holders):
            if owner == holder:
                continue
            if holder == self._rank:
                _exchange(self._parts[owner, key], to=owner)
            elif owner == self._rank:
                self._parts[owner, key] = _exchange(source=holder)
        return self._parts[self._rank, key]


def _exchange(part: Any = None, *, to: int | None = None, source: int | None = None) -> Any:
    """Sends a part to one rank while another's comes from one."""
    device = _device()
    count = torch.tensor([0 if part is None else part.numel()], device=device)
    theirs = torch.zeros_like(count)
    _send_and_receive(count, to, theirs, source)
    found = torch.empty(int(theirs), dtype=torch.uint8, device=device)
    _send_and_receive(None if part is None else part.to(device), to, found, source)
    return found.to(_CPU)


def _send_and_receive(sent: Any, to: int | None, found: Any, source: int | None) -> None:
    works = []
    if to is not None:
        works.append(dist.isend(sent, to))
    if source is not None:
        works.append(dist.irecv(found, source))
    for work in works:
        work.wait()


def _device() -> Any:
    """Where the world's group takes tensors: in the host's memory, if it can."""
    configs: Mapping[Any, Any] = dist.distributed_c10d._world.pg_backend_config
    if "cpu:" in str(configs.get(dist.group.WORLD, "cpu:")):
        return _CPU
    return torch.device("cuda", torch.cuda.current_device())
