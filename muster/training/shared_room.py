"""Memory shared with another process of this host, in which a checkpoint waits until it is written."""

from __future__ import annotations

import mmap
import os
import weakref


class SharedRoom:
    """Anonymous shared memory with a file descriptor; it grows to what is asked for, and never shrinks.

    It is freed when nobody refers to the object any more.

    Attributes:
        descriptor: for the process that reads it.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("muster-checkpoint", os.MFD_CLOEXEC)
        self._size = 0
        self._data = memoryview(b"")
        self._give_back = weakref.finalize(self, os.close, self.descriptor)

    def take(self, size: int) -> memoryview:
        """The memory's first ``size`` bytes, to write to; its contents are lost if it has to grow.

        Args:
            size: the size in bytes.

        Raises:
            OSError: there is not enough memory.
        """
        if size > self._size:
            os.posix_fallocate(self.descriptor, 0, size)  # an error now, and no SIGBUS later
            self._data = memoryview(mmap.mmap(self.descriptor, size))
            self._size = size
        return self._data[:size]

    def close(self) -> None:
        """Frees the memory once nobody reads it any more."""
        self._data = memoryview(b"")
        self._give_back()
        self.descriptor, self._size = -1, 0
