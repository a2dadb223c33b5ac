"""Derives the time-outs between workers and several schedulers from one another.

While no scheduler leads, nobody may draw conclusions from silence. A worker must find out that the leader
hangs, and reach the next leader, before two things happen: that leader takes the worker for dead, or the
worker gives up waiting for a verdict. Therefore these inequalities hold::

    detection + reconnect < a lease less a renewal + takeover_patience_s
    detection + reconnect < the scheduler's node time-out + verdict_margin_s
    takeover_patience_s   < the scheduler's node time-out + verdict_margin_s
    reconnect             < takeover_patience_s, however long nobody led

    detection = PING_AFTER_S + ping_answer_s
    reconnect = TRY_S for each scheduler but one + 1.5 * RETRY_LAST_S

All times are in seconds; ``node_timeout_s`` is MS_NODE_TIMEOUT. ``tests/wire/test_patience.py`` checks all of
the inequalities.
"""

from __future__ import annotations

PING_AFTER_S = 1.0
"""Seconds without data after which a connection is pinged."""

LEAST_ANSWER_S = 1.5
TRY_S = 1.0
"""How long one of several schedulers may take to answer before the next one is tried, in seconds."""

RETRY_LAST_S = 1.0
"""The longest pause between two reconnects, in seconds, before up to half of it is added at random."""

_LEAST_NODE_TIMEOUT_S = 5.0
_TAKEOVER_S = 1.5
_VERDICT_S = 2.0


def ping_answer_s(node_timeout_s: float) -> float:
    """Returns how many seconds one of several schedulers may take to answer a ping."""
    return max(LEAST_ANSWER_S, 0.3 * node_timeout_s)


def breaking_pause_s(node_timeout_s: float) -> float:
    """Returns the shortest pause of a scheduler, in seconds, after which a worker may leave it."""
    return 0.9 * ping_answer_s(node_timeout_s)


def takeover_patience_s(node_timeout_s: float) -> float:
    """Returns how many seconds the next leader waits for the previous leader's workers."""
    return max(node_timeout_s, _LEAST_NODE_TIMEOUT_S) + _TAKEOVER_S


def verdict_margin_s(node_timeout_s: float) -> float:
    """Returns how many seconds longer than MS_NODE_TIMEOUT a failed collective waits for the verdict."""
    return takeover_patience_s(node_timeout_s) - node_timeout_s + _VERDICT_S
