"""Groups of ranks, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from muster.communicators.base import Communicator
from muster.communicators.membership import Membership, Peer
from muster.errors import GroupError, WorkerError
from muster.wire import messages
from muster.worker.session import events

WORLD = "world"
WORLD_NAMES = (WORLD, "nccl_world_group", "hccl_world_group")
MAX_NAME_LENGTH = 128


class Group:
    """One group: its world ranks, and its communicator if this rank is in the group."""

    def __init__(self, name: str, ranks: tuple[int, ...], communicator: Communicator | None) -> None:
        self.name = name
        self.ranks = ranks
        self.communicator = communicator


class Groups:
    """The groups of a session, created as in MindSpore: every rank creates every group, in the same order.

    They are recreated in each generation.
    """

    def __init__(self) -> None:
        self._world: Communicator | None = None
        self._groups: dict[str, Group] = {}

    def enter(self, world: Communicator) -> None:
        """Enters a new generation and recreates the groups, in the order of their creation.

        A new worker creates the same groups by calling ``create_group`` right after ``init``. A group with a
        rank that the new world lacks stays without a communicator.
        """
        wanted = [(group.name, group.ranks) for group in self._groups.values()]
        self._world, self._groups = world, {}
        for name, ranks in wanted:
            fits = max(ranks) < world.world_size
            self._groups[name] = Group(name, ranks, world.split(name, ranks) if fits else None)

    def leave(self) -> None:
        """Leaves the generation; its communicators may no longer be used."""
        for group in self._groups.values():
            group.communicator = None
        self._world = None

    def create(self, name: str, ranks: Sequence[int]) -> None:
        """Creates a group.

        Raises:
            GroupError: the name is taken or not usable, or the ranks are not distinct ranks of the world.
        """
        world = self._the_world()
        if name in WORLD_NAMES or name in self._groups:
            raise GroupError(
                f"The group {name!r} exists already.", remedy="Names are unique; destroy it first."
            )
        if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= MAX_NAME_LENGTH:
            raise GroupError(
                f"A group's name has 1 to {MAX_NAME_LENGTH} printable characters; it is {name!r}."
            )
        chosen = _checked_ranks(name, ranks, world.world_size)
        self._groups[name] = Group(name, chosen, world.split(name, chosen))

    def destroy(self, name: str) -> None:
        """Destroys a group; every rank of it must call this.

        Raises:
            GroupError: there is no such group, or it is the world.
        """
        if name in WORLD_NAMES:
            raise GroupError("The world group cannot be destroyed.", remedy="release() ends it.")
        group = self._find(name)
        del self._groups[name]
        if group.communicator is not None:
            # A broken group can be destroyed as well as an intact one.
            with contextlib.suppress(WorkerError):
                group.communicator.close()

    def communicator(self, name: str | None = None) -> Communicator:
        """Returns the communicator of a group; None stands for all ranks.

        Raises:
            GroupError: there is no such group, or this rank is not in it.
        """
        if name is None or name in WORLD_NAMES:
            return self._the_world()
        group = self._find(name)
        if group.communicator is None:
            world = self._the_world()
            if max(group.ranks) >= world.world_size:
                raise GroupError(
                    f"The group {name!r} has the ranks {list(group.ranks)}, and the world has only"
                    f" {world.world_size} ranks since its members changed.",
                    remedy="Destroy it and create it again.",
                )
            raise GroupError(f"Rank {world.rank} is not in the group {name!r} of ranks {list(group.ranks)}.")
        return group.communicator

    def world_ranks(self, name: str | None = None) -> tuple[int, ...]:
        """Returns the world rank of each rank of a group.

        Raises:
            GroupError: there is no such group.
        """
        if name is None or name in WORLD_NAMES:
            return tuple(range(self._the_world().world_size))
        return self._find(name).ranks

    def _the_world(self) -> Communicator:
        if self._world is None:
            raise GroupError("There is no generation now.", remedy="Call session.rejoin() first.")
        return self._world

    def _find(self, name: str) -> Group:
        group = self._groups.get(name)
        if group is None:
            known = ", ".join((WORLD, *self._groups))
            raise GroupError(f"There is no group {name!r}; there are: {known}.")
        return group


def world_membership(build: events.Build, job_id: str, ordinal: int) -> Membership:
    """Returns all members of a generation in the form that a backend takes.

    Args:
        build: the generation, and its unique ids.
        job_id: the job's id.
        ordinal: CUDA's number of this worker's GPU in this process; -1 on a CPU.
    """
    place = build.assignment
    peers = tuple(_peer(each, ordinal if each.rank == place.rank else None) for each in place.members)
    return Membership(job_id, place.generation, WORLD, place.rank, peers, build.unique_ids)


def _peer(member: messages.Member, ordinal: int | None) -> Peer:
    return Peer(
        rank=member.rank,
        node_id=member.node_id,
        incarnation=member.incarnation,
        host_id=member.host.id,
        host_name=member.host.name,
        data_address=member.data_address,
        # Other workers' GPUs are named by their index on their host. CUDA's numbers in this process count
        # only the GPUs that it sees.
        device_index=member.device.index if ordinal is None else ordinal,
    )


def _checked_ranks(name: str, ranks: Sequence[int], world_size: int) -> tuple[int, ...]:
    chosen = tuple(ranks)
    legal = all(isinstance(r, int) and not isinstance(r, bool) and 0 <= r < world_size for r in chosen)
    if not chosen or not legal or len(set(chosen)) != len(chosen):
        raise GroupError(
            f"The ranks of the group {name!r} must be different whole numbers from 0 to {world_size - 1};"
            f" they are {list(chosen)}."
        )
    return chosen
