"""The listener that torch's clients connect to: their protocol byte by byte, and whom it serves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from muster.programs.proxy import Proxy, peer_uid
from tests.scheduler.store.rig import Rig, delayed, served
from tests.waiting import go

HELLO = b"\0" + struct.pack("<I", 0x3C85F7CE)
SET, COMPARE_SET, GET, ADD, CHECK, WAIT, NUM_KEYS, DELETE, APPEND, MULTI_GET, MULTI_SET, CANCEL_WAIT = range(
    1, 13
)
PING, QUEUE_PUSH, QUEUE_POP, QUEUE_LEN, LIST_KEYS = range(13, 18)


def data(*values: bytes) -> bytes:
    return b"".join(struct.pack("<Q", len(value)) + value for value in values)


def number(value: int) -> bytes:
    return struct.pack("<q", value)


class Client:
    """One connection, as torch's client has it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, command: int, *parts: bytes) -> None:
        self.writer.write(bytes((command,)) + b"".join(parts))

    async def hear(self, expected: bytes) -> None:
        assert await self.reader.readexactly(len(expected)) == expected

    async def ended(self) -> bool:
        with contextlib.suppress(ConnectionError):
            return await self.reader.read() == b""
        return True


@contextlib.asynccontextmanager
async def connected(
    rig: Rig,
    node: str = "a",
    *,
    prefix: bytes = b"",
    hello: bytes = HELLO,
    port: int | None = None,
    **options: Any,
) -> AsyncIterator[Callable[[], Coroutine[Any, Any, Client]]]:
    proxy = Proxy(rig.link(node, port=port), prefix=prefix, **options)
    listening = await proxy.open()
    writers = []

    async def connect() -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", listening)
        writers.append(writer)
        writer.write(hello)
        return Client(reader, writer)

    try:
        yield connect
    finally:
        for writer in writers:
            writer.close()
        await proxy.close()


def test_every_command() -> None:
    async def test() -> None:
        async with served("a") as rig, connected(rig, prefix=b"torch/") as connect:
            client = await connect()
            client.say(PING, b"1234")
            await client.hear(b"1234")
            client.say(SET, data(b"k", b"v"))
            client.say(GET, data(b"k"))
            await client.hear(data(b"v"))
            client.say(ADD, data(b"n"), number(-3))
            await client.hear(number(-3))
            client.say(CHECK, struct.pack("<Q", 2), data(b"k", b"none"))
            await client.hear(b"\1")
            client.say(CHECK, struct.pack("<Q", 1), data(b"k"))
            await client.hear(b"\0")
            client.say(WAIT, struct.pack("<Q", 1), data(b"k"))
            client.say(GET, data(b"k"))
            await client.hear(b"\0" + data(b"v"))
            client.say(COMPARE_SET, data(b"k", b"v", b"w"))
            await client.hear(data(b"w"))
            client.say(APPEND, data(b"k", b"x"))
            client.say(MULTI_SET, struct.pack("<Q", 1), data(b"m", b"1"))
            client.say(MULTI_GET, struct.pack("<Q", 2), data(b"k", b"m"))
            await client.hear(data(b"wx", b"1"))
            client.say(NUM_KEYS)
            await client.hear(number(3))
            client.say(DELETE, data(b"n"))
            await client.hear(number(1))
            client.say(LIST_KEYS)
            await client.hear(number(2) + data(b"k", b"m"))
            client.say(QUEUE_PUSH, data(b"q", b"e"))
            client.say(QUEUE_LEN, data(b"q"))
            await client.hear(number(1))
            client.say(QUEUE_POP, data(b"q"))
            await client.hear(number(1) + data(b"e"))
            client.say(QUEUE_POP, data(b"q"))
            await client.hear(number(0))
            client.say(GET, data(b"none"))
            await client.hear(data(b""))
            client.say(WAIT, struct.pack("<Q", 0))
            await client.hear(b"\0")

    go(test())


def test_a_wait_ends_with_its_keys_or_by_the_client_s_word() -> None:
    async def test() -> None:
        async with served("a") as rig, connected(rig) as connect:
            waiting, other = await connect(), await connect()
            waiting.say(WAIT, struct.pack("<Q", 2), data(b"x", b"y"))
            other.say(MULTI_SET, struct.pack("<Q", 2), data(b"x", b"1", b"y", b"2"))
            await waiting.hear(b"\0")
            waiting.say(WAIT, struct.pack("<Q", 1), data(b"never"))
            waiting.say(CANCEL_WAIT)
            await waiting.hear(b"\1")
            waiting.say(PING, b"abcd")
            await waiting.hear(b"abcd")
            waiting.say(WAIT, struct.pack("<Q", 1), data(b"never"))
            waiting.writer.close()  # it goes during a wait; nothing is left of it
            other.say(SET, data(b"never", b"1"))
            other.say(GET, data(b"never"))
            await other.hear(data(b"1"))

    go(test())


def test_a_check_of_no_keys_is_answered_when_the_store_has_what_the_client_wrote() -> None:
    async def test() -> None:
        async with (
            served("a", "b") as rig,
            delayed(rig.port, 0.2) as slow,
            connected(rig, "a", port=slow) as connect_slowly,
            connected(rig, "b") as connect,
        ):
            writer, reader = await connect_slowly(), await connect()
            for value in (b"1", b"2", b"3"):
                writer.say(SET, data(b"k", value))
                writer.say(CHECK, number(0))
                await writer.hear(b"\0")
                reader.say(GET, data(b"k"))
                await reader.hear(data(value))
            writer.say(SET, data(bytes(5000), b""))  # which the store refuses
            writer.say(CHECK, number(0))
            assert await writer.ended()

    go(test())


def test_a_value_that_came_with_a_wait_is_not_kept_for_later() -> None:
    async def test() -> None:
        async with served("a") as rig, connected(rig) as connect:
            client, other = await connect(), await connect()
            client.say(SET, data(b"k", b"old"))
            client.say(WAIT, struct.pack("<Q", 1), data(b"k"))
            await client.hear(b"\0")
            other.say(SET, data(b"k", b"new"))
            other.say(GET, data(b"k"))
            await other.hear(data(b"new"))
            client.say(PING, b"1234")
            client.say(GET, data(b"k"))
            await client.hear(b"1234" + data(b"new"))

    go(test())


@pytest.mark.parametrize(
    "hello",
    [b"GET / HTTP/1.1\r\n", b"\0\0\0\0\0", HELLO + b"\x63", HELLO + b"\1" + b"\xff" * 8],
    ids=["http", "magic", "command", "size"],
)
def test_what_is_not_torch_s_protocol_is_hung_up_on(hello: bytes) -> None:
    async def test() -> None:
        async with served("a") as rig, connected(rig, hello=hello) as connect:
            assert await (await connect()).ended()

    go(test())


def test_a_refusal_ends_the_connection_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with served("a") as rig, connected(rig) as connect:
            client = await connect()
            client.say(SET, data(b"k", b"word"))
            client.say(ADD, data(b"k"), number(1))
            assert await client.ended()
            client = await connect()
            client.say(SET, data(bytes(5000), b""))
            assert await client.ended()

    go(test())
    assert "a key whose value is a number" in caplog.text
    assert "at most 4096 bytes" in caplog.text


def test_the_end_of_the_generation_ends_every_connection() -> None:
    async def test() -> None:
        async with served("a") as rig, connected(rig) as connect:
            client = await connect()
            client.say(WAIT, struct.pack("<Q", 1), data(b"never"))
            client.say(PING, b"")
            rig.jobs.form(2, "a")
            rig.service.close()
            assert await client.ended()

    go(test())


# ---------------------------------------------------------------- whose the other end is


def test_another_user_is_hung_up_on(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with served("a") as rig, connected(rig, owner=lambda connection: 4321) as connect:
            client = await connect()
            client.say(PING, b"1234")
            assert await client.ended()

    go(test())
    assert "it came from user 4321" in caplog.text


CONNECT = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
family, host = (socket.AF_INET6, "::ffff:127.0.0.1") if sys.argv[3] == "6" else (socket.AF_INET, "127.0.0.1")
with socket.socket(family) as s:
    s.connect((host, int(sys.argv[1])))
    s.recv(1)
"""


@pytest.mark.parametrize("family", ["4", "6"])
@pytest.mark.parametrize("netlink", [True, False])
def test_the_kernel_knows_whose_a_connection_is(
    monkeypatch: pytest.MonkeyPatch, family: str, netlink: bool
) -> None:
    """Torch's client is an IPv6 socket with mapped addresses."""
    wanted = pwd.getpwnam("nobody").pw_uid if os.getuid() == 0 else os.getuid()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        port = listener.getsockname()[1]
        child = subprocess.Popen([sys.executable, "-c", CONNECT, str(port), str(wanted), family])
        connection, _ = listener.accept()
        with connection:
            if not netlink:
                monkeypatch.setattr(socket, "AF_NETLINK", 255)  # no such family
            assert peer_uid(connection) == wanted
        assert child.wait(60) == 0
