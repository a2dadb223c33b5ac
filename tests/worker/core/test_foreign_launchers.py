"""Other launchers' environments, as the launchers themselves set them."""

from __future__ import annotations

import pytest

from worker.config import load_settings
from worker.core.foreign_launchers import detect, node_rank, translate

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}
SLURM = {"SLURM_PROCID": "6", "SLURM_NTASKS": "16", "SLURM_LOCALID": "2", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("env", "node_id", "size", "local_index"),
    [(TORCHRUN, "5", "8", "1"), (OPENMPI, "3", "4", "3"), (MPICH, "2", "4", "0"), (SLURM, "6", "16", "2")],
)
def test_rank_size_and_local_index_are_taken(
    env: dict[str, str], node_id: str, size: str, local_index: str
) -> None:
    assert translate(env) == {
        "MS_ROLE": "MS_WORKER",
        "MS_NODE_ID": node_id,
        "MS_WORKER_NUM": size,
        "MS_LOCAL_INDEX": local_index,
    }


def test_an_indexed_job_gives_the_node_id_only() -> None:
    assert translate({"JOB_COMPLETION_INDEX": "4"}) == {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": "4"}


def test_what_is_set_already_wins() -> None:
    env = {**OPENMPI, "MS_NODE_ID": "left", "MS_WORKER_NUM": "9", "MS_ROLE": "MS_WORKER"}
    assert translate(env) == {"MS_LOCAL_INDEX": "3"}


def test_the_innermost_launcher_wins() -> None:
    launcher = detect({"JOB_COMPLETION_INDEX": "7", **SLURM, **OPENMPI, **TORCHRUN})
    assert launcher is not None
    assert launcher.name == "torchrun"


def test_our_own_launcher_hides_the_others() -> None:
    assert translate({**OPENMPI, "MS_LOCAL_INDEX": "0"}) == {}


def test_a_scheduler_takes_nothing() -> None:
    assert translate({**OPENMPI, "MS_ROLE": "MS_SCHED"}) == {}


def test_a_rank_table_gives_the_ranks() -> None:
    assert "MS_NODE_ID" not in translate({**SLURM, "RANK_TABLE_FILE": "table.json"})


def test_a_batch_script_outside_a_step_is_no_worker() -> None:
    assert translate({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"}) == {}


def test_nothing_known_gives_nothing() -> None:
    assert translate({"RANK": "1", "WORLD_SIZE": "2"}) == {}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"SLURM_STEP_ID": "0", "SLURM_NODEID": "3"}, 3),
        ({"JOB_COMPLETION_INDEX": "2"}, 2),
        ({"SLURM_NODEID": "3"}, None),
        ({"SLURM_STEP_ID": "0", "SLURM_NODEID": "x"}, None),
        ({}, None),
    ],
)
def test_the_number_of_the_host(env: dict[str, str], expected: int | None) -> None:
    assert node_rank(env) == expected


def test_a_worker_needs_nothing_else_from_another_launcher() -> None:
    settings = load_settings(OPENMPI)
    assert (settings.node_id, settings.worker_num, settings.local_index) == ("3", 4, 3)
