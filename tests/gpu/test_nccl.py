"""NCCL, DataParallel and captured steps on real GPUs, without a scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gpu.sharing import RANKS_PER_GPU, ranks_on

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
RANKS = ranks_on(torch.cuda.device_count())
if RANKS < 2:
    pytest.skip("needs two GPUs, or MS_TEST_RANKS_PER_GPU=2", allow_module_level=True)

from muster.bench.gpu_fleet import Fleet
from tests.gpu import communicator_checks, training_checks

SIZES = [size for size in (2, 4) if size <= RANKS]


@pytest.fixture(scope="module", params=SIZES)
def fleet(request: Any) -> Iterator[Fleet]:
    with Fleet(request.param, timeout_s=90, ranks_per_gpu=RANKS_PER_GPU) as fleet:
        yield fleet


@pytest.mark.parametrize(
    "check",
    [
        communicator_checks.check_all_reduce,
        communicator_checks.check_others,
        communicator_checks.check_dtypes,
        communicator_checks.check_buffers_of_all_dtypes,
        communicator_checks.check_send_recv_and_group,
        communicator_checks.check_streams,
        communicator_checks.check_cupy_and_interfaces,
        communicator_checks.check_wrong_use,
        communicator_checks.check_groups,
        training_checks.check_data_parallel,
        training_checks.check_compression,
        training_checks.check_sharded_optimizer,
        training_checks.check_sparse_gradients,
        training_checks.check_capture,
        training_checks.check_sync_batch_norm,
        training_checks.check_a_rank_that_goes_on_after_an_error,
        training_checks.check_bf16_weights,
        training_checks.check_capture_falls_back,
        training_checks.check_capture_fails_in_backward,
        training_checks.check_copies_beside_a_step,
        training_checks.check_what_changes_parameters_before_a_captured_step,
    ],
)
def test_on_every_rank(fleet: Fleet, check: Any) -> None:
    assert len(fleet.run(check)) == fleet.size


def test_a_collective_that_others_do_not_call_ends_at_its_deadline(fleet: Fleet) -> None:
    message = fleet.run(communicator_checks.check_timeout, ranks=[0])[0]
    fleet.run(communicator_checks.come_late)
    assert "waited for rank 1 (gpu1 on here)" in message


def test_a_communicator_forms_from_several_unique_ids(fleet: Fleet) -> None:
    ids = fleet.run(communicator_checks.fresh_ids, ranks=[0], count=2)[0]
    assert len(fleet.run(communicator_checks.check_several_ids, ids=ids)) == fleet.size


def test_a_missing_rank_is_named_at_the_deadline_of_formation(fleet: Fleet) -> None:
    message = fleet.run(communicator_checks.check_formation_deadline, ranks=[0])[0]
    assert "missing: rank 1 (gpu1 on host)" in message


def test_formation_is_given_up_when_another_generation_comes(fleet: Fleet) -> None:
    assert fleet.run(communicator_checks.check_formation_cancelled, ranks=[0])[0] < 10


def test_an_abort_frees_a_rank_that_hangs_in_a_captured_step() -> None:
    with Fleet(2, timeout_s=90, ranks_per_gpu=RANKS_PER_GPU) as fleet:
        fleet.run(training_checks.capture_a_step)
        assert fleet.run(training_checks.check_abort_with_graph, ranks=[0])[0] < 5
        fleet.run(communicator_checks.abort, ranks=[1])


def test_an_abort_frees_a_rank_whose_close_hangs() -> None:
    with Fleet(2, timeout_s=90, ranks_per_gpu=RANKS_PER_GPU) as fleet:
        fleet.run(communicator_checks.check_abort_of_a_close)
        fleet.run(communicator_checks.abort, ranks=[1])
