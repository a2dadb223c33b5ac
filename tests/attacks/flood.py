"""Opens connections as fast as it is allowed to, from many addresses of loopback; a process of its own.

``python -m tests.attacks.flood RATE SECONDS PORTS_FILE``. A third of them keeps silent, a third sends
garbage, a third half of a TLS hello. The file holds the ports, and is read again now and then. It ends with a
line of JSON.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import socket
import struct
import sys
import time
from collections import deque
from pathlib import Path

MOST_OPEN = 4000
IP_BIND_ADDRESS_NO_PORT = 24
HALF_HELLO = bytes.fromhex("16030100c8010000c40303") + b"r" * 32
SAID = (b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"\0" * 200, HALF_HELLO)
LINGER_NOT = struct.pack("ii", 1, 0)


def main() -> None:
    rate, seconds, ports_file = float(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most_open = min(MOST_OPEN, hard - 50)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most_open + 50), hard))
    chance, kept = random.Random(1), deque[socket.socket]()
    ports: list[int] = []
    made = refused = 0
    begun, cpu_begun, read_at = time.monotonic(), time.process_time(), 0.0
    while (now := time.monotonic() - begun) < seconds:
        if now >= read_at:
            read_at = now + 0.1
            with contextlib.suppress(OSError, ValueError):
                ports = json.loads(ports_file.read_text())
        due = int(now * rate) - made - refused
        if not ports or due <= 0:
            time.sleep(0.001)
            continue
        for _ in range(min(due, 100)):
            if len(kept) >= most_open:
                kept.popleft().close()
            sock = attack(chance, ports, SAID[made % 3])
            if sock is None:
                refused += 1
            else:
                made += 1
                kept.append(sock)
    took = time.monotonic() - begun
    print(
        json.dumps(
            {
                "connections": made,
                "refused": refused,
                "seconds": round(took, 1),
                "per_s": round(made / took),
                "cpu_share": round((time.process_time() - cpu_begun) / took, 2),
            }
        )
    )


def attack(chance: random.Random, ports: list[int], said: bytes) -> socket.socket | None:
    """Opens one connection; None if there is nobody, or no room."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_IP, IP_BIND_ADDRESS_NO_PORT, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
    host = f"127.{chance.randrange(1, 255)}.{chance.randrange(256)}.{chance.randrange(1, 255)}"
    try:
        sock.bind((host, 0))
        code = sock.connect_ex(("127.0.0.1", chance.choice(ports)))
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
        if said:
            with contextlib.suppress(BlockingIOError):
                sock.send(said)
    except OSError:
        sock.close()
        return None
    return sock


if __name__ == "__main__":
    main()
