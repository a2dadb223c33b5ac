"""What is read of a host's NUMA nodes, GPUs and network cards, from a made-up sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.launch.hardware import parse_list, read_hardware
from muster.launch.placement import PciPlace

GPU = ("pci0000:80", "0000:80:01.0", "0000:81:00.0")


def card(root: Path, place: tuple[str, ...], numa_node: str) -> Path:
    folder = root.joinpath("sys/devices", *place)
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(numa_node + "\n")
    (root / "sys/bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (root / "sys/bus/pci/devices" / place[-1]).symlink_to(folder)
    return folder


def of_class(root: Path, kind: str, name: str, device: Path) -> Path:
    folder = root / "sys/class" / kind / name
    folder.mkdir(parents=True)
    (folder / "device").symlink_to(device)
    return folder


@pytest.fixture
def host(tmp_path: Path) -> Path:
    for number, cores in enumerate(("0-3,8-9", "4-7", "")):  # the third has memory alone
        folder = tmp_path / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    card(tmp_path, GPU, "1")
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        device = card(tmp_path, (*GPU[:2], f"0000:82:00.{name[-1]}"), "1")
        port = of_class(tmp_path, "infiniband", name, device) / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
    for name, state in (("eth0", "up"), ("eth1", "down")):
        place = ("pci0000:00", f"0000:00:05.{name[-1]}")
        of_class(tmp_path, "net", name, card(tmp_path, place, "-1")).joinpath("operstate").write_text(state)
    (tmp_path / "sys/class/net/lo").mkdir()
    (tmp_path / "sys/class/net/lo/operstate").write_text("up")  # no card
    return tmp_path


def test_what_lies_where_is_read(host: Path) -> None:
    found = read_hardware(["00000000:81:00.0", "0000:99:00.0"], host)  # the driver writes eight digits
    assert found.nodes == {0: (0, 1, 2, 3, 8, 9), 1: (4, 5, 6, 7)}
    assert found.gpus == {"00000000:81:00.0": PciPlace(1, GPU)}
    assert found.adapters == {"mlx5_0": PciPlace(1, ("pci0000:80", "0000:80:01.0", "0000:82:00.0"))}
    assert found.interfaces == {"eth0": PciPlace(-1, ("pci0000:00", "0000:00:05.0"))}


def test_a_host_that_shows_nothing_has_nothing(tmp_path: Path) -> None:
    found = read_hardware(["0000:81:00.0"], tmp_path)
    assert (found.nodes, found.gpus, found.adapters, found.interfaces) == ({}, {}, {}, {})
    assert found.memory == frozenset()


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3,8", (0, 1, 2, 3, 8)), ("5", (5,)), ("", ()), ("0-x", ()), ("-1", ()), ("1-", (1,))],
)
def test_the_kernels_lists_of_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_list(text) == numbers
