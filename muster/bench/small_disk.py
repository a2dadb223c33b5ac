"""A small disk (a tmpfs) for a benchmark's files, which can be filled up."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path


class SmallDisk:
    """A small tmpfs; mounting it requires root.

    Args:
        at: the mount point, which is created.
        size_bytes: the size of the disk.
    """

    def __init__(self, at: Path, size_bytes: int = 1 << 20) -> None:
        self.path = at
        self.full = False
        self._size_bytes = size_bytes
        self._filler = at / "filler"

    def mount(self) -> None:
        """Mounts the disk.

        Raises:
            RuntimeError: this process must not mount disks.
        """
        self.path.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={self._size_bytes}", "muster-bench", str(self.path)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"a small disk cannot be mounted, which takes root: {done.stderr.strip()}")

    def fill(self) -> None:
        """Fills the disk, so that later writes fail."""
        self.full = True
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def make_space(self) -> None:
        """Frees the space that :meth:`fill` took."""
        self._filler.unlink(missing_ok=True)
        self.full = False

    def unmount(self) -> None:
        """Unmounts the disk, if it is mounted."""
        subprocess.run(["umount", str(self.path)], capture_output=True, check=False)
