"""Attacks on ``muster web`` by other users of its host, and by strangers where it is served beyond that."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from muster.certs.errors import UntrustedError
from muster.certs.runtime.tls import server_ssl_context
from muster.scheduler.cli.client import RefusedByScheduler
from muster.web import feed, serve
from muster.web.app import Pages
from muster.web.feed import Feed
from muster.web.guard import LoginLinks
from muster.web.model import Followed
from muster.wire.v1 import watch_pb2 as pb
from tests.attacks.defences.attack import Attack, check
from tests.scheduler.processes import Pki
from tests.waiting import LIMIT_S, until

MANY = 200
T = TypeVar("T")


def run(attack: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(attack, LIMIT_S))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Silent:
    """A connection on which the scheduler says nothing."""

    def __init__(self) -> None:
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        self._over.put(None)

    def watch(self, job_id: str) -> Iterator[pb.WatchReply]:
        self._over.get()
        return iter(())


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[int]:
    """The pages on loopback; their port."""
    pages = Pages(Followed("s"), LoginLinks(), lambda job_id: Silent())  # type: ignore[arg-type,return-value]
    listener, ready = serve.bind("127.0.0.1", 0), asyncio.Event()
    port = listener.getsockname()[1]
    task = asyncio.ensure_future(serve.serve(pages, serve.Transport(("127.0.0.1",)), listener, ready.set))
    await ready.wait()
    try:
        yield port
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listener.close()


async def held(port: int, said: bytes) -> int:
    """By how many descriptors the server has more after so many connections that have said this."""
    before = descriptors()
    with contextlib.ExitStack() as mine:
        for _ in range(MANY):
            sock = mine.enter_context(socket.socket())
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(("127.0.0.1", port))
            await asyncio.sleep(0.005)  # the server is in this loop
            with contextlib.suppress(OSError):
                sock.send(said)
        await asyncio.sleep(0.2)
        found = descriptors() - before - MANY
    await until(lambda: descriptors() <= before)  # all that were hung up on are gone
    return found


def half_requests(_: Path) -> bool:
    async def attack() -> int:
        async with served() as port:
            return await held(port, b"GET / HT")

    return run(attack()) > 150


def silence_before_tls(folder: Path) -> bool:
    """As a stranger can where the page is served beyond loopback."""
    context = server_ssl_context(Pki.make(folder).credentials("server"))

    async def attack() -> int:
        with serve.bind("127.0.0.1", 0) as listener:
            loop = asyncio.get_running_loop()
            server = await loop.create_server(
                asyncio.Protocol, sock=listener, ssl=context, ssl_handshake_timeout=2 * LIMIT_S
            )
            try:
                return await held(listener.getsockname()[1], b"")
            finally:
                server.close()

    return run(attack()) > 100


def asked(error: Exception) -> int:
    """How often a scheduler is asked that answers like this, within the time of twenty pauses."""
    tried: list[str] = []

    def connect(job_id: str) -> Any:
        tried.append(job_id)
        raise error

    async def attack() -> int:
        following = Feed(connect, Followed("here"), lambda: None)
        try:
            following.open()
            await until(lambda: bool(tried))
            for _ in range(20):  # a machine that stands still takes one of them
                await asyncio.sleep(0.05)
            return len(tried)
        finally:
            following.close()

    return run(attack())


def refusals_without_end(_: Path) -> bool:
    return asked(RefusedByScheduler("No.", code="PERMISSION_DENIED")) > 5


def failed_handshakes_without_end(_: Path) -> bool:
    return asked(UntrustedError("Of another authority.", remedy="Renew it.")) > 5


def without_pauses(patch: pytest.MonkeyPatch) -> None:
    for name in ("REFUSED_S", "UNTRUSTED_S", "REFUSED_MOST_S"):
        patch.setattr(feed, name, 0.05)


HOST, STRANGER, OWNER = "another user of the host", "reaches the port", "left a page open"
ENDLESS = 1 << 20
ATTACKS = (
    Attack(
        "half requests", "descriptors", HOST, half_requests,
        lambda patch: patch.setattr(serve, "CONNECTIONS", ENDLESS),
    ),
    Attack(
        "silence before TLS", "descriptors", STRANGER, silence_before_tls,
        lambda patch: patch.setattr(serve, "STRANGERS", ENDLESS),
    ),
    Attack("refusals without end", "the log, alerts", OWNER, refusals_without_end, without_pauses),
    Attack("failed handshakes without end", "alerts", OWNER, failed_handshakes_without_end, without_pauses),
)  # fmt: skip


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is hung up on for the time that a busy machine takes for so many connections."""
    for name in ("HANDSHAKE_S", "REQUEST_S"):
        monkeypatch.setattr(serve, name, 2 * LIMIT_S)


@pytest.mark.usefixtures("_patient")
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_its_defence_and_nothing_else_stops_it(attack: Attack, tmp_path: Path) -> None:
    check(attack, tmp_path)
