"""Which event each message of a worker becomes."""

from __future__ import annotations

from typing import get_args

from muster.scheduler.serve.sessions import EVENTS
from muster.wire import messages


def test_every_message_of_a_worker_but_its_join_is_an_event_of_its_own() -> None:
    assert set(EVENTS) == set(get_args(messages.WorkerMessage)) - {messages.Join}
    assert len(set(EVENTS.values())) == len(EVENTS)
    assert all(isinstance(event, type) and issubclass(event, message) for message, event in EVENTS.items())
