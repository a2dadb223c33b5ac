"""Jobs over several hosts, which are network namespaces with names and addresses of their own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.certs.pki.identity import Identity
from tests.end_to_end.hosts import PORT, Cluster, Host, can_make_namespaces, cluster, python
from tests.scheduler.processes import PASSWORD, ROOT, Pki
from tests.waiting import LIMIT_S

pytestmark = [
    pytest.mark.netns,
    pytest.mark.system,  # many processes on several hosts
    pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces cannot be made here"),
]

REPORT = str(ROOT / "tests/end_to_end/host_report.py")


@pytest.fixture(scope="module")
def net() -> Iterator[Cluster]:
    with cluster("control", "alpha", "beta", "gamma", "delta", networks=2) as made:
        yield made


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory, net: Cluster) -> Pki:
    made = Pki.make(tmp_path_factory.mktemp("pki"))
    made.issue(
        "server", Identity("default", "scheduler"), (net["control"].address(4), net["control"].address(6))
    )
    (made.directory / "password").write_bytes(PASSWORD)
    return made


class Job:
    """A scheduler on the host ``control``, and launchers on others."""

    def __init__(self, net: Cluster, pki: Pki, directory: Path, workers: int, family: int = 4) -> None:
        self._pki, self._directory, self._workers = pki, directory, workers
        self._net = net
        self._env = {"MS_SCHED_HOST": net["control"].address(family), "MS_SCHED_PORT": str(PORT)}
        self._env |= {"MS_TOPO_TIMEOUT": "40", "MS_CONFIG_FILE": str(pki.config)}
        self._scheduler = net["control"].start(
            directory / "scheduler.log",
            *python("-m", "scheduler"),
            **self._env,
            MS_WORKER_NUM=str(workers),
            MS_ROLE="MS_SCHED",
            MS_SERVER_PASSWORD=PASSWORD.decode(),
        )
        self._launched: list[tuple[Host, subprocess.Popen[str]]] = []

    def launch(self, host: Host, count: int, *command: str, **env: str) -> None:
        """Types the same line on a host as on all: no rank, no list of hosts, no ssh."""
        share = ("-n", str(count)) if count == self._workers else ("--nnodes", str(self._workers // count))
        options = [
            *share,
            "--nproc-per-node",
            str(count),
            "--password-file",
            str(self._pki.directory / "password"),
        ]
        self.type(host, *options, "--", *python(*command), **env)

    def type(self, host: Host, *line: str, **env: str) -> None:
        """Types ``muster run`` with these options on a host."""
        verb, rest = (line[:1], line[1:]) if line[0] == "check" else (("run",), line)
        logs = ("--tail", "all", "--log-dir", str(self._directory / host.name))
        process = host.start(
            self._directory / f"{host.name}.log",
            *python("-m", "muster", *verb, *logs, *rest),
            **self._env,
            **env,
        )
        self._launched.append((host, process))

    def codes(self) -> list[int]:
        """Waits for the launchers' exit codes."""
        return [process.wait(LIMIT_S) for _, process in self._launched]

    def finish(self) -> None:
        """Waits until all have ended well."""
        codes = {host.name: process.wait(LIMIT_S) for host, process in self._launched}
        assert set(codes.values()) == {0}, f"{codes}\n{self.logs()}"
        assert self._scheduler.wait(LIMIT_S) == 0, self.logs()

    def logs(self) -> str:
        """All output."""
        return "\n".join(f"--- {path}\n{path.read_text()}" for path in self._directory.rglob("*.log"))

    def reports(self) -> list[dict[str, Any]]:
        """What the workers said of themselves, in order of rank."""
        found = [json.loads(line) for line in re.findall(r"\{\"rank\".*\}$", self._output(), re.M)]
        return sorted(found, key=lambda report: int(report["rank"]))

    def _output(self) -> str:
        return "\n".join((self._directory / f"{host.name}.log").read_text() for host, _ in self._launched)

    @property
    def scheduler_log(self) -> str:
        return (self._directory / "scheduler.log").read_text()


@pytest.mark.parametrize(("family", "first", "second"), [(4, "beta", "alpha"), (6, "alpha", "beta")])
def test_two_hosts_train_the_digits_over_mutual_tls(
    net: Cluster, pki: Pki, tmp_path: Path, family: int, first: str, second: str
) -> None:
    job = Job(net, pki, tmp_path, workers=4, family=family)
    train = (str(ROOT / "train.py"), "--epochs", "6", "--checkpoint-dir", "")
    job.launch(net[first], 2, *train)
    job.launch(net[second], 2, *train)
    job.finish()
    output = job.logs()
    accuracies = [float(text) for text in re.findall(r"test accuracy: ([0-9.]+)", output)]
    assert accuracies and min(accuracies) > 0.9
    assert "mutual TLS" in job.scheduler_log
    # Arrival does not count: the ranks of one host are neighbours, and hosts go by name.
    places = re.findall(r"rank (\d) of 4 in generation 1", (tmp_path / "alpha.log").read_text())
    assert sorted(set(places)) == ["0", "1"]


def test_four_hosts_with_topology_labels(net: Cluster, pki: Pki, tmp_path: Path) -> None:
    job = Job(net, pki, tmp_path, workers=4)
    racks = {"delta": "rack1", "gamma": "rack2", "beta": "rack1", "alpha": "rack2"}
    for name, rack in racks.items():
        job.launch(net[name], 1, REPORT, MS_TOPOLOGY=rack)
    job.finish()
    reports = job.reports()
    assert [report["rank"] for report in reports] == [0, 1, 2, 3]
    assert reports[0]["hosts"] == ["beta", "delta", "alpha", "gamma"]
    assert [report["sum"] for report in reports] == [4.0] * 4
    assert [report["local"] for report in reports] == [[0, 1]] * 4


@pytest.mark.parametrize("family", [4, 6])
def test_the_chosen_interface_carries_the_data(net: Cluster, pki: Pki, tmp_path: Path, family: int) -> None:
    pair = [net["alpha"], net["beta"]]
    before = [host.received_bytes("eth1") for host in pair]
    job = Job(net, pki, tmp_path, workers=2, family=family)
    env = {"MS_INTERFACE": "eth1"} | ({"NCCL_SOCKET_IFNAME": "ib0"} if family == 6 else {})
    for host in pair:
        job.launch(host, 1, REPORT, **env)
    job.finish()
    for report in job.reports():
        assert [address.rpartition(":")[0].strip("[]") for address in report["data"]] == [
            host.address(family, 1) for host in pair
        ]
        assert report["gloo"] == "eth1"
        assert report["nccl"] == ("=eth1" if family == 4 else "ib0")
    for host, count in zip(pair, before, strict=True):
        assert host.received_bytes("eth1") - count > 150_000  # half of 400 kB, at least


CHECK = ("check", "--size-mib", "2", "--nproc-per-node", "1", "--nnodes")


def test_the_check_names_the_slow_host(net: Cluster, pki: Pki, tmp_path: Path) -> None:
    hosts = [net[name] for name in ("alpha", "beta", "gamma", "delta")]
    shape = (
        "qdisc",
        "add",
        "dev",
        "eth0",
        "root",
        "tbf",
        "rate",
        "100mbit",
        "burst",
        "64kb",
        "latency",
        "50ms",
    )
    assert net["gamma"].run("tc", *shape).returncode == 0
    try:
        job = Job(net, pki, tmp_path, workers=4)
        password = str(pki.directory / "password")
        for host in hosts:
            job.type(host, *CHECK, "4", "--password-file", password)
        job.finish()
    finally:
        net["gamma"].run("tc", "qdisc", "del", "dev", "eth0", "root")
    told = re.sub(r"\[\S+_0\] ", "", job.logs())
    assert "4 ranks on 4 hosts" in told
    assert "AllReduce over tcp: the numbers are right" in told
    assert re.search(r"warning: tcp: Host gamma is slow: at most 0\.0\d GB/s with each other host", told)
    assert "Host alpha is slow" not in told
    assert "ready to train" in told


def test_the_check_refuses_ranks_that_would_hang(net: Cluster, pki: Pki, tmp_path: Path) -> None:
    job = Job(net, pki, tmp_path, workers=2)
    password = str(pki.directory / "password")
    job.type(net["alpha"], *CHECK, "2", "--password-file", password, NCCL_ALGO="Ring", NCCL_DEBUG="INFO")
    job.type(net["beta"], *CHECK, "2", "--password-file", password, NCCL_ALGO="Tree")
    assert job.codes() == [1, 1]
    told = job.logs()
    assert re.search(r"refused\W+NCCL_ALGO\W+Ring\W+0\b", told)
    assert re.search(r"warning\W+NCCL_DEBUG\W+INFO\W+0\b", told)
    assert "not ready to train" in told


def test_the_tutorials_cluster_script_on_two_hosts(net: Cluster, pki: Pki, tmp_path: Path) -> None:
    """Nothing but the MS_* variables: no launcher, no ssh; the second host has one worker more."""
    script = ("sh", str(ROOT / "examples" / "run_gpu_cluster.sh"), str(tmp_path), net["control"].address())
    env = {"PYTHON": sys.executable, "SCRIPT": REPORT, "KEYS": str(pki.directory), "MS_WORKER_NUM": "3"}
    env["MS_TOPO_TIMEOUT"] = "40"
    started = []
    for host, count, role in ((net["beta"], 2, ()), (net["control"], 1, ("scheduler",))):
        (tmp_path / host.name).mkdir()
        log = tmp_path / host.name / "script.log"
        started.append(host.start(log, *script, *role, **env, LOCAL_WORKERS=str(count)))
    codes = [process.wait(LIMIT_S) for process in started]
    logs = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.log")}
    assert codes == [0, 0], logs
    workers = sorted(name for name in logs if "device/worker" in name)
    assert [name.partition("/")[0] for name in workers] == ["beta", "beta", "control"]
    lines = re.findall(r"\{\"rank\".*\}$", "\n".join(logs.values()), re.M)
    reports = [json.loads(line) for line in lines]
    assert sorted(report["rank"] for report in reports) == [0, 1, 2]
    assert reports[0]["hosts"] == ["beta", "beta", "control"]


FIREWALL = """
table inet muster {
  chain input {
    type filter hook input priority 0; policy drop;
    iif lo accept
    icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept
    ct state established,related accept
    %s
  }
}
"""
PORTS = "42000-42099"
PROBE = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 0.5).close()"


@pytest.mark.skipif(shutil.which("nft") is None, reason="nft is not installed")
def test_a_firewall_that_opens_only_the_documented_ports(pki: Pki, tmp_path: Path) -> None:
    with cluster("control", "alpha", "beta") as net:
        net["control"].firewall(FIREWALL % f"tcp dport {PORT} accept")
        for host in (net["alpha"], net["beta"]):
            host.firewall(FIREWALL % f"tcp dport {PORTS} accept")
            host.run("sysctl", "-q", "-w", f"net.ipv4.ip_local_port_range={PORTS.replace('-', ' ')}")
        job = Job(net, pki, tmp_path, workers=4)
        for host in (net["alpha"], net["beta"]):
            job.launch(host, 2, REPORT)
        job.finish()
        assert [report["sum"] for report in job.reports()] == [4.0] * 4
        ports = [int(address.rpartition(":")[2]) for address in job.reports()[0]["data"]]
        assert all(42000 <= port <= 42099 for port in ports)
        # The firewall bites: a port that is not documented is shut, though somebody listens there.
        listener = "import socket, time; s = socket.create_server(('', 5000)); time.sleep(60)"
        log = tmp_path / "listener.log"
        net["alpha"].start(log, *python("-c", listener))
        probe = net["beta"].run(*python("-c", PROBE, net["alpha"].address(), "5000"))
        assert probe.returncode != 0
        assert "timed out" in probe.stderr or "TimeoutError" in probe.stderr
