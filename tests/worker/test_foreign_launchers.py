"""Other launchers' environments, as the launchers themselves set them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muster.errors import SettingsError
from muster.worker.config import detect, load_settings, node_rank, translate

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


def test_a_process_with_a_table_and_a_rank_is_a_worker_of_as_many_as_the_table_has(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    device = [{"device_id": str(4 + i), "rank_id": str(i)} for i in range(4)]
    table.write_text(json.dumps({"server_list": [{"server_id": "127.0.0.1", "device": device}]}))
    env = {
        "RANK_TABLE_FILE": str(table),
        "RANK_ID": "3",
        "RANK_SIZE": "4",
        "DEVICE_ID": "7",
        "DEVICE_NUM": "8",
    }
    settings = load_settings(env)
    assert (settings.worker_num, settings.worker_min) == (4, 4)
    assert (settings.rank_id, settings.device_id) == (3, 7)
    with pytest.raises(SettingsError, match="RANK_SIZE must be 4"):
        load_settings({**env, "RANK_SIZE": "8"})
    with pytest.raises(SettingsError, match="MS_ROLE must be MS_WORKER"):
        load_settings({name: value for name, value in env.items() if name != "RANK_ID"})


def test_a_batch_script_outside_a_step_is_no_worker() -> None:
    assert translate({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"}) == {}


def test_the_shell_of_an_allocation_is_no_worker() -> None:
    """As Slurm 22.05 sets them there for an allocation of 2 nodes with 2 tasks each."""
    shell = {
        "SLURM_STEP_ID": "4294967290",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "4",
    }
    assert translate(shell) == {}
    assert node_rank(shell) is None


def test_nothing_known_gives_nothing() -> None:
    assert translate({"RANK": "1", "WORLD_SIZE": "2"}) == {}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"SLURM_STEP_ID": "0", "SLURM_NODEID": "3"}, 3),
        ({"JOB_COMPLETION_INDEX": "2"}, 2),
        ({"SLURM_NODEID": "3"}, None),
        ({"SLURM_STEP_ID": "0", "SLURM_NODEID": "x"}, None),
        ({"JOB_COMPLETION_INDEX": "9" * 5000}, None),
        ({}, None),
    ],
)
def test_the_number_of_the_host(env: dict[str, str], expected: int | None) -> None:
    assert node_rank(env) == expected


def test_a_worker_needs_nothing_else_from_another_launcher() -> None:
    settings = load_settings(OPENMPI)
    assert (settings.node_id, settings.worker_num, settings.local_index) == ("3", 4, 3)


# As dumped by the launchers themselves: a job of 2 hosts with 2 processes each, one process's view.
REAL = {
    "torchrun": {
        "LOCAL_RANK": "1",
        "RANK": "3",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29400",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    },
    "mpirun (Open MPI)": {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_NODE_RANK": "1",
        "OMPI_UNIVERSE_SIZE": "4",
        "OMPI_COMMAND": "python",
        "PMIX_RANK": "3",
        "PMIX_NAMESPACE": "1234567",
        "PMIX_HOSTNAME": "node2",
    },
    "srun": {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_NTASKS": "4",
        "SLURM_NPROCS": "4",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "PMI_RANK": "3",
        "PMI_SIZE": "4",
        "SLURMD_NODENAME": "node2",
    },
}


@pytest.mark.parametrize("name", REAL)
def test_whole_environments_of_real_launchers(name: str) -> None:
    env = {**REAL[name], "MS_SCHED_HOST": "127.0.0.1", "PATH": "/usr/bin"}
    launcher = detect(env)
    assert launcher is not None and launcher.name == name
    settings = load_settings(env)
    assert (settings.node_id, settings.worker_num, settings.local_index) == ("3", 4, 1)


def test_a_whole_environment_of_an_indexed_job() -> None:
    env = {
        "JOB_COMPLETION_INDEX": "3",
        "HOSTNAME": "muster-workers-3",
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "KUBERNETES_SERVICE_PORT": "443",
        "MUSTER_SCHEDULER_PORT": "tcp://10.96.1.2:6667",
        "MS_WORKER_NUM": "4",
        "MS_SCHED_HOST": "127.0.0.1",
    }
    settings = load_settings(env)
    assert (settings.node_id, settings.worker_num, settings.local_index) == ("3", 4, -1)
