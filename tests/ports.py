"""Ports for servers of tests."""

from __future__ import annotations

from muster.bench.launches import free_ports


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which nothing listens now."""
    return free_ports(host=host)[0]
