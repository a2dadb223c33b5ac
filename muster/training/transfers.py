"""Plans which bytes of held parts go to which ranks when a state is restored, at any world size. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from muster.training.parts import Part, overlap

PIECE_BYTES = 64 << 20


class TensorSpan(NamedTuple):
    """One tensor in a part's data.

    Attributes:
        name: the name of the tensor.
        part: the elements of the tensor that the part has.
        start: first byte.
        stop: one past the last byte.
    """

    name: str
    part: Part
    start: int
    stop: int


class Transfer(NamedTuple):
    """Bytes of one part that the same ranks need.

    Attributes:
        rank: the old rank whose part it is.
        tensors: the tensors in these bytes, in order.
        targets: the new ranks that need some of these bytes, in order.
    """

    rank: int
    tensors: tuple[TensorSpan, ...]
    targets: tuple[int, ...]

    @property
    def start(self) -> int:
        """First byte in the part's data."""
        return self.tensors[0].start

    @property
    def stop(self) -> int:
        """One past the last byte in the part's data."""
        return self.tensors[-1].stop


def transfers(
    parts: Sequence[Sequence[TensorSpan]], wanted: Sequence[Mapping[str, Part]]
) -> Iterator[Transfer]:
    """Yields the transfers, in the same order on all ranks; each has a bounded size, or a single tensor.

    Args:
        parts: the tensors of each old rank, in the order of their data.
        wanted: the elements of each tensor that each new rank needs.
    """
    meets: dict[tuple[Part, Part], bool] = {}
    taken: set[tuple[str, Part]] = set()  # several ranks may have copied the same elements

    def meet(one: Part, other: Part) -> bool:
        if (one, other) not in meets:
            meets[one, other] = any(overlap(a, b) for a in one.boxes() for b in other.boxes())
        return meets[one, other]

    for rank, tensors in enumerate(parts):
        piece: list[TensorSpan] = []
        of: tuple[int, ...] = ()
        for each in tensors:
            targets = tuple(
                number
                for number, needs in enumerate(wanted)
                if each.name in needs and each.stop > each.start and meet(each.part, needs[each.name])
            )
            if (each.name, each.part) in taken:
                targets = ()
            taken.add((each.name, each.part))
            if piece and (targets != of or each.stop - piece[0].start > PIECE_BYTES):
                yield Transfer(rank, tuple(piece), of)
                piece = []
            if targets:
                piece.append(each)
                of = targets
        if piece:
            yield Transfer(rank, tuple(piece), of)
