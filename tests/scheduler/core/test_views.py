"""What of a job is shown besides its members' places."""

from __future__ import annotations

import pytest

from muster.scheduler.core.views import WorkerView, nccl_traffic
from muster.wire import messages
from tests.scheduler.fakes import candidate

GPU = messages.Device("cuda", 0)


def worker(backend: str = "nccl", device: messages.Device = GPU, **facts: str) -> WorkerView:
    made = candidate(backend=backend, device=device, facts=tuple(sorted(facts.items())))
    return WorkerView(made, "member", 0, 0, 0.0, 0, 0.0)


@pytest.mark.parametrize(
    ("workers", "traffic"),
    [
        ([], ""),
        ([worker("tcp", messages.Device())], ""),
        ([worker("tcp", MS_NCCL_ENCRYPTION="require")], ""),
        ([worker(nccl="2.28.9")], "plain"),
        ([worker("torch")], "plain"),
        ([worker("torch", messages.Device())], ""),
        ([worker("torch", messages.Device(), nccl_traffic="sealed")], "sealed"),
        ([worker(nccl="2.28.9", nccl_traffic="sealed")] * 2, "sealed"),
        ([worker(nccl="2.28.9", nccl_traffic="plain")], "plain"),
        ([worker(nccl="2.28.9", nccl_traffic="<b>")], "plain"),
    ],
)
def test_what_nccl_s_traffic_is_between_hosts(workers: list[WorkerView], traffic: str) -> None:
    assert nccl_traffic(workers) == traffic
