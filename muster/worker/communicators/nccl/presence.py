"""Asks at a deadline which peers are building the communicator, because NCCL does not say.

Each worker listens on one port and answers whether it is building the communicator of a given generation.
Question and answer are proven with a key derived from the generation's unique id, which never travels; who
does not hold it gets no answer. Nothing is exchanged while all goes well.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import threading
from collections.abc import Iterable

from muster.worker.communicators.base import Membership, Peer
from muster.worker.forking import not_for_children

_NONCE_BYTES = 16
_QUESTION_BYTES = _NONCE_BYTES + 32
_ANSWER_TIMEOUT_S = 1.0


def presence_key(membership: Membership) -> bytes:
    """The generation's key for questions and answers."""
    text = f"muster presence {membership.job_id} {membership.group} {membership.generation} "
    return hashlib.sha256(text.encode() + b"".join(membership.unique_ids)).digest()


def _proof(key: bytes, word: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, word + nonce, "sha256")


class Presence:
    """Answers peers that ask whether this process is building a communicator."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=16)
        not_for_children(self._listener)
        host, port = self._listener.getsockname()[:2]
        self.endpoint = f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
        self._key: bytes | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="muster-presence", daemon=True)
        self._thread.start()

    def enter(self, key: bytes) -> None:
        """From now on answers questions proven with ``key``."""
        self._key = key

    def close(self) -> None:
        """Stops answering; idempotent."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while not self._closed:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer, contextlib.suppress(OSError):
                peer.settimeout(_ANSWER_TIMEOUT_S)
                self._answer(peer)

    def _answer(self, peer: socket.socket) -> None:
        question = _read(peer, _QUESTION_BYTES)
        nonce, proof = question[:_NONCE_BYTES], question[_NONCE_BYTES:]
        key = self._key
        if key is not None and hmac.compare_digest(_proof(key, b"ask", nonce), proof):
            peer.sendall(_proof(key, b"here", nonce))


def absent_peers(membership: Membership, peers: Iterable[Peer]) -> list[Peer]:
    """The peers that do not answer as members that are building this communicator."""
    key = presence_key(membership)
    return [peer for peer in peers if not _is_present(peer.data_address, key)]


def _is_present(endpoint: str, key: bytes) -> bool:
    host, _, port = endpoint.rpartition(":")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_TIMEOUT_S) as peer:
            peer.settimeout(_ANSWER_TIMEOUT_S)
            peer.sendall(nonce + _proof(key, b"ask", nonce))
            return hmac.compare_digest(_read(peer, 32), _proof(key, b"here", nonce))
    except (OSError, ValueError):
        return False


def _read(peer: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = peer.recv(count - len(received))
        if not part:
            return received
        received += part
    return received
