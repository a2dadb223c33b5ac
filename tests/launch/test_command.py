"""What a launch hands to its processes, worked out for machines other than this one; what a host offers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from pathlib import Path

import pytest

from muster.errors import SettingsError
from muster.launch import options as launch_options
from muster.launch.command import (
    check_port,
    cores,
    count_gpus,
    hold_port,
    local_names,
    look,
    main,
    offered_devices,
    plan_of,
    with_table_ranks,
)
from muster.launch.plan import LaunchPlan, WorkerPlan, plan_launch
from muster.worker.config import load_settings, visible_devices
from muster.worker.host import choose_device
from tests.worker.test_host import machine

ENV = {"MS_SCHED_PORT": "6667", "PATH": "/usr/bin:/bin"}


def launch(*options: str, gpus: int = 0, **env: str) -> LaunchPlan:
    """A launch of ``true`` that is not carried out."""
    with contextlib.ExitStack() as held:
        return launch_holding(held, *options, gpus=gpus, **env)


def launch_holding(held: contextlib.ExitStack, *options: str, gpus: int = 0, **env: str) -> LaunchPlan:
    """The same; ``held`` closes what is held for it."""
    parsed = launch_options.parse([*options, "--start", "exec", "--", "true"])
    return plan_launch(parsed, look(parsed, {**ENV, **env}, held, gpus))


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
    recipes = launch(*options, gpus=8, **env).recipes
    seen = [recipe.environment(env) for recipe in recipes]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == [offered, offered]
    assert [each.get("DEVICE_ID") for each in seen] == (["0", "1"] if offered else [None, None])


@pytest.mark.parametrize(
    ("gpus", "workers", "expected"),
    [(1, 2, [0, 0]), (2, 2, [0, 1]), (2, 3, [0, 0, 1]), (8, 2, [0, 1]), (0, 2, [-1, -1])],
)
def test_workers_that_may_share_gpus_find_one_each(
    tmp_path: Path, gpus: int, workers: int, expected: list[int]
) -> None:
    made = launch("-n", str(workers), "--share-gpus", gpus=gpus)
    root = machine(tmp_path, gpus)
    settings = [
        load_settings(recipe.environment({**ENV, "MS_ALLOW_INSECURE": "1"})) for recipe in made.recipes
    ]
    devices = [choose_device(each, root).device for each in settings]
    assert [each.index if each.kind == "cuda" else -1 for each in devices] == expected
    shared = workers > gpus > 0
    assert len({recipe.env.get("NCCL_HOSTID") for recipe in made.recipes}) == (workers if shared else 1)
    assert any("speeds mean nothing" in note for note in made.notes) == shared


def test_the_spellings_of_other_launchers_are_understood(tmp_path: Path) -> None:
    line = "--nnodes 2 --nproc_per_node 8 --node_rank 1 --max_restarts 3 --log_dir logs -- true"
    torchrun = launch_options.parse(line.split())
    assert (torchrun.nnodes, torchrun.nproc_per_node, torchrun.node_rank) == (2, 8, 1)
    assert (torchrun.max_restarts, torchrun.log_dir, torchrun.command) == (3, Path("logs"), ["true"])
    assert launch_options.parse(["-np", "4", "true"]).workers == 4


def test_scheduler_and_workers_get_the_job_they_were_named(tmp_path: Path) -> None:
    with contextlib.ExitStack() as held:
        made = launch_holding(held, "-n", "2", "--scheduler", "--job-id", "night", MS_SCHED_PORT="")
        scheduler = made.scheduler
        assert scheduler is not None
        recipes = [scheduler, *made.recipes]
    assert [recipe.env["MS_JOB_ID"] for recipe in recipes] == ["night"] * 3


def test_programs_that_are_to_live_on_are_told_and_get_agents(tmp_path: Path) -> None:
    by_option, by_variable = launch("-n", "2", "--in-place"), launch("-n", "2", MS_IN_PLACE="1")
    assert all(recipe.env["MS_IN_PLACE"] == "1" for recipe in by_option.recipes)
    for recipe in (*by_option.recipes, *by_variable.recipes):
        assert "muster.programs.agent" in recipe.argv
    with pytest.raises(SettingsError, match="--in-place is for torch programs, and --program is jax"):
        launch("--in-place", "--program", "jax")
    with pytest.raises(SettingsError, match="MS_IN_PLACE must be 0 or 1"):
        launch("-n", "2", MS_IN_PLACE="yes")


@pytest.mark.parametrize(("own", "places"), [("", "2"), ("1", "2"), ("5", None)])
def test_the_scheduler_has_a_place_for_each_spare_and_a_rank_table_has_none(
    tmp_path: Path, own: str, places: str | None
) -> None:
    where = ("--nnodes", "2", "--nproc-per-node", "2", "--node-rank", "0", "--join", "127.0.0.1:7000")
    made = launch(*where, "--spares", "1", "--scheduler", MS_SPARES=own)
    assert made.scheduler is not None
    assert made.scheduler.env.get("MS_SPARES") == places
    with pytest.raises(SettingsError, match="--spares has no meaning with a rank table"):
        launch("--spares", "1", "--join", "127.0.0.1:7000", RANK_TABLE_FILE=rank_table(tmp_path, 4, 5))


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
    [("0", ["node_0"]), ("node_1", ["node_1"]), ("all", ["node_0", "node_1"])],
)
def test_unknown_ranks_are_shown_by_index_or_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: str, shown: list[str]
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    made = launch("-n", "4", "--nnodes", "2", "--join", "127.0.0.1:6667", "--tail", tail)
    assert [recipe.label for recipe in made.recipes if not recipe.quiet] == shown


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


@pytest.mark.parametrize(
    ("answers", "refused"),
    [
        ({"a": socket.EAI_NONAME}, True),
        ({"a": socket.EAI_AGAIN}, False),
        ({"a": socket.EAI_NONAME, "b": socket.EAI_NONAME}, True),
        ({"a": socket.EAI_NONAME, "b": 0}, False),
    ],
)
def test_a_name_that_no_host_has_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], answers: dict[str, int], refused: bool
) -> None:
    """The command cannot be run, so that a launch that gets past the name ends, too."""

    def ask(host: str, *_: object, **__: object) -> list[object]:
        if answers.get(host):
            raise socket.gaierror(answers[host], "as the name service says")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    join = ",".join(f"{host}:6667" for host in answers)
    assert main(["-n", "1", "--join", join, "--", "no-such-program"]) == 2
    said = capfd.readouterr().err
    names = ", ".join(map(repr, answers))
    assert (f"muster: --join names {names}, and the name service knows no such host." in said) is refused
    assert ("'no-such-program' is not found" in said) is not refused


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_no_scheduler_is_started_where_another_process_listens(tmp_path: Path, host: str) -> None:
    """Its workers would otherwise join the stranger's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as stranger:
        port = str(stranger.getsockname()[1])
        with pytest.raises(SettingsError, match=f"listens on port {port} of {host} already"):
            check_port(host, port)
        argv = ["-n", "1", "--start", "exec", "--scheduler", "--", "true"]
        env = {**ENV, "MS_SCHED_HOST": host, "MS_SCHED_PORT": port}
        with pytest.raises(SettingsError, match=f"listens on port {port} of {host} already"):
            plan_of(argv, env, contextlib.ExitStack())
        argv.remove("--scheduler")
        assert plan_of(argv, env, contextlib.ExitStack()).scheduler is None
    check_port(host, port)


def test_the_port_of_a_scheduler_to_be_started_is_kept_free_until_the_launch_is_over(tmp_path: Path) -> None:
    with contextlib.ExitStack() as held:
        made = launch_holding(held, "-n", "2", "--scheduler", MS_SCHED_PORT="")
        scheduler = made.scheduler
        assert scheduler is not None
        address = ("127.0.0.1", int(scheduler.env["MS_SCHED_PORT"]))
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(address)
    with socket.socket() as later:
        later.bind(address)


def test_workers_are_told_to_leave_before_the_launcher_kills_them(tmp_path: Path) -> None:
    def told(grace: str = "10", **env: str) -> set[str]:
        recipes = launch("-n", "2", "--grace", grace, **env).recipes  # type: ignore[arg-type]
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
    made = launch(gpus=8, **{variable: table})
    assert made.counts.local_size == 4
    assert [recipe.env["CUDA_VISIBLE_DEVICES"] for recipe in made.recipes] == ["4,5,7,6"] * 4
    assert [recipe.env["DEVICE_ID"] for recipe in made.recipes] == ["0", "1", "2", "3"]
    without_gpus = launch(**{variable: table})  # type: ignore[arg-type]
    assert [worker.env["DEVICE_ID"] for worker in without_gpus.workers] == ["4", "5", "7", "6"]
    assert [worker.rank for worker in without_gpus.workers] == [0, 1, 2, 3]


def test_devices_that_are_asked_for_go_before_the_tables(tmp_path: Path) -> None:
    table = rank_table(tmp_path, 4, 5)
    asked = launch("--devices", "4", gpus=8, RANK_TABLE_FILE=table)
    assert [recipe.env["CUDA_VISIBLE_DEVICES"] for recipe in asked.recipes] == ["4"]
    seen = launch(gpus=8, RANK_TABLE_FILE=table, CUDA_VISIBLE_DEVICES="5")
    assert "CUDA_VISIBLE_DEVICES" not in seen.recipes[0].env
    elsewhere = launch("-n", "3", RANK_TABLE_FILE=rank_table(tmp_path, 4, 5, host="192.0.2.1"))
    assert ["DEVICE_ID" in worker.env for worker in elsewhere.workers] == [False] * 3


def test_a_device_of_the_table_that_is_not_there_is_refused(tmp_path: Path) -> None:
    table = rank_table(tmp_path, 6, 8)
    with pytest.raises(
        SettingsError, match=r"gives devices 6,8 to this host, which offers 0, 1, 2, 3, 4, 5, 6, 7"
    ):
        launch(gpus=8, RANK_TABLE_FILE=table)


def test_a_rank_id_that_contradicts_a_workers_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"RANK_ID is '0', but a worker of this launch has rank 1"):
        launch("-n", "2", RANK_ID="0")
    table = rank_table(tmp_path, 4)
    assert launch(RANK_TABLE_FILE=table, RANK_ID="0").workers[0].rank == 0
    with pytest.raises(SettingsError, match="RANK_ID is '1'"):
        launch(RANK_TABLE_FILE=table, RANK_ID="1")


def test_a_rank_table_and_another_by_its_old_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="MINDSPORE_HCCL_CONFIG_PATH, its old name, is 'b'"):
        launch("-n", "1", RANK_TABLE_FILE="a", MINDSPORE_HCCL_CONFIG_PATH="b")


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        ("7", "--tail names 7; there are ranks 0 to 1"),
        ("0,rank1", "--tail is '0,rank1'"),
        ("", "--tail is ''"),
    ],
)
def test_a_rank_that_the_job_does_not_have_cannot_be_shown(tail: str, words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        launch("-n", "2", "--tail", tail)


def test_output_of_ranks_on_other_hosts_may_be_asked_for() -> None:
    made = launch(
        "-n", "4", "--nnodes", "2", "--node-rank", "0", "--join", "127.0.0.1:6667", "--tail", "3,01"
    )
    assert [recipe.label for recipe in made.recipes if not recipe.quiet] == ["1"]
    many = launch("-n", "4", "--nnodes", "2", "--join", "127.0.0.1:6667")
    with pytest.raises(SettingsError, match="workers 0 to 1 of this host"):
        launch("-n", "4", "--nnodes", "2", "--join", "127.0.0.1:6667", "--tail", "2")
    assert [recipe.quiet for recipe in many.recipes] == [False, True]


def test_a_command_line_of_mpiruns_is_taken_with_notes_of_what_serves_instead(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 slots=2 max_slots=4\n")
    line = ("--allow-run-as-root", "--mca", "btl_tcp_if_include", "eth0", "--mca", "btl", "^openib")
    made = launch(*line, "-x", "PATH", "-x", "LEVEL=a=b", "--hostfile", str(tmp_path / "hosts"))
    assert [recipe.env["LEVEL"] for recipe in made.recipes] == ["a=b"] * 2
    assert "PATH" not in made.recipes[0].env
    notes = "\n".join(made.notes)
    for words in (
        "--allow-run-as-root is not needed",
        "--mca btl_tcp_if_include eth0 is passed over: MS_INTERFACE=eth0 chooses",
        "--mca btl ^openib is passed over: settings are MS_* variables",
        "-x PATH is not needed: workers inherit",
        "max_slots is passed over",
    ):
        assert words in notes
    with pytest.raises(SettingsError, match="write NAME or NAME=VALUE"):
        launch("-n", "1", "-x", "a b")


@pytest.mark.parametrize(
    ("options", "label"),
    [
        (("-n", "2", "--scheduler"), None),
        (("-n", "2", "--scheduler", "--uplink", "on"), "uplink"),
        (("--nnodes", "125", "--node-rank", "0", "--nproc-per-node", "8", "--join", "a:1"), "uplink_HOST"),
        (("--nnodes", "125", "--nproc-per-node", "8", "--join", "a:1", "--uplink", "off"), None),
        (("--nnodes", "124", "--nproc-per-node", "8", "--join", "a:1"), None),
        (("--nnodes", "1000", "--nproc-per-node", "1", "--join", "a:1"), None),
    ],
)
def test_large_jobs_on_several_hosts_have_an_uplink_on_each(
    options: tuple[str, ...], label: str | None, tmp_path: Path
) -> None:
    made = launch(*options, "--job-id", "red", MS_NODE_ID="n", MS_SERVER_PASSWORD="x", MS_UPLINK="7:7")
    uplink = made.uplink
    assert all("MS_UPLINK" not in recipe.environment({"MS_UPLINK": "7:7"}) for recipe in made.recipes)
    if label is None:
        assert uplink is None
        return
    assert uplink is not None
    assert uplink.label == label.replace("HOST", made.workers[0].host)
    assert uplink.last
    env = uplink.environment({"MS_SERVER_PASSWORD": "x", "MS_UPLINK": "7:7"})
    assert (env["MS_ROLE"], env["MS_JOB_ID"], env["MS_SCHED_HOST"]) == ("MS_WORKER", "red", made.address[0])
    assert not {"MS_SERVER_PASSWORD", "MS_UPLINK", "MS_NODE_ID", "MS_LOCAL_INDEX"} & env.keys()


def test_several_schedulers_are_told_which_workers_have_ended_and_one_sees_it() -> None:
    hosts = ("-n", "2", "--join")
    assert launch(*hosts, "a:6667").last_word is None
    told = launch(*hosts, "a:6667,b:6667").last_word
    assert told is not None
    assert told.argv[-2:] == ("-m", "muster.launch.last_word")
    assert told.env["MS_SCHED_HOST"] == "a,b"
    assert "MS_NODE_ID" not in told.env  # it speaks for all of them


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    assert count_gpus(tmp_path) == 0
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert count_gpus(tmp_path) == 2


@pytest.mark.parametrize(
    ("visible", "option", "expected"),
    [
        (None, "all", ("0", "1", "2", "3")),
        ("2,3", "all", ("2", "3")),
        ("GPU-aa,GPU-bb", "all", ("GPU-aa", "GPU-bb")),
        ("", "all", ()),
        ("-1", "all", ()),
        ("NoDevFiles", "all", ()),
        ("2,-1,3", "all", ("2",)),
        ("2,,3", "all", ("2",)),
        ("02", "all", ("2",)),
        (None, "none", ()),
        (None, "1-2", ("1", "2")),
        ("2,3", "3", ("3",)),
    ],
)
def test_offered_devices(visible: str | None, option: str, expected: tuple[str, ...]) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert offered_devices(env, option, 4) == expected
    if visible is not None and option == "all":
        assert visible_devices(env) == expected  # what a worker makes of it


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(SettingsError, match="asks for 4, 5; this host offers 0, 1, 2, 3"):
        offered_devices({}, "3-5", 4)
    with pytest.raises(SettingsError, match="asks for 0; this host offers none"):
        offered_devices({}, "0", 0)
    with pytest.raises(SettingsError, match=r"CUDA_VISIBLE_DEVICES is '1,4'.*devices 0 to 3"):
        offered_devices({"CUDA_VISIBLE_DEVICES": "1,4"}, "all", 4)


@pytest.mark.parametrize("text", ["2,2", "2,02", "GPU-a,GPU-a"])
@pytest.mark.parametrize("gpus", [0, 4])
def test_a_device_named_twice_is_refused(text: str, gpus: int) -> None:
    with pytest.raises(SettingsError, match=r"CUDA_VISIBLE_DEVICES is .* twice"):
        offered_devices({"CUDA_VISIBLE_DEVICES": text}, "all", gpus)


def test_this_host_answers_to_its_own_names_only() -> None:
    names = local_names(["127.0.0.1", "192.0.2.7", "no-such-host.invalid", "a..b"])
    assert socket.gethostname() in names
    assert "127.0.0.1" in names
    assert "192.0.2.7" not in names
    assert not {"no-such-host.invalid", "a..b"} & names


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_that_is_held_is_given_to_nobody_but_a_server_that_asks_for_it(host: str) -> None:
    with hold_port(host) as held, socket.socket(held.family) as stranger:
        address = (host, held.getsockname()[1])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with pytest.raises(OSError, match="in use"):  # as the system does where it looks for a free port
            stranger.bind(address)
        with (
            socket.create_server(address, family=held.family) as server,
            socket.create_connection(address),
        ):
            server.accept()[0].close()


def test_cores_are_those_this_process_may_use() -> None:
    assert set(cores()) == os.sched_getaffinity(0)
