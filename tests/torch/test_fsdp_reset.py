"""A broken step leaves nothing in FSDP2's modules; the real thing with lost ranks: tests/end_to_end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.fsdp", reason="needs torch 2.6: fully_shard's public place")
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

if not hasattr(fsdp, "fully_shard"):
    pytest.skip("needs torch 2.6: fully_shard's public place", allow_module_level=True)

from muster.torch.fsdp_reset import reset_fsdp
from tests.torch.worlds import end_world


@pytest.fixture(scope="module", autouse=True)
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process is a world of one rank."""
    store: Path = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    end_world()


class Breaks(nn.Module):  # type: ignore[misc]
    """A layer that raises in its forward or its backward pass, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.where = ""

    def forward(self, x: Any) -> Any:
        y = self.inner(x)
        if self.where == "forward":
            raise ConnectionError("a rank is lost")
        if self.where == "backward":
            y.register_hook(self._raise)
        return y

    def _raise(self, _gradient: Any) -> None:
        raise ConnectionError("a rank is lost")


def _trained(where: str) -> list[float]:
    """The losses of three steps; before the second one breaks where it is told to."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), Breaks(), nn.Linear(4, 4)]
    model = nn.Sequential(*layers)
    for each in (*layers, model):
        fsdp.fully_shard(each, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        if step == 1 and where:
            layers[1].where = where
            with pytest.raises(ConnectionError):
                model(torch.full((2, 4), 9.0)).square().sum().backward()
            layers[1].where = ""
            assert all(reset_fsdp(each._get_fsdp_state()) for each in [*layers, model])
            optimizer.zero_grad()
        loss = model(torch.full((2, 4), step + 1.0)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_step_after_a_broken_one_is_that_of_a_run_without_it(
    where: str, by_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_state").FSDPState
    if by_hand and hasattr(state, "_reset_iter_state"):
        monkeypatch.delattr(state, "_reset_iter_state")
    assert _trained(where) == _trained("")


def test_an_fsdp_of_another_shape_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    state = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_state").FSDPState
    if hasattr(state, "_reset_iter_state"):
        monkeypatch.delattr(state, "_reset_iter_state")
    model = nn.Linear(4, 4)
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model(torch.ones(2, 4))
    state = model._get_fsdp_state()
    (group,) = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    del group._post_reduce_event
    assert reset_fsdp(model._get_fsdp_state()) is False
