"""Writes the stacks of a worker that is alive but lost to its job, or does not end, beside its log.

If C code holds the interpreter's lock, a worker cannot answer the scheduler, which counts it as lost. The
worker's signal handler, which is also C, still answers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from muster.launch.report import LastWords
from muster.wire.files import open_own
from muster.wire.redaction import without_secrets
from muster.worker.stacks.handler import VARIABLE
from muster.worker.stacks.kernel import is_ending, threads_of
from muster.worker.stacks.mailbox import Mailbox

KEPT_AT_MOST = 8
"""Maximum number of workers that are asked in one launch; each may take two seconds."""


class Watchable(Protocol):
    """The part of a :class:`~muster.launch.process.Child` that :class:`LastStacks` needs."""

    @property
    def pid(self) -> int:
        """The process's id."""

    @property
    def label(self) -> str:
        """Its name."""

    @property
    def returncode(self) -> int | None:
        """Its exit code; None while it is not collected."""

    def has_ended(self) -> bool:
        """Whether it has ended and is not collected yet."""

    def noted(self) -> int:
        """The size in bytes of its notes, which only grow."""

    def words(self) -> LastWords:
        """Its notes."""


class LastStacks:
    """The file in memory to which the workers of one launch write their stacks."""

    def __init__(self) -> None:
        self._mailbox = Mailbox()
        self._kept = 0
        self._noted: dict[int, int] = {}
        self._lost: set[tuple[str, int]] = set()

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that tell a worker where to write."""
        return {VARIABLE: self._mailbox.path}

    def look(self, workers: Sequence[Watchable], directory: Path, say: Callable[[str], None]) -> None:
        """Writes the stacks of workers that live but were reported lost to another worker, once each.

        Workers that have named the error with which they end are left alone, because walking stacks that
        change may crash a process.

        Args:
            workers: the workers of this launch.
            directory: the directory for the files.
            say: shows a sentence to the user.
        """
        heard: set[tuple[str, int]] = set()
        for worker in workers:
            if worker.returncode is None and (noted := worker.noted()) != self._noted.get(worker.pid):
                self._noted[worker.pid] = noted
                heard |= worker.words().lost
        for lost in heard - self._lost:
            self._lost.add(lost)
            for worker in workers:
                words = worker.words()
                ended = worker.returncode is not None or worker.has_ended() or is_ending(worker.pid)
                if not (ended or words.error or words.left) and lost in words.places:
                    kept = self.keep(worker.pid, worker.label, directory)
                    say(f"worker {worker.label} (pid {worker.pid}) is alive, but lost to the others{kept}")

    def keep(self, pid: int, label: str, directory: Path) -> str:
        """Writes a process's stacks to a file in this directory.

        Returns:
            A remark that names the file; empty: nothing was written.
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
            return f"; its stacks: {path}"
        return ""

    def close(self) -> None:
        """Closes the file in memory."""
        self._mailbox.close()
