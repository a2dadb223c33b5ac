"""What a launch hands to its processes, worked out for machines other than this one."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path

import pytest

from muster.worker.errors import SettingsError
from muster.worker.launch import options as launch_options
from muster.worker.launch.command import Launch
from muster.worker.launch.plan import WorkerPlan
from muster.worker.launch.rank_table import with_table_ranks
from tests.worker.test_host import machine

ENV = {"MS_SCHED_PORT": "6667", "PATH": "/usr/bin:/bin"}


def launch(directory: Path, *options: str, gpus: int = 0, **env: str) -> Launch:
    """A launch of ``true`` that is not carried out."""
    return launch_holding(contextlib.ExitStack(), directory, *options, gpus=gpus, **env)


def launch_holding(
    held: contextlib.ExitStack, directory: Path, *options: str, gpus: int = 0, **env: str
) -> Launch:
    """The same; ``held`` closes what is held for it."""
    line = [*options, "--log-dir", str(directory), "--start", "exec", "--", "true"]
    return Launch(launch_options.parse(line), {**ENV, **env}, gpus, held)


@pytest.mark.parametrize(
    ("options", "visible", "offered"),
    [
        (("--devices", "4-5"), None, "4,5"),
        (("--devices", "6,2"), "2,4,6", "6,2"),
        (("--devices", "none", "-n", "2"), None, ""),
        (("-n", "2"), "2,3", "2,3"),
    ],
)
def test_the_devices_asked_for_are_those_that_workers_see(
    tmp_path: Path, options: tuple[str, ...], visible: str | None, offered: str
) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    recipes = launch(tmp_path, *options, gpus=8, **env).worker_recipes()
    seen = [recipe.environment(env) for recipe in recipes]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == [offered, offered]
    assert [each.get("DEVICE_ID") for each in seen] == (["0", "1"] if offered else [None, None])


def test_the_spellings_of_other_launchers_are_understood(tmp_path: Path) -> None:
    line = "--nnodes 2 --nproc_per_node 8 --node_rank 1 --max_restarts 3 --log_dir logs -- true"
    torchrun = launch_options.parse(line.split())
    assert (torchrun.nnodes, torchrun.nproc_per_node, torchrun.node_rank) == (2, 8, 1)
    assert (torchrun.max_restarts, torchrun.log_dir, torchrun.command) == (3, Path("logs"), ["true"])
    assert launch_options.parse(["-np", "4", "true"]).workers == 4


def test_scheduler_and_workers_get_the_job_they_were_named(tmp_path: Path) -> None:
    with contextlib.ExitStack() as held:
        made = launch_holding(held, tmp_path, "-n", "2", "--scheduler", "--job-id", "night", MS_SCHED_PORT="")
        scheduler = made.scheduler_recipe()
        assert scheduler is not None
        recipes = [scheduler, *made.worker_recipes()]
    assert [recipe.env["MS_JOB_ID"] for recipe in recipes] == ["night"] * 3


@pytest.mark.parametrize(
    ("line", "env", "meeting"),
    [
        ("--nnodes 2 --scheduler --join [fd00::1]:7000", {}, "fd00::1"),
        ("--nnodes 2 --scheduler", {"MS_SCHED_HOST": "[fd00::1]"}, "fd00::1"),
        ("--nnodes 2 --scheduler --join a", {"SLURM_STEP_ID": "0", "SLURM_NODEID": "1"}, ""),
        ("--nnodes 2 --scheduler --join a --node-rank 1", {}, ""),
        ("--nnodes 2 --scheduler --join a -H b:1,c:1", {}, ""),
        ("--nnodes 2 --join a", {}, ""),
        ("-n 2 --scheduler --join a", {}, ""),
    ],
)
def test_the_address_decides_only_where_nothing_numbers_the_hosts(
    line: str, env: dict[str, str], meeting: str
) -> None:
    options = launch_options.parse([*line.split(), "--", "true"])
    assert launch_options.request(options, env).meeting == meeting


@pytest.mark.parametrize(
    ("tail", "shown"),
    [("0", ["node_0"]), ("node_1", ["node_1"]), ("all", ["node_0", "node_1"]), ("7", [])],
)
def test_unknown_ranks_are_shown_by_index_or_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: str, shown: list[str]
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    made = launch(tmp_path, "-n", "4", "--nnodes", "2", "--join", "127.0.0.1:6667", "--tail", tail)
    assert [recipe.label for recipe in made.worker_recipes() if not recipe.quiet] == shown


def test_a_rank_table_is_read_as_the_scheduler_will(tmp_path: Path) -> None:
    devices = [{"device_id": str(device), "rank_id": rank} for rank, device in enumerate((3, 2))]
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"server_list": [{"server_id": "10.9.9.9", "device": devices}]}))
    env = {"RANK_TABLE_FILE": str(table), "MS_WORKER_ADDRESS": "10.9.9.9", "CUDA_VISIBLE_DEVICES": "2,3"}
    common = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2"}
    plans = [WorkerPlan(i, None, "host", {**common, "DEVICE_ID": str(i)}) for i in (0, 1)]
    root = machine(tmp_path, 4)
    assert [worker.label for worker in with_table_ranks(plans, env, root)] == ["1", "0"]
    for change in (
        {"MS_WORKER_ADDRESS": "10.9.9.8"},  # a host that the table does not name
        {"MS_WORKER_ADDRESS": "no address"},  # what the worker itself will refuse
        {"RANK_TABLE_FILE": str(tmp_path)},  # what the scheduler will refuse
    ):
        ranked = with_table_ranks(plans, {**env, **change}, root)
        assert [worker.label for worker in ranked] == ["host_0", "host_1"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_no_scheduler_is_started_where_another_process_listens(tmp_path: Path, host: str) -> None:
    """Its workers would otherwise join the stranger's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as stranger:
        port = str(stranger.getsockname()[1])
        taken = launch(tmp_path, "-n", "1", "--scheduler", MS_SCHED_HOST=host, MS_SCHED_PORT=port)
        with pytest.raises(SettingsError, match=f"listens on port {port} of {host} already"):
            taken.scheduler_recipe()
        joining = launch(tmp_path, "-n", "1", MS_SCHED_HOST=host, MS_SCHED_PORT=port)
        assert joining.scheduler_recipe() is None
    assert taken.scheduler_recipe() is not None


def test_the_port_of_a_scheduler_to_be_started_is_kept_free_until_the_launch_is_over(tmp_path: Path) -> None:
    with contextlib.ExitStack() as held:
        made = launch_holding(held, tmp_path, "-n", "2", "--scheduler", MS_SCHED_PORT="")
        scheduler = made.scheduler_recipe()
        assert scheduler is not None
        address = ("127.0.0.1", int(scheduler.env["MS_SCHED_PORT"]))
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(address)
    with socket.socket() as later:
        later.bind(address)


def test_workers_are_told_to_leave_before_the_launcher_kills_them(tmp_path: Path) -> None:
    def told(grace: str = "10", **env: str) -> set[str]:
        recipes = launch(tmp_path, "-n", "2", "--grace", grace, **env).worker_recipes()  # type: ignore[arg-type]
        return {each.env.get("MS_LEAVE_TIMEOUT", "") for each in recipes}

    assert [told(), told("100"), told("0")] == [{"8"}, {"80"}, {"1"}]
    assert told(MS_LEAVE_TIMEOUT="30") == {""}  # theirs already


def rank_table(directory: Path, *devices: int, host: str = "127.0.0.1") -> str:
    """A table that gives these devices ranks from 0."""
    ranked = [{"device_id": str(device), "rank_id": str(rank)} for rank, device in enumerate(devices)]
    path = directory / "table.json"
    path.write_text(json.dumps({"server_list": [{"server_id": host, "device": ranked}]}))
    return str(path)


@pytest.mark.parametrize("variable", ["RANK_TABLE_FILE", "MINDSPORE_HCCL_CONFIG_PATH"])
def test_devices_and_their_number_come_from_the_rank_table(tmp_path: Path, variable: str) -> None:
    table = rank_table(tmp_path, 4, 5, 7, 6)
    made = launch(tmp_path, gpus=8, **{variable: table})
    assert made.layout.local_size == 4
    assert [recipe.env["CUDA_VISIBLE_DEVICES"] for recipe in made.worker_recipes()] == ["4,5,7,6"] * 4
    assert [recipe.env["DEVICE_ID"] for recipe in made.worker_recipes()] == ["0", "1", "2", "3"]
    without_gpus = launch(tmp_path, **{variable: table})  # type: ignore[arg-type]
    assert [worker.env["DEVICE_ID"] for worker in without_gpus.workers] == ["4", "5", "7", "6"]
    assert [worker.rank for worker in without_gpus.workers] == [0, 1, 2, 3]


def test_devices_that_are_asked_for_go_before_the_tables(tmp_path: Path) -> None:
    table = rank_table(tmp_path, 4, 5)
    asked = launch(tmp_path, "--devices", "4", gpus=8, RANK_TABLE_FILE=table)
    assert [recipe.env["CUDA_VISIBLE_DEVICES"] for recipe in asked.worker_recipes()] == ["4"]
    seen = launch(tmp_path, gpus=8, RANK_TABLE_FILE=table, CUDA_VISIBLE_DEVICES="5")
    assert "CUDA_VISIBLE_DEVICES" not in seen.worker_recipes()[0].env
    elsewhere = launch(tmp_path, "-n", "3", RANK_TABLE_FILE=rank_table(tmp_path, 4, 5, host="192.0.2.1"))
    assert ["DEVICE_ID" in worker.env for worker in elsewhere.workers] == [False] * 3


def test_a_device_of_the_table_that_is_not_there_is_refused(tmp_path: Path) -> None:
    table = rank_table(tmp_path, 6, 8)
    with pytest.raises(
        SettingsError, match=r"gives devices 6,8 to this host, which offers 0, 1, 2, 3, 4, 5, 6, 7"
    ):
        launch(tmp_path, gpus=8, RANK_TABLE_FILE=table)


def test_a_rank_id_that_contradicts_a_workers_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"RANK_ID is '0', but a worker of this launch has rank 1"):
        launch(tmp_path, "-n", "2", RANK_ID="0")
    table = rank_table(tmp_path, 4)
    assert launch(tmp_path, RANK_TABLE_FILE=table, RANK_ID="0").workers[0].rank == 0
    with pytest.raises(SettingsError, match="RANK_ID is '1'"):
        launch(tmp_path, RANK_TABLE_FILE=table, RANK_ID="1")


def test_a_rank_table_and_another_by_its_old_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="MINDSPORE_HCCL_CONFIG_PATH, its old name, is 'b'"):
        launch(tmp_path, "-n", "1", RANK_TABLE_FILE="a", MINDSPORE_HCCL_CONFIG_PATH="b")
