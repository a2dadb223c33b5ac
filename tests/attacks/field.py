"""A job of three that trains under mutual TLS, and what an attacker brings along."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509

from muster.certs.pki.identity import Identity
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.wire.v1 import rendezvous_pb2_grpc as pb_grpc
from tests.attacks.proxy import Proxy
from tests.ports import free_port
from tests.scheduler.processes import PASSWORD, Pki, Scheduler, Stream, channel, environment, scheduler
from tests.waiting import LIMIT_S

WORKERS = 3


@dataclass
class Field:
    """Where the attacks take place.

    Attributes:
        directory: everything that the processes write is in here.
        pki: the certificates of the job, and others of the same authority.
        running: the scheduler.
        proxy: the recording proxy through which the job's workers reach it.
        victims: the job's workers.
        memory_before: the scheduler's resident memory before the first attack, in bytes.
        silent: a session opened at the begin, on which nothing is ever said.
        memory_after: and after the last one.
        memory_peak: and at its peak.
        attacks: the names of the tests that were run on this job until now.
        metrics_port: where the scheduler serves its metrics.
    """

    directory: Path
    pki: Pki
    running: Scheduler
    proxy: Proxy
    victims: list[subprocess.Popen[bytes]]
    memory_before: int = 0
    silent: Stream | None = None
    memory_after: int = 0
    memory_peak: int = 0
    attacks: set[str] = dataclasses.field(default_factory=set)
    metrics_port: int = 0

    @property
    def port(self) -> int:
        """The scheduler's own port."""
        return self.running.port

    def channel(self, name: str) -> grpc.Channel:
        """A channel with one of the certificates."""
        return channel(self.running.target, self.pki.credentials(name))

    def odd_channel(self, certificate_pem: bytes, key_pem: bytes) -> grpc.Channel:
        """A channel with a certificate that no Muster would load."""
        ca = (self.pki.directory / "ca.crt").read_bytes()
        tls = grpc.ssl_channel_credentials(ca, key_pem, certificate_pem)
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        return grpc.secure_channel(self.running.target, tls, options)

    def status(self, name: str = "operator") -> pb.StatusReply:
        """What the scheduler says of the job."""
        with self.channel(name) as over:
            reply = pb_grpc.RendezvousStub(over).Status(pb.StatusRequest(), timeout=LIMIT_S)
        assert isinstance(reply, pb.StatusReply)
        return reply

    def steps(self) -> int:
        """How many steps the slowest worker has done."""
        return min(worker.step for worker in self.status().workers if worker.rank >= 0)

    def audit(self) -> list[dict[str, Any]]:
        """The audit log."""
        return [json.loads(line) for line in (self.directory / "audit.jsonl").read_text().splitlines()]

    def serial(self, name: str) -> int:
        """A certificate's serial number."""
        return x509.load_pem_x509_certificate(self.pki.credentials(name).leaf_pem).serial_number

    def memory(self) -> int:
        """The scheduler's resident memory now, in bytes."""
        return memory_of(self.running.process.pid, "VmRSS")

    def data_ports(self) -> list[int]:
        """The ports that the workers listen on: their communicators' and the proxies' before them."""
        found = []
        for victim in self.victims:
            for line in Path(f"/proc/{victim.pid}/net/tcp").read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == "0A" and columns[9] in _sockets(victim.pid):
                    found.append(int(columns[1].rpartition(":")[2], 16))
        return found


def memory_of(pid: int, what: str) -> int:
    """A line of /proc/PID/status, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return 1024 * int(line.split()[1])
    raise AssertionError(what)


def _sockets(pid: int) -> set[str]:
    found = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(each.readlink()).removeprefix("socket:[").removesuffix("]"))
    return found


def make_pki(directory: Path) -> Pki:
    """The job's certificates, and those of insiders."""
    directory.mkdir()
    pki = Pki.make(directory, crl_path="crl.pem")
    pki.issue("other-job", Identity("other", "worker"))
    pki.issue("other-operator", Identity("other", "operator"))
    pki.issue("node-7", Identity("default", "worker", "node-7"))
    pki.issue("host", Identity("default", "host", nodes=("node-7", "node-8")))
    pki.issue("other-host", Identity("other", "host", nodes=("victim-0",)))
    pki.issue("revoked", Identity("default", "worker"))
    pki.issue("unlucky", Identity("default", "worker"))
    revoked = x509.load_pem_x509_certificate(pki.credentials("revoked").leaf_pem).serial_number
    pki.authority.write_revocations([revoked])
    return pki


def environment_of(directory: Path, pki: Pki) -> dict[str, str]:
    """The settings of all processes: passwords in a file, everything is logged."""
    password = directory / "password"
    password.touch(0o600)
    password.write_bytes(PASSWORD)
    return {
        "MS_CONFIG_FILE": str(pki.config),
        "MS_SERVER_PASSWORD_FILE": str(password),
        "MS_CLIENT_PASSWORD_FILE": str(password),
        "MS_WORKER_NUM": str(WORKERS),
        "MS_LOG_LEVEL": "DEBUG",
    }


def start_victims(
    directory: Path, env: dict[str, str], port: int, steps: int, pause_s: float
) -> list[subprocess.Popen[bytes]]:
    """Starts the job's workers."""
    victims = []
    for index in range(WORKERS):
        mine = {"MS_ROLE": "MS_WORKER", "MS_SCHED_PORT": str(port), "MS_NODE_ID": f"victim-{index}"}
        with (directory / f"victim-{index}.log").open("wb") as log:
            victims.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.attacks.victim", str(directory), str(steps), str(pause_s)],
                    env=environment(**{**env, **mine}),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )
    return victims


@contextlib.contextmanager
def field(directory: Path) -> Iterator[Field]:
    """The job, under way; whatever is left of it is killed at the end."""
    pki = make_pki(directory / "pki")
    env = environment_of(directory, pki)
    more = {
        "MS_AUDIT_LOG": str(directory / "audit.jsonl"),
        "MS_ENABLE_RECOVERY": "1",
        "MS_RECOVERY_PATH": str(directory / "journal"),
        "MS_SPARES": "1",
        "MS_NODE_TIMEOUT": "20",
        "MS_METRICS_PORT": str(free_port()),
    }
    with scheduler(**env, **more) as running:
        proxy = Proxy(running.port)
        victims = start_victims(directory, env, proxy.port, 1_000_000, 0.1)
        try:
            made = Field(directory, pki, running, proxy, victims)
            made.metrics_port = int(more["MS_METRICS_PORT"])
            running.await_log("Generation 1 stands with 3 members")
            made.memory_before = made.memory()
            yield made
        finally:
            for victim in victims:
                victim.kill()
                victim.wait()
            proxy.close()
