"""Whole conversations: what a decoder lets through must not upset the machine behind it, or the peers."""

from __future__ import annotations

import contextlib

from muster.scheduler.core import events
from muster.scheduler.core import machine as core
from muster.scheduler.core.events import Decision
from muster.scheduler.core.records import decode_record, encode_record
from muster.scheduler.serve.sessions import event_of
from muster.scheduler.serve.status import encode_status
from muster.wire import codec, messages
from tests.fuzzing.shapes import parts
from tests.worker.session.machine import Machine, assignment

SETTINGS = events.CoreSettings(
    worker_num=2,
    worker_min=1,
    spares=1,
    topo_timeout_s=60.0,
    node_timeout_s=5.0,
    heartbeat_interval_s=1.0,
)


def talk_to_job(data: bytes) -> None:
    """Feeds a job what several streams send; every answer must be one that a worker understands.

    Streams from 200 on stand for what is no message: a lost stream, the clock, an operator.
    """
    job, encoder, joined, now = core.Machine("default", SETTINGS), codec.AssignmentEncoder(), set[int](), 0.0
    for stream, piece in parts(data):
        now += 0.25
        try:
            event = _event(stream, piece)
        except codec.WireError:
            continue
        if isinstance(event, events.Joined):
            if stream in joined:
                continue  # the service refuses a second Join
            joined.add(stream)
        elif 0 < getattr(event, "session", 0) < 200 and stream not in joined:
            continue  # and everything before the first
        if isinstance(event, events.Tick):
            now = max(now, job.deadline() or 0.0)
        _check(job.step(event, now), encoder)
        encode_status(job.view(now), uptime_s=1.0, version="0")


def _event(stream: int, piece: bytes) -> events.Event:
    if stream < 200:
        return event_of(stream, codec.decode_worker_message(piece))
    if stream < 210:
        return events.SessionLost(stream - 200, "lost")
    if stream < 220:
        return events.DrainRequested("node-0", "drained")
    if stream < 230:
        return events.Expel("node-1", "revoked")
    return events.Tick()


def _check(decision: Decision, encoder: codec.AssignmentEncoder) -> None:
    for record in decision.records:
        assert decode_record(encode_record(record)) == record
        assert "unique" not in repr(encode_record(record))
    for _, message in decision.messages:
        codec.decode_scheduler_message(encoder.encode(message))
    assert decision.reason.isprintable(), "a caller can forge lines of the log"


def talk_to_worker(data: bytes) -> None:
    """Feeds a worker what a scheduler sends."""
    machine = Machine().welcomed()
    for stream, piece in parts(data):
        if stream > 200:
            machine.hear(assignment(stream - 200, 0 if stream % 2 else -1))
        with contextlib.suppress(codec.WireError):
            machine.hear(codec.decode_scheduler_message(piece))
        if stream == 255:
            machine.hear(messages.UniqueIds(55, (b"id",)))
        if machine.core.deadline() is not None:
            machine.tick_at_deadline()
