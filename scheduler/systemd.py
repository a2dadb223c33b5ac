"""Tells systemd that the scheduler is ready, alive or stopping (the sd_notify protocol, ``man sd_notify``).

Outside systemd (no NOTIFY_SOCKET) nothing is sent.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

READY = "READY=1"
STOPPING = "STOPPING=1"
ALIVE = "WATCHDOG=1"


def notify(state: str, env: Mapping[str, str]) -> bool:
    """Sends one state to the service manager.

    Args:
        state: one of this module's constants.
        env: the process's environment; NOTIFY_SOCKET names the socket ("@" begins an abstract one).

    Returns:
        Whether it was sent. A manager that does not listen is no reason to stop: False, no error.
    """
    name = env.get("NOTIFY_SOCKET", "")
    if not name:
        return False
    address = "\0" + name[1:] if name.startswith("@") else name
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        try:
            channel.sendto(state.encode(), address)
        except OSError:
            return False
    return True


def watchdog_interval_s(env: Mapping[str, str]) -> float | None:
    """How often to say that the event loop turns: twice per interval allowed; None if nothing is asked."""
    try:
        allowed_us = int(env.get("WATCHDOG_USEC", ""))
    except ValueError:
        return None
    return allowed_us / 2e6 if allowed_us > 0 else None
