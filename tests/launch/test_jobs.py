"""The launcher with real schedulers and workers: whole small jobs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.web.past import load
from muster.wire.process_stat import stat_fields
from tests.launch.launching import Place, free_port, gone, place
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]

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
    assert err.startswith(
        "muster: 3 workers on 1 host, CPU, tcp, NOT encrypted: no certificates (--config)\n"
    )
    assert out == "[0] 0 3 7.0\n"
    assert "scheduler ready on 127.0.0.1:" in here.scheduler_log()
    assert [here.log(label).splitlines()[-1] for label in "012"] == [f"{rank} 3 7.0" for rank in range(3)]


def test_mutual_tls_with_the_options_alone(here: Place) -> None:
    from muster.certs.__main__ import main as certs

    keys = here.directory / "keys"
    assert certs(["init", "--dir", str(keys), "--password-file", str(keys / "password")]) == 0
    options = ("--config", "keys/config.json", "--password-file", "keys/password")
    script = here.script(SUM)
    code, _, err = here.run("-n", "2", "--scheduler", *options, command=(PYTHON, script))
    assert code == 0, err
    assert err.startswith("muster: 2 workers on 1 host, CPU, tcp, encrypted\n")
    assert "mutual TLS" in here.scheduler_log()


KNOCK = """
import contextlib, os, pathlib, signal, socket, time
import muster

def scheduler():
    children = pathlib.Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
    names = {pathlib.Path(f"/proc/{each}/cmdline").read_bytes(): int(each) for each in children}
    return next((name, pid) for name, pid in names.items() if b"muster.scheduler" in name)

def knock():
    with socket.create_connection((os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"]))) as door:
        door.sendall(b"no hello at all" * 20)
        with contextlib.suppress(ConnectionError):  # it hangs up with bytes of ours unread
            door.recv(1)

def knock_until(told):
    # Once a second: of what gRPC says, what finds the socket full is lost.
    for _ in range(60):
        knock()
        for _ in range(50):
            if told():
                return
            time.sleep(0.02)
    raise SystemExit("the scheduler has told of no handshake: " + log.read_text())

with muster.init() as session:
    log = pathlib.Path("muster-runs/latest/scheduler.log")
    if session.rank == 0:
        name, pid = scheduler()
        print("forked", name.startswith(b"muster: scheduler"), os.environ["GRPC_VERBOSITY"])
        knock_until(lambda: log.read_text().count("does not speak TLS") >= 1)
        os.kill(pid, signal.SIGKILL)
        while log.read_text().count("ready on") < 2:
            time.sleep(0.02)
        told = log.read_text().count("does not speak TLS")
        knock_until(lambda: log.read_text().count("does not speak TLS") > told)
        print("forked again", scheduler()[0].startswith(b"muster: scheduler"))
    muster.barrier()
"""


@pytest.mark.parametrize("start", ["exec", "fork"])
def test_a_scheduler_hears_of_handshakes_that_fail_and_workers_grpc_is_silent(
    here: Place, start: str
) -> None:
    """gRPC reads what it is to say when it is imported: by a scheduler itself, forked or started again."""
    from muster.certs.__main__ import main as certs

    keys = here.directory / "keys"
    assert certs(["init", "--dir", str(keys), "--password-file", str(keys / "password")]) == 0
    options = ("--config", "keys/config.json", "--password-file", "keys/password", "--start", start)
    more = ("--max-restarts", "1", "--scheduler")
    env = {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(here.directory / "journal")}
    code, _, err = here.run("-n", "2", *more, *options, command=(PYTHON, here.script(KNOCK)), **env)
    assert code == 0, err
    assert "the scheduler was ended by SIGKILL; starting it again" in err
    assert f"forked {start == 'fork'} NONE\n" in here.log("0")
    assert "forked again False\n" in here.log("0")


def test_the_shares_of_two_hosts_make_one_job(here: Place) -> None:
    script = here.script(SUM)
    port = free_port("127.0.0.1")
    common = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--join",
        f"127.0.0.1:{port}",
        "--log-dir",
        "muster-runs/latest",
    )
    second = here.start(*common, "--node-rank", "1", "--scheduler", command=(PYTHON, script))
    code, _, err = here.run(*common, "--node-rank", "0", "--scheduler", command=(PYTHON, script))
    assert code == 0, err
    assert second.wait(timeout=100) == 0
    assert [here.log(label).splitlines()[-1] for label in "0123"] == [f"{rank} 4 15.0" for rank in range(4)]


@pytest.mark.parametrize(("meeting", "starts"), [("127.0.0.1", True), ("192.0.2.1", False)])
def test_of_hosts_without_numbers_the_one_that_is_joined_starts_the_scheduler(
    here: Place, meeting: str, starts: bool
) -> None:
    port = free_port("127.0.0.1")
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--scheduler", "--join", f"{meeting}:{port}")
    code, _, err = here.run(*options, command=("true",))
    assert code == 0, err
    assert (here.directory / "muster-runs" / "latest" / "scheduler.log").exists() == starts
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


@pytest.mark.parametrize(
    "other", ["muster.barrier()", "pass"], ids=["the other fails, too", "the other ends well"]
)
def test_who_ends_after_the_scheduler_of_the_job_that_it_failed_is_the_first(here: Place, other: str) -> None:
    """Its process may last longer than its session: here a thread of its own holds it up until then."""
    script = here.script(
        f"""
import pathlib, threading, time
import muster

def last_longer():
    [record] = pathlib.Path("muster-runs/latest").glob("record_*.jsonl")
    until = time.monotonic() + 60
    while '"name":"the scheduler"' not in record.read_text() and time.monotonic() < until:
        time.sleep(0.01)

with muster.init() as session:
    if session.rank == 1:
        threading.Thread(target=last_longer).start()
        raise ValueError("mine")
    {other}
"""
    )
    code, _, err = here.run("-n", "2", "--scheduler", command=(PYTHON, script))
    assert code == 1, err
    assert "worker 1 failed first: ValueError: mine" in err and "the scheduler (pid" not in err


def test_the_scheduler_ends_when_workers_end_without_joining(here: Place) -> None:
    ready = "until grep -q 'ready on' muster-runs/latest/scheduler.log; do sleep 0.05; done"
    code, _, _ = here.run("-n", "2", "--scheduler", command=("sh", "-c", ready))
    assert code == 0
    assert "ready on" in here.scheduler_log()


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


LATE = """
import os, signal, socket, sys, time
import numpy as np

LATE_AT, VICTIM = sys.argv[1], os.environ["MS_NODE_ID"] == str(int(os.environ["MS_WORKER_NUM"]) - 1)

def until(condition):
    while not condition():
        time.sleep(0.05)

def is_over():
    with socket.socket() as probe:
        return probe.connect_ex((os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"]))) != 0

if VICTIM and os.path.exists("died"):
    open("back", "w").close()
    until(lambda: LATE_AT == "in init" and is_over())
    open("joins", "w").close()
import muster
session = muster.init()
if VICTIM:
    open("died", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
while session.generation == 1:
    try:
        muster.all_reduce(np.ones(1))
    except muster.MembershipChanged:
        session.rejoin()
until(lambda: os.path.exists("back"))
muster.release()
until(lambda: LATE_AT == "before init" or os.path.exists("joins"))
"""


@pytest.mark.parametrize(
    ("late_at", "hosts"), [("before init", 1), ("in init", 1), ("before init", 2), ("in init", 2)]
)
def test_a_restarted_worker_that_comes_after_the_end_is_not_waited_for(
    here: Place, late_at: str, hosts: int
) -> None:
    """It imports, say, while the others finish; then the scheduler is gone, for which it would wait."""
    command = (PYTHON, here.script(LATE), late_at)
    options = ["--scheduler", "--start", "exec", "--max-restarts", "1", "--min-workers", "1"]
    options += ["--nproc-per-node", "2"]
    if hosts > 1:
        options += ["--nnodes", "2", "--join", f"127.0.0.1:{free_port('127.0.0.1')}"]
        first = here.start(*options, "--node-rank", "0", command=command)
        options += ["--node-rank", "1", "--log-dir", "second"]
    code, _, err = here.run(*options, command=command)
    late = f"worker {2 * hosts - 1}"
    assert code == 0, err
    assert f"{late} was ended by SIGKILL; starting it again (1 of 1)" in err
    assert f"{late} is not needed any more: the job has ended well without it" in err
    assert "ended well after" in err
    assert hosts == 1 or first.wait(timeout=100) == 0


def test_what_fails_after_the_job_has_ended_well_is_a_failure_and_not_started_again(here: Place) -> None:
    script = here.script(
        """
import pathlib, sys, time
import muster
with muster.init() as session:
    rank = session.rank
record = next(pathlib.Path("muster-runs/latest").glob("record_*.jsonl"))
while rank:
    if any("process_ended" in line and "the scheduler" in line for line in record.read_text().splitlines()):
        sys.exit(5)
    time.sleep(0.05)
"""
    )
    code, _, err = here.run("-n", "2", "--scheduler", "--max-restarts", "3", command=(PYTHON, script))
    assert code == 5, err
    assert "starting it again" not in err


def test_an_interrupt_ends_workers_and_scheduler(here: Place) -> None:
    script = here.script(
        "import os, time\nimport muster\nsession = muster.init()\n"
        "open('ready' + str(session.rank), 'w').close()\nwhile True:\n    time.sleep(1)"
    )
    launch = here.start("-n", "2", "--scheduler", command=(PYTHON, script))
    for name in ("ready0", "ready1"):
        here.until(name)
    launch.send_signal(signal.SIGINT)
    launch.communicate(timeout=100)
    assert launch.returncode == 128 + signal.SIGINT


FAILING = """
import sys
import time
import numpy as np
import muster
session = muster.init()
for step in range(10**6):
    time.sleep(0.01)
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
    other = host_0.communicate(timeout=100)[1].decode()
    assert code == host_0.returncode == 3
    assert "muster: worker 2 failed first: exit code 3\n" in own
    assert "the first to fail runs elsewhere, where its log says more: rank 2 (node 2 on host" in other
    assert "left: exit code 3\n" in other
    for told, ranks in ((own, "3"), (other, "01")):
        lines = [line for line in told.splitlines() if line.startswith("muster: worker ")]
        assert [line[len("muster: worker ")] for line in lines if "because of that" in line] == list(ranks)
        assert "/worker_0" not in told


LEAVING = """
import os
import signal
import numpy as np
import muster
from muster.training.sampler import ShardedSampler
from muster.training.state import TrainingState
from muster.training.loop import ElasticLoop

session = muster.init()
state = TrainingState({"w": np.zeros(4)}, ShardedSampler(400, 4))
for step in ElasticLoop(session, state, epochs=10**9):
    with step:
        muster.all_reduce(np.ones(4))
        if state.step == 5 and session.rank in (LEAVERS):
            os.kill(os.getpid(), signal.SIGTERM)
    if session.world_size == 1 and 0 not in (LEAVERS):  # not sooner than the leave took effect
        break
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


STAYING = """
import os
import time
import numpy as np
import muster
from muster import ElasticLoop, ShardedSampler, TrainingState

session = muster.init()
state = TrainingState({"w": np.zeros(4)}, ShardedSampler(4 * 10**6, 4))
for step in ElasticLoop(session, state, epochs=1):
    with step:
        muster.all_reduce(np.ones(4))
    if step.done:
        session.report(loss=0.25)
    time.sleep(0.02)
    if os.path.exists("over"):
        break
"""


def muster(here: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs one of the other commands, without any address."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MS_")}
    return subprocess.run(
        [PYTHON, "-m", "muster", *arguments],
        cwd=here.directory,
        env={**env, "XDG_RUNTIME_DIR": str(here.directory / "runtime")},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_a_launch_is_found_shown_and_drained_without_its_address(here: Place) -> None:
    """Over mutual TLS; then one leaves, and the launch says for what the other waits."""
    from muster.certs.__main__ import main as certs

    keys = here.directory / "keys"
    assert certs(["init", "--dir", str(keys), "--password-file", str(keys / "password")]) == 0
    options = ("--config", "keys/config.json", "--password-file", "keys/password", "--job-id", "night")
    script = here.script(STAYING)
    runtime = here.directory / "runtime"
    runtime.mkdir()
    launch = here.start(
        *("-n", "2", "--scheduler", *options), command=(PYTHON, script), XDG_RUNTIME_DIR=str(runtime)
    )

    def moving() -> list[dict[str, Any]]:
        asked = muster(here, "status", "--json")
        workers = json.loads(asked.stdout)["workers"] if not asked.returncode else []
        return workers if len(workers) == 2 and all(w["step"] and w["loss"] for w in workers) else []

    wait_for(moving, lambda: muster(here, "status").stderr + here.scheduler_log() + here.log("0"))
    workers = moving()
    assert [worker["loss"] for worker in workers] == [0.25, 0.25]
    for worker in workers:
        shown = Path(f"/proc/{worker['pid']}/cmdline").read_bytes().rstrip(b"\0").decode()
        assert shown == f"muster: rank {worker['rank']} script.py"
        assert Path(f"/proc/{worker['pid']}/comm").read_text() == f"muster: rank {worker['rank']}\n"
    table = muster(here, "status").stdout
    assert table.startswith("job night: running, generation 1, 2 of 2 ranks"), table
    assert all(str(worker["pid"]) in table for worker in workers)
    [line] = [line for line in muster(here, "jobs").stdout.splitlines() if "night" in line]
    assert line.split()[:6] == ["night", "running", "1", "2", "of", "2"]
    watched = muster(here, "status", "--job", "other")
    assert watched.returncode == 1  # no launch of that job: the scheduler of the default address is asked
    assert muster(here, "drain", "1").returncode == 0
    assert launch.stderr is not None
    said = next(line for line in launch.stderr if b"waits for a replacement" in line).decode()
    assert (
        "--max-restarts N restarts workers that fail, --min-workers N goes on with fewer, --spares N" in said
    )
    line = said.rstrip().partition("To start one now: ")[2]
    typed = {name: value for name, value in os.environ.items() if not name.startswith("MS_")}
    replacement = subprocess.Popen(f"exec {line}", shell=True, cwd=here.directory, env=typed)
    here.launched.append(replacement)
    wait_for(lambda: replacement.pid in [worker["pid"] for worker in moving()], lambda: line)
    assert workers[0]["pid"] in [worker["pid"] for worker in moving()]
    launch.send_signal(signal.SIGINT)
    launch.communicate(timeout=100)
    assert not list((runtime / "muster").iterdir())


SPARED = """
import os
import numpy as np
import muster
from muster import ElasticLoop, ShardedSampler, TrainingState

session = muster.init()
state = TrainingState({"w": np.zeros(4)}, ShardedSampler(4 * 10**6, 4))
for step in ElasticLoop(session, state, epochs=1):
    with step:
        replaced = muster.all_reduce(np.array([float(session.node_id == "2")]))[0]
    if step.done and session.node_id == "1":
        os.kill(os.getpid(), 9)
    if replaced:
        break
"""


def test_a_spare_takes_the_place_of_a_worker_that_is_lost(here: Place) -> None:
    """The loss stands among the faults of the run's report, although the launch ends well."""
    script = here.script(SPARED)
    code, _, err = here.run("-n", "2", "--spares", "1", "--scheduler", command=(PYTHON, script))
    assert code == 0, err + here.scheduler_log()
    assert "muster: worker 1 was ended by SIGKILL; a spare takes its place\n" in err
    assert "muster: generation 2: 2 workers on 1 host" in err
    assert "rank 1 of 2 in generation 2" in here.log("spare_0")
    faults = [each.text for each in load(here.directory / "muster-runs" / "latest").faults]
    assert any(text.startswith("worker 1 was ended by SIGKILL") for text in faults), faults


HANGING = """
import pathlib, time
import numpy as np
import muster
with muster.init() as session:
    for step in range(6):
        session.step_boundary(step)
        while session.rank == 1 and step == 3 and not pathlib.Path("woken").exists():
            time.sleep(0.02)
        muster.all_reduce(np.ones(4))
        session.report(step + 1, 1.0)
    pathlib.Path(f"through{session.rank}").touch()
    while not pathlib.Path("end").exists():
        time.sleep(0.02)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hang_is_shown_on_the_terminal_once_with_what_helps_and_that_it_is_over(
    here: Place, rank: int
) -> None:
    """The worker whose notes are read may be the one that hangs."""
    script = here.script(HANGING.replace("session.rank == 1", f"session.rank == {rank}"))
    launch = here.start(
        *("-n", "2", "--scheduler", "--devices", "none"),
        command=(PYTHON, script),
        MS_STALL_TIMEOUT="2",
        MS_BACKEND="tcp",
    )
    assert launch.stderr is not None
    # A busy machine may take so long for a step before.
    said = next(line for line in launch.stderr if b"lags in step 4 with 3 finished" in line).decode()
    assert "No progress" in said and f"rank {rank} (node {rank} on host" in said
    assert f"rank {1 - rank} called collective 4 of group world" in said and f"rank {rank} did not" in said
    assert "(muster run --min-workers 1 lets the others go on without it, --spares 1 with another" in said
    assert "max-restarts" not in said, "nobody has failed"
    wait_for(lambda: here.scheduler_log().count("with 3 finished") >= 2)  # it is said again there
    (here.directory / "woken").touch()
    here.until("through0")
    more = next(launch.stderr).decode()
    assert more.startswith("muster: Training goes on at step ")
    (here.directory / "end").touch()
    _, rest = launch.communicate(timeout=100)
    assert launch.returncode == 0 and b"No progress" not in rest, rest


@pytest.mark.system
def test_a_rank_that_sleeps_is_named_on_the_terminal_with_the_first_late_report(here: Place) -> None:
    """By default too: ten seconds and some after it fell asleep, and nothing is promised that cannot be."""
    script = here.script(HANGING)
    launch = here.start(
        "-n", "2", "--scheduler", "--devices", "none", command=(PYTHON, script), MS_BACKEND="tcp"
    )
    assert launch.stderr is not None
    said = next(line for line in launch.stderr if b"rank 1" in line.lower()).decode()
    assert "Rank 1 (node 1 on host" in said and "does not come to the step for which 1 member waits" in said
    assert "nobody is expelled, because only 1 could go on, and MS_WORKER_MIN is 2" in said
    assert "No progress for 60 s" not in here.scheduler_log()
    (here.directory / "woken").touch()
    assert next(line for line in launch.stderr if b"Training goes on at step" in line)
    (here.directory / "end").touch()
    launch.communicate(timeout=100)
    assert launch.returncode == 0


TRAIN = """
import os, pathlib, time
import numpy as np
import muster
with muster.init() as session:
    pathlib.Path(f"in{session.rank}").touch()
    total = 0.0
    while muster.all_reduce(np.array([float(pathlib.Path("end").exists())]))[0] < session.world_size:
        time.sleep(0.02)
    print("generation", session.generation, flush=True)
"""
"""Sums until all ranks have seen the file ``end``."""

BY_UPLINK = f"""
import os, sys
sys.path.append({str(ROOT)!r})
from tests.worker.uplink.hosts import answers
while not answers(os.environ):
    pass
"""
"""Waits for the uplink: a worker to which it does not answer soon goes to the scheduler directly."""


def uplink_of(launch: subprocess.Popen[bytes]) -> int:
    """Process id of a launch's uplink, once it has its name."""

    def found() -> int:
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                parent = int(stat_fields(entry)[1])
                if parent == launch.pid and b"muster.worker.uplink" in (entry / "cmdline").read_bytes():
                    return int(entry.name)
        return 0

    return wait_for(found)


@pytest.mark.parametrize("start", ["exec", "fork"])
def test_an_uplink_that_is_killed_amid_training_costs_nobody_his_place(here: Place, start: str) -> None:
    options = ("-n", "2", "--scheduler", "--uplink", "on", "--start", start)
    launch = here.start(*options, command=(PYTHON, here.script(BY_UPLINK + TRAIN)), MS_NODE_TIMEOUT="20")
    for name in ("in0", "in1"):
        here.until(name)
    uplink = uplink_of(launch)

    def joins() -> list[str]:
        lines = [line for line in here.scheduler_log().splitlines() if " joined " in line]
        return lines if len(lines) == 2 else []

    assert len({line.split("peer=")[1].split()[0] for line in wait_for(joins)}) == 1  # one connection
    os.kill(uplink, signal.SIGKILL)
    wait_for(lambda: here.scheduler_log().count(" is back") >= 2)
    (here.directory / "end").touch()
    _, err = launch.communicate(timeout=100)
    assert launch.returncode == 0, err
    assert b"the uplink was killed" in err or b"starting it again" in err
    assert [here.log(label).splitlines()[-1] for label in "01"] == ["generation 1"] * 2


def test_a_worker_that_is_killed_behind_an_uplink_is_lost_at_once(here: Place) -> None:
    options = ("-n", "2", "--scheduler", "--uplink", "on", "--start", "exec", "--max-restarts", "1")
    script = here.script("import os\nprint('pid', os.getpid(), flush=True)\n" + BY_UPLINK + TRAIN)
    launch = here.start(*options, command=(PYTHON, script), MS_NODE_TIMEOUT="60")
    for name in ("in0", "in1"):
        here.until(name)
    wait_for(lambda: "pid" in here.log("1"))
    os.kill(int(here.log("1").split("pid ")[1].split()[0]), signal.SIGKILL)
    wait_for(lambda: "its stream ended (no goodbye was said)" in here.scheduler_log())
    launch.terminate()
    launch.communicate(timeout=100)


def test_an_uplink_ends_with_a_launcher_that_is_killed_after_the_workers(here: Place) -> None:
    launch = here.start("-n", "2", "--scheduler", "--uplink", "on", command=(PYTHON, here.script(TRAIN)))
    for name in ("in0", "in1"):
        here.until(name)
    uplink = uplink_of(launch)
    launch.kill()
    wait_for(lambda: gone(uplink))
