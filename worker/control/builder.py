"""Builds the communicator of all members of a generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.worker.communicators.base import Backend, Communicator, Membership, Peer
from muster.worker.communicators.fault_aware import GuardedCommunicator
from muster.worker.communicators.groups import WORLD
from muster.worker.control import events as e
from muster.worker.control import messages as m
from muster.worker.errors import PeerLostError, WorkerError

if TYPE_CHECKING:
    from muster.worker.communicators.flight_recorder import CollectiveLog
    from muster.worker.config import Settings
    from muster.worker.control.client import Client

SURVIVOR_TIMEOUT_S = 7 * 86_400.0


class CommunicatorBuilder:
    """Connects the members, says why that failed, and guards what they then call.

    Args:
        settings: of this worker.
        backend: the data plane.
        client: knows whether a generation still stands.
        recorder: remembers the last collectives.
    """

    def __init__(self, settings: Settings, backend: Backend, client: Client, recorder: CollectiveLog) -> None:
        self._settings = settings
        self._backend = backend
        self._client = client
        self._recorder = recorder

    def build(self, build: e.Build, ordinal: int) -> Communicator:
        """Connects this worker with the other members of a generation.

        Args:
            build: the generation, and its unique ids.
            ordinal: this worker's GPU as CUDA counts in this process; -1 on a CPU.

        Raises:
            MembershipChanged: the generation ended meanwhile.
            WorkerError: they cannot be connected.
        """
        generation, members = build.assignment.generation, build.assignment.members
        inner = self._connect(build, ordinal)
        inner.timeout_s = self._settings.collective_timeout_s
        self._client.adopt(generation, inner)
        self._recorder.clear()
        return GuardedCommunicator(
            inner,
            world_ranks=range(len(members)),
            verdict=lambda rank, error: self._client.verdict(generation, rank, error),
            recorder=self._recorder,
            adopted=lambda each: self._client.adopt(generation, each),
            closed=self._client.communicators.forget,
        )

    def _connect(self, build: e.Build, ordinal: int) -> Communicator:
        place = build.assignment
        membership = Membership(
            job_id=self._settings.job_id,
            generation=place.generation,
            group=WORLD,
            rank=place.rank,
            peers=tuple(_peer(each, ordinal if each.rank == place.rank else None) for each in place.members),
            unique_ids=build.unique_ids,
        )
        timeout_s = min(self._settings.topo_timeout_s, self._settings.collective_timeout_s)
        if place.state_source_rank >= 0:
            # A survivor may be busy outside collectives for as long as it likes. The scheduler says for whom
            # this waits, and ends it if all are here and cannot connect; there is a limit without it, too.
            timeout_s = SURVIVOR_TIMEOUT_S
        try:
            return self._backend.connect(
                membership,
                timeout_s=timeout_s,
                cancelled=lambda: self._client.change_of(place.generation),
            )
        except WorkerError as error:
            rank = error.rank if isinstance(error, PeerLostError) else -1
            explained = self._client.verdict(place.generation, rank, error)
            if explained is error:
                raise
            raise explained from error


def _peer(member: m.Member, ordinal: int | None) -> Peer:
    return Peer(
        rank=member.rank,
        node_id=member.node_id,
        incarnation=member.incarnation,
        host_id=member.host.id,
        host_name=member.host.name,
        data_address=member.data_address,
        # Others are named by their place on their host; this process counts what it sees.
        device_index=member.device.index if ordinal is None else ordinal,
    )
