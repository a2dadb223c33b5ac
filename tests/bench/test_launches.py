"""What benchmarks start jobs with."""

from __future__ import annotations

import socket
from pathlib import Path

from muster.bench.launches import free_ports


def test_ports_are_free_differ_and_are_none_that_connections_get() -> None:
    lowest_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with socket.create_server(("127.0.0.1", free_ports()[0])) as taken:
        ports = free_ports(500)
        assert taken.getsockname()[1] not in ports
    assert len(set(ports)) == 500
    assert max(ports) < max(lowest_of_connections, 32_000)
    with socket.create_server(("127.0.0.1", ports[0])):
        pass
