"""A batch script under a real Slurm: four nodes, which are four slurmd of one machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deploy.machines import can_make_machines

ROOT = Path(__file__).parents[3]
WAIT_S = 180.0
NODES = ("n1", "n2", "n3", "n4")

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not can_make_machines(), reason="needs root, mounts and unshare"),
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="needs slurmctld"),
]

# A job that is queued again waits for as long as Slurm's credentials live, two minutes if nothing is said.
CONF = """\
ClusterName=virtual
SlurmctldHost=n1
SlurmctldPort=17000
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={at}/munge.sock,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmdTimeout=5
MessageTimeout=5
ReturnToService=2
KillWait=20
SchedulerParameters=sched_interval=2,bf_interval=2
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool-%n
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/%n.pid
SlurmctldLogFile={at}/slurmctld.log
SlurmdLogFile={at}/%n.log
PartitionName=all Nodes=n1,n2,n3,n4 Default=YES MaxTime=INFINITE State=UP
"""
# Ports, host name, /etc/hosts and processes are the cluster's own: its ports are free, and none outlives it.
START = """
set -e
ip link set lo up
# Slurm asks for addresses to listen at, and gets none where there is only loopback.
ip link add uplink type veth peer name peer
ip address add 10.98.0.1/24 dev uplink
ip link set uplink up; ip link set peer up
hostname n1
mount --bind "$AT/hosts" /etc/hosts
munged --force --foreground --key-file="$AT/key" --socket="$AT/munge.sock" \
    --pid-file="$AT/munged.pid" --log-file="$AT/munged.log" --seed-file="$AT/seed" &
until [ -S "$AT/munge.sock" ]; do sleep 0.1; done
slurmctld -D &
for node in n1 n2 n3 n4; do VIRTUAL_NODE=$node slurmd -D -N "$node" & done
wait
"""


class Cluster:
    """Four nodes of Slurm in namespaces of their own."""

    def __init__(self, at: Path) -> None:
        self.at = at
        self._killed: list[str] = []
        self._env = {**os.environ, "AT": str(at), "SLURM_CONF": str(at / "slurm.conf")}
        self._env |= {"MS_ALLOW_INSECURE": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (at / name).mkdir()
        ports = (f"NodeName={node} Port={17001 + i} CPUs=4\n" for i, node in enumerate(NODES))
        head, _, partition = CONF.format(at=at).partition("PartitionName")
        (at / "slurm.conf").write_text(head + "".join(ports) + "PartitionName" + partition)
        (at / "hosts").write_text("127.0.0.1 localhost " + " ".join(NODES) + "\n")
        (at / "key").write_bytes(os.urandom(1024))
        (at / "key").chmod(0o400)
        own = ("--mount", "--uts", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
        with (at / "daemons.log").open("wb") as log:
            self._outer = subprocess.Popen(
                ["unshare", *own, "bash", "-c", START], env=self._env, stdout=log, stderr=log
            )

    def end(self) -> None:
        self._outer.kill()
        self._outer.wait()

    def _inner(self) -> str:
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        return children[0] if children else ""

    def ask(self, *command: str) -> str:
        """What a program answers inside; "" where it fails."""
        inner = self._inner()
        if not inner:
            return ""
        enter = ("nsenter", f"--target={inner}", "--mount", "--uts", "--net", "--pid", f"--wd={self.at}")
        done = subprocess.run(
            [*enter, *command], env=self._env, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout if done.returncode == 0 else ""

    def submit(self, *arguments: str, spares: int = 0) -> str:
        """Submits deploy/slurm/muster.sbatch, say; returns the number of the job."""
        self._env["SPARE_NODES"] = str(spares)
        free = ("--gpus-per-node=0", "--cpus-per-task=1", "--ntasks-per-node=1")
        told = self.ask("sbatch", "--parsable", *free, *arguments)
        assert told, self.logs()
        return told.strip()

    def job(self, number: str) -> str:
        return self.ask("scontrol", "show", "job", number)

    def nodes(self, number: str) -> list[str]:
        """The job's nodes, in Slurm's order: the first one has the batch script and the scheduler."""
        [found] = re.findall(r"^ +NodeList=(\S+)", self.job(number), re.M)
        return self.ask("scontrol", "show", "hostnames", found).split()

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text()[-2500:]}" for p in sorted(self.at.glob("*.log")))

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, f"{what}\n{self.logs()}"
            time.sleep(0.3)

    def kill_node(self, node: str) -> None:
        """Kills the node's slurmd and all that it runs, as a loss of power does."""
        # All are stopped first: a daemon would report what is killed before it. A step's daemon has no
        # variables, and is known by its tasks.
        script = f"""
            for p in /proc/[0-9]*; do
                tr '\\0' '\\n' <$p/environ | grep -qxE '(VIRTUAL_NODE|SLURMD_NODENAME)={node}' || continue
                all="$all ${{p#/proc/}}"
                read -r _ parent < <(grep PPid: $p/status)
                [ $(head -c 10 /proc/$parent/cmdline) != slurmstepd ] || all="$all $parent"
            done
            kill -STOP $all; kill -KILL $all
        """
        self.ask("bash", "-c", script)
        self._killed.append(node)

    def mend(self) -> None:
        """Ends all jobs, starts the nodes that were killed, and waits until all are idle."""
        self.ask("scancel", "--user=root")
        while self._killed:
            node = self._killed.pop()
            self.ask("env", f"VIRTUAL_NODE={node}", "slurmd", "-N", node)
        self.until("all are idle", lambda: self.ask("sinfo", "-hN", "-o%T").split() == ["idle"] * len(NODES))

    def log(self, name: str) -> str:
        path = self.at / name
        return path.read_text(errors="replace") if path.exists() else ""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        yield cluster
    finally:
        cluster.end()


@pytest.fixture
def cluster(made: Cluster) -> Cluster:
    made.mend()
    return made


SCRIPT = str(ROOT / "deploy/slurm/muster.sbatch")
TRAIN = (SCRIPT, str(ROOT / "train.py"), "--data=digits", "--resume")
LONG = 100_000


def has_checkpoint(folder: Path) -> bool:
    return any(folder.rglob("step_*"))


def queued_again(cluster: Cluster, number: str) -> None:
    """Waits for the job to be back in the queue, and until it has resumed from its checkpoint."""
    cluster.until("back in the queue", lambda: "Restarts=1" in cluster.job(number))
    log, resumed = f"muster-{number}.log", re.compile(r"resumed after step [1-9]")
    cluster.until("resumed", lambda: resumed.search(cluster.log(log)) is not None)
    assert cluster.log(log).count("starting over") >= 1  # what the first attempt wrote is still there
    assert "starts again (attempt 2)" in cluster.log(log)
    cluster.ask("scancel", number)


def test_a_spare_node_of_the_allocation_takes_the_place_of_one_that_is_killed(cluster: Cluster) -> None:
    number = cluster.submit("--nodes=3", *TRAIN, "--checkpoint-dir=spare", "--epochs=120", spares=1)
    cluster.until("a checkpoint", lambda: has_checkpoint(cluster.at / "spare"))
    cluster.kill_node(cluster.nodes(number)[1])
    cluster.until("the end", lambda: "JobState=COMPLETED" in cluster.job(number))
    assert "Restarts=0" in cluster.job(number)
    log = cluster.log(f"muster-{number}.log")
    assert "rank 1 of 2 in generation 2" in log
    assert "test accuracy" in log and "the training is complete" in log
    assert re.search(r"^0: epoch: 1 step: ", log, re.M), log  # each line with its task, and at once
    assert "\x1b" not in log and "###" not in log  # no worker takes the log for a terminal


def test_a_job_whose_node_is_killed_is_queued_again_and_resumes(cluster: Cluster) -> None:
    number = cluster.submit("--nodes=2", *TRAIN, "--checkpoint-dir=killed", f"--epochs={LONG}")
    cluster.until("a checkpoint", lambda: has_checkpoint(cluster.at / "killed"))
    killed = cluster.nodes(number)[1]
    cluster.kill_node(killed)
    queued_again(cluster, number)
    assert f"lost: {killed}; the job goes back into the queue" in cluster.log(f"muster-{number}.log")


def test_a_job_whose_first_node_is_killed_is_queued_again_by_another_one(cluster: Cluster) -> None:
    number = cluster.submit("--nodes=2", *TRAIN, "--checkpoint-dir=first", f"--epochs={LONG}")
    cluster.until("a checkpoint", lambda: has_checkpoint(cluster.at / "first"))
    cluster.kill_node(cluster.nodes(number)[0])  # and with it the batch script and the scheduler
    cluster.until("back in the queue", lambda: "Restarts=1" in cluster.job(number))


def test_before_the_time_limit_the_workers_save_and_leave_and_the_job_is_queued_again(
    cluster: Cluster,
) -> None:
    work = ("--checkpoint-dir=limit", f"--epochs={LONG}", "--batch-size=1")
    number = cluster.submit("--nodes=1", *TRAIN, *work)
    log = f"muster-{number}.log"
    epoch = re.compile(r"epoch: 1 step: (\d+),")
    cluster.until("training", lambda: epoch.search(cluster.log(log)) is not None)
    cluster.ask(
        "scontrol", "update", f"JobId={number}", "TimeLimit=2"
    )  # the script asks for SIGTERM 120 s before
    cluster.until("back in the queue", lambda: "Restarts=1" in cluster.job(number))
    cluster.ask("scontrol", "update", f"JobId={number}", "TimeLimit=60")
    queued_again(cluster, number)
    text = cluster.log(log)
    assert "the time limit is near: the workers leave" in text
    found = epoch.search(text)
    resumed = re.search(r"resumed after step (\d+)", text)
    assert found and resumed
    # Not a checkpoint of an epoch's end, but the one that was written on leaving.
    assert int(resumed[1]) % int(found[1]) != 0


def test_a_node_that_fails_its_check_is_drained_with_the_reason(cluster: Cluster) -> None:
    check = cluster.at / "check"
    check.write_text("#!/bin/sh\n[ $SLURM_NODEID = 0 ] || { echo bad memory; exit 1; }\n")
    check.chmod(0o755)
    command = f"{sys.executable} -m muster slurm --no-requeue --node-check {check} -- true"
    number = cluster.submit("--nodes=2", "--wrap", command)
    cluster.until("drained", lambda: "muster: bad memory" in cluster.ask("sinfo", "-hR", "-o%E"))
    drained = cluster.ask("sinfo", "-hN", "--states=drain", "-o%N").split()
    assert drained == cluster.nodes(number)[1:]
