"""A wire between two network namespaces that loses, delays, doubles and swaps what passes.

``python -m tests.end_to_end.lossy NAMESPACE INTERFACE NAMESPACE INTERFACE LOSS DELAY_S SEED``: it makes both
interfaces, says ``ready``, and carries frames until its input ends. It is in user space, where netem is not.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time
from pathlib import Path

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
LARGEST, MOST_ON_THE_WAY = 65_536, 4000
DOUBLED = 0.01


def tap(namespace: str, interface: str) -> int:
    """Makes an interface in a namespace; what is sent through it is read from the descriptor."""
    with Path("/run/netns", namespace).open("rb") as where:
        if ctypes.CDLL(None, use_errno=True).setns(where.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", interface.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor


def carry(ends: tuple[int, int], loss: float, delay_s: float, chance: random.Random) -> None:
    """Carries frames between both ends: each with a delay of its own, of up to twice as much, if at all."""
    across = dict(zip(ends, reversed(ends), strict=True))
    on_the_way: list[tuple[float, int, int, bytes]] = []
    number = lost = 0
    while True:
        wait_s = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        readable = select.select((*ends, 0), (), (), wait_s)[0]
        if 0 in readable and not os.read(0, 1):
            print(f"carried {number}, lost {lost}", flush=True)
            return
        for end in set(readable) & set(ends):
            frame = os.read(end, LARGEST)
            if chance.random() < loss or len(on_the_way) >= MOST_ON_THE_WAY:
                lost += 1
                continue
            for _ in range(1 + (chance.random() < DOUBLED)):
                number += 1
                due = time.monotonic() + chance.uniform(0.0, 2 * delay_s)
                heapq.heappush(on_the_way, (due, number, across[end], frame))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(on_the_way)
            try:
                os.write(end, frame)
            except OSError:  # the interface is down: what comes is lost, as on any wire
                lost += 1


def main() -> None:
    here, inside, there, outside, loss, delay_s, seed = sys.argv[1:]
    ends = tap(here, inside), tap(there, outside)
    print("ready", flush=True)
    carry(ends, float(loss), float(delay_s), random.Random(int(seed)))


if __name__ == "__main__":
    main()
