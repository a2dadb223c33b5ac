"""What is known of an array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from muster.communicators.arrays import HOST, Description, check_apart, describe
from muster.errors import ArrayError


def test_a_description_is_flat_and_of_the_same_memory() -> None:
    array = np.zeros((2, 3), "f4")
    found = describe(array)
    found.flat[:] = 7
    assert (array == 7).all()
    assert (found.dtype, found.shape, found.size, found.nbytes) == ("float32", (2, 3), 6, 24)
    assert found.device == HOST and found.array is array
    assert describe(found) is found, "what is described once stays so"
    assert describe(np.array(5.0)).flat.shape == (1,)
    assert describe(array.view(np.matrix)).flat.shape == (6,)


def test_what_is_made_of_numbers_is_said_to_be() -> None:
    assert describe([1.0, 2.0]).is_made and describe(np.float32(1)).is_made
    assert describe(np.float32(1)).shape == ()
    assert not describe(np.ones(1)).is_made


def test_overlap_is_all_or_nothing() -> None:
    whole = np.zeros(10, "f4")

    def apart(part: Any, offset: int | None = 0) -> None:
        check_apart(describe(whole), describe(part), offset)

    apart(whole)
    apart(whole[4:6], 4)
    apart(np.zeros(10, "f4"))
    for part, offset in ((whole[1:], 0), (whole[4:6], 3), (whole, None)):
        with pytest.raises(ArrayError, match="overlap"):
            apart(part, offset)


# ---------------------------------------------------------------- torch


def test_a_tensor_is_described_as_an_array_is() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(2, 3, requires_grad=True)
    found = describe(tensor)
    assert (found.dtype, found.shape, found.device) == ("float32", (2, 3), HOST)
    found.flat[:] = 7
    assert tensor.detach().eq(7).all()
    short = torch.ones(3, dtype=torch.bfloat16)
    found = describe(short)
    assert (found.dtype, found.itemsize, found.flat.dtype) == ("bfloat16", 2, np.uint16)
    found.flat[:] = 0
    assert short.eq(0).all()
    assert found.new((2,)).array.dtype == torch.bfloat16


def test_a_description_holds_its_memory() -> None:
    found: Description = describe(np.arange(3))
    assert found.flat.tolist() == [0, 1, 2]
