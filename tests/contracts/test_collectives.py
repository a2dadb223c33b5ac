"""Every collective of every backend gives what NumPy gives."""

from __future__ import annotations

import pytest

from muster.communicators.reduce_ops import ReduceOp
from tests.contracts import bodies
from tests.contracts.agents import Agents
from tests.contracts.kits import Kit


@pytest.mark.parametrize("op", list(ReduceOp))
def test_all_reduce_is_right_and_equal_on_all_ranks(
    agents: Agents, backend: Kit, size: int, op: ReduceOp
) -> None:
    shown = agents.run(backend.name, size, bodies.all_reduce, "f4", op)
    assert all(each == shown[0] for each in shown)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.PROD])
def test_all_reduce_takes_every_dtype(agents: Agents, backend: Kit, op: ReduceOp) -> None:
    for dtype in backend.dtypes:
        agents.run(backend.name, min(3, backend.max_world_size), bodies.all_reduce, dtype, op, (33, 70_001))


def test_rounding_is_the_same_on_all_ranks(agents: Agents, backend: Kit, size: int) -> None:
    for elements in (100, 50_000):
        assert len(set(agents.run(backend.name, size, bodies.same_bits, elements))) == 1


@pytest.mark.parametrize("dtype", ["f4", "i8"])
def test_rooted_collectives_work_with_every_root(agents: Agents, backend: Kit, size: int, dtype: str) -> None:
    agents.run(backend.name, size, bodies.rooted, dtype)


@pytest.mark.parametrize("dtype", ["f4", "i4"])
def test_gathers_and_shuffles(agents: Agents, backend: Kit, size: int, dtype: str) -> None:
    agents.run(backend.name, size, bodies.shuffles, dtype)


@pytest.mark.parametrize("elements", [10, 60_000])
def test_in_place_forms(agents: Agents, backend: Kit, size: int, elements: int) -> None:
    agents.run(backend.name, size, bodies.in_place_shuffles, elements)


def test_send_and_recv_between_all_pairs(agents: Agents, backend: Kit, size: int) -> None:
    agents.run(backend.name, size, bodies.points)


def test_asynchronous_work_is_done_in_order(agents: Agents, backend: Kit, size: int) -> None:
    agents.run(backend.name, size, bodies.asynchronous, 40)


def test_nobody_leaves_a_barrier_before_the_last_has_come(agents: Agents, backend: Kit, size: int) -> None:
    times = agents.run(backend.name, size, bodies.barriers)
    assert max(came for came, _ in times) <= min(left for _, left in times)


def test_wrong_arrays_are_refused_and_do_no_harm(agents: Agents, backend: Kit, size: int) -> None:
    shown = agents.run(backend.name, size, bodies.refusals)
    assert "contiguous" in shown[0][2]
    assert "mean" in shown[0][3]


def test_split_makes_groups_that_work_beside_their_parent(agents: Agents, backend: Kit, size: int) -> None:
    found = agents.run(backend.name, size, bodies.splits)
    total = sum(range(1, size + 1))
    for rank, (backwards, part, whole) in enumerate(found):
        members = [r for r in range(size) if r % 2 == rank % 2]
        assert (backwards, whole) == (total, total)
        assert part == sum(r + 1 for r in members)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_collective_takes_torchs_tensors_in_the_hosts_memory(
    agents: Agents, backend: Kit, dtype: str
) -> None:
    """Short floats are combined in float32 and rounded once, the same on all ranks."""
    pytest.importorskip("torch")
    if backend.on_device:
        pytest.skip("nccl takes tensors on a GPU")
    for world in {min(count, backend.max_world_size) for count in (2, 3)}:
        shown = agents.run(backend.name, world, bodies.on_torch, dtype, (7, 40_001))
        assert all(each == shown[0] for each in shown)


@pytest.mark.parametrize("elements", [12, 60_000])
def test_a_mean_of_halves_does_not_overflow_where_it_is_a_half(
    agents: Agents, backend: Kit, size: int, elements: int
) -> None:
    if backend.on_device:
        pytest.skip("nccl scales each rank's part before it adds them")
    assert agents.run(backend.name, size, bodies.half_means, elements) == [[60000.0]] * size


def test_gradients_travel_in_bfloat16(agents: Agents, backend: Kit) -> None:
    pytest.importorskip("torch")
    if backend.on_device:
        pytest.skip("nccl takes tensors on a GPU")
    size = min(3, backend.max_world_size)
    if backend.backend == "nccl":  # in a session on GPUs, a module that stays on the CPU is a mistake
        with pytest.raises(AssertionError, match=r"the module is on the CPU, .* module\.cuda\(\)"):
            agents.run(backend.name, size, bodies.data_parallel_in_bfloat16)
        return
    for found, wanted in agents.run(backend.name, size, bodies.data_parallel_in_bfloat16):
        assert found == pytest.approx(wanted, rel=1e-2, abs=1e-4)
