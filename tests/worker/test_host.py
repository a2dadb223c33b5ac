"""What a worker finds out about its machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from muster.errors import SettingsError
from muster.wire.messages import Device, Host
from muster.worker.config import Settings
from muster.worker.gpu_health.identity import GpuIdentity
from muster.worker.host import (
    DeviceChoice,
    bind_libraries,
    choose_device,
    describe_host,
    host_identity,
    node_identity,
    visible_gpu,
)

HOST = Host("id-1", "alpha", "10.0.0.1")


def settings(**changes: object) -> Settings:
    return Settings(worker_num=2, worker_min=2, **changes)  # type: ignore[arg-type]


def machine(root: Path, count: int) -> Path:
    """A file tree as of a machine with GPUs; minors in the reverse order of the buses."""
    (root / "dev").mkdir()
    (root / "dev" / "nvidiactl").touch()
    for minor in range(count):
        (root / "dev" / f"nvidia{minor}").touch()
        directory = root / "proc/driver/nvidia/gpus" / f"0000:{9 - minor}0:00.0"
        directory.mkdir(parents=True)
        facts = (
            f"Model: \t\t NVIDIA H200\nBus Location: \t 0000:{9 - minor}0:00.0\nDevice Minor: \t {minor}\n"
        )
        (directory / "information").write_text(facts)
    return root


def test_without_gpus_the_device_is_the_cpu(tmp_path: Path) -> None:
    assert choose_device(settings(), tmp_path) == DeviceChoice(Device("cpu", -1))
    assert choose_device(settings(local_index=3), tmp_path).device == Device("cpu", 3)
    assert choose_device(settings(device_id=2, local_index=3), tmp_path).device == Device("cpu", 2)


@pytest.mark.parametrize(
    ("changes", "ordinal", "index"),
    [
        ({"device_id": 2}, 2, 2),
        ({"local_index": 1}, 1, 1),
        ({"device_id": 3, "local_index": 1}, 3, 3),
        ({"visible_devices": ("2", "3"), "local_index": 1}, 1, 3),
        ({"visible_devices": ("3",)}, 0, 3),
        ({"visible_devices": ("3",), "local_index": 2}, 0, 3),
        ({}, -1, -1),
    ],
)
def test_devices_are_told_by_their_index_on_the_host(
    tmp_path: Path, changes: dict[str, object], ordinal: int, index: int
) -> None:
    choice = choose_device(settings(**changes), machine(tmp_path, 4))
    assert (choice.ordinal, choice.device.index, choice.device.kind) == (ordinal, index, "cuda")
    if index >= 0:
        assert choice.device.pci_bus_id == f"0000:{9 - index}0:00.0"
        assert choice.device.model == "NVIDIA H200"


def test_a_container_with_some_gpus_tells_those(tmp_path: Path) -> None:
    machine(tmp_path, 8)
    for minor in set(range(8)) - {3, 5}:
        (tmp_path / "dev" / f"nvidia{minor}").unlink()
    devices = [choose_device(settings(device_id=ordinal), tmp_path).device for ordinal in (0, 1)]
    assert [(device.index, device.pci_bus_id) for device in devices] == [
        (0, "0000:60:00.0"),
        (1, "0000:40:00.0"),
    ]


def test_a_gpu_is_named_by_where_it_sits_and_by_its_uuid(tmp_path: Path) -> None:
    uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"
    machine(tmp_path, 2)
    file = tmp_path / "proc/driver/nvidia/gpus/0000:80:00.0/information"
    file.write_text(f"{file.read_text()}GPU UUID: \t {uuid}\n")
    assert visible_gpu(settings(), 1, tmp_path) == GpuIdentity(1, "0000:80:00.0", uuid)
    assert visible_gpu(settings(), 0, tmp_path) == GpuIdentity(0, "0000:90:00.0")
    hidden = settings(visible_devices=("1", "GPU-x"))
    assert visible_gpu(hidden, 0, tmp_path) == GpuIdentity(1, "0000:80:00.0", uuid)
    assert visible_gpu(hidden, 1, tmp_path) == GpuIdentity(uuid="GPU-x")
    assert visible_gpu(settings(), 7, tmp_path) == GpuIdentity(7)


def test_hidden_gpus_are_not_used(tmp_path: Path) -> None:
    choice = choose_device(settings(visible_devices=()), machine(tmp_path, 2))
    assert (choice.device.kind, choice.visible_count) == ("cpu", 0)


@pytest.mark.parametrize("variable", ["device_id", "local_index"])
def test_a_device_that_is_not_there_is_refused(tmp_path: Path, variable: str) -> None:
    with pytest.raises(SettingsError, match="from 0 to 1, because 2 GPUs are visible; it is 2"):
        choose_device(settings(**{variable: 2}), machine(tmp_path, 2))


def test_the_hosts_identity_is_stable_and_says_nothing() -> None:
    assert host_identity() == host_identity()
    assert len(host_identity()) == 16
    assert socket.gethostname() not in host_identity()


@pytest.mark.parametrize("name", ["a..b", "x" * 64 + ".example"])
def test_a_name_that_no_host_can_have_is_refused_at_once(name: str) -> None:
    with pytest.raises(SettingsError, match=r"MS_SCHED_HOST must be .* 1 to 63") as caught:
        describe_host(settings(scheduler_hosts=(name,)))
    assert type(caught.value) is SettingsError  # the kind that is not tried again


def test_node_ids() -> None:
    assert node_identity(settings(node_id="7"), HOST, "ab12") == "7"
    by_index = node_identity(settings(local_index=3), HOST, "ab12")
    assert by_index.startswith("alpha-") and by_index.endswith("-3")
    assert node_identity(settings(), HOST, "ab12").endswith("-ab12")


def test_two_machines_with_one_name_have_different_node_ids() -> None:
    twin = Host("id-2", "alpha", "10.0.0.2")
    assert node_identity(settings(local_index=0), HOST, "") != node_identity(
        settings(local_index=0), twin, ""
    )


def test_the_address_is_the_one_on_the_way_to_the_scheduler() -> None:
    assert describe_host(settings(scheduler_hosts=("127.0.0.1",))).address == "127.0.0.1"
    assert describe_host(settings(worker_address="10.1.2.3")).address == "10.1.2.3"
    assert describe_host(settings(interface="lo")).address == "127.0.0.1"
    assert describe_host(settings(host_id="mine", topology="rack 4")).id == "mine"


def test_an_unknown_interface_is_refused_naming_those_there_are() -> None:
    with pytest.raises(SettingsError, match=r"MS_INTERFACE .*\blo\b.*'nosuch0'"):
        describe_host(settings(interface="nosuch0"))


def test_an_interface_may_be_named_by_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_host(settings(interface="127.0.0.0/8")).address == "127.0.0.1"
    assert describe_host(settings(interface="127.0.0.1/24")).address == "127.0.0.1"
    with pytest.raises(SettingsError, match=r"MS_INTERFACE .*a network.*\blo\b.*'255\.255\.255\.255/32'"):
        describe_host(settings(interface="255.255.255.255/32"))
    with pytest.raises(SettingsError, match=r"'10\.0\.0\.0/99', which is no network"):
        describe_host(settings(interface="10.0.0.0/99"))
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # as it was, at the end
        del os.environ[name]
    bind_libraries("127.0.0.0/8")
    assert (os.environ["NCCL_SOCKET_IFNAME"], os.environ["GLOO_SOCKET_IFNAME"]) == ("=lo", "lo")


def test_an_unknown_scheduler_is_refused_naming_it() -> None:
    with pytest.raises(SettingsError, match=r"is 'no\.such\.host\.invalid' \(--join, MS_SCHED_HOST\), and"):
        describe_host(settings(scheduler_hosts=("no.such.host.invalid",)))
