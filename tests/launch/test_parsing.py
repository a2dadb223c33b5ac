"""The words of the launcher's options."""

from __future__ import annotations

import pytest

from muster.errors import SettingsError
from muster.launch.parsing import (
    HostShare,
    parse_address,
    parse_addresses,
    parse_hostfile,
    parse_hosts,
    parse_numbers,
)


def test_hosts_with_and_without_counts_and_ipv6() -> None:
    assert parse_hosts("node1:8, node2,[fd00::1]:4,[::1]") == (
        HostShare("node1", 8),
        HostShare("node2", 1),
        HostShare("fd00::1", 4),
        HostShare("::1", 1),
    )


@pytest.mark.parametrize(
    "text", ["", "node1:", "node1:0", "node1:x", "fd00::1:8", ":8", "a:2,a:3", "a:" + "9" * 5000]
)
def test_wrong_hosts_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="-H"):
        parse_hosts(text)


def test_a_hostfile_may_have_comments_and_blank_lines() -> None:
    text = "# the cluster\nDEVICE1 slots=8   # eight GPUs\n\n192.168.0.1 slots=4\nlone\n"
    assert parse_hostfile(text, "hosts") == (
        HostShare("DEVICE1", 8),
        HostShare("192.168.0.1", 4),
        HostShare("lone", 1),
    )


@pytest.mark.parametrize("line", ["b slots", "b slots=", "b slots=0", "b gpus=8", "b slots=8 extra", "b 8"])
def test_a_wrong_line_is_named_by_number(line: str) -> None:
    with pytest.raises(SettingsError, match=r"hosts, line 3"):
        parse_hostfile(f"# c\na slots=1\n{line}\n", "hosts")


def test_a_hostfile_without_hosts_is_refused() -> None:
    with pytest.raises(SettingsError, match="names no host"):
        parse_hostfile("# nothing\n", "hosts")


def test_numbers() -> None:
    assert parse_numbers("4-7,9", "--devices") == (4, 5, 6, 7, 9)


@pytest.mark.parametrize("text", ["", "7-4", "1,1", "-1", "a", "1-", "5000", "1" * 5000])
def test_wrong_numbers_are_refused_by_name(text: str) -> None:
    with pytest.raises(SettingsError, match="--devices"):
        parse_numbers(text, "--devices")


def test_addresses() -> None:
    assert parse_address("node1:7000") == ("node1", "7000")
    assert parse_address("node1") == ("node1", "6667")
    assert parse_address("[::1]:7000") == ("::1", "7000")
    assert parse_address("[::1]") == ("::1", "6667")


@pytest.mark.parametrize("text", ["", ":7000", "node1:0", "node1:65536", "node1:x", "::1:7000"])
def test_wrong_addresses_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--join"):
        parse_address(text)


def test_several_schedulers_have_one_port() -> None:
    assert parse_addresses("a:7000,b:7000, [::1]:7000") == ("a,b,::1", "7000")
    assert parse_addresses("a") == ("a", "6667")
    with pytest.raises(SettingsError, match="same port"):
        parse_addresses("a:7000,b:7001")
