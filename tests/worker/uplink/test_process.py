"""The uplink's process between a worker's socket and a scripted scheduler."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

from muster.wire.v1 import host_pb2 as pb
from muster.worker.session.streams import Stream
from muster.worker.uplink.batches import MAX_WAITING
from muster.worker.uplink.door import make_door
from muster.worker.uplink.frames import UplinkFrameKind, frame
from muster.worker.uplink.process import Uplink
from tests.waiting import LIMIT_S


def test_a_worker_that_was_let_go_while_too_much_of_its_own_waited_is_seen_to_end() -> None:
    """The scheduler reads nothing and then ends the worker's conversation: nothing of it may stay."""
    sent = threading.Event()

    def dial(outbox: SimpleQueue[bytes | None]) -> Stream:
        def replies() -> Iterator[bytes]:
            sent.wait(LIMIT_S)
            closed = pb.ToHost(items=[pb.ToWorkers(workers=[1], closed=pb.Closed(code=3, detail="no"))])
            yield closed.SerializeToString()
            while outbox.get() is not None:
                pass

        return replies(), lambda: None

    async def test() -> None:
        inner, outer = make_door()
        own, theirs = socket.socketpair()
        uplink = asyncio.ensure_future(Uplink(inner, dial, b"here").run())
        await asyncio.sleep(0)
        with inner, outer, own:
            own.setblocking(False)
            with theirs:
                socket.send_fds(outer, [b"here"], [theirs.fileno()])
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(own, frame(UplinkFrameKind.MESSAGE, b"x") * (MAX_WAITING + 1))
            await _taken(own)
            sent.set()
            own.shutdown(socket.SHUT_WR)
            while data := await asyncio.wait_for(loop.sock_recv(own, 4096), LIMIT_S):
                assert data
            outer.close()
            await asyncio.wait_for(uplink, LIMIT_S)

    asyncio.run(test())


class CountingDoor(socket.socket):
    """A door's inner end that counts how often it is read."""

    reads = 0

    def recvmsg(self, *arguments: int) -> Any:
        self.reads += 1
        return super().recvmsg(*arguments)


def test_a_door_that_nobody_holds_any_more_is_not_read_again() -> None:
    """A worker that is still carried keeps the uplink up."""

    def dial(outbox: SimpleQueue[bytes | None]) -> Stream:
        return iter(outbox.get, None), lambda: None

    async def test() -> None:
        ends = make_door()
        inner, outer = CountingDoor(fileno=ends[0].detach()), ends[1]
        own, theirs = socket.socketpair()
        uplink = asyncio.ensure_future(Uplink(inner, dial, b"here").run())
        await asyncio.sleep(0)
        with inner, own:
            own.setblocking(False)
            with outer, theirs:
                socket.send_fds(outer, [b"here"], [theirs.fileno()])
            for _ in range(50):
                await asyncio.get_running_loop().sock_sendall(own, frame(UplinkFrameKind.ALIVE))
                await _taken(own)
            assert not uplink.done()
            assert inner.reads < 10
            own.close()
            await asyncio.wait_for(uplink, LIMIT_S)

    asyncio.run(test())


async def _taken(end: socket.socket) -> None:
    """Waits until the other side has read all that was sent."""
    import fcntl
    import termios

    unread: Any = b"\1\0\0\0"
    while any(unread):
        await asyncio.sleep(0.005)
        unread = fcntl.ioctl(end.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
