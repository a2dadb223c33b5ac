"""Copies of each rank's state in its own and its partners' memory, for processes that replace lost ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from muster.training.part_copy import DamagedCopyError, HeldCopies, PartCopy
from muster.training.snapshots.partners import partners
from muster.training.snapshots.parts import PartKey, SnapshotId
from muster.wire.messages import Device, Host, Member

log = logging.getLogger("muster.worker")

Key = tuple[int, int]
"""Generation and step of a copy; a greater key is later."""

Source = tuple[int, int]
"""The rank that owns the part to restore, and the rank that holds a copy of it."""

_CPU = torch.device("cpu")


def newest_whole(
    holds: Sequence[Sequence[Sequence[int]]], active: Sequence[int], like: Sequence[str]
) -> tuple[Key, dict[int, Source]] | None:
    """Finds the latest copy that is complete for the active ranks, and the source of each rank's part.

    None if there is none. A copy with each rank's own part is preferred, even to a later one in which parts
    of replicas take the place of missing ones.

    Args:
        holds: by rank, the (owner, generation, step) of each part that it holds; empty if it is absent.
        active: the ranks that go on.
        like: by rank, a text that describes what its part contains; the same for replicas.
    """
    holders: dict[Key, dict[int, int]] = {}
    for holder, parts in enumerate(holds):
        for owner, generation, step in parts:
            found = holders.setdefault((generation, step), {})
            if owner == holder or owner not in found:
                found[owner] = holder
    for alike in (False, True):
        for key in sorted(holders, reverse=True):
            found = holders[key]
            owners = {rank: _owner_for(rank, found, like if alike else ()) for rank in active}
            if None not in owners.values():
                return key, {
                    rank: (owner, found[owner]) for rank, owner in owners.items() if owner is not None
                }
    return None


def _owner_for(rank: int, owners: Collection[int], like: Sequence[str]) -> int | None:
    """Returns the owner of a part that suits a rank: itself or a replica; None: there is none."""
    if rank in owners:
        return rank
    return next((each for each in sorted(owners) if like and like[each] == like[rank]), None)


def parts_that_lack(
    holds: Sequence[Sequence[Sequence[int]]], active: Sequence[int]
) -> tuple[int, list[int]] | None:
    """Returns the step of the most complete copy (the latest of these), and the ranks whose parts it lacks.

    None if there is no copy.

    Args:
        holds: as for :func:`newest_whole`.
        active: the ranks that go on.
    """
    owners: dict[Key, set[int]] = {}
    for parts in holds:
        for owner, generation, step in parts:
            owners.setdefault((generation, step), set()).add(owner)
    if not owners:
        return None
    key = max(owners, key=lambda each: (len(owners[each]), each))
    return key[1], sorted(set(active) - owners[key])


class PeerCopies:
    """The copies that this rank holds: of its own part of the state, and of the parts of its wards.

    A rank's wards are the ranks whose partner it is. Partners are on other hosts if there are any. Each copy
    has its owner's checksums, so that a corrupted or incomplete copy is detected, and not used.

    Args:
        rank: this process's rank.
        size: the world size.
        copies: number of partners of each rank.
    """

    def __init__(self, rank: int, size: int, copies: int = 1) -> None:
        self._rank, self._size, self._copies = rank, size, copies
        self._held = HeldCopies()
        self._active: Sequence[int] = range(size)
        self._partners: Mapping[int, Sequence[int]] = {}
        self._partners_in = -1

    @property
    def holds(self) -> list[list[int]]:
        """Owner, generation and step of each part whose checksums are right, for :func:`newest_whole`."""
        found = []
        for copy in self._held.all():
            try:
                copy.check()
            except DamagedCopyError as error:
                log.error("%s It is not used.", error.message)
                continue
            found.append([copy.key.rank, *copy.key.snapshot])
        return found

    def take(self, key: Key, part: PartCopy) -> PartCopy:
        """Keeps this rank's part here and at its partners. All ranks call it; it returns once all are done.

        Args:
            key: generation and step of the copy.
            part: this rank's part; it may have another key, for example after it was restored.

        Returns:
            This rank's copy, with checksums.
        """
        mine = replace(part, key=self._key(self._rank, key), is_own=True).sealed()
        self._held.keep(mine)
        if len(self._active) > 1:
            table = self._partners_of(key[0])
            wards = [rank for rank in self._active if self._rank in table[rank]]
            for copy in self._exchange(key, dict.fromkeys(table[self._rank], mine), {w: w for w in wards}):
                self._held.keep(copy)
            dist.barrier()  # after it, a rank knows that all ranks have exchanged their copies
        self._held.drop([copy.key for copy in self._held.all() if copy.key.snapshot != mine.key.snapshot])
        return mine

    def among(self, active: Sequence[int]) -> None:
        """Sets the ranks that go on in this generation."""
        self._active = active

    def restore(self, key: Key, sources: Mapping[int, Source]) -> PartCopy:
        """Returns the part to which this rank goes back; ranks without theirs receive it. All ranks call it.

        Args:
            key: generation and step of the copy.
            sources: by rank, the owner of the part that it restores, and the rank that holds it.

        Raises:
            DamagedCopyError: the part that was received does not match its owner's checksums.
        """
        for rank, (owner, holder) in sorted(sources.items()):
            if rank == holder:
                continue
            if holder == self._rank:
                copy = self._held.get(self._key(owner, key))
                assert copy is not None
                self._exchange(key, {rank: copy}, {})
            elif rank == self._rank:
                self._held.drop([self._key(owner, key)])  # a copy of it that this rank has is damaged
                for copy in self._exchange(key, {}, {holder: owner}):
                    self._held.keep(copy)
        mine = self._held.get(self._key(sources[self._rank][0], key))
        if mine is None:
            raise DamagedCopyError(f"Rank {self._rank}'s part of step {key[1]} has come damaged.")
        return mine

    def _key(self, owner: int, key: Key) -> PartKey:
        return PartKey(SnapshotId(*key), self._size, owner)

    def _partners_of(self, generation: int) -> Mapping[int, Sequence[int]]:
        """Returns each active rank's partners in a generation; all ranks call it and exchange their hosts."""
        if self._partners_in != generation:
            host = torch.tensor([int(os.environ.get("GROUP_RANK", "0"))], device=collective_device())
            hosts = [torch.zeros_like(host) for _ in range(self._size)]
            dist.all_gather(hosts, host)
            places = [int(hosts[rank]) for rank in self._active]
            table = partners_on(places, self._copies)
            self._partners_in = generation
            self._partners = {
                rank: [self._active[at] for at in row] for rank, row in zip(self._active, table, strict=True)
            }
        return self._partners

    def _exchange(self, key: Key, sent: Mapping[int, PartCopy], coming: Mapping[int, int]) -> list[PartCopy]:
        """Sends copies, by receiver, and receives others: ``coming`` maps each sender to the copy's owner.

        Returns:
            The received copies whose checksums are right.
        """
        device = collective_device()
        numbers = {
            to: torch.tensor([len(copy.head), len(copy.data), *copy.checksums], device=device)
            for to, copy in sent.items()
        }
        lengths = {to: torch.tensor([len(each)], device=device) for to, each in numbers.items()}
        counts = {source: torch.zeros(1, dtype=torch.int64, device=device) for source in coming}
        _send_and_receive(self._rank, lengths, counts)
        theirs = {s: torch.zeros(int(count), dtype=torch.int64, device=device) for s, count in counts.items()}
        _send_and_receive(self._rank, numbers, theirs)
        heads, data = (
            {s: torch.empty(int(each[at]), dtype=torch.uint8, device=device) for s, each in theirs.items()}
            for at in (0, 1)
        )
        mine = {to: _tensor_of(copy.head).to(device) for to, copy in sent.items()}
        _send_and_receive(self._rank, mine, heads)
        mine = {to: _tensor_of(copy.data).to(device) for to, copy in sent.items()}
        _send_and_receive(self._rank, mine, data)
        found = []
        for source, part in data.items():
            head, whole = (memoryview(each.to(_CPU).numpy()) for each in (heads[source], part))
            sums = tuple(map(int, theirs[source][2:]))
            copy = PartCopy(self._key(coming[source], key), bytes(head), whole, sums)
            try:
                copy.check()
            except DamagedCopyError as error:
                log.error("%s It is not kept.", error.message)
            else:
                found.append(copy)
        return found


def partners_on(hosts: Sequence[int], copies: int = 1) -> tuple[tuple[int, ...], ...]:
    """Returns, by rank, the partners that keep a copy of its part: on other hosts, if there are any.

    Args:
        hosts: the number of each rank's host, by rank.
        copies: number of partners of a rank. There are fewer if there are not as many other hosts (or, on a
            single host, other ranks).
    """
    members = [
        Member(rank, f"{rank:09d}", rank, Host(f"{host:09d}", "", ""), Device(), 0, 1)
        for rank, host in enumerate(hosts)
    ]
    return partners(members, copies)


def _tensor_of(data: Any) -> Any:
    """Returns the bytes as a uint8 tensor, which shares their memory if that is writable."""
    if not len(data):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data) if isinstance(data, bytes) else data, dtype=torch.uint8)


def _send_and_receive(rank: int, sent: Mapping[int, Any], found: Mapping[int, Any]) -> None:
    """Sends and receives tensors, by rank; both sides leave out those without elements.

    NCCL carries out the transfers between two ranks in the order in which each of them has called them. So
    the lower rank's tensor comes first at both ranks: if both sent first, they would wait for each other.
    """
    begin = [(to, rank, partial(dist.isend, tensor, to)) for to, tensor in sent.items() if tensor.numel()]
    begin += [(to, to, partial(dist.irecv, tensor, to)) for to, tensor in found.items() if tensor.numel()]
    works = [call() for _, _, call in sorted(begin, key=lambda each: each[:2])]
    for work in works:
        work.wait()


def collective_device() -> Any:
    """Returns the device whose tensors the default process group communicates: the CPU if possible."""
    configs: Mapping[Any, Any] = dist.distributed_c10d._world.pg_backend_config
    if "cpu:" in str(configs.get(dist.group.WORLD, "cpu:")):
        return _CPU
    return torch.device("cuda", torch.cuda.current_device())
