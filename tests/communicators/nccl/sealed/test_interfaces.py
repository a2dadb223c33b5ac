"""The interfaces that NCCL's settings choose."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.communicators.nccl.sealed.kit import BOTH_OK, meet, move, ranks

NAMES = [name for _, name in socket.if_nameindex()]


def devices(driver: Path, **env: str) -> list[str]:
    """Names of the devices with these settings; the reason, as one, where init fails."""
    with ranks(driver, env, init=False) as (rank,):
        answer = rank.ask("init")
        if answer != "ok":
            return [answer]
        words = rank.ask("devices").split()
        assert int(words[1]) == len(words) - 2
        return [word.split("/")[0] for word in words[2:]]


@pytest.mark.parametrize("choice", ["l", "=lo,eth9", "^eth,veth", "nothing,lo:4000"])
def test_the_choice_of_names_is_read_as_nccl_reads_it(driver: Path, choice: str) -> None:
    assert "lo" in devices(driver, NCCL_SOCKET_IFNAME=choice)


@pytest.mark.parametrize("choice", ["=l", "^lo", "^=lo"])
def test_what_is_not_chosen_is_not_used(driver: Path, choice: str) -> None:
    assert "lo" not in devices(driver, NCCL_SOCKET_IFNAME=choice)


def test_a_beginning_that_is_excluded_is_no_whole_name(driver: Path) -> None:
    assert "lo" in devices(driver, NCCL_SOCKET_IFNAME="^=l")


def test_where_nothing_fits_the_reason_names_the_choice(driver: Path) -> None:
    [answer] = devices(driver, NCCL_SOCKET_IFNAME="=absent0")
    assert answer.startswith("error 2 NCCL's network cannot begin: this host has no network interface"), (
        answer
    )
    assert "NCCL_SOCKET_IFNAME==absent0" in answer


def test_without_a_choice_loopback_is_the_last_resort(driver: Path) -> None:
    found = devices(driver, NCCL_SOCKET_IFNAME="")
    assert found
    assert found == ["lo"] or "lo" not in found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MS_NCCL_CONNECTIONS", "0"),
        ("MS_NCCL_CONNECTIONS", "17"),
        ("MS_NCCL_CONNECTIONS", "4x"),
        ("MS_NCCL_ACCEPT_TIMEOUT", "0"),
    ],
)
def test_a_setting_that_cannot_be_read_is_refused(driver: Path, name: str, value: str) -> None:
    [answer] = devices(driver, **{name: value})
    assert answer.startswith(f"error 5 NCCL's network cannot begin: {name}={value} is no whole number"), (
        answer
    )


def test_ipv6_carries_messages(driver: Path) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this host has no IPv6")
    six = {"NCCL_SOCKET_FAMILY": "AF_INET6"}
    with ranks(driver, six, six) as (receiver, sender):
        meet(receiver, sender)
        assert move(receiver, sender, 300_000, step=7, count=9) == BOTH_OK
        sender.kill()
        reason = receiver.reason()
        assert reason.startswith("NCCL's encrypted connection with [::1]:"), reason
