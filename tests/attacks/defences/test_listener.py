"""Attacks by another user of the host on the listener that torch's and JAX's programs find on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.programs import proxy
from muster.programs.proxy import Proxy
from tests.attacks.defences.attack import Attack, check
from tests.scheduler.store.rig import served

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

HELLO = struct.pack("<BI", 0, 0x3C85F7CE)
SET = b"\1" + b"".join(struct.pack("<Q", len(part)) + part for part in (b"k", b"forged"))
GET = b"\3" + struct.pack("<Q", 1) + b"k"
ENEMY = """
import os, socket, sys
port, count, said, hang_up = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3]), sys.argv[4]
os.setgroups([]); os.setgid(65534); os.setuid(65534)
held = [socket.socket() for _ in range(count)]
for each in held:
    each.connect(("127.0.0.1", port))
    each.sendall(said)
    if hang_up:
        each.close()
while hang_up and any(  # what has ended on both sides is root's
    row.split()[2].endswith(f":{port:04X}") and row.split()[7] != "0" for row in open("/proc/net/tcp")
):
    pass
print("done", flush=True)
sys.stdin.read()
"""


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def enemy(port: int, count: int, said: bytes, hang_up: str) -> Iterator[None]:
    """Another user, once all of its connections are made and have spoken."""
    command = [sys.executable, "-c", ENEMY, str(port), str(count), said.hex(), hang_up]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        yield
        process.stdin.close()


def attacked(count: int, said: bytes = b"", hang_up: str = "") -> tuple[bytes, int]:
    """Has another user connect before the listener comes to accepting.

    Returns:
        The value of the key ``k`` then, and by how many descriptors the process had more at most.
    """
    peak = 0

    async def run() -> bytes:
        nonlocal peak
        async with served("a") as rig:
            listener = Proxy(rig.link("a"))
            port = await listener.open()
            with enemy(port, count, said, hang_up):
                idle, reading = descriptors(), asyncio.ensure_future(read(port))
                while not reading.done():
                    await asyncio.sleep(0)
                    peak = max(peak, descriptors() - idle)
                await listener.close()
            return reading.result()

    return asyncio.run(run()), peak


async def read(port: int) -> bytes:
    """The value of the key, asked for by its user, whose turn comes after those of the enemy."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HELLO + GET)
    (size,) = struct.unpack("<Q", await reader.readexactly(8))
    found = await reader.readexactly(size)
    writer.close()
    return found


def change_a_key(_: Path) -> bool:
    """Sets a key and hangs up at once: what no process holds any more is root's, says the kernel."""
    return attacked(1, HELLO + SET, "hang up")[0] == b"forged"


class Counter(logging.Handler):
    lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += 1


def fill_a_log(_: Path) -> bool:
    """Connects 500 times, and is refused as often."""
    counter, log = Counter(), logging.getLogger("muster.worker")
    log.addHandler(counter)
    try:
        attacked(500)
    finally:
        log.removeHandler(counter)
    return counter.lines > 50


def use_up_descriptors(_: Path) -> bool:
    """Connects so often at once that the process has no descriptor left for a moment."""
    return attacked(500)[1] > 100


HOST = "another user of the host"
ATTACKS = (
    Attack(
        "change a key of a job of root's", "the meeting of its processes", HOST, change_a_key,
        lambda patch: patch.setattr(proxy, "owner_of", lambda uid, inode: uid),
    ),
    Attack(
        "fill a log by connections", "the log, the disk", HOST, fill_a_log,
        lambda patch: patch.setattr(proxy, "LINES", 1 << 30),
    ),
    Attack(
        "use up descriptors by connections", "availability", HOST, use_up_descriptors,
        lambda patch: patch.setattr(proxy, "owner_of", lambda uid, inode: os.getuid()),
    ),
)  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_its_defence_and_nothing_else_stops_it(attack: Attack, tmp_path: Path) -> None:
    check(attack, tmp_path)
