"""What is added to NCCL's own words when an encrypted connection has ended."""

from __future__ import annotations

import pytest

from muster.communicators.membership import Membership, Peer
from muster.communicators.nccl.ended_connection import why_ended

ADDRESSES = ["10.0.0.1:4000", "10.0.0.2:4000", "10.0.0.22:4000", "[fd00::2]:4000", ""]
PEERS = tuple(Peer(rank, f"w{rank}", 1, f"h{rank}", f"host{rank}", a) for rank, a in enumerate(ADDRESSES))
MEMBERSHIP = Membership("job", 3, "world", 0, PEERS)


class Plugin:
    def __init__(self, reason: str) -> None:
        self._reason = reason

    def use_secret(self, generation: int, secret: bytes) -> None:
        return

    def reason(self) -> str:
        return self._reason

    def forget_reason(self) -> None:
        self._reason = ""


@pytest.mark.parametrize(
    ("reason", "added"),
    [
        ("", ""),
        ("no memory", "; the plug-in that encrypts says: no memory."),
        (
            "The peer 10.0.0.2:51000 proved another secret. Look there.",
            "; the plug-in that encrypts says: The peer 10.0.0.2:51000 proved another secret. Look there."
            " That address is of rank 1 (w1 on host1).",
        ),
        (
            "[fd00::2]:9 closed",
            "; the plug-in that encrypts says: [fd00::2]:9 closed. That address is of rank 3 (w3 on host3).",
        ),
        ("110.0.0.2:9 closed", "; the plug-in that encrypts says: 110.0.0.2:9 closed."),
        ("10.0.0.1:9 (here) failed", "; the plug-in that encrypts says: 10.0.0.1:9 (here) failed."),
    ],
)
def test_the_plug_ins_words_and_who_is_at_that_address(reason: str, added: str) -> None:
    assert why_ended(Plugin(reason), MEMBERSHIP) == added


def test_without_a_plug_in_nothing_is_added() -> None:
    assert why_ended(None, MEMBERSHIP) == ""
