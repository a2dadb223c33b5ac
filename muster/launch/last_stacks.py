"""Takes the stacks of a worker that does not end before it is killed, and puts them beside its log.

A worker whose interpreter's lock is held by C code cannot answer the scheduler; its signal handler, which is
C as well, answers all the same.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from muster.wire.files import open_own
from muster.wire.redaction import without_secrets
from muster.worker.stacks.handler import VARIABLE
from muster.worker.stacks.kernel import threads_of
from muster.worker.stacks.mailbox import Mailbox

KEPT_AT_MOST = 8
"""So many workers are asked in one launch: each may take two seconds."""


class LastStacks:
    """What the workers of one launch write their stacks to."""

    def __init__(self) -> None:
        self._mailbox = Mailbox()
        self._kept = 0

    @property
    def variables(self) -> dict[str, str]:
        """What a worker finds in its environment."""
        return {VARIABLE: self._mailbox.path}

    def keep(self, pid: int, label: str, directory: Path) -> str:
        """Writes where a process stands to a file in this directory.

        Returns:
            A remark on that; empty: nothing was written.
        """
        if self._kept >= KEPT_AT_MOST:
            return ""
        self._kept += 1
        said = self._mailbox.ask(pid)
        python = (
            "no handler for them here" if said is None else said or "no answer: stopped, or in the kernel"
        )
        text = f"Python stacks of pid {pid}:\n{python}\n\nkernel:\n" + "\n".join(threads_of(pid)) + "\n"
        path = directory / f"stacks-{label.replace(os.sep, '_')}.txt"
        with contextlib.suppress(OSError), os.fdopen(open_own(path), "w", encoding="utf-8") as out:
            out.write(without_secrets(text, os.environ))
            return f"; where it stood: {path}"
        return ""

    def close(self) -> None:
        """Closes the file in memory."""
        self._mailbox.close()
