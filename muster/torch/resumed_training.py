"""Resumes training from a checkpoint in the same process, for trainers that cannot go back to a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from muster.programs.keep_alive import living_program

log = logging.getLogger("muster.worker")

T = TypeVar("T")


def resumed(train: Callable[[str | None], T], checkpoints: Callable[[], Sequence[str]]) -> T:
    """Calls ``train``, and calls it again when ranks are lost, until it returns; process and groups stay.

    ``train`` gets the latest checkpoint that all ranks see, or None if there is none, and must load all of
    its state from it. An error in ``train`` that the loss of a rank causes is suppressed. ``train`` is then
    called again, on all ranks and in the process that replaces the lost one. If there is no checkpoint yet,
    or ``keep_alive()`` has not returned True, processes are restarted instead.

    Args:
        train: trains to the end.
        checkpoints: returns the names of the complete checkpoints, the latest last.

    Returns:
        What ``train`` returns.

    Raises:
        Exception: ``train`` has raised it, and not because a rank was lost.
    """
    program = living_program()
    if program is None:
        return train(latest([list(checkpoints())]))
    program.begin()
    program.note_state()
    enters, meets = False, program.rehearses
    while True:
        try:
            if enters:
                program.enter_next()
            told = [list(checkpoints())]
            if enters or meets:
                told = program.connect(told[0], lambda said: list(range(len(said)))).said
            checkpoint = latest(told)
            if checkpoint is None and (enters or meets):
                program.restart("There is no checkpoint yet.")
            log.info("training goes on from %s", checkpoint or "the beginning")
            return train(checkpoint)
        except Exception as error:
            if program.is_own_failure():
                raise
            log.info("ignoring an error caused by the loss of a rank: %s", error)
            program.break_off()
            enters = True


def latest(told: Sequence[Any]) -> str | None:
    """Returns the last name that is in every rank's list; None: there is none."""
    return next((name for name in reversed(told[0]) if all(name in each for each in told)), None)
