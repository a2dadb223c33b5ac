"""Hosts of one machine: network namespaces with addresses of their own, joined by a switch; takes root."""

from __future__ import annotations

import ctypes
import os
import subprocess
from typing import Any

_NET = "10.78.0"
_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET."""


def enter_namespace(name: str) -> None:
    """Takes the calling thread, and what it starts, into a network namespace.

    Raises:
        OSError: there is none of this name.
    """
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEW_NETWORK):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)
    finally:
        os.close(descriptor)


class NamespaceHosts:
    """Hosts by number, and one more for the scheduler. A context manager: they are gone at its end.

    Args:
        count: how many hosts.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._prefix = f"musterbench{os.getpid()}"
        self.scheduler_host = count

    def name(self, number: int) -> str:
        """A host's namespace."""
        return f"{self._prefix}-{number}"

    def address(self, number: int) -> str:
        """A host's address."""
        return f"{_NET}.{number + 1}"

    def cut(self, number: int) -> None:
        """Takes a host off the network; nobody is notified, as when a switch fails behind another."""
        _ip("-n", f"{self._prefix}-switch", "link", "set", f"port{number}", "nomaster")

    def join(self, number: int) -> None:
        """Joins it to the network again."""
        _ip("-n", f"{self._prefix}-switch", "link", "set", f"port{number}", "master", "br0")

    def __enter__(self) -> NamespaceHosts:
        """Makes them.

        Raises:
            RuntimeError: they cannot be made here.
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
        """Takes them away."""
        for name in [*(self.name(number) for number in range(self._count + 1)), f"{self._prefix}-switch"]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"hosts of one machine need the program ip: {error}") from error
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}; making hosts takes root")
