"""How many arenas malloc makes for many threads, in processes of their own."""

from __future__ import annotations

import itertools
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduler.processes import scheduler

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")

THREADS = """
import ctypes, os, sys, threading
from muster.wire.malloc import bound_arenas

if sys.argv[2] == "bounded":
    bound_arenas(os.environ)
met = threading.Barrier(9)

def work():
    kept = bytearray(100_000)  # of malloc, not of Python's own allocator
    met.wait()
    met.wait()

threads = [threading.Thread(target=work) for _ in range(8)]
for each in threads:
    each.start()
met.wait()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
met.wait()
"""


def arenas(into: Path, how: str, **env: str) -> int:
    """How many there are while nine threads hold memory."""
    command = [sys.executable, "-c", THREADS, str(into), how]
    plain = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    subprocess.run(command, env=plain | env, check=True, timeout=100)
    return len(re.findall(r"<heap nr=", into.read_text()))


def test_many_threads_share_two_arenas_unless_the_environment_says_otherwise(tmp_path: Path) -> None:
    assert arenas(tmp_path / "without", "unbounded") > 4
    assert arenas(tmp_path / "with", "bounded") <= 2
    assert arenas(tmp_path / "env", "bounded", MALLOC_ARENA_MAX="4") == 4


HEAP_BYTES = 64 << 20
"""Each arena but the first begins with a heap at a multiple of this, most of it only reserved."""


def further_heaps(pid: int) -> int:
    """How many heaps a process has beside the first arena's."""
    areas = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        bounds, mode, *more = line.split()
        begin, end = (int(each, 16) for each in bounds.split("-"))
        areas.append((begin, end, mode if len(more) == 3 else "of a file"))
    return sum(
        begin % HEAP_BYTES == 0 and mode == "rw-p" and following == (end, begin + HEAP_BYTES, "---p")
        for (begin, end, mode), following in itertools.pairwise(areas)
    )


def test_a_scheduler_has_two(tmp_path: Path) -> None:
    with scheduler() as running:
        assert further_heaps(running.process.pid) <= 1
