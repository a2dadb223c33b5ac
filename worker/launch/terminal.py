"""What the launcher itself writes to its terminal."""

from __future__ import annotations

import contextlib
import os
import sys


def say(sentence: str) -> None:
    """Tells the user what the launcher does, on standard error."""
    with contextlib.suppress(OSError):
        print(f"muster: {sentence}", file=sys.stderr, flush=True)


def write(descriptor: int, data: bytes) -> None:
    """Writes it all; a terminal that has gone away is no reason to end training."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]
