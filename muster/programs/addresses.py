"""Exchanges the addresses of a torch process group's processes.

The members, their node ids and the unique ids that prove membership come from the scheduler's assignment,
which the agent hands over. Ports cannot come from there: a program may be several processes, which start and
end within a generation. So each process opens a listener of its own and publishes its address in the group's
store: each rank sets one key, rank 0 reads all of them and sets one key with the whole table, and each rank
reads that table. These are at most four operations per rank for any world size.
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
        process_id: id of the process that opened it; a forked child opens its own.
        backend: the listener's backend.
        data_address: ``host:port`` for peers.
        incarnation: a random number from 1 to 2**64 - 1 that tells this process from others.
    """

    process_id: int
    backend: TcpBackend
    data_address: str
    incarnation: int


_listeners: dict[tuple[str, str], PeerListener] = {}
"""Listeners by job id and path of config.json. Those that were inherited by fork stay, and are not used."""
_lock = threading.Lock()


def open_peer_listener(handover: Handover, env: Mapping[str, str]) -> PeerListener:
    """Returns this process's listener for peers; the first call opens it.

    Raises:
        SettingsError: config.json or the password is wrong.
        SecurityError: the certificate cannot be used, or plaintext would leave this host.
        CommunicatorError: the host cannot listen on the address.
    """
    name = handover.job_id, handover.config_path
    with _lock:
        listener = _listeners.get(name)
        if listener is None or listener.process_id != os.getpid():
            listener = _listeners[name] = _open(handover, env)
        return listener


def close_peer_listeners() -> None:
    """Closes this process's listeners; those that were inherited by fork stay open in the parent."""
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
    """Loads this worker's credentials; they are loaded again when their files change.

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
    """Publishes this process's address in the store, and reads the addresses of the group's other ranks.

    Args:
        store: torch's store, with keys of this group alone.
        handover: what the agent handed over.
        listener: this process's listener.
        name: the group's name, for messages.
        rank: this process's rank within the group.
        size: the group's world size.

    Returns:
        The group's membership, and the group's name on the wire, which no earlier or later group has.

    Raises:
        CommunicatorError: the ranks are of different generations, one published something that is not an
            address, or the table does not have ``size`` ranks.
    """
    mine = [handover.generation, handover.member, listener.data_address, listener.incarnation]
    _set_new(store, f"muster/{rank}", json.dumps(mine))
    try:
        if rank == 0:
            said = store.multi_get([f"muster/{each}" for each in range(size)])
            # The same processes may make many groups: only this number tells their tables apart.
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
    """Sets a new key without waiting for the store, as there is no older value that others could read.

    All other writes wait, because the plug-in for torch wraps them: see ``programs/plugin.py``.
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
