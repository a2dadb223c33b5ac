"""Copies of each rank's state in its own memory and in a partner's, for who takes a lost rank's place."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from muster.training.part_copy import DamagedCopyError, HeldCopies, PartCopy
from muster.training.snapshots.partners import partners
from muster.training.snapshots.parts import PartKey, SnapshotId
from muster.wire.messages import Device, Host, Member

log = logging.getLogger("muster.worker")

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
    """What this rank holds: its own state at a step, and that of those whose partner it is.

    Partners are on other hosts where there are some. Each copy has the checksums of what its owner took, so
    that one that is flipped, torn or of another step is noticed, and not used.

    Args:
        rank: this one.
        size: how many ranks there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._held = HeldCopies()
        self._partners: Sequence[Sequence[int]] = ()
        self._partners_in = -1

    @property
    def holds(self) -> list[list[int]]:
        """Owner, generation and step of each part that is as it was taken, for :func:`newest_whole`."""
        found = []
        for copy in self._held.all():
            try:
                copy.check()
            except DamagedCopyError as error:
                log.error("%s It is not used.", error.message)
                continue
            found.append([copy.key.rank, *copy.key.snapshot])
        return found

    def take(self, key: Key, part: Any) -> None:
        """Keeps this rank's part, at its partner too; all ranks call it, and all hold it when it returns.

        Args:
            key: of the copy.
            part: uint8, in the host's memory.
        """
        mine = PartCopy(self._key(self._rank, key), b"", memoryview(part.numpy()), is_own=True).sealed()
        self._held.keep(mine)
        if self._size > 1:
            table = self._partners_of(key[0])
            wards = [rank for rank in range(self._size) if self._rank in table[rank]]
            for copy in self._exchange(key, dict.fromkeys(table[self._rank], mine), {w: w for w in wards}):
                self._held.keep(copy)
            dist.barrier()  # who has passed it knows that all have come to it
        self._held.drop([copy.key for copy in self._held.all() if copy.key.snapshot != mine.key.snapshot])

    def restore(self, key: Key, holders: Sequence[int]) -> Any:
        """This rank's part of a copy; those who have lost theirs get it; all ranks call it.

        Args:
            key: of the copy.
            holders: who has each rank's part.

        Raises:
            DamagedCopyError: the part that was handed over is not what its owner took.
        """
        for owner, holder in enumerate(holders):
            if owner == holder:
                continue
            if holder == self._rank:
                copy = self._held.get(self._key(owner, key))
                assert copy is not None
                self._exchange(key, {owner: copy}, {})
            elif owner == self._rank:
                self._held.drop([self._key(owner, key)])  # what it has of it is damaged
                for copy in self._exchange(key, {}, {holder: owner}):
                    self._held.keep(copy)
        mine = self._held.get(self._key(self._rank, key))
        if mine is None:
            raise DamagedCopyError(f"Rank {self._rank}'s part of step {key[1]} has come damaged.")
        return torch.frombuffer(mine.data, dtype=torch.uint8)

    def _key(self, owner: int, key: Key) -> PartKey:
        return PartKey(SnapshotId(*key), self._size, owner)

    def _partners_of(self, generation: int) -> Sequence[Sequence[int]]:
        """Each rank's partners in a generation; all ranks call it, and tell each other where they are."""
        if self._partners_in != generation:
            host = torch.tensor([int(os.environ.get("GROUP_RANK", "0"))], device=_device())
            hosts = [torch.zeros_like(host) for _ in range(self._size)]
            dist.all_gather(hosts, host)
            self._partners, self._partners_in = partners_on([int(each) for each in hosts]), generation
        return self._partners

    def _exchange(self, key: Key, sent: Mapping[int, PartCopy], coming: Mapping[int, int]) -> list[PartCopy]:
        """Sends copies to ranks while others come: ``coming`` says from which rank, and whose.

        Returns:
            Those that are what their owners took.
        """
        device = _device()
        heads = {
            to: torch.tensor([len(copy.data), *copy.checksums], device=device) for to, copy in sent.items()
        }
        lengths = {to: torch.tensor([len(head)], device=device) for to, head in heads.items()}
        counts = {source: torch.zeros(1, dtype=torch.int64, device=device) for source in coming}
        _send_and_receive(lengths, counts)
        theirs = {s: torch.zeros(int(count), dtype=torch.int64, device=device) for s, count in counts.items()}
        _send_and_receive(heads, theirs)
        data = {s: torch.empty(int(head[0]), dtype=torch.uint8, device=device) for s, head in theirs.items()}
        mine = {to: torch.frombuffer(copy.data, dtype=torch.uint8).to(device) for to, copy in sent.items()}
        _send_and_receive(mine, data)
        found = []
        for source, part in data.items():
            sums = tuple(map(int, theirs[source][1:]))
            whole = memoryview(part.to(_CPU).numpy())
            copy = PartCopy(self._key(coming[source], key), b"", whole, sums)
            try:
                copy.check()
            except DamagedCopyError as error:
                log.error("%s It is not kept.", error.message)
            else:
                found.append(copy)
        return found


def partners_on(hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For each rank the one that keeps a copy of its part: on another host, where there is one.

    Args:
        hosts: each rank's, by number.
    """
    members = [
        Member(rank, f"{rank:09d}", rank, Host(f"{host:09d}", "", ""), Device(), 0, 1)
        for rank, host in enumerate(hosts)
    ]
    return partners(members)


def _send_and_receive(sent: Mapping[int, Any], found: Mapping[int, Any]) -> None:
    works = [dist.isend(tensor, to) for to, tensor in sent.items()]
    works += [dist.irecv(tensor, source) for source, tensor in found.items()]
    for work in works:
        work.wait()


def _device() -> Any:
    """Where the world's group takes tensors: in the host's memory, if it can."""
    configs: Mapping[Any, Any] = dist.distributed_c10d._world.pg_backend_config
    if "cpu:" in str(configs.get(dist.group.WORLD, "cpu:")):
        return _CPU
    return torch.device("cuda", torch.cuda.current_device())
