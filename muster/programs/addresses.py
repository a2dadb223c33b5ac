"""How the processes of a torch process group find each other: names by the assignment, ports by the store.

Who the members are, as which nodes, and the unique ids that prove it come from the scheduler's assignment,
which the agent has handed over. A program may be several processes, which come and go within a generation. So
each opens a listener of its own and says its port in the group's store: each rank sets one key, rank 0 reads
them all and sets one with all of them, and each reads that: three operations a rank, whatever the size.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muster.certs.errors import CertificateError, ConfigError
from muster.certs.runtime.follower import follow_files
from muster.communicators import tls_policies
from muster.communicators.membership import Membership, Peer
from muster.communicators.tcp.backend import TcpBackend
from muster.communicators.tcp.endpoint import host_and_port
from muster.errors import CommunicatorError, SecurityError, SettingsError
from muster.programs.assignment import Handover
from muster.wire.log_lines import one_line

if TYPE_CHECKING:
    from muster.certs.runtime.follower import Follower

log = logging.getLogger("muster.worker")


@dataclass(frozen=True)
class PeerListener:
    """This process's listener, as peers reach it.

    Attributes:
        process_id: of the process whose it is; a forked child opens its own.
        incarnation: a number that no other process has.
    """

    process_id: int
    backend: TcpBackend
    data_address: str
    incarnation: int


_listeners: dict[tuple[str, str], PeerListener] = {}
"""By job and config.json; what a process has inherited by fork stays, and is not used."""
_lock = threading.Lock()


def open_peer_listener(handover: Handover, env: Mapping[str, str]) -> PeerListener:
    """This process's listener for peers; opened at the first call.

    Raises:
        SettingsError: config.json or the password is wrong.
        SecurityError: the certificate cannot be used, or plaintext would leave this host.
        CommunicatorError: it cannot listen on that address.
    """
    name = handover.job_id, handover.config_path
    with _lock:
        listener = _listeners.get(name)
        if listener is None or listener.process_id != os.getpid():
            listener = _listeners[name] = _open(handover, env)
        return listener


def close_peer_listeners() -> None:
    """Closes this process's listeners; what it has inherited by fork stays open where it belongs."""
    with _lock:
        for listener in _listeners.values():
            if listener.process_id == os.getpid():
                listener.backend.close()
        _listeners.clear()


def _open(handover: Handover, env: Mapping[str, str]) -> PeerListener:
    follower = follow(handover, env) if handover.config_path else None
    policies = None if follower is None else tls_policies(follower, handover.job_id)
    backend = TcpBackend(tls=policies, allow_insecure=handover.allow_insecure)
    address = backend.open_endpoint(handover.address)
    return PeerListener(os.getpid(), backend, address, int.from_bytes(os.urandom(8), "big") or 1)


def follow(handover: Handover, env: Mapping[str, str]) -> Follower:
    """This worker's credentials, which follow their files.

    Raises:
        SettingsError: config.json or the password is wrong.
        SecurityError: the certificate cannot be used.
    """
    try:
        return follow_files(handover.config_path, "worker", env, log, job=handover.job_id)
    except ConfigError as error:
        raise SettingsError(error.message, remedy=error.remedy) from error
    except CertificateError as error:
        raise SecurityError(error.message, remedy=error.remedy) from error


def exchange_addresses(
    store: Any, handover: Handover, listener: PeerListener, name: str, rank: int, size: int
) -> tuple[Membership, str]:
    """Says where this process is reached, and learns where the others of its group are.

    Args:
        store: torch's, with keys of this group alone.
        handover: this program's.
        listener: this process's.
        name: of the group, for messages.
        rank: of this process within the group.
        size: of the group.

    Returns:
        The group, and what names it on the wire: no other group, before or after, has the same.

    Raises:
        CommunicatorError: the ranks are of different generations or jobs, or one said what is no address.
    """
    mine = [handover.generation, handover.member, listener.data_address, listener.incarnation]
    _set_new(store, f"muster/{rank}", json.dumps(mine))
    try:
        if rank == 0:
            said = store.multi_get([f"muster/{each}" for each in range(size)])
            # The same processes may make many groups, whose tables are the same but for this number.
            _set_new(store, "muster/all", json.dumps([os.urandom(16).hex(), *map(json.loads, said)]))
        table = store.get("muster/all")
        _, *rows = json.loads(table)
        peers = tuple(_peer(handover, each, *row) for each, row in enumerate(rows))
    except (TypeError, ValueError, RecursionError) as error:
        raise CommunicatorError(
            f"A rank of group {name!r} said what is no address: {one_line(str(error))[:200]}."
        ) from None
    if len(peers) != size:
        raise CommunicatorError(
            f"Group {name!r} has {size} ranks, and {len(peers)} have said where they are."
        )
    membership = Membership(handover.job_id, handover.generation, name, rank, peers, handover.unique_ids)
    return membership, hashlib.sha256(table).hexdigest()


def _set_new(store: Any, key: str, value: str) -> None:
    """Sets a key that has no older value, which somebody might read still: so it need not wait for the store.

    The plug-in for torch lets other writes wait, see ``programs/plugin.py``.
    """
    write = type(store).set
    getattr(write, "__wrapped__", write)(store, key, value)


def _peer(
    handover: Handover, rank: int, generation: int, member: int, address: str, incarnation: int
) -> Peer:
    if generation != handover.generation:
        raise CommunicatorError(
            f"Rank {rank} is of generation {str(generation)[:20]!a}, and this process of "
            f"{handover.generation}.",
            remedy="A group is made of processes of one generation.",
        )
    numbers = all(type(each) is int for each in (member, incarnation))
    if not numbers or not 0 <= member < len(handover.members) or not 0 < incarnation < 1 << 64:
        raise ValueError(f"rank {rank} names no member and process")
    if not isinstance(address, str) or not address.isprintable():
        raise ValueError(f"the address of rank {rank} is no text")
    host_and_port(address)
    place = handover.members[member]
    return Peer(rank, place.node_id, incarnation, place.host_id, place.host_name, address)
