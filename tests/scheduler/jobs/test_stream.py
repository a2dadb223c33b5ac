"""A session's queue: in order, bounded, and its two ways to end."""

from __future__ import annotations

import asyncio

from muster.scheduler.access import Caller
from muster.scheduler.errors import StoppingError, TooSlowError
from muster.scheduler.jobs.stream import MAX_WAITING_BYTES, MAX_WAITING_MESSAGES, OutgoingStream
from tests.waiting import go


def test_messages_leave_in_order_and_then_the_stream_ends() -> None:
    async def test() -> None:
        session = OutgoingStream(1, Caller("x"))
        for data in (b"a", b"b"):
            session.send(data)
        session.close()
        session.send(b"too late")
        assert [await session.next() for _ in range(3)] == [b"a", b"b", None]
        assert session.closed is None
        assert not session.dropped.is_set()

    go(test())


def test_a_waiting_sender_wakes_up() -> None:
    async def test() -> None:
        session = OutgoingStream(1, Caller("x"))
        waiting = asyncio.ensure_future(session.next())
        await asyncio.sleep(0)
        session.send(b"a")
        assert await waiting == b"a"
        waiting = asyncio.ensure_future(session.next())
        await asyncio.sleep(0)
        session.close(StoppingError("bye"))
        assert await waiting is None
        assert str(session.closed) == "bye"

    go(test())


def test_the_first_reason_to_close_counts() -> None:
    async def test() -> None:
        session = OutgoingStream(1, Caller("x"))
        session.close()
        session.close(StoppingError("bye"))
        assert session.closed is None

    go(test())


def test_too_many_messages_drop_the_session() -> None:
    async def test() -> None:
        session = OutgoingStream(1, Caller("x"))
        for _ in range(MAX_WAITING_MESSAGES):
            session.send(b"a")
        assert not session.over
        session.send(b"a")
        assert isinstance(session.closed, TooSlowError)
        assert session.dropped.is_set()
        assert await session.next() is None

    go(test())


def test_too_many_bytes_drop_the_session_and_sent_ones_no_longer_count() -> None:
    async def test() -> None:
        session = OutgoingStream(1, Caller("x"))
        session.send(b"x" * MAX_WAITING_BYTES)
        await session.next()
        session.send(b"x" * MAX_WAITING_BYTES)
        assert not session.over
        session.send(b"x")
        assert isinstance(session.closed, TooSlowError)

    go(test())


def test_a_newer_generation_takes_the_place_of_what_still_waits_of_an_older_one() -> None:
    async def test() -> None:
        session = OutgoingStream(1, Caller("x"))
        session.send(b"waiting")
        session.send(b"assignment ", b"1", of_generation=True, assigns=1)
        session.send(b"ids 1", of_generation=True)
        session.send(b"assignment ", b"2", of_generation=True, assigns=2)
        session.send(b"ids 2", of_generation=True)
        session.close()
        sent, held = [], []
        for _ in range(4):
            sent.append(await session.next())
            held.append(session.held)
        assert sent == [b"waiting", b"assignment 2", b"ids 2", None]
        assert held == [0, 2, 2, 2]  # the first one never left: nothing may build on it

    go(test())
