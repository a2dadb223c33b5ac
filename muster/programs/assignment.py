"""The data that an agent hands over to its programs through its listener on loopback."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.worker.session.session import Session

FINISHED_KEY = "muster/finished"
"""The key that is set in a generation's store once a member's script has exited with 0."""

KEY = "muster/assignment"
"""The key of the handover, which the agent's listener answers by itself; it is not in the store."""


@dataclass(frozen=True, slots=True)
class HeldPlace:
    """A member of the generation, whose agent has started one or more processes of a torch program."""

    node_id: str
    host_id: str
    host_name: str


@dataclass(frozen=True, slots=True)
class Handover:
    """The generation as the scheduler assigned it, with what a program needs to connect to other ranks.

    Attributes:
        job_id: the job.
        generation: the generation's number.
        member: index in ``members`` of the agent that has started the program.
        members: the generation's members, in the order of their ranks.
        address: this host's address for peers, without a port.
        config_path: path of config.json; empty without TLS.
        allow_insecure: whether plaintext may leave loopback.
        unique_ids: secrets that only the generation's members know.
    """

    job_id: str
    generation: int
    member: int
    members: tuple[HeldPlace, ...]
    address: str
    config_path: str
    allow_insecure: bool
    unique_ids: tuple[bytes, ...] = field(repr=False)

    def encode(self) -> bytes:
        """Returns it as JSON, for :meth:`decode`."""
        return json.dumps({**asdict(self), "unique_ids": [each.hex() for each in self.unique_ids]}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Handover:
        """Reads what :meth:`encode` wrote."""
        said: dict[str, Any] = json.loads(data)
        said["members"] = tuple(HeldPlace(**each) for each in said["members"])
        said["unique_ids"] = tuple(bytes.fromhex(each) for each in said["unique_ids"])
        return cls(**said)


def handover_of(session: Session) -> Handover:
    """Builds the handover of this worker's current generation.

    Raises:
        MembershipChanged: the generation is over.
    """
    membership, settings = session.communicator.membership, session.settings
    members = tuple(HeldPlace(each.node_id, each.host_id, each.host_name) for each in membership.peers)
    return Handover(
        membership.job_id,
        membership.generation,
        membership.rank,
        members,
        session.me.host.address,
        str(settings.config_path or ""),
        settings.allow_insecure,
        membership.unique_ids,
    )


def own_keys(handover: Handover) -> Mapping[bytes, bytes]:
    """Returns the keys, as torch's client sends them, and the values that the agent's listener answers."""
    return {f"/{KEY}".encode(): handover.encode()}
