"""Bringing all members to one state after a change: the furthest gives, whoever needs it takes."""

from __future__ import annotations

import zlib
from typing import Protocol

from muster.worker.communicators.base import Communicator
from muster.worker.training.state import TrainingState


class StateHolder(Protocol):
    """What is needed of a :class:`muster.worker.control.session.Session`."""

    @property
    def communicator(self) -> Communicator:
        """The world's communicator in the present generation."""

    @property
    def state_source_rank(self) -> int:
        """Who holds the state that newcomers take; -1: all start anew."""

    @property
    def newcomer_ranks(self) -> tuple[int, ...]:
        """Who holds no state."""


def share_state(session: StateHolder, state: TrainingState) -> int:
    """Makes the state of all ranks that of the furthest one, and the sampler fit the new world.

    A change of members may catch some ranks just before, others just after a step: the most steps win, so
    that no finished step is redone. When all start anew, a rank that resumed from a checkpoint is the
    furthest. Should it die before any other has its state, the rest start anew once more: its replacement
    may have the checkpoint, too. Where nobody lacks anything, one small collective is all that happens.

    What is received is put in place only when it is there as a whole: a giver that dies half-way leaves
    every other rank with the state it had.

    Returns:
        The rank whose state it is now.

    Raises:
        StateMismatchError: the giver trains another model.
        MembershipChanged: the members changed again; nothing was overwritten.
    """
    communicator = session.communicator
    state.roll_back()
    rank, anew = communicator.rank, session.state_source_rank < 0
    carrier = state.carrier(communicator)
    description = state.describe().encode()
    holds = anew or (state.shared and rank not in session.newcomer_ranks)
    digest = [zlib.crc32(description), len(description)]
    tickets = carrier.gather([state.step if holds else -1, *digest])
    if all(steps < 0 for steps, *_ in tickets):
        anew, tickets = True, carrier.gather([state.step, *digest])
    source = _furthest([ticket[0] for ticket in tickets], session.state_source_rank)
    if anew or any(ticket != tickets[source] for ticket in tickets):
        text = carrier.broadcast_text(description, tickets[source][2], source)
        if rank != source:
            state.check(text, f"rank {source}")
        received = carrier.broadcast_arrays(source)
        if rank != source and (anew or tickets[rank] != tickets[source]):
            for name, array in received.items():
                state.arrays[name][...] = array
            state.restore(text)
    state.enter(communicator, source)
    state.shared = True
    return source


def _furthest(steps: list[int], preferred: int) -> int:
    """The rank with the most steps; among equals the longest-lived, as the scheduler says, else the first."""
    most = max(steps)
    if preferred >= 0 and steps[preferred] == most:
        return preferred
    return steps.index(most)
