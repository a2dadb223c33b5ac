"""The same attacks on torch's TCPStore: ``python -m tests.attacks.tcpstore`` where torch is installed.

It starts a store as ``torchrun`` does, attacks it from a client that has been given nothing but its port,
and prints what happened.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.attacks.proxy import Proxy

KEY, SECRET = "default_pg/0//cuda//0", b"NCCL-UNIQUE-ID-" * 8


def store(port: int, *, serve: bool = False) -> Any:
    from torch.distributed import TCPStore

    limit = datetime.timedelta(seconds=5)
    return TCPStore("127.0.0.1", port, None, serve, timeout=limit, wait_for_workers=False)


def memory_of(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def told(name: str, attack: Callable[[], object]) -> None:
    try:
        print(f"{name}: {attack()!r}", flush=True)
    except Exception as error:
        print(f"{name}: refused, {type(error).__name__}", flush=True)


def on_the_wire(port: int) -> bool:
    proxy = Proxy(port)
    client = store(proxy.port)
    client.set("id", SECRET)
    client.get("id")
    seen = SECRET in proxy.seen
    proxy.close()
    return seen


def half_hellos(port: int) -> int:
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(500)]
    for sock in sockets:
        sock.sendall(b"\x0c")
        sock.setblocking(False)
    time.sleep(8)  # longer than a store would wait that has a deadline
    still = 0
    for sock in sockets:
        with contextlib.suppress(ConnectionError):
            try:
                still += sock.recv(1) != b""
            except BlockingIOError:
                still += 1
        sock.close()
    return still


def is_dropped(port: int, data: bytes) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=8) as sock:
        sock.sendall(data)
        with contextlib.suppress(TimeoutError, ConnectionError):
            return sock.recv(1) == b""
        return False


def many_keys(port: int, pid: int) -> str:
    before, client = memory_of(pid), store(port)
    for number in range(20_000):
        client.set(f"{number}" + "x" * 4000, b"v")
    return f"stored, {memory_of(pid) - before:.0f} MB"


def main() -> None:
    if sys.argv[1:] == ["serve"]:
        kept = store(0, serve=True)
        print(kept.port, flush=True)
        time.sleep(120)
        return
    command = [sys.executable, "-m", "tests.attacks.tcpstore", "serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        owner = store(port)
        owner.set(KEY, SECRET)
        told("reads the unique id", lambda: store(port).get(KEY) == SECRET)
        told("replaces it", lambda: (store(port).set(KEY, b"forged"), owner.get(KEY))[1])
        told("takes a rank", lambda: store(port).add("rank", 1))
        told("deletes a key", lambda: store(port).delete_key(KEY))
        told("unique id readable on the wire", lambda: on_the_wire(port))
        told("of 500 half hellos open after 8 s", lambda: half_hellos(port))
        told("random bytes are dropped", lambda: is_dropped(port, os.urandom(4096)))
        told("HTTP is dropped", lambda: is_dropped(port, b"GET / HTTP/1.1\r\n\r\n"))
        told("a value of 100 MB", lambda: store(port).set("big", bytes(100_000_000)))
        told("20,000 keys of 4 kB", lambda: many_keys(port, server.pid))
        told("a name with a line break", lambda: store(port).set("line\nforged", b"v"))
        server.kill()


if __name__ == "__main__":
    main()
