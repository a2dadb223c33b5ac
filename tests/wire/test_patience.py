"""While nobody leads nobody draws a conclusion from silence: the sums of waits, over all legal settings."""

from __future__ import annotations

import pytest

from muster.scheduler.config import load_settings
from muster.scheduler.etcd.leadership import LEASE_S, RENEW_S
from muster.wire import patience
from muster.wire.settings import client_options
from muster.wire.variables import MAX_SCHEDULERS
from muster.worker.session.events import Timing

LEGAL_S = [
    0.5,
    0.51,
    0.75,
    *(1 + number / 8 for number in range(400)),
    60,
    100,
    300,
    600,
    1000,
    1800,
    3599,
    3600,
]
ADDRESSES = range(2, MAX_SCHEDULERS + 1)
ETCD = {"MS_WORKER_NUM": "2", "MS_RECOVERY_PATH": "etcd://a,b,c/muster"}


def detection_s(node_timeout_s: float) -> float:
    """How long after a scheduler has stopped its workers leave it, at the latest."""
    return patience.PING_AFTER_S + patience.ping_answer_s(node_timeout_s)


@pytest.mark.parametrize("schedulers", ADDRESSES)
def test_a_worker_leaves_a_leader_that_hangs_and_finds_the_next_before_anybody_is_given_up(
    schedulers: int,
) -> None:
    for node_timeout_s in LEGAL_S:
        core = load_settings(ETCD | {"MS_NODE_TIMEOUT": str(node_timeout_s)}).core()
        assert core.recovered_timeout_s is not None
        patience_s = max(core.recovered_timeout_s, core.node_timeout_s)
        verdict_s = core.node_timeout_s + patience.verdict_margin_s(node_timeout_s)
        reconnect_s = (schedulers - 1) * patience.TRY_S + 1.5 * patience.RETRY_LAST_S
        away_s = detection_s(node_timeout_s) + reconnect_s
        assert away_s < LEASE_S - RENEW_S + patience_s, node_timeout_s
        assert away_s < verdict_s, node_timeout_s
        assert patience_s + 1.0 < verdict_s, node_timeout_s  # the dead are buried, and their group knows
        assert reconnect_s < patience_s, node_timeout_s


def test_the_waits_are_those_that_are_in_force() -> None:
    assert Timing().retry_first_s < patience.RETRY_LAST_S
    for node_timeout_s in LEGAL_S:
        options = dict(client_options(node_timeout_s, schedulers=2))
        found_s = (options["grpc.keepalive_time_ms"] + options["grpc.http2.ping_timeout_ms"]) / 1000
        assert found_s == pytest.approx(detection_s(node_timeout_s), abs=0.002)


def test_one_scheduler_is_waited_for_as_ever() -> None:
    core = load_settings({"MS_WORKER_NUM": "2"}).core()
    assert core.recovered_timeout_s is None
    assert dict(client_options(5.0))["grpc.keepalive_time_ms"] == 5000
