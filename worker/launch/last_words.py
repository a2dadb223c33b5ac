"""What a worker lets its launcher know: who it is, what ended it, who was the first to go.

The launcher sees exit codes and signals only, in the order in which processes end, which is not the order in
which they failed. So it gives each worker a file in memory, named by MUSTER_LAST_WORDS, and reads it when
one has failed. :func:`muster.worker.launch.report.read_words` is the other side.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

VARIABLE = "MUSTER_LAST_WORDS"
FILE_NAME = "muster-last-words"


def note(**facts: object) -> None:
    """Appends one line of facts; without a launcher, or where that is gone, it does nothing."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        if not str(Path(path).readlink()).startswith(
            f"/memfd:{FILE_NAME}"
        ):  # another process has the number by now
            return
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(descriptor, (json.dumps(facts) + "\n").encode())
    except OSError:
        pass
    finally:
        os.close(descriptor)
