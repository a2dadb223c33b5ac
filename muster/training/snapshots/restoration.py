"""Decides to which snapshot all ranks of a new generation go back, and which rank sends which part to which.

Every rank tells all others what it holds (:func:`encode`, one ``all_gather`` over the new group), and all
make the same decision from the same data. None of this is journaled or known to the scheduler.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from muster.training.snapshots.parts import PartKey, SnapshotId

MAX_HOLDINGS = 256
"""Maximum number of parts that one rank reports to the others."""

_MAGIC = b"parts1"
_HEAD = struct.Struct("<6s?QQI")
_HOLDING = struct.Struct("<QQIIQQ?")

MAX_BYTES = _HEAD.size + MAX_HOLDINGS * _HOLDING.size
"""Maximum number of bytes that one rank reports: the size of each rank's piece in the all_gather."""


class Holding(NamedTuple):
    """One part in one rank's memory, complete as far as the rank can tell.

    Attributes:
        part: the part.
        announced: the owner's checksum, from 0 to 2**64 - 1: announced by this rank for its own part, or
            received with another rank's part.
        found: the checksum of the present contents in memory.
        is_own: whether the holder is the owner, in the same process.
    """

    part: PartKey
    announced: int
    found: int
    is_own: bool


class Told(NamedTuple):
    """A rank's report to the others on the snapshots that it holds.

    Attributes:
        agreed: the newest snapshot that it knows to be complete on all ranks, or the snapshot that it had to
            keep when it last entered a generation; None: there is none.
        holdings: the parts that it holds.
    """

    agreed: SnapshotId | None = None
    holdings: tuple[Holding, ...] = ()


class Handing(NamedTuple):
    """A part that one rank of the new generation sends to another that does not hold it."""

    part: PartKey
    source: int
    target: int


class Restoration(NamedTuple):
    """The decision that all ranks go back to one snapshot.

    Attributes:
        snapshot: the snapshot.
        world_size: the world size of the generation in which it was taken.
        needs: by new rank, the old ranks whose parts it loads.
        handings: the parts to send, in the same order on all ranks.
        keep: the snapshot to keep until one of the new generation counts (``Retention.enter``). It was known
            to be complete everywhere, and may be older than ``snapshot``.
    """

    snapshot: SnapshotId
    world_size: int
    needs: tuple[tuple[int, ...], ...]
    handings: tuple[Handing, ...]
    keep: SnapshotId


class PartsMissing(NamedTuple):
    """The decision that no snapshot is complete, so that the job takes its last durable checkpoint.

    Attributes:
        snapshot: the newest snapshot that counted, or else the newest of all; None: no rank holds any.
        world_size: the world size of the generation in which it was taken.
        ranks: the old ranks whose parts are missing: there is no copy, or none with its owner's checksum.
    """

    snapshot: SnapshotId | None = None
    world_size: int = 0
    ranks: tuple[int, ...] = ()


Needs = Callable[[int, int], Sequence[Sequence[int]]]
"""Takes the old and the new world size; returns, by new rank, the old ranks whose parts it needs."""


def overlapping(then: int, now: int) -> tuple[tuple[int, ...], ...]:
    """Returns, by new rank, the old parts that overlap its share, if all shares are equal pieces of a line.

    At an unchanged world size, each rank needs the part with its own number.
    """
    return tuple(tuple(range(rank * then // now, -(-(rank + 1) * then // now))) for rank in range(now))


# ---------------------------------------------------------------- the exchange


def encode(told: Told) -> bytes:
    """Encodes one rank's report, in at most :data:`MAX_BYTES`.

    Raises:
        ValueError: the rank holds more than :data:`MAX_HOLDINGS` parts.
    """
    count = len(told.holdings)
    if count > MAX_HOLDINGS:
        raise ValueError(f"a rank tells of at most {MAX_HOLDINGS} parts; these are {count}")
    agreed = told.agreed or SnapshotId(0, 0)
    pieces = [_HEAD.pack(_MAGIC, told.agreed is not None, *agreed, count)]
    for part, announced, found, is_own in told.holdings:
        pieces.append(_HOLDING.pack(*part.snapshot, part.world_size, part.rank, announced, found, is_own))
    return b"".join(pieces)


def decode(data: bytes) -> Told:
    """Decodes one rank's report; zeros after it are padding.

    Raises:
        ValueError: :func:`encode` has not made ``data``.
    """
    if len(data) < _HEAD.size:
        raise ValueError(f"what a rank holds takes {_HEAD.size} bytes or more; these are {len(data)}")
    magic, has_agreed, generation, step, count = _HEAD.unpack_from(data)
    end = _HEAD.size + count * _HOLDING.size
    if magic != _MAGIC or count > MAX_HOLDINGS or len(data) < end or any(data[end:]):
        raise ValueError("these bytes do not say what a rank holds")
    holdings = []
    for fields in _HOLDING.iter_unpack(data[_HEAD.size : end]):
        *snapshot, world_size, rank, announced, found, is_own = fields
        if rank >= world_size:
            raise ValueError(f"a part is of rank {rank} of {world_size}")
        holdings.append(Holding(PartKey(SnapshotId(*snapshot), world_size, rank), announced, found, is_own))
    return Told(SnapshotId(generation, step) if has_agreed else None, tuple(holdings))


# ---------------------------------------------------------------- the decision


def decide(told: Sequence[Told], needs: Needs = overlapping) -> Restoration | PartsMissing:
    """Decides for all ranks: the newest snapshot with all its parts, and who sends which part to which rank.

    A copy counts if its contents have its owner's checksum. If copies of one part were announced with
    different checksums, only those count that agree with the owner's own copy; without that copy, none
    counts. A rank that loads a part checks it again. If the copy has changed since, the generation ends, and
    all decide again.

    Args:
        told: the report of each rank of the new generation, in order of rank.
        needs: which parts each new rank loads.
    """
    holders = _holders(told)
    kinds = {(part.snapshot, part.world_size) for part in holders}
    found = {kind for kind in kinds if not _missing(holders, *kind)}
    counted = {each.agreed for each in told if each.agreed is not None}
    if not found:
        snapshot, world_size = max(
            (kind for kind in kinds if kind[0] in counted), default=max(kinds, default=(None, 0))
        )
        return PartsMissing(
            snapshot, world_size, () if snapshot is None else _missing(holders, snapshot, world_size)
        )
    snapshot, world_size = max(found)
    wanted = tuple(tuple(each) for each in needs(world_size, len(told)))
    return Restoration(
        snapshot,
        world_size,
        wanted,
        tuple(_handings(holders, snapshot, world_size, wanted)),
        max((kind[0] for kind in found if kind[0] in counted), default=snapshot),
    )


def _missing(
    holders: dict[PartKey, tuple[int, ...]], snapshot: SnapshotId, world_size: int
) -> tuple[int, ...]:
    keys = (PartKey(snapshot, world_size, rank) for rank in range(world_size))
    return tuple(key.rank for key in keys if not holders.get(key))


def _holders(told: Sequence[Told]) -> dict[PartKey, tuple[int, ...]]:
    """Returns, for each part that any rank has reported, the ranks with a copy that counts."""
    copies: dict[PartKey, list[tuple[int, Holding]]] = {}
    for rank, each in enumerate(told):
        for holding in each.holdings:
            copies.setdefault(holding.part, []).append((rank, holding))
    return {part: _good(each) for part, each in copies.items()}


def _good(copies: Iterable[tuple[int, Holding]]) -> tuple[int, ...]:
    copies = list(copies)
    announced = {holding.announced for _, holding in copies if holding.is_own}
    announced = announced or {holding.announced for _, holding in copies}
    if len(announced) != 1:
        return ()
    [right] = announced
    return tuple(rank for rank, holding in copies if holding.announced == holding.found == right)


def _handings(
    holders: dict[PartKey, tuple[int, ...]],
    snapshot: SnapshotId,
    world_size: int,
    wanted: Sequence[Sequence[int]],
) -> Iterable[Handing]:
    """Yields the parts to send, each from the holder that sends the fewest parts so far."""
    load: dict[int, int] = {}
    for target, ranks in enumerate(wanted):
        for rank in ranks:
            part = PartKey(snapshot, world_size, rank)
            if target not in holders[part]:
                source = min(holders[part], key=lambda each: (load.get(each, 0), each))
                load[source] = load.get(source, 0) + 1
                yield Handing(part, source, target)
