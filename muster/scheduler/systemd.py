"""Tells systemd that the scheduler is ready, alive or stopping, and adds priorities to its log lines.

The protocols are described in ``man sd_notify`` and ``man sd-daemon``. Outside systemd, nothing is sent.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

READY = "READY=1"
STOPPING = "STOPPING=1"
ALIVE = "WATCHDOG=1"

_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7


def notify(state: str, env: Mapping[str, str]) -> bool:
    """Sends one state to the service manager.

    Args:
        state: one of this module's constants.
        env: the process's environment; NOTIFY_SOCKET names the socket ("@" begins an abstract one).

    Returns:
        Whether it was sent. If the service manager does not listen, returns False instead of raising an
            error.
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
    """Returns the interval of watchdog notifications in seconds: half of what systemd allows.

    Returns None if there is no watchdog.
    """
    try:
        allowed_us = int(env.get("WATCHDOG_USEC", ""))
    except ValueError:
        return None
    return allowed_us / 2e6 if allowed_us > 0 else None


def is_journal(fd: int, env: Mapping[str, str]) -> bool:
    """Whether output to this descriptor goes to systemd's journal."""
    if "JOURNAL_STREAM" not in env:
        return False
    found = os.fstat(fd)
    return env["JOURNAL_STREAM"] == f"{found.st_dev}:{found.st_ino}"


def priority_prefix(level: int) -> str:
    """The prefix that gives a line in systemd's journal its priority; ``level`` is a level of ``logging``."""
    return f"<{next((number for least, number in _PRIORITIES if level >= least), _DEBUG)}>"
