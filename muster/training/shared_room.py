"""Memory shared with another process of this host, in which a checkpoint waits until it is written."""

from __future__ import annotations

import mmap
import os
import weakref


class SharedRoom:
    """Anonymous shared memory with a file descriptor; it grows to the requested size, and never shrinks.

    It is freed when no reference to the object is left.

    Attributes:
        descriptor: the file descriptor, for the process that reads the memory.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("muster-checkpoint", os.MFD_CLOEXEC)
        self._size = 0
        self._data = memoryview(b"")
        self._give_back = weakref.finalize(self, os.close, self.descriptor)

    def take(self, size: int) -> memoryview:
        """Returns the memory's first ``size`` bytes, to write to; contents are lost if it has to grow.

        Args:
            size: the size in bytes.

        Raises:
            OSError: there is not enough memory.
        """
        if size > self._size:
            os.posix_fallocate(self.descriptor, 0, size)  # so that it fails now, and not by SIGBUS later
            self._data = memoryview(mmap.mmap(self.descriptor, size))
            self._size = size
        return self._data[:size]

    def close(self) -> None:
        """Frees the memory once no process reads it any more."""
        self._data = memoryview(b"")
        self._give_back()
        self.descriptor, self._size = -1, 0
