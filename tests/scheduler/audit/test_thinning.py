"""Floods of failures become few lines, and none is forgotten in the counts."""

from __future__ import annotations

from muster.scheduler.audit.grpc_trace import INTERVAL_S, MAX_HOSTS, Failure, Line, Thinner


def failure(host: str = "10.0.0.9", reason: str = "expired", port: int = 1) -> Failure:
    return Failure(reason, f"{host}:{port}", f"{reason} {host}:{port}")


def test_the_first_is_told_at_once_and_the_next_of_that_address_later() -> None:
    thinner = Thinner()
    assert thinner.add(failure(), 100.0) == Line("expired", "10.0.0.9:1", "expired 10.0.0.9:1")
    assert thinner.add(failure(), 100.0) is None
    assert thinner.add(failure("10.0.0.10"), 101.0) is not None
    assert list(thinner.due(100.0 + INTERVAL_S - 0.1)) == []


def test_the_rest_is_told_as_a_count_once_in_an_interval() -> None:
    thinner = Thinner()
    thinner.add(failure(), 100.0)
    for port in range(214):
        thinner.add(failure(reason="no_tls" if port < 200 else "expired", port=port), 101.0)
    assert thinner.next_s() == 100.0 + INTERVAL_S
    [line] = thinner.due(100.0 + INTERVAL_S)
    assert line == Line(
        "no_tls",
        "10.0.0.9",
        "TLS handshakes failed: 214 more from 10.0.0.9 within 10 s (200 no_tls, 14 expired).",
        214,
    )
    assert thinner.add(failure(), 111.0) is None  # its next interval has begun
    assert list(thinner.due(111.0)) == []


def test_a_single_one_is_told_in_full() -> None:
    thinner = Thinner()
    thinner.add(failure(), 100.0)
    thinner.add(failure(port=2, reason="no_tls"), 100.0)
    assert list(thinner.due(200.0)) == [Line("no_tls", "10.0.0.9:2", "no_tls 10.0.0.9:2")]


def test_a_quiet_interval_makes_an_address_new_again() -> None:
    thinner = Thinner()
    thinner.add(failure(), 100.0)
    assert list(thinner.due(100.0 + INTERVAL_S)) == []
    assert thinner.add(failure(), 111.0) is not None


def test_only_so_many_addresses_are_remembered() -> None:
    thinner = Thinner()
    told = [thinner.add(failure(f"10.0.{i // 256}.{i % 256}"), 100.0) for i in range(10 * MAX_HOSTS)]
    assert sum(line is not None for line in told) == MAX_HOSTS + 1  # all others count as one address
    [line] = thinner.due(200.0)
    assert line.count == 9 * MAX_HOSTS - 1
    assert f"{9 * MAX_HOSTS - 1} more from other addresses" in line.text


def test_at_the_end_nothing_stays_untold() -> None:
    thinner = Thinner()
    for port in range(5):
        thinner.add(failure(port=port), 100.0)
    assert [line.count for line in thinner.all()] == [4]
    assert thinner.next_s() is None
