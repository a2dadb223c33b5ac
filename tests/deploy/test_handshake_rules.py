"""deploy/nftables/handshakes.nft: one address that opens connections without end holds up nobody else."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.deploy.test_deploy import DEPLOY
from tests.end_to_end.hosts import PORT, can_make_namespaces, cluster, python
from tests.waiting import wait_for

BURST, PER_SECOND = 250, 50
TRIES = 600
LISTEN = f"""
import socket, time
listener = socket.create_server(("::", {PORT}), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
print("ready", flush=True)
time.sleep(100)
"""
OPEN = """
import socket, sys, time, select
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
kind = socket.AF_INET6 if ":" in host else socket.AF_INET
began = time.monotonic()
sockets = [socket.socket(kind) for _ in range(count)]
for sock in sockets:
    sock.setblocking(False)
    sock.connect_ex((host, port))
time.sleep(0.3)  # before TCP tries again, after a second
print(len(select.select([], sockets, [], 0)[1]), time.monotonic() - began)
"""

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces cannot be made here"),
    pytest.mark.skipif(shutil.which("nft") is None, reason="nft is not installed"),
]


@pytest.mark.parametrize("family", [4, 6])
def test_one_address_gets_no_more_than_its_share(family: int, tmp_path: Path) -> None:
    rules = (DEPLOY / "nftables" / "handshakes.nft").read_text()
    assert f"scheduler_port = {PORT}\n" in rules
    with cluster("control", "loud", "calm") as net:
        for _ in range(2):  # it may be loaded again
            net["control"].firewall(rules)
        log = tmp_path / "listener.log"
        net["control"].start(log, *python("-c", LISTEN))
        wait_for(lambda: "ready" in log.read_text(), log.read_text)
        address = net["control"].address(family)

        def opened(host: str, count: int) -> tuple[int, float]:
            done = net[host].run(*python("-c", OPEN, address, str(PORT), str(count)))
            assert done.returncode == 0, done.stderr
            number, taken_s = done.stdout.split()
            return int(number), float(taken_s)

        began = time.monotonic()
        first, taken_s = opened("loud", TRIES)
        assert BURST <= first <= BURST + PER_SECOND * taken_s + 1
        second, _ = opened("loud", TRIES)
        assert first + second <= BURST + PER_SECOND * (time.monotonic() - began) + 1
        # A neighbour's IPv6 address is of the same /64 here, and shares what is left.
        if family == 4:
            assert opened("calm", 50)[0] == 50
