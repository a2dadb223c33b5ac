"""Hosts whose wires lose, delay, double and swap packets: training is slower and right, and all stay in."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from muster.certs.pki.identity import Identity
from tests.end_to_end.hosts import PORT, can_make_namespaces, cluster, python
from tests.scheduler.processes import Pki

WAIT_S = 120.0
LOSS, DELAY_S = 0.02, 0.005
STEPS = 20
PROGRAM = """
import numpy, muster
with muster.init() as session:
    for step in range(1, STEPS + 1):
        for size in (1, 1000, 100_000):
            sent = numpy.arange(size, dtype="float64") + step + session.rank
            expected = session.world_size * (numpy.arange(size) + step) + sum(range(session.world_size))
            assert (muster.all_reduce(sent) == expected).all(), (step, size)
        session.report(samples=1)
    print("right", session.generation, flush=True)
"""

pytestmark = [
    pytest.mark.netns,
    pytest.mark.system,
    pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces cannot be made here"),
    pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="there is no /dev/net/tun"),
    pytest.mark.timeout(200, method="signal"),
]


def test_a_wire_that_loses_delays_and_swaps_costs_time_alone(tmp_path: Path) -> None:
    """Asset: membership and gradients; position: the network. No sum is wrong, no generation ends."""
    pki = Pki.make(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM.replace("STEPS", str(STEPS)))
    with cluster("control", "alpha", "beta", "gamma") as net:
        wires = [net.wear_out(name, LOSS, DELAY_S) for name in ("alpha", "beta", "gamma")]
        control = net["control"].address()
        pki.issue("server", Identity("default", "scheduler"), (control,))
        env = {"MS_WORKER_NUM": "3", "MS_WORKER_MIN": "2", "MS_SCHED_HOST": control, "MS_NODE_TIMEOUT": "5"}
        env |= {"MS_SCHED_PORT": str(PORT), **pki.env()}
        log = tmp_path / "scheduler.log"
        scheduler = net["control"].start(log, *python("-m", "scheduler"), **env, MS_ROLE="MS_SCHED")
        workers = [
            net[name].start(
                tmp_path / f"{name}.log", *python("program.py"), **env, MS_ROLE="MS_WORKER", MS_NODE_ID=str(i)
            )
            for i, name in enumerate(("alpha", "beta", "gamma"))
        ]
        until = time.monotonic() + WAIT_S
        codes = [each.wait(max(0.1, until - time.monotonic())) for each in (*workers, scheduler)]
        said = {path.name: path.read_text() for path in tmp_path.glob("*.log")}
        assert codes == [0, 0, 0, 0], said
        assert all("right 1\n" in said[f"{name}.log"] for name in ("alpha", "beta", "gamma")), said
        assert "Generation 2" not in said["scheduler.log"] and "Traceback" not in said["scheduler.log"]
        for wire in wires:
            told = wire.communicate()[0].replace(",", "").split()
            assert int(told[1]) > 300 and int(told[3]) > int(told[1]) * LOSS / 2, told
