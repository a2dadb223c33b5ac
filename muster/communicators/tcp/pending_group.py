"""A group whose members are not all connected yet; collects their connections."""

from __future__ import annotations

import threading

from muster.communicators.membership import Membership
from muster.communicators.tcp.connection import PeerConnection


class PendingGroup:
    """Collects the connections of one communicator as they are established.

    Args:
        membership: the members of the group, and the unique ids that prove membership.
        label: names the group on the wire.
    """

    def __init__(self, membership: Membership, label: bytes) -> None:
        self.membership = membership
        self.label = label
        self.closed = False
        self.changed = threading.Condition()
        self.arrived: dict[int, PeerConnection] = {}
        self.failures: dict[int, Exception] = {}
        self.notes: dict[int, str] = {}

    def arrive(self, connection: PeerConnection) -> None:
        """Takes a proven connection; the first one of a rank wins."""
        with self.changed:
            if self.closed or connection.peer in self.arrived:
                connection.sock.close()
                return
            self.arrived[connection.peer] = connection
            self.changed.notify_all()

    def fail(self, rank: int, error: Exception) -> None:
        """Gives up on a peer, because another attempt would fail for the same reason."""
        with self.changed:
            self.failures[rank] = error
            self.changed.notify_all()

    def note(self, rank: int, text: str) -> None:
        """Records why the last attempt to reach a peer failed."""
        self.notes[rank] = text
