"""Models of the suite in mode "hybrid", some of whose parameters every rank keeps for itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import muster
from tests.parallel.oracle import EPSILON, close, part_of
from tests.parallel.ranks import RankCommunicator, run_ranks
from tests.parallel.suite import SUITE

torch.set_num_threads(1)
RANKS, STEPS = 2, 2
OWN = {
    "vit_pooled": "head.",
    "mlp_mixer": "across.",
    "conv_next": "channels.",
    "dlrm_bags": "bottom.",
    "causal_waves": "filters.1.",
}
"""The models, and what the names of their layerwise parameters begin with; losses are means over samples."""


def one_process(net: Any, begins: str, batches: list[Any]) -> Any:
    """A copy of the module for each rank, of whose parameters all but the layerwise ones stay equal."""
    copies = [_of_rank(net, begins, rank) for rank in range(RANKS)]
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2, eps=EPSILON) for each in copies]
    losses = []
    for batch in batches:
        own = [each(*(x.chunk(RANKS)[rank] for x in batch)) for rank, each in enumerate(copies)]
        for each, loss in zip(copies, own, strict=True):
            each.zero_grad()
            loss.backward()
        for group in zip(*(each.named_parameters() for each in copies), strict=True):
            if not group[0][0].startswith(begins):
                mean = sum(p.grad for _, p in group) / RANKS
                for _, p in group:
                    p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(sum(loss.detach() for loss in own) / RANKS)
    return losses, [dict(each.named_parameters()) for each in copies]


def _of_rank(net: Any, begins: str, rank: int) -> Any:
    own = copy.deepcopy(net)
    marked = [p for name, p in own.named_parameters() if name.startswith(begins)]
    assert marked
    with torch.no_grad():
        for parameter in marked:
            muster.layerwise(parameter).mul_(1 + 0.1 * rank)
    return own


@pytest.mark.parametrize("again", [False, "always"])
@pytest.mark.parametrize("name", OWN)
def test_as_one_process_with_a_copy_for_each_rank(name: str, again: bool | str) -> None:
    """The others in shares too, and layers computed again."""
    net, begins = SUITE[name].make(), OWN[name]
    batches = [SUITE[name].batch(seed) for seed in range(STEPS)]
    losses, weights = one_process(net, begins, batches)

    def train(communicator: RankCommunicator) -> Any:
        own = _of_rank(net, begins, communicator.rank)
        mine = [[part_of(x, communicator, "data_parallel") for x in batch] for batch in batches]
        model = muster.parallelize(
            own,
            mine[0],
            communicator=communicator,
            mode="hybrid",
            shard_parameters=again,
            checkpoint_activations=again,
        )
        assert any(state.regathered for state in model.plan.states) == bool(again)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=EPSILON)
        found = []
        for batch in mine:
            optimizer.zero_grad()
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return found, model.full_state_dict()

    for rank, (found, whole) in enumerate(run_ranks(RANKS, train)):
        for step, loss in enumerate(losses):
            close(f"loss {step}", found[step], loss, 1e-12)
        for key, weight in weights[rank].items():
            close(f"{key} of rank {rank}", whole[key], weight.detach(), 1e-12)
    apart = [
        not torch.equal(weights[0][key], weights[1][key]) for key in weights[0] if key.startswith(begins)
    ]
    assert any(apart)
