"""Several hosts on one machine: network namespaces with addresses of their own, joined by a switch."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.scheduler.processes import ROOT, environment
from tests.waiting import LIMIT_S

PORT = 6667
_CLUSTERS = itertools.count()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def can_make_namespaces() -> bool:
    """Whether this process may make network namespaces and join them."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    name = f"mu{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        switch = ["ip", "-n", name, "link", "add", "br0", "type", "bridge"]
        made = subprocess.run(switch, capture_output=True, check=False).returncode == 0
        ip("netns", "del", name)
    return made


class Host:
    """One namespace with a host name, and one interface to each network."""

    def __init__(self, number: int, name: str, namespace: str) -> None:
        self.number = number
        self.name = name
        self.namespace = namespace
        self._started: list[subprocess.Popen[str]] = []

    def address(self, family: int = 4, network: int = 0) -> str:
        """Its address in a network."""
        return f"10.77.{network}.{self.number}" if family == 4 else f"fd77:0:0:{network}::{self.number}"

    def start(self, log: Path, *command: str, **env: str) -> subprocess.Popen[str]:
        """Starts a program on this host."""
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')
        with log.open("w") as out:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *named, self.name, *command],
                env=environment(**env),
                cwd=log.parent,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
            )
        self._started.append(process)
        return process

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs a program on this host to its end."""
        return subprocess.run(
            ["ip", "netns", "exec", self.namespace, *command],
            env=environment(**env),
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
            cwd=ROOT,
        )

    def firewall(self, rules: str) -> None:
        """Loads an nftables file."""
        subprocess.run(
            ["ip", "netns", "exec", self.namespace, "nft", "-f", "-"], input=rules, text=True, check=True
        )

    def stop(self) -> None:
        """Ends what still runs here."""
        for process in self._started:
            if process.poll() is None:
                process.kill()  # exec all the way: this is the program itself
            process.wait(LIMIT_S)
        self._started.clear()

    def received_bytes(self, interface: str) -> int:
        """What has come in by an interface since the host was made."""
        path = f"/sys/class/net/{interface}/statistics/rx_bytes"
        return int(self.run("cat", path).stdout)


class Cluster:
    """Hosts on one or two networks, each network a switch in a namespace of its own."""

    def __init__(self, *names: str, networks: int = 1) -> None:
        prefix = f"mu{os.getpid()}-{next(_CLUSTERS)}"
        self._switch = f"{prefix}-switch"
        self._networks = networks
        self._wires: list[subprocess.Popen[str]] = []
        self.hosts = [Host(number, name, f"{prefix}-{name}") for number, name in enumerate(names, start=1)]

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def build(self) -> None:
        ip("netns", "add", self._switch)
        for network in range(self._networks):
            ip("-n", self._switch, "link", "add", f"br{network}", "type", "bridge")
            ip("-n", self._switch, "link", "set", f"br{network}", "up")
        for host in self.hosts:
            ip("netns", "add", host.namespace)
            ip("-n", host.namespace, "link", "set", "lo", "up")
            for network in range(self._networks):
                self._plug(host, network)

    def _plug(self, host: Host, network: int) -> None:
        inside, outside = f"eth{network}", f"port{host.number}-{network}"
        pair = ["link", "add", outside, "type", "veth", "peer", "name", inside, "netns", host.namespace]
        ip("-n", self._switch, *pair)
        ip("-n", self._switch, "link", "set", outside, "master", f"br{network}", "up")
        self._address(host, network, inside)

    def _address(self, host: Host, network: int, inside: str) -> None:
        four, six = host.address(4, network), host.address(6, network)
        ip("-n", host.namespace, "address", "add", f"{four}/24", "dev", inside)
        ip("-n", host.namespace, "-6", "address", "add", f"{six}/64", "dev", inside, "nodad")
        ip("-n", host.namespace, "link", "set", inside, "up")

    def unplug(self, name: str) -> None:
        """Cuts a host off every network; nobody is notified, as when a switch fails behind another."""
        for network in range(self._networks):
            ip("-n", self._switch, "link", "set", f"port{self[name].number}-{network}", "nomaster")

    def plug_in(self, name: str) -> None:
        """Joins it to the networks again."""
        for network in range(self._networks):
            port = f"port{self[name].number}-{network}"
            ip("-n", self._switch, "link", "set", port, "master", f"br{network}")

    def wear_out(self, name: str, loss: float, delay_s: float) -> subprocess.Popen[str]:
        """Has a host's wire to the first network lose, delay, double and swap frames: see ``lossy``.

        Returns:
            The wire, which says what it carried when its input ends.
        """
        host = self[name]
        outside = f"lossy{host.number}"
        ip("-n", self._switch, "link", "del", f"port{host.number}-0")
        wire = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.end_to_end.lossy", host.namespace, "eth0"),
                *(self._switch, outside, str(loss), str(delay_s), str(host.number)),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._wires.append(wire)
        assert wire.stdout is not None and wire.stdout.readline() == "ready\n"
        ip("-n", self._switch, "link", "set", outside, "master", "br0", "up")
        self._address(host, 0, "eth0")
        return wire

    def cut_one_way(self, name: str, other: str) -> None:
        """Loses all that a host sends to another; what that one sends still arrives."""
        nobody = "02:00:00:00:00:01"
        to = [self[other].address(), "lladdr", nobody, "dev", "eth0", "nud", "permanent"]
        ip("-n", self[name].namespace, "neighbour", "replace", *to)

    def heal(self, name: str, other: str) -> None:
        """Ends :meth:`cut_one_way`."""
        ip("-n", self[name].namespace, "neighbour", "del", self[other].address(), "dev", "eth0")

    def remove(self) -> None:
        for host in self.hosts:
            host.stop()
        for wire in self._wires:
            wire.kill()
            wire.communicate()
        for namespace in [*(host.namespace for host in self.hosts), self._switch]:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


@contextlib.contextmanager
def cluster(*names: str, networks: int = 1) -> Iterator[Cluster]:
    """Makes hosts of these names; takes them away in any case."""
    made = Cluster(*names, networks=networks)
    try:
        made.build()
        yield made
    finally:
        made.remove()


def python(*arguments: str) -> tuple[str, ...]:
    """A Python program with warnings as errors."""
    return (sys.executable, "-W", "error", *arguments)
