"""Addresses: names, families, loopback, and why a bind fails."""

from __future__ import annotations

import socket

import pytest

from muster.scheduler.config import load_settings
from muster.scheduler.errors import BindError, SchedulerSettingsError
from muster.scheduler.serve import listen
from muster.scheduler.serve.credentials import check_may_listen


def test_resolving() -> None:
    assert listen.resolve(["127.0.0.1"]) == ["127.0.0.1"]
    assert listen.resolve(["::1"]) == ["::1"]
    assert "127.0.0.1" in listen.resolve(["localhost"])
    with pytest.raises(
        SchedulerSettingsError, match=r"MS_SCHED_HOST 'no-such-host\.invalid' cannot be resolved"
    ):
        listen.resolve(["no-such-host.invalid"])
    with pytest.raises(SchedulerSettingsError, match="cannot be resolved"):
        listen.resolve(["a" * 70 + ".example"])


def test_a_taken_port_a_foreign_address_and_a_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BindError, match=f"already listens on 127.0.0.1:{port}"):
            listen.usable(["127.0.0.1"], port)
    with pytest.raises(BindError, match=r"None of this machine's interfaces has the address 192\.0\.2\.1"):
        listen.usable(["192.0.2.1"], 0)
    assert listen.usable(["192.0.2.1", "127.0.0.1"], 0) == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("addresses", "tls", "consent", "outcome"),
    [
        (["127.0.0.1", "::1"], False, "0", False),
        (["127.0.0.1"], False, "1", False),
        (["0.0.0.0"], True, "0", False),
        (["0.0.0.0"], False, "1", True),
        (["127.0.0.1", "10.0.0.1"], False, "1", True),
        (["0.0.0.0"], False, "0", None),
        (["127.0.0.1", "10.0.0.1"], False, "0", None),
    ],
)
def test_plaintext_stays_on_loopback(
    addresses: list[str], tls: bool, consent: str, outcome: bool | None
) -> None:
    settings = load_settings({"MS_WORKER_NUM": "1", "MS_ALLOW_INSECURE": consent})
    if outcome is None:
        with pytest.raises(SchedulerSettingsError, match="loopback only"):
            check_may_listen(settings, addresses, tls=tls)
    else:
        assert check_may_listen(settings, addresses, tls=tls) is outcome
