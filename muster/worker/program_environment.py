"""The environment variables that an unmodified torch program reads, as torchrun would set them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from muster.errors import SettingsError

STORE_VARIABLE = "MUSTER_STORE"
"""``host:port`` of the store's listener on loopback, in programs started by Muster."""

GENERATION_VARIABLE = "MUSTER_GENERATION"
AGENT_VARIABLE = "MUSTER_AGENT_FD"
"""The program's end of its connection to the agent, as a descriptor number."""

AGENT_PID_VARIABLE = "MUSTER_AGENT_PID"
NODE_VARIABLE = "MUSTER_NODE_ID"
"""The worker's stable name."""

NCCL_SECRET_VARIABLE = "MUSTER_NCCL_SECRET"
"""Path in /proc by which torchrun's workers, which inherit no descriptor, open the secret of NCCL's
connections.
"""

GLOO_VARIABLE = "MS_TORCH_GLOO"
"""Set by the user to "muster" in order to replace Gloo's groups by Muster's."""

JAX_PROGRAM = "muster.programs.jax_program"
"""The module that runs a JAX script, because JAX does not read those variables."""

HOST = "127.0.0.1"


class _MemberHost(Protocol):
    @property
    def id(self) -> str: ...


class _Member(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def host(self) -> _MemberHost: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_world_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Place:
    """One worker of a generation.

    Attributes:
        group_rank: number of its host, in the order of the hosts' first ranks.
        group_count: number of hosts.
        restarts: the number of earlier generations in which its script has run.
    """

    job_id: str
    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    group_count: int
    restarts: int = 0


def place_of(job_id: str, generation: int, members: Sequence[_Member], rank: int, restarts: int) -> Place:
    """Returns the place of the member with this rank."""
    hosts = list(dict.fromkeys(member.host.id for member in members))
    me = members[rank]
    return Place(
        job_id,
        generation,
        rank,
        len(members),
        me.local_rank,
        me.local_world_size,
        hosts.index(me.host.id),
        len(hosts),
        restarts,
    )


def torch_variables(place: Place, port: int, gloo: str = "") -> Mapping[str, str]:
    """Returns the variables for a worker whose store listens on this port of the loopback interface.

    With TORCHELASTIC_USE_AGENT_STORE, torch is a client of the existing store and never opens one of its own,
    even if Muster's plug-in for torch is switched off.

    Args:
        place: the worker's place.
        port: the listener's port.
        gloo: the value of MS_TORCH_GLOO. If Gloo's groups are to be replaced by Muster's, Gloo itself gets no
            network interface, because without the plug-in it would communicate in plain text.

    Raises:
        SettingsError: MS_TORCH_GLOO has an unknown value.
    """
    if gloo not in ("", "muster"):
        raise SettingsError(f"{GLOO_VARIABLE} is {gloo!r}; legal is 'muster', or nothing.")
    no_gloo = {"GLOO_SOCKET_IFNAME": "only-by-muster"} if gloo else {}
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.group_rank),
        "GROUP_WORLD_SIZE": str(place.group_count),
        "NODE_RANK": str(place.group_rank),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": place.job_id,
        "TORCHELASTIC_RESTART_COUNT": str(place.restarts),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "DCP_USE_PREFIX_STORE": "1",
        STORE_VARIABLE: f"{HOST}:{port}",
        GENERATION_VARIABLE: str(place.generation),
        **no_gloo,
    }
