"""Hosts without IPv4 or with both kinds of addresses, and a scheduler whose name moves to another address."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.certs.pki.identity import Identity
from tests.end_to_end.hosts import PORT, Cluster, Host, can_make_namespaces, cluster, ip, python
from tests.scheduler.processes import ROOT, Pki
from tests.waiting import LIMIT_S, wait_for

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces cannot be made here"),
]

REPORT = str(ROOT / "tests/end_to_end/host_report.py")
NAME = "muster.example"

STEPS = """
import pathlib, sys, time
import numpy as np
import muster

stop, step = pathlib.Path(sys.argv[1]), 0
session = muster.init()
while True:
    ends = muster.all_reduce(np.array([float(stop.exists())]), op="max")[0]
    step += 1
    session.report(step, 1.0)
    if ends:
        break
    time.sleep(0.02)
print("steps", step, "generation", session.generation, flush=True)
muster.release()
"""


class Names:
    """What the hosts of a cluster find in /etc/hosts: ``ip netns exec`` puts a file of ours in its place."""

    def __init__(self, net: Cluster) -> None:
        self._folders = [Path("/etc/netns") / host.namespace for host in net.hosts]

    def say(self, *addresses: str) -> None:
        """From now on the scheduler's name has these addresses."""
        lines = ["127.0.0.1 localhost", *(f"{address} {NAME}" for address in addresses)]
        for folder in self._folders:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "hosts").open("r+" if (folder / "hosts").exists() else "w") as file:
                file.truncate()  # the same file: it is mounted where programs run already
                file.write("\n".join(lines) + "\n")

    def remove(self) -> None:
        for folder in self._folders:
            (folder / "hosts").unlink(missing_ok=True)
            folder.rmdir()


@pytest.fixture
def net() -> Iterator[Cluster]:
    with cluster("control", "alpha", "beta", "other") as made:
        yield made


@pytest.fixture
def names(net: Cluster) -> Iterator[Names]:
    made = Names(net)
    made.say()
    yield made
    made.remove()


def drop(host: Host, family: int) -> None:
    """Takes a host's addresses of a family away."""
    option = ["-4"] if family == 4 else ["-6"]
    ip("-n", host.namespace, *option, "address", "flush", "dev", "eth0")


class Several:
    """A job of one worker on each of two hosts, with a scheduler that may be started on any."""

    def __init__(self, net: Cluster, pki: Pki, directory: Path, scheduler: str) -> None:
        self._net, self._directory = net, directory
        self._env = {
            "MS_SCHED_HOST": scheduler,
            "MS_SCHED_PORT": str(PORT),
            "MS_TOPO_TIMEOUT": "60",
            "MS_WORKER_NUM": "2",
            "MS_RECOVERY_PATH": str(directory / "journal"),
            "MS_ENABLE_RECOVERY": "1",
            **pki.env(),
        }
        self.workers: list[subprocess.Popen[str]] = []

    def schedule(self, host: str, address: str) -> subprocess.Popen[str]:
        command = python("-m", "scheduler", "--bind", address)
        return self._net[host].start(
            self._directory / f"scheduler_{host}.log", *command, **self._env, MS_ROLE="MS_SCHED"
        )

    def work(self, host: str, *script: str, **env: str) -> None:
        log = self._directory / f"worker_{host}.log"
        own = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(len(self.workers)), **env}
        self.workers.append(self._net[host].start(log, *python(*script), **self._env, **own))

    def logs(self) -> str:
        """All output."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in self._directory.glob("*.log"))

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text()


def make_pki(directory: Path, *hosts: str) -> Pki:
    made = Pki.make(directory)
    made.issue("server", Identity("default", "scheduler"), hosts)
    return made


def test_hosts_without_ipv4_form_a_group(net: Cluster, tmp_path: Path) -> None:
    for host in net.hosts:
        drop(host, 4)
    address = net["control"].address(6)
    job = Several(net, make_pki(tmp_path, address), tmp_path, address)
    scheduler = job.schedule("control", address)
    for name in ("alpha", "beta"):
        job.work(name, REPORT)
    assert [worker.wait(LIMIT_S) for worker in job.workers] == [0, 0], job.logs()
    assert scheduler.wait(LIMIT_S) == 0, job.logs()
    report = json.loads(re.findall(r"\{\"rank\".*\}$", job.log("worker_alpha"), re.M)[0])
    assert report["sum"] == 2.0
    assert all(each.startswith("[fd77:") for each in report["data"])


def test_a_name_with_both_kinds_of_addresses_is_reached_by_what_a_host_has(
    net: Cluster, names: Names, tmp_path: Path
) -> None:
    """Each host is reached by its peers all the same where MS_INTERFACE says by which network."""
    drop(net["alpha"], 6)
    names.say(net["control"].address(6), net["control"].address(4))
    job = Several(net, make_pki(tmp_path, NAME), tmp_path, NAME)
    scheduler = job.schedule("control", "::")
    for host in ("alpha", "beta"):
        job.work(host, REPORT, MS_INTERFACE="10.77.0.0/16")
    assert [worker.wait(LIMIT_S) for worker in job.workers] == [0, 0], job.logs()
    assert scheduler.wait(LIMIT_S) == 0, job.logs()
    report = json.loads(re.findall(r"\{\"rank\".*\}$", job.log("worker_beta"), re.M)[0])
    assert all(each.startswith("10.77.") for each in report["data"])


def test_a_scheduler_that_returns_at_another_address_of_its_name_is_found(
    net: Cluster, names: Names, tmp_path: Path
) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    stop = tmp_path / "stop"
    names.say(net["control"].address())
    job = Several(net, make_pki(tmp_path, NAME), tmp_path, NAME)
    first = job.schedule("control", net["control"].address())
    for host in ("alpha", "beta"):
        job.work(host, str(tmp_path / "steps.py"), str(stop))
    wait_for(lambda: "rank" in job.log("worker_alpha") and "rank" in job.log("worker_beta"), job.logs)
    first.kill()
    first.wait(LIMIT_S)
    names.say(net["other"].address())
    second = job.schedule("other", net["other"].address())
    wait_for(lambda: job.log("scheduler_other").count("is back") == 2, job.logs)
    stop.touch()
    assert [worker.wait(LIMIT_S) for worker in job.workers] == [0, 0], job.logs()
    assert second.wait(LIMIT_S) == 0, job.logs()
    assert "generation 1" in job.log("worker_alpha")
