"""Makes torch create process groups that outlive generations, and connects them to each generation."""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
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
"""The first and the last version of NCCL whose communicators may hang when they are aborted."""

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_BARRIER = "_store_based_barrier"
_NEEDED = ("_new_process_group_helper", _BARRIER, "_world", "_unregister_process_group")
_ASKED = ("store", "group_name", "group_rank", "group_size", "global_ranks_in_group")
"""Parameters that torch's function that makes a group must have."""


def lacking_nccl(version: tuple[int, ...] | None) -> str:
    """Returns why groups of this version of NCCL cannot be aborted; empty if they can, or without NCCL."""
    if version is None or not HANGING_NCCL[0] <= version <= HANGING_NCCL[1]:
        return ""
    return f"NCCL {'.'.join(map(str, version))} can hang when a communicator is aborted"


def _nccl_version() -> tuple[int, ...] | None:
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    return tuple(torch.cuda.nccl.version())


def _let_live() -> None:
    """Keeps torch from ending this process when NCCL finds that another rank is lost.

    Torch does so by default, and reads the variable when it makes a group, so this applies to new groups.
    Some programs, such as torchtitan, set the variable at their start.
    """
    if os.environ.get(_ERROR_HANDLING) != "0":
        os.environ[_ERROR_HANDLING] = "0"


def unlike(mine: Sequence[Any], theirs: Sequence[Any], rank: int, other: int) -> str:
    """Returns how the process groups of two ranks differ, as a sentence; empty if they agree.

    They agree if both ranks have made the groups that contain both of them, in the same order.

    Args:
        mine: the first rank's groups, as :attr:`LastingWorld.groups` has them.
        theirs: the second rank's groups.
        rank: the first rank, in the world.
        other: the second rank, in the world.
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
    """A group, and torch's function and arguments that make its inner group."""

    group: LastingProcessGroup
    make: Callable[..., Any]
    arguments: dict[str, Any]
    name: str


class LastingWorld:
    """The process groups of this process, in the order in which the program has made them.

    After :meth:`install`, for each group that torch makes, a :class:`LastingProcessGroup` is registered under
    the same name instead, and torch's own becomes its inner group.
    """

    def __init__(self) -> None:
        self._c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
        self._all: list[_LastingEntry] = []
        self._lock = threading.Lock()
        self.rehearses = False
        """Whether new groups rehearse instead of connecting: see :mod:`muster.programs.rehearsal`."""

    def lacks(self) -> str:
        """Returns what this torch or NCCL lacks for it, in words; empty if nothing."""
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
        """Replaces torch's function that makes groups, so that new groups are lasting ones."""
        helper = self._c10d._new_process_group_helper
        barrier = getattr(self._c10d, _BARRIER)
        signature = inspect.signature(inspect.unwrap(helper))

        @functools.wraps(helper)
        def made(*args: Any, **kwargs: Any) -> Any:
            return self._make(helper, dict(signature.bind(*args, **kwargs).arguments))

        @functools.wraps(barrier)
        def met(*args: Any, **kwargs: Any) -> Any:
            """Skips the barrier while this process rehearses: the other ranks passed it long ago."""
            return None if self.rehearses else barrier(*args, **kwargs)

        self._c10d._new_process_group_helper = made
        setattr(self._c10d, _BARRIER, met)

    @property
    def groups(self) -> list[tuple[str, list[int]]]:
        """The name and the ranks of each group, in the order in which they were made."""
        world = list(range(dist.get_world_size()))
        return [
            (each.name, list(each.arguments["global_ranks_in_group"]) or world) for each in self._living()
        ]

    def break_off(self, reason: str) -> None:
        """Fails the operations in progress in all groups, and those that are called until :meth:`connect`."""
        for each in self._living():
            if each.group.is_connected:
                each.group.break_off(reason)

    def destroy(self) -> None:
        """Destroys all groups, without the other ranks."""
        self.break_off("The program makes new process groups.")
        for each in self._living():
            each.group.rest()
        dist.destroy_process_group()

    def connect(self, store: Any, generation: int, active: Collection[int] | None = None) -> None:
        """Makes a generation's inner group for each group, one after the other; all active ranks call it.

        Args:
            store: a store that all ranks of this generation share.
            generation: the generation's number, which is put before all keys and into the groups' names.
            active: the ranks that take part; None for all.
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
            _let_live()
            inner, _ = each.make(**arguments)
            self._forget(inner, name)
            each.group.connect(inner, there)

    def _living(self) -> list[_LastingEntry]:
        """Returns the groups that the program has not destroyed."""
        with self._lock:
            self._all = [each for each in self._all if each.group in self._c10d._world.pg_map]
            return list(self._all)

    def _make(self, helper: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        asked = dict(arguments)
        if self.rehearses:
            asked.update(group_rank=0, group_size=1, store=dist.HashStore())
        _let_live()
        inner, store = helper(**asked)
        if not isinstance(inner, dist.ProcessGroup) or isinstance(inner, LastingProcessGroup):
            return inner, store  # this process is not a member, or the group existed already
        name = self._c10d._world.pg_names[inner]
        group = LastingProcessGroup(arguments["group_rank"], arguments["group_size"], name)
        group.device_types = list(getattr(inner, "_device_types", []))
        # C++ keeps no reference to a group made in Python.
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
        """Puts the lasting group in the place of its inner one in torch's tables."""
        for table in self._tables():
            if inner in table:
                table[group] = table.pop(inner)
        for groups in self._c10d._world.tags_to_pg.values():
            groups[:] = [group if each is inner else each for each in groups]
        self._c10d._unregister_process_group(name)
        self._c10d._register_process_group(name, group)

    def _forget(self, inner: Any, name: str) -> None:
        """Removes an inner group from torch's tables."""
        for table in self._tables():
            table.pop(inner, None)
        for groups in self._c10d._world.tags_to_pg.values():
            groups[:] = [each for each in groups if each is not inner]
        self._c10d._unregister_process_group(name)
