"""What a host offers to workers."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from muster.errors import SettingsError
from muster.launch.command import cores, count_gpus, hold_port, local_names, offered_devices
from muster.worker.config import visible_devices


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    assert count_gpus(tmp_path) == 0
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert count_gpus(tmp_path) == 2


@pytest.mark.parametrize(
    ("visible", "option", "expected"),
    [
        (None, "all", ("0", "1", "2", "3")),
        ("2,3", "all", ("2", "3")),
        ("GPU-aa,GPU-bb", "all", ("GPU-aa", "GPU-bb")),
        ("", "all", ()),
        ("-1", "all", ()),
        ("NoDevFiles", "all", ()),
        ("2,-1,3", "all", ("2",)),
        ("2,,3", "all", ("2",)),
        ("02", "all", ("2",)),
        (None, "none", ()),
        (None, "1-2", ("1", "2")),
        ("2,3", "3", ("3",)),
    ],
)
def test_offered_devices(visible: str | None, option: str, expected: tuple[str, ...]) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert offered_devices(env, option, 4) == expected
    if visible is not None and option == "all":
        assert visible_devices(env) == expected  # what a worker makes of it


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(SettingsError, match="asks for 4, 5; this host offers 0, 1, 2, 3"):
        offered_devices({}, "3-5", 4)
    with pytest.raises(SettingsError, match="asks for 0; this host offers none"):
        offered_devices({}, "0", 0)
    with pytest.raises(SettingsError, match=r"CUDA_VISIBLE_DEVICES is '1,4'.*devices 0 to 3"):
        offered_devices({"CUDA_VISIBLE_DEVICES": "1,4"}, "all", 4)


@pytest.mark.parametrize("text", ["2,2", "2,02", "GPU-a,GPU-a"])
@pytest.mark.parametrize("gpus", [0, 4])
def test_a_device_named_twice_is_refused(text: str, gpus: int) -> None:
    with pytest.raises(SettingsError, match=r"CUDA_VISIBLE_DEVICES is .* twice"):
        offered_devices({"CUDA_VISIBLE_DEVICES": text}, "all", gpus)


def test_this_host_answers_to_its_own_names_only() -> None:
    names = local_names(["127.0.0.1", "192.0.2.7", "no-such-host.invalid", "a..b"])
    assert socket.gethostname() in names
    assert "127.0.0.1" in names
    assert "192.0.2.7" not in names
    assert not {"no-such-host.invalid", "a..b"} & names


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_that_is_held_is_given_to_nobody_but_a_server_that_asks_for_it(host: str) -> None:
    with hold_port(host) as held, socket.socket(held.family) as stranger:
        address = (host, held.getsockname()[1])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with pytest.raises(OSError, match="in use"):  # as the system does where it looks for a free port
            stranger.bind(address)
        with (
            socket.create_server(address, family=held.family) as server,
            socket.create_connection(address),
        ):
            server.accept()[0].close()


def test_cores_are_those_this_process_may_use() -> None:
    assert set(cores()) == os.sched_getaffinity(0)
