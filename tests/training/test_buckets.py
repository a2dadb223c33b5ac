import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.training.buckets import ParameterSpec, Slot, plan_buckets


def spec(name: str, size: int, dtype: str = "float32") -> ParameterSpec:
    return ParameterSpec(name, size, dtype, {"float16": 2, "float32": 4, "float64": 8}[dtype])


def names(parameters: list[ParameterSpec], bucket_bytes: int, first_bytes: int) -> list[list[str]]:
    plan = plan_buckets(parameters, bucket_bytes=bucket_bytes, first_bytes=first_bytes)
    return [[slot.name for slot in bucket.slots] for bucket in plan]


def test_first_bucket_is_small_and_the_rest_fill_to_the_cap() -> None:
    parameters = [spec(name, 2) for name in "abcdefg"]
    assert names(parameters, bucket_bytes=24, first_bytes=8) == [["a"], ["b", "c", "d"], ["e", "f", "g"]]


def test_parameter_larger_than_the_cap_travels_alone() -> None:
    parameters = [spec("a", 1), spec("big", 100), spec("b", 1), spec("c", 1)]
    assert names(parameters, bucket_bytes=16, first_bytes=16) == [["a"], ["big"], ["b", "c"]]


def test_dtypes_never_mix_and_buckets_are_ordered_by_their_last_gradient() -> None:
    parameters = [spec("a", 1), spec("h", 1, "float16"), spec("b", 1), spec("i", 1, "float16"), spec("c", 1)]
    plan = plan_buckets(parameters, bucket_bytes=1000, first_bytes=1000)
    assert [(b.dtype, [s.name for s in b.slots]) for b in plan] == [
        ("float16", ["h", "i"]),
        ("float32", ["a", "b", "c"]),
    ]


def test_only_the_very_first_bucket_has_the_small_cap() -> None:
    parameters = [spec("a", 1), spec("d", 1, "float64"), spec("e", 1, "float64"), spec("b", 1)]
    assert names(parameters, bucket_bytes=16, first_bytes=4) == [["a"], ["d", "e"], ["b"]]


def test_offsets_are_flat() -> None:
    (bucket,) = plan_buckets([spec("a", 3), spec("b", 0), spec("c", 5)])
    assert bucket.slots == (Slot("a", 0, 3), Slot("b", 3, 0), Slot("c", 3, 5))
    assert bucket.size == 8


def test_no_parameters_make_no_buckets() -> None:
    assert plan_buckets([]) == ()


@pytest.mark.parametrize("caps", [{"bucket_bytes": 0}, {"first_bytes": -1}])
def test_caps_must_be_positive(caps: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be > 0 bytes"):
        plan_buckets([spec("a", 1)], **caps)


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' is given twice"):
        plan_buckets([spec("a", 1), spec("a", 1)])


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' has -1 elements"):
        plan_buckets([spec("a", -1)])


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["float16", "float32", "float64"])), max_size=30),
    st.integers(1, 200),
    st.integers(1, 200),
)
def test_every_parameter_has_exactly_one_place_within_the_caps(
    sizes: list[tuple[int, str]], bucket_bytes: int, first_bytes: int
) -> None:
    parameters = [spec(f"p{i}", size, dtype) for i, (size, dtype) in enumerate(sizes)]
    plan = plan_buckets(parameters, bucket_bytes=bucket_bytes, first_bytes=first_bytes)
    order = {parameter.name: i for i, parameter in enumerate(parameters)}
    by_name = {parameter.name: parameter for parameter in parameters}
    placed = [slot.name for bucket in plan for slot in bucket.slots]
    assert sorted(placed) == sorted(order)
    last = [order[bucket.slots[-1].name] for bucket in plan]
    assert last == sorted(last)
    for bucket in plan:
        end = 0
        for slot in bucket.slots:
            assert (slot.offset, slot.size) == (end, by_name[slot.name].size)
            assert by_name[slot.name].dtype == bucket.dtype
            end += slot.size
        assert end == bucket.size
        cap = first_bytes if order[bucket.slots[0].name] == 0 else bucket_bytes
        if len(bucket.slots) > 1:
            assert bucket.size * by_name[bucket.slots[0].name].itemsize <= cap
