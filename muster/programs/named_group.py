"""What torch asks every process group in Python for its name by."""

from __future__ import annotations

import torch.distributed as dist


class NamedProcessGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch has no types here
    """A process group that keeps the name torch has for it.

    Args:
        rank: of this process within the group.
        size: how many ranks there are.
        name: torch's.
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

    # Before torch 2.6 C++ knows no name of a group without backends.
    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
