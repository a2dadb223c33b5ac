"""Which cores, memory and network cards a worker is given."""

from __future__ import annotations

import pytest

from muster.launch.placement import (
    HostHardware,
    PciPlace,
    Placement,
    near_cards,
    propose_cards,
    spread_over_cores,
    spread_over_nodes,
)

GPU_0 = PciPlace(0, ("pci0000:00", "0000:00:01.0", "0000:01:00.0"))
GPU_1 = PciPlace(1, ("pci0000:80", "0000:80:01.0", "0000:81:00.0"))
NEAR_0 = PciPlace(0, ("pci0000:00", "0000:00:01.0", "0000:02:00.0"))
SAME_ROOT_0 = PciPlace(0, ("pci0000:00", "0000:00:05.0", "0000:03:00.0"))
SAME_NODE_1 = PciPlace(1, ("pci0000:c0", "0000:c0:01.0", "0000:c1:00.0"))


def two_nodes(**changes: object) -> HostHardware:
    made = {"nodes": {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}, "memory": frozenset({0, 1})}
    return HostHardware(**{**made, "gpus": {"g0": GPU_0, "g1": GPU_1}, **changes})  # type: ignore[arg-type]


def test_cores_are_spread_without_overlap_while_there_are_enough() -> None:
    assert [each.cores for each in spread_over_cores(range(8), 3)] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert [each.cores for each in spread_over_cores((0, 1), 3)] == [(0,), (1,), (0,)]


def test_a_worker_gets_cores_and_memory_of_its_gpus_node() -> None:
    places, notes = spread_over_nodes(two_nodes(), range(8), ["g1", "g0", "g1"])
    assert places == (Placement((4, 5), 1), Placement((0, 1, 2, 3), 0), Placement((6, 7), 1))
    assert notes == ()


def test_workers_without_gpus_are_spread_over_the_nodes() -> None:
    places, notes = spread_over_nodes(two_nodes(), range(8), [""] * 4)
    assert [each.memory_node for each in places] == [0, 0, 1, 1]
    assert [each.cores for each in places] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert notes == ()


def test_only_cores_that_the_launch_may_use_are_given() -> None:
    places, notes = spread_over_nodes(two_nodes(), (2, 3), ["g0", "g1"])
    assert [each.cores for each in places] == [(2,), (3,)]
    assert notes == ()  # there is one node only: nobody is better placed elsewhere
    places, notes = spread_over_nodes(two_nodes(nodes={0: (0,), 1: (1,), 2: (2,)}), (0, 2), ["g0", "g1"])
    assert notes == ("--bind numa: GPU g1 of worker 1: no core of its NUMA node 1 may be used",)


def test_a_gpu_whose_node_is_not_known_is_named() -> None:
    _, notes = spread_over_nodes(two_nodes(), range(8), ["g0", "GPU-12ab"])
    assert notes == ("--bind numa: GPU GPU-12ab of worker 1: its NUMA node is not known",)


def test_memory_that_may_not_be_chosen_is_left_alone_and_said() -> None:
    places, notes = spread_over_nodes(two_nodes(memory=frozenset()), range(8), ["g0", "g1"])
    assert [each.memory_node for each in places] == [-1, -1]
    assert len(notes) == 1 and "set_mempolicy is refused" in notes[0]
    places, _ = spread_over_nodes(two_nodes(memory=frozenset({0})), range(8), ["g0", "g1"])
    assert [each.memory_node for each in places] == [0, -1]


def test_without_nodes_the_cores_are_spread_all_the_same() -> None:
    places, notes = spread_over_nodes(HostHardware(), range(4), ["", ""])
    assert [each.cores for each in places] == [(0, 1), (2, 3)]
    assert "cannot be read" in notes[0]


@pytest.mark.parametrize(
    ("cards", "near"),
    [
        ({"a": NEAR_0, "b": SAME_ROOT_0}, ("a",)),  # behind the same bridge, and not only at the same root
        ({"b": SAME_ROOT_0, "c": SAME_NODE_1}, ("b",)),
        ({"c": SAME_NODE_1}, ()),
        ({"d": PciPlace(0, ("pci0000:40", "0000:41:00.0"))}, ("d",)),  # no way in common, but the node
        ({}, ()),
    ],
)
def test_near_is_who_shares_most_of_the_way_then_the_node(
    cards: dict[str, PciPlace], near: tuple[str, ...]
) -> None:
    assert near_cards(cards, [GPU_0]) == near


def test_nccl_is_told_of_the_adapters_next_to_the_gpus_unless_the_user_has_said_which() -> None:
    hardware = two_nodes(adapters={"mlx5_0": NEAR_0, "mlx5_1": SAME_NODE_1, "mlx5_9": SAME_ROOT_0})
    env, notes = propose_cards(hardware, ["g0", "g1"], {})
    assert env == {"NCCL_IB_HCA": "=mlx5_0,mlx5_1"}
    assert "mlx5_0,mlx5_1" in notes[0]
    assert propose_cards(hardware, ["g0", "g1"], {"NCCL_IB_HCA": "mlx5_9"}) == ({}, ())


def test_adapters_that_are_all_near_need_no_word() -> None:
    hardware = two_nodes(adapters={"mlx5_0": NEAR_0, "mlx5_1": SAME_NODE_1})
    assert propose_cards(hardware, ["g0", "g1"], {}) == ({}, ())


def test_interfaces_are_named_and_not_set() -> None:
    hardware = two_nodes(interfaces={"eth0": SAME_ROOT_0, "eth1": NEAR_0})
    env, notes = propose_cards(hardware, ["g0"], {})
    assert env == {}
    assert "eth1" in notes[0] and "MS_INTERFACE" in notes[0]
    assert propose_cards(hardware, ["g0"], {"MS_INTERFACE": "eth0"}) == ({}, ())
