"""A schedule of torch's pipelines goes on after a step that was broken off in its middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.pipelining", reason="needs torch 2.5: pipelining")
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from muster.torch.pipeline_reset import reset_pipelines
from tests.torch.worlds import end_world


@pytest.fixture(scope="module", autouse=True)
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process is a world of one rank."""
    store: Path = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    end_world()


class StepBrokenOffError(Exception):
    """Says that a peer is gone."""


def test_the_next_step_is_that_of_a_schedule_that_nothing_broke_off() -> None:
    torch.manual_seed(0)
    net, rows = nn.Linear(4, 4), torch.randn(4, 4)
    breaks = [False, True]

    def loss_of(output: Any, target: Any) -> Any:
        if breaks and breaks.pop(0):
            raise StepBrokenOffError
        return (output - target).square().mean()

    def make() -> Any:
        piece = torch.zeros(2, 4)
        stage = PipelineStage(net, 0, 1, torch.device("cpu"), piece, piece.clone().requires_grad_())
        return Schedule1F1B(stage, 2, loss_fn=loss_of)

    def trained(schedule: Any) -> list[Any]:
        """The losses and gradients of a step."""
        net.zero_grad()
        losses: list[Any] = []
        schedule.step(rows, target=rows, losses=losses)
        return [*losses, *(each.grad.clone() for each in net.parameters())]

    schedule = make()
    with pytest.raises(StepBrokenOffError):
        schedule.step(rows, target=rows)
    assert reset_pipelines()
    for found, wanted in zip(trained(schedule), trained(make()), strict=True):
        torch.testing.assert_close(found, wanted)
