"""Keeps what is in memory out of files."""

from __future__ import annotations

import contextlib
import resource


def forbid_core_files() -> None:
    """Makes a crash of this process leave no core file, which would hold its private key.

    The hard limit stays, so that whoever needs a core file can raise the soft one again.
    """
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
