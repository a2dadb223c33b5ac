"""Typed reads of the environment, for both sides."""

from __future__ import annotations

import pytest

from muster.wire.settings import Environment, canonical_address, is_loopback, show_address


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::1%lo", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
        ("0.0.0.0", False),
        ("::", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_an_ipv6_address_has_one_form() -> None:
    assert canonical_address("FD77:0::1") == "fd77::1"
    assert canonical_address("node1") == "node1"


def test_addresses_are_shown_for_people() -> None:
    assert show_address("10.0.0.1", 5) == "10.0.0.1:5"
    assert show_address("::1", 5) == "[::1]:5"


def test_a_wrong_value_is_the_callers_error() -> None:
    with pytest.raises(OSError, match="MS_SPARES must be a whole number from 0 to 1024; it is '1025'"):
        Environment({"MS_SPARES": "1025"}, OSError).integer("MS_SPARES")


def test_a_variable_that_is_not_in_the_table_cannot_be_read() -> None:
    with pytest.raises(LookupError, match="MS_OTHER is not in the table"):
        Environment({"MS_OTHER": "1"}, OSError).flag("MS_OTHER")
