"""What collectives cost within a host, and between hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from muster.parallel.planning.costs import H100, H200, Hardware
from muster.parallel.planning.layouts import hosts_of
from muster.parallel.planning.planner import find_plan
from tests.parallel.planning.test_kept import gpt_graph

EIGHT = replace(H200, latency_s=0.0, network_latency_s=0.0)
LARGE = 1e9


def test_a_mesh_dimension_knows_the_hosts_edge() -> None:
    mesh = (8, 8)
    assert hosts_of((1,), mesh, 8) == 1
    assert hosts_of((0,), mesh, 8) == 8
    assert hosts_of((0, 1), mesh, 8) == 8
    assert hosts_of((1,), (4, 16), 8) == 2
    assert hosts_of((0,), (4, 4), 8) == 2
    assert hosts_of((0,), (8,), 8) == 1


def test_a_collective_is_as_slow_as_the_links_that_its_ranks_have() -> None:
    inside = EIGHT.along_s("all_gather", (1,), (8, 8), LARGE)
    between = EIGHT.along_s("all_gather", (0,), (8, 8), LARGE)
    everywhere = EIGHT.along_s("all_gather", (0, 1), (8, 8), LARGE)
    assert inside == pytest.approx(7 / 8 * LARGE / H200.bus_bytes_per_s)
    assert between == pytest.approx(7 / 8 * LARGE / 50e9)  # one rank of each host: one link
    assert everywhere == pytest.approx(63 / 64 * LARGE / 355e9)  # eight links are as fast as the bus
    slow = replace(EIGHT, network_bytes_per_s=10e9)
    assert slow.along_s("all_gather", (0, 1), (8, 8), LARGE) == pytest.approx(63 / 64 * LARGE / 80e9)
    assert slow.along_s("all_to_all", (0, 1), (8, 8), LARGE) == pytest.approx(7 / 8 * LARGE / 10e9)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_small_collective_waits_longer_the_more_hosts_there_are(kind: str) -> None:
    waits = [H100.along_s(kind, (0,), (ranks,), 1024.0) for ranks in (8, 16, 64, 512)]
    assert waits == sorted(waits)
    assert waits[0] < 1.1 * H100.latency_s
    assert waits[3] > 2 * waits[2] or kind == "all_reduce"  # around all hosts; sums go by trees
    assert waits[3] < 2 * waits[2] or kind != "all_reduce"


def test_a_layer_is_divided_within_a_host() -> None:
    """Activations travel in each layer, gradients once: the faster link is for the former."""
    graph = gpt_graph(16)
    machine = replace(H200, host_ranks=4, network_bytes_per_s=12.5e9, memory_bytes=20e9)
    plan = find_plan(graph, 16, machine=machine)
    activations = [
        each
        for each in plan.collectives
        if each.phase in ("forward", "backward") and each.nbytes > 1e6 and each.node.startswith("linear")
    ]
    assert "on 4 hosts" in str(plan)
    assert all(machine.hosts_along(each.dims, plan.mesh) == 1 for each in activations)


def test_the_same_step_takes_longer_on_more_hosts() -> None:
    graph = gpt_graph(16)
    seconds = {
        hosts: find_plan(
            graph, 16, machine=replace(H200, host_ranks=16 // hosts), mode="data_parallel"
        ).timeline
        for hosts in (1, 16)
    }
    assert seconds[16].gradients_s > 5 * seconds[1].gradients_s


def test_a_machine_of_an_older_measurement_has_hosts_of_eight() -> None:
    old = Hardware("old", flops_per_s=1e12)
    assert (old.host_ranks, old.network_bytes_per_s) == (8, 50e9)
