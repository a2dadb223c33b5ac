"""Floods of failures become few lines, and none is forgotten in the counts."""

from __future__ import annotations

from muster.scheduler.audit.grpc_trace import HUNG_UP, INTERVAL_S, MAX_HOSTS, Failure, Thinner


def failure(host: str = "10.0.0.9", reason: str = "expired", port: int = 1) -> Failure:
    return Failure(reason, f"{host}:{port}", f"{reason} {host}:{port}")


def test_the_first_of_an_address_is_told_at_once_and_the_rest_as_a_count_once_in_an_interval() -> None:
    thinner = Thinner()
    assert thinner.add(failure(), 100.0) == [failure()]
    for port in range(214):
        assert thinner.add(failure(reason="no_tls" if port < 200 else "expired", port=port), 101.0) == []
    assert thinner.add(failure("10.0.0.10"), 101.0) == [failure("10.0.0.10")]
    assert thinner.next_s() == 100.0 + INTERVAL_S
    text = "TLS handshakes failed: 214 more from 10.0.0.9 within 10 s (200 no_tls, 14 expired)."
    assert thinner.add(failure(), 111.0) == [Failure("no_tls", "10.0.0.9", text, 214)]


def test_a_single_one_is_told_in_full() -> None:
    thinner = Thinner()
    thinner.add(failure(), 100.0)
    thinner.add(failure(port=2, reason="no_tls"), 100.0)
    assert list(thinner.due(200.0)) == [failure(port=2, reason="no_tls")]
    assert thinner.next_s() is None


def test_who_just_hangs_up_takes_no_line_from_the_others() -> None:
    thinner = Thinner()
    assert thinner.add(failure(reason=HUNG_UP), 100.0) == [failure(reason=HUNG_UP)]
    assert thinner.add(failure(), 100.0) == [failure()]


def test_only_so_many_addresses_are_remembered() -> None:
    thinner = Thinner()
    told = [thinner.add(failure(f"10.0.{i // 256}.{i % 256}"), 100.0) for i in range(10 * MAX_HOSTS)]
    assert sum(map(len, told)) == MAX_HOSTS + 1  # all others count as one address
    [line] = thinner.due(float("inf"))
    assert line.count == 9 * MAX_HOSTS - 1
    assert f"{9 * MAX_HOSTS - 1} more from other addresses" in line.text
