"""Factors of a sum, as NCCL takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from muster.communicators.nccl.reduction import scalar_bytes
from muster.errors import ArrayError


def test_factors_are_written_in_the_dtype() -> None:
    assert scalar_bytes(0.5, 7) == np.float32(0.5).tobytes()
    assert scalar_bytes(0.5, 6) == np.float16(0.5).tobytes()
    assert scalar_bytes(1.0, 9) == b"\x80\x3f"
    with pytest.raises(ArrayError, match="int32"):
        scalar_bytes(0.5, 2)


@pytest.mark.parametrize(
    ("factor", "dtype", "name"),
    [(1e6, 6, "float16"), (1e39, 7, "float32"), (1e39, 9, "bfloat16"), (3.4e38, 9, "bfloat16"), ("2", 7, "")],
)
def test_a_factor_beyond_the_dtype_is_refused_in_words(factor: Any, dtype: int, name: str) -> None:
    with pytest.raises(ArrayError, match=rf"the factor {factor!r} .* cannot be a {name}".replace("+", r"\+")):
        scalar_bytes(factor, dtype)


def test_infinity_is_a_factor() -> None:
    assert scalar_bytes(float("inf"), 9) == b"\x80\x7f" and scalar_bytes(float("-inf"), 6) == b"\x00\xfc"
