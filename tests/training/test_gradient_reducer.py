from __future__ import annotations

import sys
import threading
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from muster.errors import ArrayError, MembershipChanged
from muster.training.gradient_reducer import GradientError, GradientReducer
from tests.fakes import (
    FakeSession,
    fake_communicators,
    fake_sessions,
    membership_changed,
    results_or_errors,
    run_ranks,
)

Arrays = dict[str, NDArray[np.float64]]
SHAPES = {"w1": (4, 3), "b1": (3,), "w2": (3, 2), "b2": (2,)}


def parameters() -> Arrays:
    return {name: np.zeros(shape) for name, shape in SHAPES.items()}


def gradients(seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape) for name, shape in SHAPES.items()}


def small_buckets(session: FakeSession, **options: bool) -> GradientReducer:
    return GradientReducer(session, parameters(), bucket_bytes=80, first_bytes=16, **options)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_are_averaged_or_summed_over_ranks(size: int, mean: bool) -> None:
    sessions = fake_sessions(size)
    reduced = run_ranks(
        size, lambda rank: small_buckets(sessions[rank], gradients_mean=mean).reduce(gradients(rank))
    )
    for name in SHAPES:
        expected = sum(gradients(rank)[name] for rank in range(size)) / (size if mean else 1)
        for result in reduced:
            np.testing.assert_allclose(result[name], expected, rtol=1e-14)


def test_a_bucket_travels_while_the_backward_pass_goes_on() -> None:
    sessions = fake_sessions(2)
    arrived = threading.Barrier(2)

    def body(rank: int) -> int:
        reducer = small_buckets(sessions[rank])
        reducer.ready("b2", gradients(rank)["b2"])
        started = len([call for call in sessions[rank].communicator.log if call[0] == "all_reduce"])
        arrived.wait(60)
        for name in ("w2", "b1", "w1"):
            reducer.ready(name, gradients(rank)[name])
        reducer.finish()
        return started

    assert run_ranks(2, body) == [1, 1]


def test_collectives_are_issued_in_one_order_whatever_order_gradients_come_in() -> None:
    sessions = fake_sessions(2)
    orders = [["b2", "w2", "b1", "w1"], ["w1", "b1", "w2", "b2"]]

    def body(rank: int) -> Arrays:
        reducer = small_buckets(sessions[rank])
        for name in orders[rank]:
            reducer.ready(name, gradients(rank)[name])
        return reducer.finish()

    first, second = run_ranks(2, body)
    assert sessions[0].communicator.log == sessions[1].communicator.log
    for name in SHAPES:
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(first[name], (gradients(0)[name] + gradients(1)[name]) / 2)


def test_steps_follow_each_other_and_the_plan_is_compared_once() -> None:
    sessions = fake_sessions(2)

    def body(rank: int) -> list[float]:
        reducer = small_buckets(sessions[rank])
        return [float(reducer.reduce(gradients(10 * step + rank))["b1"][0]) for step in range(3)]

    first, second = run_ranks(2, body)
    assert first == second
    assert first[2] == pytest.approx((gradients(20)["b1"][0] + gradients(21)["b1"][0]) / 2)
    names = [name for name, _ in sessions[0].communicator.log]
    assert (names.count("all_gather"), names.count("all_reduce")) == (1, 9)


def test_accumulation_adds_up_without_communication() -> None:
    sessions = fake_sessions(2)

    def body(rank: int) -> tuple[int, Arrays]:
        reducer = small_buckets(sessions[rank])
        with reducer.no_sync():
            for micro in (0, 1):
                for name, gradient in gradients(10 * micro + rank).items():
                    reducer.ready(name, gradient)
        quiet = len(sessions[rank].communicator.log)
        return quiet, reducer.reduce(gradients(20 + rank))

    for quiet, result in run_ranks(2, body):
        assert quiet == 0
        for name in SHAPES:
            expected = sum(gradients(10 * micro + rank)[name] for micro in range(3) for rank in range(2)) / 2
            np.testing.assert_allclose(result[name], expected)


def test_what_was_accumulated_needs_no_last_piece() -> None:
    (session,) = fake_sessions(1)
    reducer = small_buckets(session)
    with reducer.no_sync():
        for name, gradient in gradients(0).items():
            reducer.ready(name, gradient)
    np.testing.assert_array_equal(reducer.finish()["w1"], gradients(0)["w1"])


def test_gradients_are_copied_so_that_the_callers_array_may_be_reused() -> None:
    sessions = fake_sessions(2)

    def body(rank: int) -> float:
        reducer = small_buckets(sessions[rank])
        scratch = np.ones(2)
        reducer.ready("b2", scratch)
        scratch[:] = 100
        for name in ("w2", "b1", "w1"):
            reducer.ready(name, gradients(rank)[name])
        return float(reducer.finish()["b2"][0])

    assert run_ranks(2, body) == [1.0, 1.0]


def test_a_missing_gradient_fails_the_step_on_every_rank_and_names_rank_and_parameter() -> None:
    sessions = fake_sessions(3)

    def body(rank: int) -> None:
        reducer = small_buckets(sessions[rank])
        for name, gradient in gradients(rank).items():
            if (rank, name) != (1, "w2"):
                reducer.ready(name, gradient)
        reducer.finish()

    for error in results_or_errors(3, body):
        assert isinstance(error, GradientError)
        assert "Rank 1 gave no gradient for 'w2'" in str(error)


def test_the_step_after_a_missing_gradient_is_sound() -> None:
    (session,) = fake_sessions(1)
    reducer = small_buckets(session)
    reducer.ready("b1", np.ones(3))
    with pytest.raises(GradientError):
        reducer.finish()
    np.testing.assert_array_equal(reducer.reduce(gradients(4))["b1"], gradients(4)["b1"])


def test_other_parameters_on_one_rank_are_named_on_all() -> None:
    sessions = fake_sessions(3)

    def body(rank: int) -> None:
        mine = parameters()
        if rank == 2:
            mine["w1"] = np.zeros((3, 4))
            mine["extra"] = np.zeros(1)
        reducer = GradientReducer(sessions[rank], mine)
        reducer.reduce(mine)

    for error in results_or_errors(3, body):
        assert isinstance(error, GradientError)
        assert "Rank 2 has other parameters than rank 0" in str(error)
        assert "rank 0 has 'w1' float64[4, 3]" in str(error)
        assert "rank 2 has 'extra' float64[1]" in str(error)


def test_mean_on_one_rank_and_sum_on_another_is_refused() -> None:
    sessions = fake_sessions(2)
    errors = results_or_errors(
        2, lambda rank: small_buckets(sessions[rank], gradients_mean=rank == 0).broadcast_parameters()
    )
    assert all("gradients_mean differ" in str(error) for error in errors)


@pytest.mark.parametrize("source", [0, 2])
def test_parameters_are_broadcast_in_place(source: int) -> None:
    sessions = fake_sessions(3)

    def body(rank: int) -> Arrays:
        mine = gradients(rank)
        GradientReducer(sessions[rank], mine).broadcast_parameters(source)
        return mine

    for result in run_ranks(3, body):
        for name in SHAPES:
            np.testing.assert_array_equal(result[name], gradients(source)[name])


def test_dtypes_do_not_mix() -> None:
    sessions = fake_sessions(2)

    def body(rank: int) -> dict[str, str]:
        mine = {"half": np.ones(5, "float16"), "single": np.ones(5, "float32"), "double": np.ones(5)}
        reduced = GradientReducer(sessions[rank], mine, gradients_mean=False).reduce(mine)
        assert all((array == 2).all() for array in reduced.values())
        return {name: str(array.dtype) for name, array in reduced.items()}

    assert run_ranks(2, body)[0] == {"half": "float16", "single": "float32", "double": "float64"}


def test_a_step_cut_off_by_a_change_of_members_is_forgotten() -> None:
    old, new = fake_communicators(2), fake_communicators(1, generation=2)
    session = FakeSession(old[0])
    reducer = small_buckets(session)
    run_ranks(2, lambda rank: [reducer, small_buckets(FakeSession(old[1]))][rank].reduce(gradients(rank)))
    reducer.ready("b2", np.full(2, 7.0))  # its AllReduce waits for rank 1, which is gone
    with reducer.no_sync():
        reducer.ready("w1", np.full((4, 3), 7.0))
    old[0].abort(membership_changed(1))
    with pytest.raises(MembershipChanged):
        reducer.finish()
    reducer.ready("w2", np.full((3, 2), 7.0))
    session.communicator = new[0]
    np.testing.assert_array_equal(reducer.reduce(gradients(0))["b2"], gradients(0)["b2"])


def test_wrong_gradients_are_named() -> None:
    (session,) = fake_sessions(1)
    reducer = small_buckets(session)
    with pytest.raises(GradientError, match=r"no parameter 'w9'.*The parameters are: w1, b1, w2, b2"):
        reducer.ready("w9", np.zeros(1))
    with pytest.raises(GradientError, match=r"float64\[2\], its parameter float64\[3\]"):
        reducer.ready("b1", np.zeros(2))
    with pytest.raises(GradientError, match="float32"):
        reducer.ready("b1", np.zeros(3, "float32"))
    reducer.ready("b1", np.zeros(3))
    with pytest.raises(GradientError, match="given twice"):
        reducer.ready("b1", np.zeros(3))
    with reducer.no_sync(), pytest.raises(GradientError, match="within no_sync"):
        reducer.finish()


def test_parameters_that_cannot_be_reduced_are_refused() -> None:
    (session,) = fake_sessions(1)
    with pytest.raises(ArrayError, match="'i' has dtype int64"):
        GradientReducer(session, {"i": np.zeros(3, "int64")})
    with pytest.raises(ArrayError, match="'t' is not C-contiguous"):
        GradientReducer(session, {"t": np.zeros((3, 2)).T})
    with pytest.raises(ArrayError, match="all of NumPy"):
        GradientReducer(session, {"l": [1.0]})
    with pytest.raises(ArrayError, match="none at all"):
        GradientReducer(session, {})


def test_buffers_come_from_the_arrays_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device a missing gradient is reported at once, without reading anything back from the device."""
    cupy = ModuleType("cupy")
    cupy.__dict__.update({name: getattr(np, name) for name in ("zeros", "asarray")})
    device_array = type("ndarray", (np.ndarray,), {"__module__": "cupy"})
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    (session,) = fake_sessions(1)
    reducer = GradientReducer(
        session, {"w": np.zeros(3).view(device_array), "b": np.zeros(1).view(device_array)}
    )
    reducer.ready("w", np.ones(3))
    with pytest.raises(GradientError, match="Rank 0 gave no gradient for 'b'"):
        reducer.finish()
    assert session.communicator.log == []
    assert reducer.reduce({"w": np.ones(3), "b": np.ones(1)})["w"].tolist() == [1, 1, 1]
