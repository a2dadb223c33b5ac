"""Each line of docs/mindspore.md is run by a test, which is named here, or nothing in it can be run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "mindspore.md").read_text()

_TUTORIALS = "tests/end_to_end/test_tutorials.py"
_ROLES = f"{_TUTORIALS}::test_the_scheduler_is_the_same_script_in_another_role"
_CALLS = f"{_TUTORIALS}::test_the_calls_of_the_tutorials"
_EXAMPLES = "tests/end_to_end/test_examples.py"
_TABLE = f"{_TUTORIALS}::test_a_script_with_a_rank_table_needs_nothing_but_a_scheduler"
_WORKER = "tests/worker/test_config.py"
_NOTHING = "says what is not here"
RUN_BY = {
    "`from mindspore.communication import": _CALLS,
    '`init("nccl")`': _CALLS,
    "`init()` under": _ROLES,
    "`get_rank()`": _CALLS,
    "`get_world_rank_from_group_rank`": _CALLS,
    "`ops.AllReduce`": _CALLS,
    "`ops.AlltoAll`": _CALLS,
    "`ops.NeighborExchange`": (
        f"{_TUTORIALS}::test_neighbours_exchange_more_than_a_socket_holds_in_both_directions"
    ),
    "`context.set_ps_context(config_file_path": _ROLES,
    "`context.set_ps_context(enable_ssl=False)`": (
        f"{_WORKER}::test_without_tls_beyond_loopback_two_switches_must_say_so"
    ),
    "`context.set_ps_context(enable_ps=True": (
        "tests/worker/test_runtime.py::test_set_ps_context_takes_what_later_releases_give"
    ),
    "`context.set_context": _NOTHING,
    "`context.set_auto_parallel_context": (
        "tests/parallel/planning/test_context.py::test_the_context_sets_defaults_and_is_forgotten"
    ),
    "`Model.train`": _NOTHING,
    "`Cifar10Dataset": (
        "tests/training/test_sampler.py::test_any_world_sees_the_batches_of_one_process_and_every_sample_once"
    ),
    "`model.train(": (
        "tests/examples/test_capture_on_cpu.py"
        "::test_the_example_is_captured_in_the_first_epoch_and_computes_what_eager_steps_do"
    ),
    "`LossMonitor()`": f"{_EXAMPLES}::test_run_gpu_trains_on_one_host",
    "`ModelCheckpoint": (
        "tests/training/test_checkpoint.py::test_a_state_comes_back_as_it_was_into_the_same_arrays"
    ),
    "`parameter_broadcast`": (
        "tests/torch/test_data_parallel.py::test_every_rank_starts_with_rank_zeros_parameters_and_buffers"
    ),
    "`MS_ROLE`": f"{_WORKER}::test_wrong_values_are_refused_in_one_sentence",
    "`MS_SERVER_NUM`": f"{_WORKER}::test_wrong_values_are_refused_in_one_sentence",
    "`MS_WORKER_NUM`": _ROLES,
    "`MS_ENABLE_RECOVERY`": "tests/scheduler/test_config.py::test_recovery_needs_a_directory",
    "`RANK_TABLE_FILE`": "tests/scheduler/test_config.py::test_rank_table_is_read",
    "`RANK_SIZE`": "tests/scheduler/test_config.py::test_a_rank_table_says_how_many_workers_there_are",
    "`RANK_ID`": _TABLE,
    "the config.json": _ROLES,
    "`server.p12`": "tests/certs/runtime/test_store.py::test_files_made_by_openssl_load_old_ones_included",
    "`mpirun -n 8 python nccl_allgather.py`": f"{_TUTORIALS}::test_the_first_program_gathers_everybodys_rank",
    "`mpirun -n 8 python train.py`": _CALLS,
    "`mpirun -n 8 pytest": f"{_TUTORIALS}::test_pytest_and_a_wrapper_may_be_the_worker_s_command",
    "`mpirun -n 16 --hostfile": f"{_TUTORIALS}::test_a_hostfile_names_this_host",
    "`mpirun --mca": "tests/worker/test_host.py::test_an_interface_may_be_named_by_its_network",
    "`mpirun ... wrapper.sh`": f"{_TUTORIALS}::test_a_wrapper_that_ends_before_its_program_is_named",
    "`python hccl_tools.py": (
        "tests/launch/test_rank_table.py::test_the_default_is_this_host_and_a_telling_name"
    ),
    "`bash ascend8p.sh`": _TABLE,
    "`bash run_gpu.sh DATA_PATH`": f"{_EXAMPLES}::test_run_gpu_trains_on_one_host",
    "`bash run_gpu_cluster.sh DATA_PATH`": (
        f"{_EXAMPLES}::test_run_gpu_cluster_with_one_argument_trains_on_this_host"
    ),
    "its parts `_1`": "tests/end_to_end/test_hosts.py::test_the_tutorials_cluster_script_on_two_hosts",
    "`export MS_ROLE=MS_SCHED": _ROLES,
    "`msrun": _CALLS,
}
"""The test of each row, by how the row begins."""


def rows() -> list[str]:
    """The first cell of each row of the page's tables, and what follows."""
    lines = [line[2:] for line in PAGE.splitlines() if line.startswith("| ")]
    return [line for line in lines if not line.startswith("in the tutorials |")]


def test_each_row_is_listed_once_and_nothing_else_is() -> None:
    found = [[begin for begin in RUN_BY if row.startswith(begin)] for row in rows()]
    assert [row for row, begins in zip(rows(), found, strict=True) if len(begins) != 1] == []
    assert [begins[0] for begins in found] == list(RUN_BY)


@pytest.mark.parametrize("place", sorted(set(RUN_BY.values()) - {_NOTHING}))
def test_the_tests_are_there(place: str) -> None:
    file, _, name = place.partition("::")
    text = (ROOT / file).read_text()
    assert re.search(rf"^def {name}\(", text, re.MULTILINE)
