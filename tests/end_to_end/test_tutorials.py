"""The tutorials' own scripts and lines, with nothing changed but the import."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launching import free_port
from tests.scheduler.processes import PASSWORD, Pki, environment

SCRIPT = """
import muster
from muster import get_group_size, get_rank, init, set_ps_context

set_ps_context(config_file_path={config!r}, enable_ssl=True, enable_ps=True,
               client_password={password!r}, server_password={password!r})
init()
print("rank", get_rank(), "of", get_group_size())

def test_train():
    assert float(muster.all_reduce(1.0)) == 2.0
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "keys").mkdir()
    pki = Pki.make(tmp_path / "keys")
    path = tmp_path / "resnet50_distributed_training_gpu.py"
    path.write_text(SCRIPT.format(config=str(pki.config), password=PASSWORD.decode()))
    return path


def ended(started: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    try:
        return [(process.wait(100), process.communicate()[0]) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.mark.parametrize("command", [(), ("-m", "pytest", "-s", "-v", "-p", "no:cacheprovider")])
def test_the_scheduler_is_the_same_script_in_another_role(script: Path, command: tuple[str, ...]) -> None:
    """Also as the tutorials start it: ``pytest -s -v ./SCRIPT``; every process exits with 0."""
    env = {"MS_WORKER_NUM": "2", "MS_SCHED_PORT": free_port("127.0.0.1"), "MS_TOPO_TIMEOUT": "40"}
    started = [
        subprocess.Popen(
            [sys.executable, *command, str(script)],
            cwd=script.parent,
            env=environment(MS_ROLE=role, MS_BACKEND="tcp", **env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for role in ("MS_WORKER", "MS_WORKER", "MS_SCHED")
    ]
    results = ended(started)
    assert [code for code, _ in results] == [0, 0, 0], results
    printed = re.findall(r"\brank . of .$", "\n".join(text for _, text in results), re.MULTILINE)
    assert {"rank 0 of 2", "rank 1 of 2"} <= set(printed)
    assert "has completed the training" in results[2][1]


RANK_TABLE = """
#!/bin/bash
export DEVICE_NUM=8
export RANK_SIZE=2
export RANK_TABLE_FILE="./hccl_2p_67_127.0.0.1.json"

for ((i = 0; i < ${RANK_SIZE}; i++)); do
    export DEVICE_ID=$((i+6))
    export RANK_ID=$i
    python -u train.py &> ./train_$i.log &
done
"""


def test_a_script_with_a_rank_table_needs_nothing_but_a_scheduler(tmp_path: Path) -> None:
    """Size, role and ranks are the table's: the tutorial's loop as it stands, and one process more."""
    device = [{"device_id": str(6 + i), "device_ip": "127.0.0.1", "rank_id": str(i)} for i in range(2)]
    table = {"server_count": "1", "server_list": [{"server_id": "127.0.0.1", "device": device}]}
    (tmp_path / "hccl_2p_67_127.0.0.1.json").write_text(json.dumps({**table, "status": "completed"}))
    (tmp_path / "train.py").write_text(
        "import os, muster\n"
        "with muster.init():\n"
        "    print(os.environ['DEVICE_ID'], 'is rank', muster.get_rank(), 'of', muster.get_group_size())\n"
    )
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    serve = "MS_ROLE=MS_SCHED python -m muster scheduler &> ./scheduler.log &\n"
    lines = RANK_TABLE + serve + "for job in $(jobs -p); do wait $job || exit; done\n"
    env = environment(
        MS_SCHED_PORT=free_port("127.0.0.1"),
        MS_TOPO_TIMEOUT="40",
        MS_BACKEND="tcp",
        CUDA_VISIBLE_DEVICES="",
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    )
    done = subprocess.run(["bash", "-c", lines], cwd=tmp_path, env=env, check=False, timeout=200)
    logs = {path.name: path.read_text() for path in tmp_path.glob("*.log")}
    assert done.returncode == 0, logs
    assert "6 is rank 0 of 2\n" in logs["train_0.log"] and "7 is rank 1 of 2\n" in logs["train_1.log"], logs


CALLS = """
import numpy as np
import muster
from muster import create_group, get_group_rank_from_world_rank, get_group_size, get_local_rank
from muster import get_local_rank_size, get_rank, get_world_rank_from_group_rank, init

try:
    init("hccl")
except muster.WorkerError as error:
    print("refused:", error)
init()
rank, size = get_rank(), get_group_size()
assert (get_local_rank(), get_local_rank_size()) == (rank, size) and size == 2
create_group("backwards", [1, 0])
assert get_group_rank_from_world_rank(1, "backwards") == 0
assert get_world_rank_from_group_rank("backwards", 0) == 1
assert muster.all_reduce(np.ones(2)).tolist() == [2, 2]
assert muster.all_gather(np.full(1, rank)).tolist() == [0, 1]
assert muster.reduce_scatter(np.arange(2)).tolist() == [2 * rank]
assert muster.broadcast(np.full(1, rank), 1).tolist() == [1]
assert muster.all_to_all(np.array([rank, rank])).tolist() == [0, 1]
muster.barrier()
print("all as written")
"""


def test_the_calls_of_the_tutorials(tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(CALLS)
    done = launched(tmp_path, "-n", "2", "--", sys.executable, "calls.py")
    logs = [path.read_text() for path in (tmp_path / "muster-runs" / "latest").glob("worker_*.log")]
    assert [("refused: " in log, "all as written" in log) for log in logs] == [(True, True)] * 2, done.stdout


def test_a_hostfile_names_this_host(tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(CALLS)
    (tmp_path / "hosts").write_text("127.0.0.1 slots=2\n")
    launched(tmp_path, "--hostfile", "hosts", "--", sys.executable, "calls.py")
    logs = (tmp_path / "muster-runs" / "latest").glob("worker_*.log")
    assert sum("all as written" in path.read_text() for path in logs) == 2


PYTEST = f"{sys.executable} -m pytest -s -v -p no:cacheprovider ./train.py > train_$MS_LOCAL_INDEX.log 2>&1"


def test_pytest_and_a_wrapper_may_be_the_worker_s_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import muster\nmuster.init()\n\ndef test_train():\n    assert float(muster.all_reduce(1.0)) == 2.0\n"
    )
    (tmp_path / "wrapper.sh").write_text(f"NCCL_SOCKET_IFNAME=lo\n{PYTEST}\n")
    launched(tmp_path, "-n", "2", "--", "bash", "wrapper.sh")
    assert "1 passed" in (tmp_path / "train_1.log").read_text()
    command = (sys.executable, "-m", "pytest", "-s", "-v", "-p", "no:cacheprovider", "./train.py")
    assert "1 passed" in launched(tmp_path, "-n", "2", "--", *command).stdout


def test_a_wrapper_that_ends_before_its_program_is_named(tmp_path: Path) -> None:
    """What it has left in the background ends with the worker, and the launch says that nobody came."""
    (tmp_path / "train.py").write_text("import time\ntime.sleep(60)\nimport muster\nmuster.init()\n")
    (tmp_path / "wrapper.sh").write_text(f"{PYTEST} &\n")
    assert "no worker joined the job" in launched(tmp_path, "-n", "2", "--", "bash", "wrapper.sh").stderr


EXCHANGE = """
import numpy as np
import muster

with muster.init() as session:
    rank, size = session.rank, session.world_size
    left, right = (rank - 1) % size, (rank + 1) % size
    given = {peer: np.full(1 << 20, 10.0 * rank + peer) for peer in (left, right)}
    got = muster.neighbor_exchange(given, {left: np.empty(1 << 20), right: np.empty(1 << 20)})
    wrong = [peer for peer, x in got.items() if not (x == 10.0 * peer + rank).all()]
    print("wrong:", wrong)
    for kind in (muster.all_to_all, muster.all_gather, muster.reduce_scatter, muster.broadcast):
        kind(np.zeros(3))
    muster.barrier()
"""


def test_neighbours_exchange_more_than_a_socket_holds_in_both_directions(tmp_path: Path) -> None:
    (tmp_path / "ring.py").write_text(EXCHANGE)
    done = launched(tmp_path, "-n", "3", "--tail", "all", "--", sys.executable, "ring.py")
    assert done.stdout.count("wrong: []") == 3, done.stdout + done.stderr


def test_the_first_program_gathers_everybodys_rank(tmp_path: Path) -> None:
    launched(tmp_path, "-n", "4", "--", sys.executable, "-m", "examples.nccl_allgather")
    logs = [path.read_text() for path in (tmp_path / "muster-runs" / "latest").glob("worker_*.log")]
    assert len(logs) == 4
    assert all("[[0.]\n [1.]\n [2.]\n [3.]]\n" in log for log in logs), logs


def launched(folder: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A launch on this host's CPUs, ended well."""
    done = subprocess.run(
        [sys.executable, "-m", "muster", "run", "--scheduler", "--devices", "none", *options],
        cwd=folder,
        env=environment(**env),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_a_wrong_setting_of_the_scheduler_s_role_is_one_sentence(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment(MS_ROLE="MS_SCHED", MS_WORKER_NUM="none"),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "MS_WORKER_NUM must be a whole number from 1 to 65536" in line
