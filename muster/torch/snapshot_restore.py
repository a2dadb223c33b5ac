"""Restores a state from the ranks' copies: all report what they hold, decide, and exchange parts."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from muster.communicators.base import Communicator
from muster.torch.flat import elements_within
from muster.torch.snapshot_tensors import GivesParts, SnapshotTensor
from muster.training.carrier import Carrier, NumpyLibrary
from muster.training.part_copy import HeldCopies, PartCopy, in_words
from muster.training.parts import Part, overlap
from muster.training.snapshots.parts import PartKey, SnapshotId
from muster.training.snapshots.restoration import (
    MAX_BYTES,
    Holding,
    PartsMissing,
    Restoration,
    Told,
    decide,
    decode,
    encode,
)
from muster.training.state import StateMismatchError
from muster.training.transfers import TensorSpan, Transfer, transfers

_LOG = logging.getLogger("muster.worker")


class CopyHead(NamedTuple):
    """The head of a copy, which describes its data.

    Attributes:
        tensors: the place of each tensor, in order.
        layout: dtype and shape of each tensor, as text, by name.
        notes: the rest of the state, as JSON values.
    """

    tensors: list[TensorSpan]
    layout: dict[str, str]
    notes: dict[str, Any]


def encode_head(
    tensors: Sequence[SnapshotTensor], places: Sequence[tuple[int, int]], notes: dict[str, Any]
) -> bytes:
    """Encodes the head of a copy of these tensors; ``places`` are their offsets and sizes, in bytes."""
    rows = [
        [each.name, _kind(each), [each.own.offsets, each.own.sizes, each.own.start, each.own.stop], *place]
        for each, place in zip(tensors, places, strict=True)
    ]
    return json.dumps({"tensors": rows, "notes": notes}).encode()


def decode_head(data: str) -> CopyHead:
    """Reads what :func:`encode_head` wrote."""
    values = json.loads(data)
    tensors, layout = [], {}
    for name, kind, part, start, size in values["tensors"]:
        tensors.append(TensorSpan(name, _part(part), start, start + size))
        layout[name] = kind
    return CopyHead(tensors, layout, values["notes"])


def _kind(each: SnapshotTensor) -> str:
    return f"{str(each.tensor.dtype).removeprefix('torch.')}{list(each.shape)}"


def _part(row: Sequence[Any]) -> Part:
    offsets, sizes, start, stop = row
    return Part(tuple(offsets), tuple(sizes), start, stop)


class Restorer:
    """Decides with all ranks of a new generation which snapshot to restore, and restores it.

    Args:
        communicator: the communicator of all ranks; takes arrays in host memory.
        held: the copies that this rank holds.
    """

    def __init__(self, communicator: Communicator, held: HeldCopies) -> None:
        self._communicator = communicator
        self._held = held
        self._carrier = Carrier(communicator, NumpyLibrary(np))

    def decide(self, agreed: SnapshotId | None, *, check: bool = True) -> Restoration | PartsMissing:
        """Gathers what all ranks hold, and decides from that, with the same result on all ranks.

        Args:
            agreed: the newest snapshot that is complete everywhere, as far as this rank has heard.
            check: whether to compare all copies with their checksums, which takes a second per one or two
                gigabytes.
        """
        holdings = []
        for copy in self._held.all():
            holding = Holding(
                copy.key, copy.announced, copy.found() if check else copy.announced, copy.is_own
            )
            if holding.announced != holding.found:
                _LOG.error("A copy in memory is damaged and is not used: %s", in_words(copy.key))
            holdings.append(holding)
        told = np.frombuffer(encode(Told(agreed, tuple(holdings))).ljust(MAX_BYTES, b"\0"), np.uint8).copy()
        heard = np.empty(MAX_BYTES * self._communicator.world_size, np.uint8)
        self._communicator.all_gather(told, heard)
        everybody = [decode(row.tobytes()) for row in heard.reshape(-1, MAX_BYTES)]
        return decide(everybody, lambda then, now: [range(then)] * now)

    def restore(self, decision: Restoration, parts: GivesParts) -> None:
        """Overwrites this rank's tensors, and the rest of its state, with those of the snapshot.

        Raises:
            StateMismatchError: the snapshot is of another state.
            MembershipChanged: the members have changed again; nothing was overwritten.
        """
        communicator = self._communicator
        sources = _sources(decision, communicator.world_size)
        heads = self._heads(decision, sources)
        tensors = parts.snapshot_tensors(communicator.rank, communicator.world_size)
        _check_same(tensors, heads)
        wanted = [
            {name: _part(row) for name, row in json.loads(text).items()}
            for text in self._carrier.gather_texts(json.dumps(_wanted(tensors)))
        ]
        fresh = _Fresh(tensors)
        for transfer in transfers([head.tensors for head in heads], wanted):
            data = self._move(decision, transfer, sources[transfer.rank])
            if communicator.rank in transfer.targets:
                fresh.take(transfer, data)
        communicator.synchronize()
        fresh.put(decision.snapshot)
        same_rank = communicator.rank < decision.world_size
        parts.put_snapshot_notes(heads[communicator.rank if same_rank else 0].notes, same_rank=same_rank)

    def _copy(self, decision: Restoration, rank: int) -> PartCopy | None:
        return self._held.get(PartKey(decision.snapshot, decision.world_size, rank))

    def _heads(self, decision: Restoration, sources: Sequence[int]) -> list[CopyHead]:
        mine = [self._copy(decision, rank) for rank in range(decision.world_size)]
        lengths = self._carrier.gather([0 if copy is None else len(copy.head) for copy in mine])
        heads = []
        for rank, source in enumerate(sources):
            copy = mine[rank]
            text = b"" if copy is None else copy.head
            heads.append(decode_head(self._carrier.broadcast_text(text, lengths[source][rank], source)))
        return heads

    def _move(self, decision: Restoration, transfer: Transfer, source: int) -> Any:
        """Sends the transfer's bytes to the ranks that need them, and returns them there."""
        rank, communicator = self._communicator.rank, self._communicator
        receivers = [target for target in transfer.targets if target != source]
        data: Any = None
        if rank == source:
            copy = self._copy(decision, transfer.rank)
            assert copy is not None
            data = np.frombuffer(copy.data, np.uint8)[transfer.start : transfer.stop]
        if not receivers:
            return data
        if len(receivers) > 1:
            data = data.copy() if data is not None else np.empty(transfer.stop - transfer.start, np.uint8)
            communicator.broadcast(data, source)
        elif rank == source:
            communicator.send(np.ascontiguousarray(data), receivers[0])
        elif rank == receivers[0]:
            data = np.empty(transfer.stop - transfer.start, np.uint8)
            communicator.recv(data, source)
        return data


class _Fresh:
    """Assembles this rank's tensors of the snapshot in new memory, and then overwrites the present ones."""

    def __init__(self, tensors: Sequence[SnapshotTensor]) -> None:
        self._tensors = {each.name: each for each in tensors}
        self._values = {
            each.name: torch.empty(each.wanted.stop - each.wanted.start, dtype=each.tensor.dtype)
            for each in tensors
        }
        self._missing = {name: values.numel() for name, values in self._values.items()}

    def take(self, transfer: Transfer, data: Any) -> None:
        """Copies the elements that this rank wants out of a transfer's bytes."""
        whole = torch.from_numpy(data.copy())  # aligned, and writable
        for placed in transfer.tensors:
            tensor = self._tensors[placed.name]
            start = placed.start - transfer.start
            piece = whole[start : start + placed.stop - placed.start]
            if start % tensor.tensor.element_size():
                piece = piece.clone()
            piece = piece.view(tensor.tensor.dtype)
            values = self._values[placed.name]
            for source in placed.part.boxes():
                for target in tensor.wanted.boxes():
                    both = overlap(source, target)
                    if both is not None:
                        elements_within(values, target, both).copy_(elements_within(piece, source, both))
                        self._missing[placed.name] -= math.prod(both.sizes)

    def put(self, snapshot: SnapshotId) -> None:
        """Overwrites the tensors.

        Raises:
            StateMismatchError: some elements were in no copy; nothing was overwritten.
        """
        incomplete = [name for name, count in self._missing.items() if count]
        if incomplete:
            raise StateMismatchError(f"The copies of {snapshot} do not make up the whole of {incomplete[0]}.")
        with torch.no_grad():
            for name, values in self._values.items():
                self._tensors[name].put(values)


def _wanted(tensors: Sequence[SnapshotTensor]) -> dict[str, Any]:
    found = {}
    for each in tensors:
        part = each.wanted
        found[each.name] = [part.offsets, part.sizes, part.start, part.stop]
    return found


def _check_same(tensors: Sequence[SnapshotTensor], heads: Sequence[CopyHead]) -> None:
    mine = {each.name: _kind(each) for each in tensors}
    for rank, head in enumerate(heads):
        names = [*mine, *(name for name in head.layout if name not in mine)]
        differ = [name for name in names if mine.get(name) != head.layout.get(name)]
        if differ:
            name = differ[0]
            raise StateMismatchError(
                f"The copy of rank {rank}'s part is of another state: {name} is"
                f" {head.layout.get(name, 'absent')} there and {mine.get(name, 'absent')} here.",
                remedy="Use the same model, optimizer and dtype on all ranks.",
            )


def _sources(decision: Restoration, ranks: int) -> list[int]:
    """Returns the rank that sends each part: the one decided on or, if all hold the part, any rank."""
    lacking: Mapping[int, int] = {each.part.rank: each.source for each in decision.handings}
    return [lacking.get(rank, rank % ranks) for rank in range(decision.world_size)]
