"""What is no rank of a group is refused by all communicators in the same words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from muster.communicators.membership import Membership, Peer
from muster.errors import ArrayError

PEERS = tuple(Peer(rank, f"w{rank}", rank, "h", "host", "") for rank in range(2))
MEMBERSHIP = Membership("job", 1, "world", 0, PEERS)


@pytest.mark.parametrize("rank", [2, -1, 1.0, "1", None])
def test_what_is_no_rank_is_refused(rank: Any) -> None:
    with pytest.raises(ArrayError, match=rf"root is {rank!r}; the group 'world' has ranks 0 to 1"):
        MEMBERSHIP.check_rank(rank, "root")


@pytest.mark.parametrize("rank", [0, np.int64(1)])
def test_whole_numbers_of_any_kind_are_ranks(rank: Any) -> None:
    MEMBERSHIP.check_rank(rank, "root")
