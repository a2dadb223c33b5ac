"""A disk of its own for a benchmark's files, whose space can be taken away: a small tmpfs."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path


class SmallDisk:
    """Mounts a tmpfs, which takes root.

    Args:
        at: where; is made.
        size_bytes: all its space.
    """

    def __init__(self, at: Path, size_bytes: int = 1 << 20) -> None:
        self.path = at
        self.full = False
        self._size_bytes = size_bytes
        self._filler = at / "filler"

    def mount(self) -> None:
        """Mounts it.

        Raises:
            RuntimeError: nothing may be mounted here.
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
        """Takes the space that is left: whoever writes next finds none."""
        self.full = True
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def make_space(self) -> None:
        """Gives the space back."""
        self._filler.unlink(missing_ok=True)
        self.full = False

    def unmount(self) -> None:
        """Takes the disk away, if it is there."""
        subprocess.run(["umount", str(self.path)], capture_output=True, check=False)
