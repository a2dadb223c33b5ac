"""What the scheduler's state machine makes of an event."""

from __future__ import annotations

from dataclasses import dataclass

from muster.scheduler.core.messages import Message
from muster.scheduler.core.records import Record
from muster.scheduler.core.values import SessionId


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from one event.

    The adapter makes ``records`` durable, then sends ``messages`` in order, then logs ``reason``
    if it is not empty. After ``Refused`` or ``Ended`` it closes that session's stream. Records and
    messages are apart so that the order cannot be got wrong (as in etcd raft's ``Ready``).
    """

    records: tuple[Record, ...] = ()
    messages: tuple[tuple[SessionId, Message], ...] = ()
    reason: str = ""
