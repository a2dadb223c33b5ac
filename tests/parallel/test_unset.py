"""Modules of any size are made without their memory, and small tensors in them are right."""

from __future__ import annotations

import resource

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from muster.parallel.unset import LARGE, LargeTensorsUnset


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_large_tensors_take_no_memory() -> None:
    before = _peak_kib()
    with LargeTensorsUnset():
        layers = [nn.Linear(16_384, 16_384) for _ in range(8)]  # 8.6 GB
        nn.init.orthogonal_(layers[0].weight)
        drawn = torch.randn(16_384, 16_384) * 0.02
        layers[1].weight.data.copy_(drawn + drawn.t())
    assert layers[0].weight.shape == drawn.shape
    assert layers[0].weight.device.type == "cpu"
    assert _peak_kib() - before < 1_000_000


def test_small_tensors_have_their_contents() -> None:
    with LargeTensorsUnset():
        rates = torch.linspace(0, 0.1, 5).tolist()
        norm = nn.LayerNorm(64)
        large = torch.zeros(LARGE // 64, 64)
        part = large[:1].reshape(-1)[:4]
    assert rates == pytest.approx([0, 0.025, 0.05, 0.075, 0.1])
    assert torch.equal(norm.weight.detach(), torch.ones(64))
    assert part.shape == (4,)
    with LargeTensorsUnset(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        large @ torch.zeros(65, 3)
