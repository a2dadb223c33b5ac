"""Strangers and insiders at endpoints with hardly any room, while generations follow one another."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import ssl
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from muster.certs.runtime.tls import client_ssl_context
from muster.communicators.tcp.endpoint import Endpoint
from muster.communicators.tcp.handshake import Hello, group_label
from tests.communicators.tcp.world import Office, World, make_world
from tests.logs import said

ATTACK_S = 20.0
ATTACKERS = 4
KEPT = 25
RESET_AT_CLOSE = struct.pack("ii", 1, 0)


@dataclass
class Attacker:
    """Does what it likes, again and again, to all members of a world."""

    world: World
    contexts: list[ssl.SSLContext]
    chance: random.Random
    sock: socket.socket = field(default_factory=socket.socket)
    kept: list[socket.socket] = field(default_factory=list)
    attacks: int = 0

    def run(self, over: threading.Event) -> None:
        self.sock.close()
        while not over.is_set():
            self.attacks += 1
            self.sock = socket.socket()
            with contextlib.suppress(OSError, ValueError):
                self._attack(self.sock)
            if self.chance.random() < 0.6:
                self.sock.close()
            else:
                self.kept.append(self.sock)
            if len(self.kept) > KEPT:
                self.kept.pop(self.chance.randrange(KEPT)).close()
        for sock in (self.sock, *self.kept):
            sock.close()

    def _attack(self, sock: socket.socket) -> None:
        chance = self.chance
        peer = chance.choice(self.world.memberships[0].peers)
        sock.settimeout(chance.choice((0.01, 0.2)))
        if chance.random() < 0.5:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
        host = chance.choice(("127.0.0.1", "127.5.5.5", f"127.6.6.{chance.randrange(1, 250)}"))
        sock.bind((host, 0))
        sock.connect(("127.0.0.1", int(peer.data_address.rpartition(":")[2])))
        kind = chance.choice(("silence", "noise", "part of a hello", "inside", "inside"))
        if kind == "inside":
            self._inside(sock)
        elif kind == "noise":
            sock.sendall(chance.randbytes(chance.randrange(1, 3000)))
        elif kind == "part of a hello":
            hello = b"\x16\x03\x01\x02\x00\x01" + chance.randbytes(512)
            sock.sendall(hello[: chance.randrange(len(hello) + 1)])
            if chance.random() < 0.3:
                sock.shutdown(socket.SHUT_WR)

    def _inside(self, sock: socket.socket) -> None:
        """With a certificate of the authority, of this job or another."""
        chance, mine = self.chance, self.world.memberships[0]
        self.sock = sock = chance.choice(self.contexts).wrap_socket(sock)
        generation = max(0, mine.generation + chance.choice((0, 0, 1, -1, 2**40)))
        label = group_label(mine, "world") if chance.random() < 0.5 else os.urandom(32)
        hello = Hello(generation, chance.randrange(4), chance.randrange(4), label, os.urandom(32)).encode()
        sock.sendall(hello[: chance.choice((len(hello), len(hello), chance.randrange(len(hello))))])
        if chance.random() < 0.5:
            sock.recv(200)
            sock.sendall(os.urandom(64))


@pytest.mark.system
@pytest.mark.parametrize("seed", [1, 2])
def test_every_generation_forms(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "muster.tcp")
    bounds: dict[str, Any] = {
        "handshake_timeout_s": 1.0,
        "parked_timeout_s": 1.0,
        "max_handshakes": 12,
        "max_parked": 8,
    }
    monkeypatch.setattr("muster.communicators.tcp.backend.Endpoint", lambda tls: Endpoint(tls, **bounds))
    office = Office(tmp_path)
    world = make_world([office.credentials(node=f"n{rank}") for rank in range(3)])
    insiders = (("worker", "job-a", None), ("worker", "job-a", "n1"), ("worker", "job-b", None))
    contexts = [client_ssl_context(office.credentials(*each)) for each in (*insiders, ("operator",))]
    attackers = [Attacker(world, contexts, random.Random(10 * seed + each)) for each in range(ATTACKERS)]
    over = threading.Event()
    threads = [threading.Thread(target=attacker.run, args=(over,)) for attacker in attackers]
    for thread in threads:
        thread.start()
    formed, end = 0, time.monotonic() + ATTACK_S
    try:
        while time.monotonic() < end:
            communicators = world.connect()
            assert not [each for each in communicators if isinstance(each, Exception)], communicators
            for each in communicators:
                each.close()
            formed += 1
            world.next()
    finally:
        over.set()
        for thread in threads:
            thread.join()
        world.close()
    print(f"{formed} generations under {sum(attacker.attacks for attacker in attackers)} attacks")
    assert formed > 3
    assert not said(caplog, "muster.tcp")
