"""Disks without space."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(size_bytes: int) -> Iterator[None]:
    """No file of this process can be larger: what does not fit is refused as by a quota (EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@contextlib.contextmanager
def mounted_disk(at: Path, size: str = "1m") -> Iterator[Path]:
    """A real disk of this size; skips the test where none may be mounted."""
    at.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "muster-test", str(at)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs root, mounts and unshare")
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)


@contextlib.contextmanager
def filled(disk: Path, left_bytes: int = 0) -> Iterator[None]:
    """Nothing more is left of a disk's space."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        file.truncate(file.tell() - left_bytes)
    try:
        yield
    finally:
        filler.unlink()
