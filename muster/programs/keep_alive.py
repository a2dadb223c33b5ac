"""Keeps a torch program's process and process groups alive when another rank is lost and replaced."""

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
"""The pause between checks whether another rank has finished, while it waits for the others."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The values that the ranks of a generation have exchanged when they connected.

    Attributes:
        generation: the generation's number.
        said: what each rank has reported on its state, in the order of ranks; None for an absent rank.
        active: the ranks that train; the other present ones wait for the next generation.
    """

    generation: int
    said: list[Any]
    active: list[int]


def numbers_of(claimed: Sequence[int | None], size: int = 0) -> list[int]:
    """Assigns a rank to each process of a generation.

    Processes that stay alive keep their ranks, and new processes take the free ranks in order. So no rank of
    a process changes, although the scheduler numbers its members differently once a spare has come in.

    Args:
        claimed: the rank that each process has already, in the scheduler's order; None for a new process.
        size: the number of ranks, if it is larger than the number of processes.

    Returns:
        The rank of each process, in the scheduler's order.
    """
    free = iter(sorted(set(range(max(size, len(claimed)))) - set(claimed)))
    return [next(free) if number is None else number for number in claimed]


class LivingProgram:
    """A program whose process survives the loss of other ranks; connects its groups in each generation.

    Args:
        world: the process groups of this process, a :class:`~muster.programs.lasting_world.LastingWorld`.

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
            except Exception:  # an error of torch's store
                if self._line.failed_first():
                    raise
            self._line.enter_next()
            self._size = self._members = _variable("WORLD_SIZE")
            self._store = None
        if not world.rehearses:
            self._line.do_not_stay()

    @property
    def rehearses(self) -> bool:
        """Whether this process is a replacement, which must get its state from surviving ranks."""
        return bool(self._groups.rehearses)

    @property
    def generation(self) -> int:
        """The current generation's number."""
        return _variable(GENERATION_VARIABLE)

    @property
    def is_over(self) -> bool:
        """Whether the generation is over, so that results of collectives since then are undefined."""
        return self._line.is_over

    @property
    def is_resharding(self) -> bool:
        """Whether the world size has changed, and all ranks make new groups and modules."""
        return self._is_resharding

    def begin(self, *, takes_fewer: bool = False, reshards: bool = False) -> None:
        """Lets the program continue in the next generation, in which it would otherwise be restarted.

        Args:
            takes_fewer: whether it can continue with fewer ranks in the same groups.
            reshards: whether it can continue with fewer or more ranks in new groups and modules.
        """
        self._takes_fewer, self._reshards = takes_fewer, reshards
        self._line.stay()

    def leave_groups(self) -> None:
        """Destroys all groups, so that the program can make new ones."""
        self._groups.destroy()
        self._groups.rehearses = False

    def settle(self) -> None:
        """Notes that groups and modules fit the current world size."""
        self._is_resharding = False

    def note_state(self) -> None:
        """Notes that this process has a state to which it can go back."""
        self._has_state = True

    def is_own_failure(self) -> bool:
        """Whether an exception of this program is its own failure; False if the generation is over."""
        return self._line.failed_first()

    def restart(self, why: str) -> NoReturn:
        """Ends this process; the agent starts the program again in the next generation."""
        self._line.restart(why)

    def enter_next(self) -> None:
        """Waits for the next generation; restarts the program if it cannot continue in it."""
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
            holds: what the other ranks need to know about this rank's state, as JSON values.
            active_of: picks the ranks that train. It gets each rank's ``holds``, in the order of ranks, with
                None for absent ones.
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
        if self.is_over:  # it ended while groups connected
            self._groups.break_off("The generation is over.")
        return meeting

    def break_off(self) -> None:
        """Disconnects all groups from a generation that is over."""
        self._groups.break_off("The generation is over.")

    def _others_live(self) -> bool:
        """Assigns this process its rank, in agreement with the others.

        Returns:
            Whether another process has stayed alive.
        """
        place = _variable("RANK")  # the scheduler's order, which has just come from the agent
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
        """Exchanges JSON values among the processes of this generation.

        Args:
            what: the exchange's name, before the keys in the store.
            place: this process's number among them.
            mine: this process's value.
            places: the numbers of all processes.

        Returns:
            Each process's value, by its number.
        """
        store, places = self._generation_store(), list(places)
        store.set(f"{what}/{place}", json.dumps(mine))
        keys = [f"{what}/{each}" for each in places]
        while not _have_come(store, keys):
            self._end_if_finished()
        return {each: json.loads(said) for each, said in zip(places, store.multi_get(keys), strict=True)}

    def _end_if_finished(self) -> None:
        """Ends this process if another has completed the training, and will not join this generation.

        Raises:
            SystemExit: another process has completed the training.
        """
        try:
            has_finished = self._agent_store().check([FINISHED_KEY])
        except RuntimeError:  # the generation of the store is over
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
    """Waits at most 5 s for keys to be set; returns whether they are.

    Raises:
        RuntimeError: the store has ended.
    """
    try:
        store.wait(keys, _MEET_TIMEOUT)
    except RuntimeError:
        return bool(store.check(keys))
    return True


def _variable(name: str) -> int:
    return int(os.environ[name])


_program: LivingProgram | None = None


def keep_alive() -> bool:
    """Keeps this program's process, groups and modules alive when another rank is lost.

    All ranks call it before ``init_process_group()``. From then on torch makes process groups that are
    connected again in each generation, as long as the world size stays the same. A restarted worker or a
    spare takes the place of the lost rank. Training goes on in :func:`muster.torch.steps`. If the program
    cannot go on in a generation, it is restarted as without this call, and the log says why.

    Returns:
        Whether the program stays alive; False if no agent of ``muster run`` has started it, or if this torch
        lacks what is needed.

    Raises:
        WorkerError: ``init_process_group()`` was called before.
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
    return True


def living_program() -> LivingProgram | None:
    """Returns this process's :class:`LivingProgram`; None unless :func:`keep_alive` has returned True."""
    return _program
