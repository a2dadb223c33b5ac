"""A rank with fewer batches is named by the others."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.launch.launching import place

SCRIPT = """
import numpy as np
import muster
session = muster.init()
for step in range(5 if session.rank == 1 else 8):
    muster.all_reduce(np.ones(4))
"""


def test_a_rank_with_fewer_batches_is_named(tmp_path: Path) -> None:
    with place(tmp_path) as here:
        script = here.script(SCRIPT)
        code, _, err = here.run("-n", "2", "--scheduler", command=(sys.executable, script), MS_BACKEND="tcp")
        assert code != 0, err
        last = here.log("0").splitlines()[-1]
        assert "rank 1 (node 1 on " in last, last
        assert "has finished, while this rank still calls all_reduce" in last
        assert "it had fewer batches" in last
