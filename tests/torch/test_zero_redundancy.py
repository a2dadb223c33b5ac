"""What a copy has of torch's ZeroRedundancyOptimizer: this rank's state, and the numbers of all groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.torch.zero_redundancy import opened
from tests.torch.worlds import end_world


def test_the_optimizer_within_stands_for_it_and_its_numbers_come_back(tmp_path: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    try:
        net = torch.nn.Linear(2, 2)
        zero: Any = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.5)
        found = opened({"net": net, "optimizer": zero})
        assert list(found) == ["net", "optimizer", "optimizer.settings"]
        assert found["net"] is net
        assert found["optimizer"] is zero.optim
        kept = found["optimizer.settings"].state_dict()
        zero.param_groups[0]["lr"] = 0.1
        found["optimizer.settings"].load_state_dict(kept)
        assert zero.param_groups[0]["lr"] == 0.5
    finally:
        end_world()
