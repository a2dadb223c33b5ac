"""Simulates hosts on one machine by network namespaces with addresses and a switch; requires root."""

from __future__ import annotations

import ctypes
import os
import subprocess
from typing import Any

_NET = "10.78.0"
_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET."""


def enter_namespace(name: str) -> None:
    """Moves the calling thread, and what it starts, into a network namespace.

    Raises:
        OSError: there is no namespace with this name, or this process must not enter it.
    """
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEW_NETWORK):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)
    finally:
        os.close(descriptor)


class NamespaceHosts:
    """Hosts by number, and one more for the scheduler. A context manager, which removes them at its end.

    Args:
        count: the number of hosts.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._prefix = f"musterbench{os.getpid()}"
        self.scheduler_host = count

    def name(self, number: int) -> str:
        """Returns the name of a host's namespace."""
        return f"{self._prefix}-{number}"

    def address(self, number: int) -> str:
        """Returns a host's address."""
        return f"{_NET}.{number + 1}"

    def cut(self, number: int) -> None:
        """Disconnects a host from the network without notice, as when a switch behind another fails."""
        _ip("-n", f"{self._prefix}-switch", "link", "set", f"port{number}", "nomaster")

    def join(self, number: int) -> None:
        """Connects a host to the network again."""
        _ip("-n", f"{self._prefix}-switch", "link", "set", f"port{number}", "master", "br0")

    def __enter__(self) -> NamespaceHosts:
        """Makes the hosts.

        Raises:
            RuntimeError: namespaces cannot be made here.
        """
        switch = f"{self._prefix}-switch"
        try:
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", switch, "link", "set", "br0", "up")
            for number in range(self._count + 1):
                name, port = self.name(number), f"port{number}"
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
                _ip("-n", switch, "link", "set", port, "master", "br0", "up")
                _ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
        except RuntimeError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        """Removes the hosts."""
        for name in [*(self.name(number) for number in range(self._count + 1)), f"{self._prefix}-switch"]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"hosts of one machine need the program ip: {error}") from error
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}; making hosts takes root")
