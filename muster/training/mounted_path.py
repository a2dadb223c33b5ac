"""Checks that checkpoints are on a mounted file system, not at the address of an object store."""

from __future__ import annotations

import re
from pathlib import Path

from muster.errors import SettingsError

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def mounted_path(path: str | Path) -> Path:
    """Returns the path of a checkpoint, which must be on a mounted file system.

    Raises:
        SettingsError: ``path`` is an address such as s3://bucket/run, which would make a directory "s3:".
    """
    if _ADDRESS.match(str(path)):
        raise SettingsError(
            f"checkpoints are written to mounted file systems, and '{path}' is an address.",
            remedy="Mount that store (s3fs, gcsfuse, a volume of the cluster) and name the place, or write"
            " to it by torch.distributed.checkpoint with fsspec.",
        )
    return Path(path)
