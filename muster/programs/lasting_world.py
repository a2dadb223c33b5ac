"""All process groups of a program that outlives generations, and how torch comes to make them."""

from __future__ import annotations

import ctypes
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from muster.programs.lasting_group import LastingProcessGroup

OLDEST_TORCH = (2, 9)
HANGING_NCCL = (2, 28, 3), (2, 28, 8)
"""The first and the last of those whose communicators may hang when they are aborted."""

_BARRIER = "_store_based_barrier"
_NEEDED = ("_new_process_group_helper", _BARRIER, "_world", "_unregister_process_group")
_ASKED = ("store", "group_name", "group_rank", "group_size", "global_ranks_in_group")
"""What the function that makes a group is given, by name in every torch."""


def lacking_nccl(version: tuple[int, ...] | None) -> str:
    """Why groups of this NCCL cannot be ended, in words; empty: they can, or there is none."""
    if version is None or not HANGING_NCCL[0] <= version <= HANGING_NCCL[1]:
        return ""
    return f"NCCL {'.'.join(map(str, version))} can hang when a communicator is aborted"


def _nccl_version() -> tuple[int, ...] | None:
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    return tuple(torch.cuda.nccl.version())


def unlike(mine: Sequence[Any], theirs: Sequence[Any], rank: int, other: int) -> str:
    """Which group two ranks have not both made, or not in one order, in words; empty: none.

    Args:
        mine: the groups of one, as :attr:`LastingWorld.groups` has them.
        theirs: those of the other.
        rank: of the one, in the world.
        other: the other's.
    """
    ours = [name for name, ranks in mine if other in ranks]
    others = [name for name, ranks in theirs if rank in ranks]
    if ours == others:
        return ""
    absent = [name for name in ours if name not in others] + [name for name in others if name not in ours]
    if absent:
        return f"Only one of the ranks {rank} and {other} has made the process group {absent[0]!r}."
    return f"The ranks {rank} and {other} have made their process groups in different orders."


@dataclass(frozen=True, slots=True)
class _LastingEntry:
    """A group, and how torch makes its inner one."""

    group: LastingProcessGroup
    make: Callable[..., Any]
    arguments: dict[str, Any]
    name: str


class LastingWorld:
    """The process groups of this process, in the order in which the program has made them.

    Groups that torch makes after :meth:`install` last: torch makes an inner one as ever, and has a
    :class:`LastingProcessGroup` registered in its place, under the same name.
    """

    def __init__(self) -> None:
        self._c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
        self._all: list[_LastingEntry] = []
        self._lock = threading.Lock()
        self.rehearses = False
        """Groups that are made now stay alone: see :mod:`muster.programs.rehearsal`."""

    def lacks(self) -> str:
        """What this torch has not that is needed, in words; empty: nothing."""
        if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
            return f"torch {torch.__version__} is older than {'.'.join(map(str, OLDEST_TORCH))}"
        absent = [name for name in _NEEDED if not hasattr(self._c10d, name)]
        if absent:
            return f"torch.distributed has no {', '.join(absent)}"
        helper = inspect.unwrap(self._c10d._new_process_group_helper)
        unknown = [name for name in _ASKED if name not in inspect.signature(helper).parameters]
        if unknown:
            return f"torch makes groups without {', '.join(unknown)}"
        return lacking_nccl(_nccl_version())

    def install(self) -> None:
        """Has torch make groups that last."""
        helper = self._c10d._new_process_group_helper
        barrier = getattr(self._c10d, _BARRIER)
        signature = inspect.signature(inspect.unwrap(helper))

        @functools.wraps(helper)
        def made(*args: Any, **kwargs: Any) -> Any:
            return self._make(helper, dict(signature.bind(*args, **kwargs).arguments))

        @functools.wraps(barrier)
        def met(*args: Any, **kwargs: Any) -> Any:
            """The others have met long ago."""
            return None if self.rehearses else barrier(*args, **kwargs)

        self._c10d._new_process_group_helper = made
        setattr(self._c10d, _BARRIER, met)

    @property
    def groups(self) -> list[tuple[str, list[int]]]:
        """Name of each group and the ranks in it, in order."""
        world = list(range(dist.get_world_size()))
        return [
            (each.name, list(each.arguments["global_ranks_in_group"]) or world) for each in self._living()
        ]

    def break_off(self, reason: str) -> None:
        """Lets all that is under way in any group fail, and all that is called until :meth:`connect`."""
        for each in self._living():
            if each.group.is_connected:
                each.group.break_off(reason)

    def destroy(self) -> None:
        """Destroys all groups, as a program does at its end, without any other rank."""
        self.break_off("The program makes new process groups.")
        for each in self._living():
            each.group.rest()
        dist.destroy_process_group()

    def connect(self, store: Any, generation: int, active: Collection[int] | None = None) -> None:
        """Makes all groups' inner ones for a generation, one after the other; all their ranks call it.

        Args:
            store: one that all ranks of this generation have.
            generation: its number, which stands before all keys and in the names.
            active: the ranks that are there; None: all.
        """
        place = dist.PrefixStore(f"generation-{generation}", store)
        for each in self._living():
            name = f"{each.name}@{generation}"
            arguments = {**each.arguments, "store": place, "group_name": name, "pg_tag": None}
            ranks = list(arguments["global_ranks_in_group"]) or list(range(each.group.size()))
            there = [at for at, rank in enumerate(ranks) if active is None or rank in active]
            if len(there) < len(ranks):
                arguments["global_ranks_in_group"] = [ranks[at] for at in there]
                arguments["group_rank"] = there.index(each.group.rank())
                arguments["group_size"] = len(there)
            inner, _ = each.make(**arguments)
            self._forget(inner, name)
            each.group.connect(inner, there)

    def _living(self) -> list[_LastingEntry]:
        """Those that the program has not destroyed."""
        with self._lock:
            self._all = [each for each in self._all if each.group in self._c10d._world.pg_map]
            return list(self._all)

    def _make(self, helper: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        asked = dict(arguments)
        if self.rehearses:
            asked.update(group_rank=0, group_size=1, store=dist.HashStore())
        inner, store = helper(**asked)
        if not isinstance(inner, dist.ProcessGroup) or isinstance(inner, LastingProcessGroup):
            return inner, store  # this process is no member, or the group was there already
        name = self._c10d._world.pg_names[inner]
        group = LastingProcessGroup(arguments["group_rank"], arguments["group_size"], name)
        group.device_types = list(getattr(inner, "_device_types", []))
        # C++ keeps neither alive.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._stand_in(inner, group, name)
        if not self.rehearses:
            group.connect(inner)
        with self._lock:
            self._all.append(_LastingEntry(group, helper, arguments, name))
        return group, store

    def _tables(self) -> list[Any]:
        world = self._c10d._world
        names = ("pg_map", "pg_names", "pg_backend_config", "pg_to_tag", "pg_group_ranks")
        return [getattr(world, name) for name in names if hasattr(world, name)]

    def _stand_in(self, inner: Any, group: LastingProcessGroup, name: str) -> None:
        """Puts a group where torch has registered its inner one."""
        for table in self._tables():
            if inner in table:
                table[group] = table.pop(inner)
        for groups in self._c10d._world.tags_to_pg.values():
            groups[:] = [group if each is inner else each for each in groups]
        self._c10d._unregister_process_group(name)
        self._c10d._register_process_group(name, group)

    def _forget(self, inner: Any, name: str) -> None:
        """Takes an inner group out of torch's tables."""
        for table in self._tables():
            table.pop(inner, None)
        for groups in self._c10d._world.tags_to_pg.values():
            groups[:] = [each for each in groups if each is not inner]
        self._c10d._unregister_process_group(name)
