"""What an agent hands over to the programs that it has started, by its listener on loopback."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.worker.session.session import Session

FINISHED_KEY = "muster/finished"
"""Stands in a generation's store once a member's script has ended well."""

KEY = "muster/assignment"
"""Which key of the agent's listener it has; the agent itself answers, the scheduler's store lacks it."""


@dataclass(frozen=True, slots=True)
class HeldPlace:
    """A member of the generation: one that has started a torch program, or several."""

    node_id: str
    host_id: str
    host_name: str


@dataclass(frozen=True, slots=True)
class Handover:
    """The generation as the scheduler has assigned it, and what a program's own connections need.

    Attributes:
        member: which of ``members`` has started the program.
        address: of this host, where peers reach it; no port.
        config_path: config.json; empty: no TLS.
        allow_insecure: plaintext may leave loopback.
        unique_ids: secret; only the generation's members know them.
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
        """As bytes, for :meth:`decode`."""
        return json.dumps({**asdict(self), "unique_ids": [each.hex() for each in self.unique_ids]}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Handover:
        """Reads what :meth:`encode` wrote."""
        said: dict[str, Any] = json.loads(data)
        said["members"] = tuple(HeldPlace(**each) for each in said["members"])
        said["unique_ids"] = tuple(bytes.fromhex(each) for each in said["unique_ids"])
        return cls(**said)


def handover_of(session: Session) -> Handover:
    """What this worker's programs need to know of its present generation.

    Raises:
        MembershipChanged: it is over.
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
    """What the agent's listener answers by itself, by the keys that torch's client makes of its callers'."""
    return {f"/{KEY}".encode(): handover.encode()}
