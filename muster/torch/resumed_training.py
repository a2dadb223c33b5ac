"""For trainers whose loop cannot be wound back: they resume from a checkpoint in the same process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from muster.programs.keep_alive import living_program

log = logging.getLogger("muster.worker")

T = TypeVar("T")


def resumed(train: Callable[[str | None], T], checkpoints: Callable[[], Sequence[str]]) -> T:
    """Calls ``train`` until it returns, in the same process and with its groups when ranks are lost.

    ``train`` is called with the latest checkpoint that all ranks see, or with None where there is none, and
    has to take all of its state from that. What the loss of a rank makes it raise is dropped. It is called
    then on all ranks and in the process that takes the lost one's place, which all do the same from there on.
    Processes are started again where there is no checkpoint yet, or ``keep_alive()`` has not said yes.

    Args:
        train: trains to the end.
        checkpoints: the names of those that are whole, the latest last.

    Returns:
        What ``train`` returns.

    Raises:
        Exception: what ``train`` raises by itself.
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
            log.info("what the loss of a rank brought about is dropped: %s", error)
            program.break_off()
            enters = True


def latest(told: Sequence[Any]) -> str | None:
    """The last name that all have told."""
    return next((name for name in reversed(told[0]) if all(name in each for each in told)), None)
