"""How values of all ranks are combined on the host, and how they are rounded."""

from __future__ import annotations

import numpy as np
import pytest

from muster.communicators.arithmetic import ARITHMETIC
from muster.communicators.reduce_ops import ReduceOp


def test_booleans_take_min_max_and_product() -> None:
    parts = [np.array([True, True, False]), np.array([True, False, False])]
    out = np.zeros(3, bool)
    for op, wanted in (
        (ReduceOp.MIN, [True, False, False]),
        (ReduceOp.MAX, [True, True, False]),
        (ReduceOp.PROD, [True, False, False]),
    ):
        ARITHMETIC["bool"].reduce_all(op, parts, out)
        assert out.tolist() == wanted


def test_the_mean_is_the_sum_divided_once() -> None:
    out = np.zeros(2, "f4")
    ARITHMETIC["float32"].reduce_all(ReduceOp.MEAN, [np.full(2, v, "f4") for v in (1, 2, 6)], out)
    assert out.tolist() == [3.0, 3.0]
    assert out.dtype == np.float32


def test_a_mean_of_halves_overflows_only_where_it_is_too_large_itself() -> None:
    out = np.zeros(2, "f2")
    numbers = ARITHMETIC["float16"]
    parts = [np.array([60000, 1], "f2") for _ in range(3)]
    numbers.reduce_all(ReduceOp.MEAN, parts, out)
    assert out.tolist() == [60000, 1]
    numbers.reduce_all(ReduceOp.SUM, parts, out)
    assert out.tolist() == [np.inf, 3]


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(1)
    bits = generator.integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    ties = (generator.integers(0, 2**16, 1000).astype(np.uint32) << 16) + 0x8000
    wide = np.concatenate([bits, ties, np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0x7F7FFFFF], "u4")])
    numbers, values = ARITHMETIC["bfloat16"], wide.view(np.float32)
    found = np.empty(values.shape, np.uint16)
    numbers.narrow(values.copy(), found)
    wanted = torch.from_numpy(values).to(torch.bfloat16)
    result = torch.from_numpy(found).view(torch.bfloat16)
    assert torch.equal(result.isnan(), wanted.isnan())
    assert torch.equal(result.nan_to_num(7.0), wanted.nan_to_num(7.0))
    back = numbers.widen(found)
    assert np.array_equal(back, result.float().numpy(), equal_nan=True)
