"""Where checkpoints are: on file systems that this host has mounted."""

from __future__ import annotations

import re
from pathlib import Path

from muster.errors import SettingsError

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def mounted_path(path: str | Path) -> Path:
    """A checkpoint's path, which is one of this host's file systems.

    Raises:
        SettingsError: it is an address, such as s3://bucket/run: that would become a directory called "s3:".
    """
    if _ADDRESS.match(str(path)):
        raise SettingsError(
            f"checkpoints are written to mounted file systems, and '{path}' is an address.",
            remedy="Mount that store (s3fs, gcsfuse, a volume of the cluster) and name the place, or write"
            " to it by torch.distributed.checkpoint with fsspec.",
        )
    return Path(path)
