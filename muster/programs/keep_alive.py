"""For torch programs whose processes outlive others: their process groups stay, and get new members."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

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
        said: what each rank has said, by its number; None: it is not there.
        active: the ranks that train; others that are there wait for the next generation.
    """

    generation: int
    said: list[Any]
    active: list[int]


def numbers_of(claimed: Sequence[int | None], size: int = 0) -> list[int]:
    """Which number each process of a generation has among the ranks.

    Who lives on keeps its own; the others take what is free, in order. So nobody's number changes, although
    the scheduler counts its members otherwise once a spare has come in.

    Args:
        claimed: the number that each process has already, in the scheduler's order; None: it is new.
        size: how many numbers there are, if these are more than the processes.
    """
    free = iter(sorted(set(range(max(size, len(claimed)))) - set(claimed)))
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
        self._size = self._members = _variable("WORLD_SIZE")
        self._numbers: list[int] = []
        self._takes_fewer = self._reshards = self._has_state = False
        self._is_resharding = False
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
            self._size = self._members = _variable("WORLD_SIZE")
            self._store = None
        if not world.rehearses:
            self._line.do_not_stay()

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

    @property
    def is_resharding(self) -> bool:
        """Whether the ranks have become fewer or more, and all make new groups and modules."""
        return self._is_resharding

    def begin(self, *, takes_fewer: bool = False, reshards: bool = False) -> None:
        """From now on the program can go on in a next generation; before, it is started again in that.

        Args:
            takes_fewer: also in one of fewer ranks, with the same groups.
            reshards: also in one of fewer or more, with new groups and modules.
        """
        self._takes_fewer, self._reshards = takes_fewer, reshards
        self._line.stay()

    def leave_groups(self) -> None:
        """Destroys all groups, so that the program can make new ones, as at its beginning."""
        self._groups.destroy()
        self._groups.rehearses = False

    def settle(self) -> None:
        """Notes that groups and modules are those of the present number of ranks."""
        self._is_resharding = False

    def note_state(self) -> None:
        """From now on there is a state to which this process can go back."""
        self._has_state = True

    def is_own_failure(self) -> bool:
        """Whether what this program has raised is its own fault; False: the generation is over."""
        return self._line.failed_first()

    def restart(self, why: str) -> NoReturn:
        """Ends this process; it is started again in the next generation, as without keep_alive()."""
        self._line.restart(why)

    def enter_next(self) -> None:
        """Waits for the next generation; restarts the program where it cannot go on in it."""
        if not self._has_state and not self.rehearses:
            self.restart("The members have changed before the training had a state to go back to.")
        self._line.enter_next(self._end_if_finished)
        self._members = _variable("WORLD_SIZE")
        is_served = self._reshards or (self._takes_fewer and self._members < self._size)
        if self._members != self._size and not is_served:
            self.restart(f"The ranks were {self._size} and would be {self._members}.")
        self._store = None
        others = self._others_live()
        if self.rehearses and not others:
            self.restart("No process is left that has the state.")

    def connect(self, holds: Any, active_of: Callable[[list[Any]], list[int]]) -> Meeting:
        """Connects all groups to this generation's members; all ranks call it.

        Args:
            holds: what the others are to know of this rank's state, as JSON values.
            active_of: which ranks train, by what each of them says; None: it is not there.
        """
        from muster.programs.lasting_world import unlike

        groups, rank = self._groups.groups, _variable("RANK")
        said = self._meet("ready", rank, {"groups": groups, "holds": holds}, self._numbers)
        for other, each in said.items():
            if why := unlike(groups, each["groups"], rank, other):
                self.restart(why)
        told = [said[each]["holds"] if each in said else None for each in range(self._size)]
        meeting = Meeting(self.generation, told, active_of(told))
        if rank in meeting.active:
            self._groups.rehearses = False
            self._groups.connect(self._generation_store(), meeting.generation, meeting.active)
        if self.is_over:  # while they connected
            self._groups.break_off("The generation is over.")
        return meeting

    def break_off(self) -> None:
        """Lets go of what has been connected of a generation that is over."""
        self._groups.break_off("The generation is over.")

    def _others_live(self) -> bool:
        """Whether another process lives on; this one gets its number among the ranks."""
        place = _variable("RANK")  # the agent has just set it
        is_resharding = self._is_resharding or (self._reshards and self._members != self._size)
        mine = [self._has_state, self._rank, self._size, is_resharding]
        said = self._meet("lives", place, mine, range(self._members))
        self._is_resharding = any(reshards for *_, reshards in said.values())
        if self._is_resharding:
            self._size, numbers = self._members, list(range(self._members))
        else:
            self._size = max([size for lives, _, size, _ in said.values() if lives], default=self._size)
            numbers = numbers_of([number for _, number, _, _ in said.values()], self._size)
        self._rank, self._numbers = numbers[place], sorted(numbers)
        os.environ.update({"RANK": str(self._rank), "WORLD_SIZE": str(self._size)})
        return any(lives for other, (lives, *_) in said.items() if other != place)

    def _meet(self, what: str, place: int, mine: Any, places: Iterable[int]) -> dict[int, Any]:
        """Tells all processes of this generation something, and hears what each says, by its place."""
        store, places = self._generation_store(), list(places)
        store.set(f"{what}/{place}", json.dumps(mine))
        keys = [f"{what}/{each}" for each in places]
        while not _have_come(store, keys):
            self._end_if_finished()
        return {each: json.loads(said) for each, said in zip(places, store.multi_get(keys), strict=True)}

    def _end_if_finished(self) -> None:
        """Ends this process if others have completed the training: they do not come any more."""
        try:
            has_finished = self._agent_store().check([FINISHED_KEY])
        except RuntimeError:  # the store of a generation that is over
            return
        if has_finished:
            log.warning("The others have completed the training, which ends here, too.")
            raise SystemExit(0)

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
