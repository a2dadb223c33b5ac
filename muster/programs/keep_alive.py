"""For torch programs whose processes outlive others: their process groups stay, and get new members."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from muster.errors import NotInitializedError, WorkerError
from muster.programs.agent_line import AgentLine
from muster.programs.assignment import FINISHED_KEY
from muster.worker.program_environment import GENERATION_VARIABLE

log = logging.getLogger("muster.worker")

_MEET_TIMEOUT = timedelta(seconds=5)
"""So long it waits for the others before it looks whether one of them has finished."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """What all ranks of a generation have told each other.

    Attributes:
        generation: its number.
        said: what each process has said, in order of its place.
    """

    generation: int
    said: list[Any]


def numbers_of(claimed: Sequence[int | None]) -> list[int]:
    """Which number each process of a generation has among the ranks.

    Who lives on keeps its own; the others take what is free, in order. So nobody's number changes, although
    the scheduler counts its members otherwise once a spare has come in.

    Args:
        claimed: the number that each process has already, in the scheduler's order; None: it is new.
    """
    free = iter(sorted(set(range(len(claimed))) - set(claimed)))
    return [next(free) if number is None else number for number in claimed]


class LivingProgram:
    """This process as a program that goes on when other ranks are lost.

    Raises:
        NotInitializedError: no agent of ``muster run`` has started this program.
    """

    def __init__(self, world: Any) -> None:
        self._groups = world
        self._line = AgentLine(world.break_off)
        self._rank: int | None = None
        self._size = _variable("WORLD_SIZE")
        self._has_state = False
        self._store: Any = None
        world.install()
        while True:
            try:
                world.rehearses = self._others_live()
                break
            except Exception:  # of torch's store
                if self._line.failed_first():
                    raise
            self._line.enter_next()
            self._size, self._store = _variable("WORLD_SIZE"), None

    @property
    def rehearses(self) -> bool:
        """Whether the others live on, so that this process has to take what it lacks from them."""
        return bool(self._groups.rehearses)

    @property
    def generation(self) -> int:
        """Its number."""
        return _variable(GENERATION_VARIABLE)

    @property
    def is_over(self) -> bool:
        """Whether the generation has ended, so that what was computed since may be anything."""
        return self._line.is_over

    def note_state(self) -> None:
        """From now on there is a state to which this process can go back."""
        self._has_state = True

    def is_own_failure(self) -> bool:
        """Whether what this program has raised is its own fault; False: the generation is over."""
        return self._line.failed_first()

    def restart(self, why: str) -> None:
        """Ends this process; it is started again in the next generation, as without keep_alive()."""
        self._line.restart(why)

    def enter_next(self) -> None:
        """Waits for the next generation; restarts the program where it cannot go on in it."""
        if not self._has_state and not self.rehearses:
            self.restart("The members have changed before the training had a state to go back to.")
        self._line.enter_next()
        if _variable("WORLD_SIZE") != self._size:
            self.restart(f"The ranks were {self._size} and would be {_variable('WORLD_SIZE')}.")
        self._store = None
        others = self._others_live()
        if self.rehearses and not others:
            self.restart("No process is left that has the state.")

    def connect(self, holds: Any) -> Meeting:
        """Connects all groups to this generation's members; all ranks call it.

        Args:
            holds: what the others are to know of this rank's state, as JSON values.
        """
        from muster.programs.lasting_world import unlike

        groups = self._groups.groups
        meeting = self._meet("ready", _variable("RANK"), {"groups": groups, "holds": holds})
        for rank, said in enumerate(meeting.said):
            if why := unlike(groups, said["groups"], _variable("RANK"), rank):
                self.restart(why)
        self._groups.rehearses = False
        self._groups.connect(self._generation_store(), meeting.generation)
        if self.is_over:  # while they connected
            self._groups.break_off("The generation is over.")
        return Meeting(meeting.generation, [each["holds"] for each in meeting.said])

    def break_off(self) -> None:
        """Lets go of what has been connected of a generation that is over."""
        self._groups.break_off("The generation is over.")

    def _others_live(self) -> bool:
        """Whether another process lives on; this one gets its number among the ranks."""
        place = _variable("RANK")  # the agent has just set it
        said = self._meet("lives", place, [self._has_state, self._rank]).said
        self._rank = numbers_of([number for _, number in said])[place]
        os.environ["RANK"] = str(self._rank)
        return any(lives for other, (lives, _) in enumerate(said) if other != place)

    def _meet(self, what: str, place: int, mine: Any) -> Meeting:
        """Tells all processes of this generation something, and hears what each says, in order of place."""
        store = self._generation_store()
        store.set(f"{what}/{place}", json.dumps(mine))
        keys = [f"{what}/{each}" for each in range(self._size)]
        while not _have_come(store, keys):
            if self._agent_store().check([FINISHED_KEY]):
                # Their processes do not come any more, and nobody has the state.
                log.warning("The others have completed the training, which ends here, too.")
                raise SystemExit(0)
        said = [json.loads(each) for each in store.multi_get(keys)]
        return Meeting(self.generation, said)

    def _generation_store(self) -> Any:
        import torch.distributed as dist

        return dist.PrefixStore("in-place", self._agent_store())

    def _agent_store(self) -> Any:
        if self._store is None:
            import torch.distributed as dist

            host, _, port = os.environ["MUSTER_STORE"].rpartition(":")
            self._store = dist.TCPStore(host, int(port), None, False, wait_for_workers=False)
        return self._store


def _have_come(store: Any, keys: list[str]) -> bool:
    """Waits for keys, but not for long."""
    try:
        store.wait(keys, _MEET_TIMEOUT)
    except RuntimeError:
        return bool(store.check(keys))  # which fails where the store has ended
    return True


def _variable(name: str) -> int:
    return int(os.environ[name])


_program: LivingProgram | None = None


def keep_alive() -> bool:
    """Lets this program's process, groups and modules live on when another rank is lost.

    All ranks call it, before ``init_process_group()``. From then on torch makes process groups whose
    connections are made again in each generation, with a restarted worker or a spare in the lost one's place,
    as long as the ranks are as many; training goes on within :func:`muster.torch.steps`. Where
    that cannot be, the program is started again, as without it, and the log says why.

    Returns:
        Whether it is so; False: no agent of ``muster run`` has started this program, or this torch cannot.
    """
    global _program
    if _program is not None:
        return True
    import torch.distributed as dist

    if not dist.is_available():
        return False
    if dist.is_initialized():
        raise WorkerError(
            "keep_alive() was called after init_process_group().", remedy="Call it before, on all ranks."
        )
    from muster.programs.lasting_world import LastingWorld

    world = LastingWorld()
    if lacks := world.lacks():
        log.warning("The program is started again when members change: %s.", lacks)
        return False
    try:
        _program = LivingProgram(world)
    except NotInitializedError:
        return False
    # Else torch ends this process when NCCL hears that another has gone.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    return True


def living_program() -> LivingProgram | None:
    """This process's, once :func:`keep_alive` has said yes."""
    return _program
