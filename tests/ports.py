"""Ports for servers of tests."""

from __future__ import annotations

import random
import socket

_LOWEST, _HIGHEST = 10_000, 32_000
"""Below those that Linux gives to connections: a port of theirs is soon taken again while other tests run."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which nothing listens now."""
    chance = random.SystemRandom()  # tests in other processes draw others
    while True:
        port = chance.randrange(_LOWEST, _HIGHEST)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
