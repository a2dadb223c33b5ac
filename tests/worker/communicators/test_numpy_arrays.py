"""Arrays are checked before anything is sent."""

from __future__ import annotations

import numpy as np
import pytest

from muster.worker.communicators import numpy_arrays as arrays
from muster.worker.communicators.base import ReduceOp
from muster.worker.errors import ArrayError


@pytest.mark.parametrize(
    ("array", "word"),
    [
        ([1.0], "list"),
        (np.ones(4)[::2], "contiguous"),
        (np.ones(4, ">f4"), "dtype"),
        (np.ones(4, complex), "complex"),
        (np.array(["a"]), "dtype"),
        (np.ma.masked_array([1.0, 2.0], [False, True]), "masked, and masks do not travel"),
    ],
)
def test_what_cannot_be_sent_is_refused(array: object, word: str) -> None:
    with pytest.raises(ArrayError, match=word):
        arrays.checked(array, "send")


def test_a_read_only_array_cannot_receive() -> None:
    array = np.ones(3)
    array.flags.writeable = False
    assert arrays.checked(array, "send").size == 3
    with pytest.raises(ArrayError, match="read-only"):
        arrays.checked(array, "recv", writable=True)


def test_a_checked_array_is_flat_and_the_same_memory() -> None:
    array = np.zeros((2, 3), "f4")
    arrays.checked(array, "recv", writable=True)[:] = 7
    assert (array == 7).all()
    assert arrays.checked(np.array(5.0), "send").shape == (1,)
    assert arrays.checked(array.view(np.matrix), "send").shape == (6,)


def test_overlap_is_all_or_nothing() -> None:
    whole = np.zeros(10, "f4")
    arrays.check_overlap(whole, whole)
    arrays.check_overlap(whole, whole[4:6], 4)
    arrays.check_overlap(whole, np.zeros(10, "f4"))
    for part, offset in ((whole[1:], 0), (whole[4:6], 3)):
        with pytest.raises(ArrayError, match="overlap"):
            arrays.check_overlap(whole, part, offset)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [("i4", ReduceOp.MEAN), ("u1", ReduceOp.MEAN), ("b1", ReduceOp.SUM), ("b1", ReduceOp.MEAN)],
)
def test_operations_without_meaning_are_refused(dtype: str, op: ReduceOp) -> None:
    with pytest.raises(ArrayError, match="not defined"):
        arrays.check_op(np.zeros(1, dtype), op)


def test_booleans_take_min_max_and_product() -> None:
    parts = [np.array([True, True, False]), np.array([True, False, False])]
    out = np.zeros(3, bool)
    for op, wanted in (
        (ReduceOp.MIN, [True, False, False]),
        (ReduceOp.MAX, [True, True, False]),
        (ReduceOp.PROD, [True, False, False]),
    ):
        arrays.check_op(out, op)
        arrays.reduce_all(op, parts, out)
        assert out.tolist() == wanted


def test_the_mean_is_the_sum_divided_once() -> None:
    out = np.zeros(2, "f4")
    arrays.reduce_all(ReduceOp.MEAN, [np.full(2, v, "f4") for v in (1, 2, 6)], out)
    assert out.tolist() == [3.0, 3.0]
    assert out.dtype == np.float32


def test_no_bytes_make_an_empty_array() -> None:
    assert arrays.from_bytes(memoryview(b""), np.dtype("f8")).shape == (0,)
