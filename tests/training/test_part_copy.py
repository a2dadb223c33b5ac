"""Checksums of copies: a copy is what its rank held at that step, or it is noticed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from muster.training.part_copy import CHUNK_BYTES, DamagedCopyError, HeldCopies, PartCopy
from muster.training.snapshots.parts import PartKey, SnapshotId

KEY = PartKey(SnapshotId(3, 40), 4, 2)


def copy_of(size: int, key: PartKey = KEY, head: bytes = b'{"a": 1}') -> PartCopy:
    return PartCopy(key, head, memoryview(bytearray(b"x" * size))).sealed()


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 5])
def test_what_is_unchanged_passes(size: int) -> None:
    copy = copy_of(size)
    copy.check()
    assert copy.found() == copy.announced


@pytest.mark.parametrize("place", [0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 4])
def test_one_flipped_bit_anywhere_is_noticed(place: int) -> None:
    copy = copy_of(2 * CHUNK_BYTES + 5)
    copy.data[place] ^= 1
    with pytest.raises(DamagedCopyError, match=r"rank 2's part of step 40.*chunk"):
        copy.check()
    assert copy.found() != copy.announced


def test_chunks_in_another_order_are_noticed() -> None:
    copy = PartCopy(KEY, b"", memoryview(bytearray(b"a" * CHUNK_BYTES + b"b" * CHUNK_BYTES))).sealed()
    copy.data[:] = bytes(copy.data[CHUNK_BYTES:]) + bytes(copy.data[:CHUNK_BYTES])
    with pytest.raises(DamagedCopyError):
        copy.check()


@pytest.mark.parametrize(
    "other",
    [
        {"key": PartKey(SnapshotId(3, 30), 4, 2)},
        {"key": PartKey(SnapshotId(2, 40), 4, 2)},
        {"key": PartKey(SnapshotId(3, 40), 4, 1)},
        {"key": PartKey(SnapshotId(3, 40), 5, 2)},
        {"head": b'{"a": 2}'},
    ],
)
@pytest.mark.parametrize("size", [0, 9])
def test_data_under_another_name_or_head_is_noticed(other: dict[str, Any], size: int) -> None:
    """The bytes of an older step, say, or another rank's."""
    with pytest.raises(DamagedCopyError):
        replace(copy_of(size), **other).check()


def test_half_a_copy_is_noticed() -> None:
    copy = copy_of(2 * CHUNK_BYTES)
    with pytest.raises(DamagedCopyError, match="not whole"):
        replace(copy, data=copy.data[:CHUNK_BYTES]).check()


def test_what_is_held_is_found_by_its_part_until_it_is_dropped() -> None:
    held, other = HeldCopies(), PartKey(SnapshotId(1, 2), 1, 0)
    held.keep(copy_of(3))
    held.keep(copy_of(4, other))
    assert [copy.key for copy in held.all()] == [other, KEY]
    held.drop([KEY, KEY])
    assert held.get(KEY) is None
    assert held.get(None) is None
    found = held.get(other)
    assert found is not None
    assert len(found.data) == 4
