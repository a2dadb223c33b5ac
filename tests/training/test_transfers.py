"""Which bytes go to whom when a state comes back: every element once to each rank that needs it."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from muster.training.parts import Part, divided, overlap, piece, whole_part
from muster.training.transfers import PIECE_BYTES, TensorSpan, transfers


def rows(count: int, width: int, ranks: int) -> list[Part]:
    """A tensor of so many rows, divided by rows as evenly as can be."""
    edges = [count * rank // ranks for rank in range(ranks + 1)]
    return [Part((a, 0), (b - a, width), 0, (b - a) * width) for a, b in itertools.pairwise(edges)]


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_each_rank_gets_each_element_that_it_needs_once(count: int, width: int, then: int, now: int) -> None:
    old, new = rows(count, width, then), rows(count, width, now)
    parts = [[TensorSpan("w", part, 0, 4 * (part.stop - part.start))] for part in old]
    found = [0] * now
    for transfer in transfers(parts, [{"w": part} for part in new]):
        for target in transfer.targets:
            for placed in transfer.tensors:
                for source in placed.part.boxes():
                    for wanted in new[target].boxes():
                        both = overlap(source, wanted)
                        found[target] += 0 if both is None else math.prod(both.sizes)
    assert found == [part.stop - part.start for part in new]


def test_what_goes_to_the_same_ranks_goes_together_up_to_a_size() -> None:
    whole, half = whole_part((10,)), piece(whole_part((10,)), 0, 2)
    tensors = [
        TensorSpan("a", whole, 0, 40),
        TensorSpan("b", whole, 40, 80),
        TensorSpan("c", half, 80, 100),
        TensorSpan("d", whole, 128, 128 + PIECE_BYTES),
        TensorSpan("unwanted", whole, 256 + PIECE_BYTES, 300 + PIECE_BYTES),
    ]
    wanted = [{"a": whole, "b": whole, "d": whole}, {"a": half, "b": half, "c": half, "d": whole}]
    found = [([each.name for each in t.tensors], t.targets) for t in transfers([tensors], wanted)]
    assert found == [(["a", "b"], (0, 1)), (["c"], (1,)), (["d"], (0, 1))]


def test_what_several_ranks_have_copied_travels_once() -> None:
    whole = whole_part((10,))
    parts = [[TensorSpan("a", whole, 0, 40)], [TensorSpan("a", whole, 0, 40), TensorSpan("b", whole, 40, 80)]]
    found = [
        (t.rank, [each.name for each in t.tensors]) for t in transfers(parts, [{"a": whole, "b": whole}])
    ]
    assert found == [(0, ["a"]), (1, ["b"])]


@given(st.integers(0, 40), st.integers(1, 7))
def test_what_several_hold_is_divided_so_that_each_element_is_held_once(count: int, ranks: int) -> None:
    alike = divided([whole_part((count,))] * ranks)
    assert [part.start for part in alike[1:]] == [part.stop for part in alike[:-1]]
    assert (alike[0].start, alike[-1].stop) == (0, count)
    assert max(p.stop - p.start for p in alike) - min(p.stop - p.start for p in alike) <= 1
    different = rows(12, 2, 3)
    assert divided(different) == different
