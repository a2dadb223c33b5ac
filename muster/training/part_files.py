"""Writes copies in memory to files: a durable checkpoint is a directory with one file for each rank's part.

A file has the copy's key, checksums, head and bytes. It gets its name once it is complete. So the checkpoint
is complete when all its files exist, and no rank waits for another rank's disk. Checkpoints are ordered by
the attempt's number, then by generation, then by step, and not by a clock.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.training.attempts import number_of_attempt
from muster.training.checkpoint import CheckpointError
from muster.training.paced_file import WritePace, write_all
from muster.training.part_copy import PartCopy
from muster.training.snapshots.parts import PartKey, SnapshotId
from muster.wire.files import beside

KEPT = 2
"""Number of complete checkpoints that are kept: the last one, and one in case that is damaged."""

_DIRECTORY = re.compile(r"snapshot_(\d{6,})\.(\d{6,})\.(\d{9,})")
_FILE = re.compile(r"part_(\d+)_of_(\d+)")
_MAX_LINE_BYTES = 1 << 24


def part_order(copy: PartCopy, root: Path, attempt: str, mbytes_per_s: float = 0.0) -> dict[str, Any]:
    """Returns an order for :func:`write_part`, as JSON values.

    Args:
        copy: the copy to write.
        root: the directory of all checkpoints.
        attempt: names the launch that writes, and how often it has gone back to a checkpoint.
        mbytes_per_s: maximum rate of the write, in 10**6 bytes per second; 0: no limit.
    """
    snapshot, world_size, rank = copy.key
    return {
        "copy": {
            "key": [*snapshot, world_size, rank],
            "head": copy.head.decode(),
            "checksums": list(copy.checksums),
        },
        "root": str(root),
        "attempt": attempt,
        "unfinished": str(beside(root / f"part_{rank}")),
        "mbytes_per_s": mbytes_per_s,
    }


def write_part(data: memoryview, what: Mapping[str, Any]) -> dict[str, Any]:
    """Writes one rank's part of a checkpoint; runs in the writer process, or in a thread.

    Args:
        data: the copy's bytes.
        what: see :func:`part_order`.

    Returns:
        The size of the whole checkpoint in bytes (0 if parts are still missing), and the seconds that writing
        took.

    Raises:
        CheckpointError: the copy is damaged, or the file cannot be written.
        DamagedCopyError: the copy has changed since it was taken.
    """
    begun = time.monotonic()
    root, unfinished = Path(what["root"]), Path(what["unfinished"])
    copy = _copy(what["copy"], data)
    copy.check()
    rank, world_size = copy.key.rank, copy.key.world_size
    try:
        root.mkdir(parents=True, exist_ok=True)
        number = number_of_attempt(root, what["attempt"], [order[0] for order in _orders(root)])
        generation, step = copy.key.snapshot
        folder = root / f"snapshot_{number:06d}.{generation:06d}.{step:09d}"
        folder.mkdir(exist_ok=True)
        line = json.dumps({**what["copy"], "size": len(data)}).encode() + b"\n"
        with unfinished.open("wb", buffering=0) as file:
            pace = WritePace(what["mbytes_per_s"])
            write_all(file, memoryview(line), pace)
            write_all(file, data, pace)
            os.fsync(file.fileno())
        unfinished.replace(folder / f"part_{rank}_of_{world_size}")
        _sync(folder)
        _sync(root)
        size_bytes = sum(each.stat().st_size for each in folder.iterdir()) if _is_whole(folder) else 0
        if rank == 0:
            _make_room(root)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise CheckpointError(
            f"Rank {rank} could not write its part of a checkpoint in {root}: {error}.",
            remedy="Make room, or choose another directory.",
        ) from error
    return {"size_bytes": size_bytes, "seconds": time.monotonic() - begun}


def whole_checkpoints(root: Path) -> list[str]:
    """Returns the names of the complete checkpoints, the latest first."""
    return [path.name for _, path in sorted(_orders(root).items(), reverse=True) if _is_whole(path)]


def read_parts(folder: Path, rank: int, world_size: int) -> list[PartCopy]:
    """Reads this rank's share of a checkpoint's files; leaves out a file that cannot be read."""
    found = []
    for path in sorted(folder.iterdir()):
        match = _FILE.fullmatch(path.name)
        if match is None or int(match[1]) % world_size != rank:
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), path.open("rb") as file:
            line = file.readline(_MAX_LINE_BYTES)
            said = json.loads(line)
            whole = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))[len(line) :]
            copy = _copy(said, whole)
            if len(whole) == said["size"] and copy.key[1:] == (int(match[2]), int(match[1])):
                found.append(copy)
    return found


def _copy(said: Mapping[str, Any], data: memoryview) -> PartCopy:
    generation, step, world_size, rank = said["key"]
    key = PartKey(SnapshotId(generation, step), world_size, rank)
    return PartCopy(key, said["head"].encode(), data, tuple(said["checksums"]))


def _orders(root: Path) -> dict[tuple[int, ...], Path]:
    """Returns the directories of checkpoints by their sort key: number, generation, step."""
    if not root.is_dir():
        return {}
    found = [(_DIRECTORY.fullmatch(path.name), path) for path in root.iterdir()]
    return {tuple(map(int, match.groups())): path for match, path in found if match is not None}


def _is_whole(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # another process has removed it to make room
        found = [_FILE.fullmatch(path.name) for path in folder.iterdir()]
        parts = {(int(match[2]), int(match[1])) for match in found if match is not None}
        return any({(size, rank) for rank in range(size)} <= parts for size, _ in parts)
    return False


def _make_room(root: Path) -> None:
    """Removes all checkpoints, complete or not, that are older than the oldest checkpoint to keep."""
    latest_first = [path for _, path in sorted(_orders(root).items(), reverse=True)]
    whole = [path for path in latest_first if _is_whole(path)]
    if len(whole) >= KEPT:
        for path in latest_first[latest_first.index(whole[KEPT - 1]) + 1 :]:
            shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
