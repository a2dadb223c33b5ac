"""Computes which elements of a tensor each rank holds, as boxes of the whole tensor. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a whole tensor.

    Attributes:
        offsets: the offsets of its first element, one for each dimension.
        sizes: number of elements along each dimension.
        start: the offset of its elements, row by row, in the flat tensor of the rank that holds it.
    """

    offsets: Shape
    sizes: Shape
    start: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a tensor that one rank holds: the elements from start to stop, row by row, of a box.

    Attributes:
        offsets: the offsets of the box in the whole tensor.
        sizes: the sizes of the box.
        start: first element of the box that the rank holds; 0 unless the update is sharded.
        stop: one past the last element.
    """

    offsets: Shape
    sizes: Shape
    start: int
    stop: int

    def boxes(self) -> list[Box]:
        """The same elements as boxes, in the order in which the rank holds them."""
        found, place = [], 0
        for offsets, sizes in _boxes(self.sizes, self.start, self.stop):
            whole = tuple(a + b for a, b in zip(self.offsets, offsets, strict=True))
            found.append(Box(whole, sizes, place))
            place += math.prod(sizes)
        return found


def whole_part(shape: Shape) -> Part:
    """Returns the part that is the whole tensor."""
    return Part((0,) * len(shape), shape, 0, math.prod(shape))


def overlap(a: Box, b: Box) -> Box | None:
    """Returns the intersection of two boxes of a tensor; its ``start`` has no meaning. None: it is empty."""
    offsets = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    ends = (min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
    sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def divided(parts: Sequence[Part]) -> list[Part]:
    """Divides each part that several ranks hold among them, so that no element is held twice.

    Args:
        parts: what each rank holds, by rank.
    """
    alike: dict[Part, int] = {}
    numbers = []
    for part in parts:
        numbers.append(alike.get(part, 0))
        alike[part] = numbers[-1] + 1
    return [piece(part, number, alike[part]) for part, number in zip(parts, numbers, strict=True)]


def piece(part: Part, number: int, count: int) -> Part:
    """Returns the ``number``-th of ``count`` pieces of a part, which are as even as possible."""
    length = part.stop - part.start
    first, beyond = (part.start + length * each // count for each in (number, number + 1))
    return Part(part.offsets, part.sizes, first, beyond)


def _boxes(sizes: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Cuts elements start to stop of a tensor, row by row, into boxes: (offsets, sizes), in order."""
    if start >= stop:
        return
    if not sizes:
        yield (), ()
        return
    row = math.prod(sizes[1:])
    first, within = divmod(start, row)
    if within:  # the rest of a row that was begun
        end = min(stop, (first + 1) * row)
        for offsets, inner in _boxes(sizes[1:], within, end - first * row):
            yield (first, *offsets), (1, *inner)
        first, start = first + 1, end
    rows = (stop - start) // row
    if rows:
        yield (first, *(0,) * (len(sizes) - 1)), (rows, *sizes[1:])
        first, start = first + rows, start + rows * row
    for offsets, inner in _boxes(sizes[1:], 0, stop - start):
        yield (first, *offsets), (1, *inner)
