"""What a session tells of this worker and of the present generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.worker.control import messages as m
from muster.worker.errors import NotInitializedError

if TYPE_CHECKING:
    from muster.worker.communicators.base import Backend
    from muster.worker.config import Settings
    from muster.worker.host import DeviceChoice


class SessionFacts:
    """The part of a :class:`~muster.worker.control.session.Session` that only tells.

    Attributes:
        settings: what this worker was told at its start.
        device: the device chosen for it.
        backend: the data plane.
    """

    def __init__(
        self, settings: Settings, *, profile: m.Profile, device: DeviceChoice, backend: Backend
    ) -> None:
        self.settings = settings
        self.device = device
        self.backend = backend
        self._profile = profile
        self._assignment: m.Assignment | None = None
        self._first_ordinal: int | None = None
        self._released = False

    @property
    def rank(self) -> int:
        """This worker's rank, from 0."""
        return self._place.rank

    @property
    def world_size(self) -> int:
        """How many workers there are in this generation."""
        return len(self._place.members)

    @property
    def local_rank(self) -> int:
        """This worker's rank among those of its host."""
        return self.me.local_rank

    @property
    def local_world_size(self) -> int:
        """How many workers there are on this host."""
        return self.me.local_world_size

    @property
    def generation(self) -> int:
        """Number of the present membership; grows with every change."""
        return self._place.generation

    @property
    def members(self) -> tuple[m.Member, ...]:
        """All members, in order of rank."""
        return self._place.members

    @property
    def me(self) -> m.Member:
        """This worker as a member."""
        place = self._place
        return place.members[place.rank]

    @property
    def job_id(self) -> str:
        """The job."""
        return self._profile.job_id

    @property
    def node_id(self) -> str:
        """This worker's stable name."""
        return self._profile.node_id

    @property
    def device_ordinal(self) -> int:
        """Index of this worker's GPU as CUDA counts in this process; -1 on a CPU."""
        return self._ordinal(self.local_rank)

    def _ordinal(self, local_rank: int) -> int:
        device = self.device
        if device.visible_count == 0 or device.ordinal >= 0:
            return device.ordinal if device.visible_count else -1
        if self._first_ordinal is None:  # local ranks move up when others die; the arrays stay where they are
            self._first_ordinal = local_rank % device.visible_count
        return self._first_ordinal

    @property
    def state_source_rank(self) -> int:
        """Whose parameters the newcomers take; -1: there are none to take, all start anew."""
        return self._place.state_source_rank

    @property
    def newcomer_ranks(self) -> tuple[int, ...]:
        """Ranks that were not members of the generation before."""
        return self._place.newcomer_ranks

    @property
    def launch(self) -> int:
        """Names this launch of the job, the same in all its generations; 0: not known."""
        return self._place.launch

    @property
    def change_reason(self) -> str:
        """Why the present generation exists, in words."""
        return self._place.reason

    @property
    def _place(self) -> m.Assignment:
        if self._assignment is None or self._released:
            raise NotInitializedError("There is no session.", remedy="Call worker.init() first.")
        return self._assignment
