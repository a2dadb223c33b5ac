"""The launcher with real schedulers and workers: whole small jobs."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.launch.launching import Place, free_port, place

PYTHON = sys.executable
SUM = """
import numpy as np
import muster
with muster.init() as session:
    print(session.rank, session.world_size, muster.all_reduce(np.array([2.0 ** session.rank]))[0])
"""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path) as made:
        yield made


@pytest.mark.parametrize("start", ["exec", "fork"])
def test_a_job_with_its_own_scheduler(here: Place, start: str) -> None:
    script = here.script(SUM)
    code, out, err = here.run("-n", "3", "--scheduler", "--start", start, command=(PYTHON, script))
    assert code == 0, err
    assert "[scheduler] scheduler ready on 127.0.0.1:" in out
    assert [here.log(label).splitlines()[-1] for label in "012"] == [f"{rank} 3 7.0" for rank in range(3)]


def test_mutual_tls_with_the_options_alone(here: Place) -> None:
    from muster.certs.__main__ import main as certs

    keys = here.directory / "keys"
    assert certs(["init", "--dir", str(keys), "--password-file", str(keys / "password")]) == 0
    options = ("--config", "keys/config.json", "--password-file", "keys/password")
    script = here.script(SUM)
    code, out, err = here.run("-n", "2", "--scheduler", *options, command=(PYTHON, script))
    assert code == 0, err
    assert "mutual TLS" in out


def test_the_shares_of_two_hosts_make_one_job(here: Place) -> None:
    script = here.script(SUM)
    port = free_port("127.0.0.1")
    common = ("--nnodes", "2", "--nproc-per-node", "2", "--join", f"127.0.0.1:{port}")
    second = here.start(*common, "--node-rank", "1", "--scheduler", command=(PYTHON, script))
    code, _, err = here.run(*common, "--node-rank", "0", "--scheduler", command=(PYTHON, script))
    assert code == 0, err
    assert second.wait(timeout=60) == 0
    assert [here.log(label).splitlines()[-1] for label in "0123"] == [f"{rank} 4 15.0" for rank in range(4)]


@pytest.mark.parametrize(("meeting", "starts"), [("127.0.0.1", True), ("192.0.2.1", False)])
def test_of_hosts_without_numbers_the_one_that_is_joined_starts_the_scheduler(
    here: Place, meeting: str, starts: bool
) -> None:
    port = free_port("127.0.0.1")
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--scheduler", "--join", f"{meeting}:{port}")
    code, _, err = here.run(*options, command=("true",))
    assert code == 0, err
    assert (here.directory / "device" / "scheduler.log").exists() == starts
    assert ("not started here: 192.0.2.1 is no address of this host" in err) != starts


def test_logs_and_tail_go_by_the_ranks_of_a_rank_table(here: Place) -> None:
    ranks = [{"device_id": device, "rank_id": 1 - device} for device in (0, 1)]
    table = {"server_list": [{"server_id": "127.0.0.1", "device": ranks}], "status": "completed"}
    (here.directory / "table.json").write_text(json.dumps(table))
    script = here.script(SUM)
    code, out, err = here.run(
        "-n", "2", "--scheduler", "--tail", "0", command=(PYTHON, script), RANK_TABLE_FILE="table.json"
    )
    assert code == 0, err
    assert [here.log(label).splitlines()[-1] for label in "01"] == ["0 2 3.0", "1 2 3.0"]
    assert out.splitlines()[-1] == "[0] 0 2 3.0"


def test_a_host_list_starts_the_share_of_this_host(here: Place) -> None:
    script = here.script(SUM)
    options = ("-H", "127.0.0.1:2,192.0.2.1:6", "-n", "2", "--scheduler")
    code, _, err = here.run(*options, command=(PYTHON, script), MS_SCHED_PORT=free_port("127.0.0.1"))
    assert code == 0, err
    assert here.log("1").splitlines()[-1] == "1 2 3.0"


def test_a_scheduler_that_cannot_start_ends_the_launch_with_its_sentence(here: Place) -> None:
    script = here.script("import time\nwhile True:\n    time.sleep(1)")
    code, _, err = here.run("-n", "2", "--scheduler", command=(PYTHON, script), MS_NODE_TIMEOUT="soon")
    assert code == 2
    assert "the scheduler (pid " in err
    assert "MS_NODE_TIMEOUT" in err


def test_the_scheduler_ends_when_workers_end_without_joining(here: Place) -> None:
    code, out, _ = here.run("-n", "2", "--scheduler", command=("true",))
    assert code == 0
    assert "ready on" in out


@pytest.mark.parametrize("start", ["exec", "fork"])
def test_a_worker_that_dies_is_replaced_and_the_job_ends_well(here: Place, start: str) -> None:
    script = here.script(
        """
import os, signal
import numpy as np
import muster
if os.environ["MS_NODE_ID"] == "1" and not os.path.exists("died"):
    session = muster.init()
    open("died", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
session = muster.init()
while True:
    try:
        total = muster.all_reduce(np.ones(1))[0]
        if os.path.exists("died") and session.generation > 1:
            break
    except muster.MembershipChanged:
        session.rejoin()
print("total", total)
muster.release()
"""
    )
    code, _, err = here.run(
        *("-n", "2", "--scheduler", "--start", start, "--max-restarts", "1"), command=(PYTHON, script)
    )
    assert code == 0, err
    assert "worker 1 was ended by SIGKILL; starting it again (1 of 1)" in err
    assert here.log("0").splitlines()[-1] == "total 2.0"


def test_an_interrupt_ends_workers_and_scheduler(here: Place) -> None:
    script = here.script(
        "import os, time\nimport muster\nsession = muster.init()\n"
        "open('ready' + str(session.rank), 'w').close()\nwhile True:\n    time.sleep(1)"
    )
    launch = here.start("-n", "2", "--scheduler", command=(PYTHON, script))
    for name in ("ready0", "ready1"):
        here.until(name)
    launch.send_signal(signal.SIGINT)
    launch.communicate(timeout=60)
    assert launch.returncode == 128 + signal.SIGINT


FAILING = """
import sys
import numpy as np
import muster
session = muster.init()
for step in range(10**6):
    if step == 5 and session.rank == 2:
        sys.exit(3)
    muster.all_reduce(np.ones(4))
"""


def test_each_host_names_who_failed_first_wherever_that_runs(here: Place) -> None:
    script = here.script(FAILING)
    common = ("--nnodes", "2", "--nproc-per-node", "2", "--join", f"127.0.0.1:{free_port('127.0.0.1')}")
    host_0 = here.start(*common, "--node-rank", "0", "--scheduler", command=(PYTHON, script))
    options = ("--node-rank", "1", "--scheduler", "--log-dir", "second")
    code, _, own = here.run(*common, *options, command=(PYTHON, script))
    other = host_0.communicate(timeout=60)[1].decode()
    assert code == host_0.returncode == 3
    assert "muster: worker 2 failed first: exit code 3\n" in own
    assert "the first to fail runs elsewhere, where its log says more: rank 2 (node 2 on host" in other
    assert "left: exit code 3\n" in other
    for told, ranks in ((own, "3"), (other, "01")):
        lines = [line for line in told.splitlines() if line.startswith("muster: worker ")]
        assert [line[len("muster: worker ")] for line in lines if "because of that" in line] == list(ranks)
        assert "; the end of device/worker_0" not in told


LEAVING = """
import os
import signal
import numpy as np
import muster
from muster.worker.training.sampler import ShardedSampler
from muster.worker.training.state import TrainingState
from muster.worker.training.loop import ElasticLoop

session = muster.init()
state = TrainingState({"w": np.zeros(4)}, ShardedSampler(400, 4))
for step in ElasticLoop(session, state, epochs=1):
    with step:
        muster.all_reduce(np.ones(4))
        if state.step == 5 and session.rank in (LEAVERS):
            os.kill(os.getpid(), signal.SIGTERM)
print("saving the final model")
"""


PASSED_ON = """
import runpy
import sys
import muster
try:
    runpy.run_path("leaving.py")
except muster.WorkerError as error:
    sys.exit(error.exit_code)
"""
"""A script that catches what ends it, and exits with the code of that."""


@pytest.mark.parametrize(
    ("leavers", "code", "script"), [("1,", 0, LEAVING), ("0, 1", 143, LEAVING), ("1,", 0, PASSED_ON)]
)
def test_a_worker_that_leaves_is_no_failure_and_does_not_complete_the_job(
    here: Place, leavers: str, code: int, script: str
) -> None:
    leaving = LEAVING.replace("LEAVERS", leavers)
    (here.directory / "leaving.py").write_text(leaving)
    script = here.script(leaving if script == LEAVING else script)
    options = ("-n", "2", "--min-workers", "1", "--max-restarts", "1", "--scheduler")
    found, _, err = here.run(*options, command=(PYTHON, script))
    assert found == code, err
    assert "starting it again" not in err and "failed" not in err
    assert "saving" not in here.log("1")
    assert ("saving" in here.log("0")) == (code == 0)
