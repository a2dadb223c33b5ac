"""The methods by which torch reads and sets the name of a process group made in Python."""

from __future__ import annotations

import torch.distributed as dist


class NamedProcessGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch has no types here
    """A process group that keeps its name in torch.

    Args:
        rank: this process's rank within the group.
        size: the group's world size.
        name: the group's name in torch.
    """

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._group_name = self._group_desc = name

    def getGroupName(self) -> str:  # noqa: N802
        """See torch; C++ finds the group by it."""
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """See torch."""
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """See torch."""
        return self._group_desc

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        """See torch."""
        self._group_desc = text

    # Before torch 2.6, C++ has no name for a group without backends.
    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
