from __future__ import annotations

import mmap
import os

import pytest

from muster.training.shared_room import SharedRoom


def test_who_has_the_descriptor_reads_what_was_written_and_it_grows() -> None:
    room = SharedRoom()
    room.take(3)[:] = b"abc"
    with mmap.mmap(room.descriptor, 3, prot=mmap.PROT_READ) as other:
        assert other[:] == b"abc"
    room.take(5000)[4999] = 7
    with mmap.mmap(room.descriptor, 5000, prot=mmap.PROT_READ) as other:
        assert other[4999] == 7
    assert len(room.take(2)) == 2
    assert os.fstat(room.descriptor).st_size == 5000


@pytest.mark.parametrize("closed", [True, False])
def test_its_memory_is_given_back(closed: bool) -> None:
    room = SharedRoom()
    descriptor = room.descriptor
    room.take(10)
    if closed:
        room.close()
        room.close()
    del room
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
