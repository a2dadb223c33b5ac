"""The launch names who failed first; all ways to fail on all ranks, twice each, are system tests."""

from __future__ import annotations

import pytest

from muster.bench import blame
from muster.bench.blame import WAYS, judge

SAID = """\
muster: worker 1 failed first: ValueError: a planned failure
muster: worker 1 (pid 7 on host) exited with code 1; the end of device/worker_1.log:
    ValueError: a planned failure
muster: worker 0 exited with code 1 because of that: MembershipChanged: Generation 1 is over.
muster: worker 2 was ended by SIGTERM, asked to end by this launcher
"""


@pytest.mark.parametrize(
    ("rank", "code", "said", "fault"),
    [
        (1, 1, SAID, ""),
        (1, 2, SAID, "ended with 2 instead of 1"),
        (0, 1, SAID, "worker 0 is not the one"),
        (1, 1, SAID.replace("    ValueError", "    PeerLostError"), "shown as the cause"),
        (1, 1, SAID.replace("ValueError: a", "ValueError: an un"), "is not shown"),
        (1, 1, SAID.rpartition("muster: worker 2")[0], "there are 1 lines for 2 others"),
        (1, 1, "", "worker 1 is not the one"),
    ],
)
def test_a_wrong_blame_is_found(rank: int, code: int, said: str, fault: str) -> None:
    found = judge(WAYS["raise"], rank, 3, code, said)
    assert fault in found and bool(fault) == bool(found)


@pytest.mark.timeout(120)
def test_the_worker_that_raises_is_blamed() -> None:
    assert blame.launch("raise", 1, workers=3, step=5) == ""


@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_way_to_fail_on_each_rank_is_blamed_right(way: str, rank: int) -> None:
    assert [blame.launch(way, rank, workers=3, step=5 + n) for n in range(2)] == ["", ""]
