"""A cluster of etcd on this host, with mutual TLS from an authority of its own."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

from muster.bench.launches import MUSTER, ROOT, environment, free_ports

START_TIMEOUT_S = 30.0
POLL_S = 0.05
FILL_BYTES = 1_000_000
FILL_LIMIT = 200


def make_keys(directory: Path, hosts: str, *, job: str = "default") -> Path:
    """Makes certificates for schedulers on ``hosts``, and those for etcd; returns the password's file."""
    password = directory / "password"
    secret = ["--password-file", str(password)]
    for more in (["init", "--hosts", hosts], ["etcd", "--job", job]):
        command = [*MUSTER, "certs", more[0], "--dir", str(directory), *more[1:], *secret]
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"muster certs {more[0]} ended with code {done.returncode}:\n{done.stderr}")
    return password


class EtcdCluster:
    """Members of one cluster. A context manager: leaving kills them.

    Args:
        directory: the folder for data and logs.
        keys: the folder that ``muster certs etcd`` made.
        size: the number of members.
        quota_bytes: the quota of etcd's database in bytes; 0 for etcd's default.

    Raises:
        RuntimeError: etcd is not installed.
    """

    def __init__(self, directory: Path, keys: Path, size: int = 3, *, quota_bytes: int = 0) -> None:
        if shutil.which("etcd") is None or shutil.which("etcdctl") is None:
            raise RuntimeError("etcd is not installed: apt-get install etcd-server etcd-client")
        self.directory, self.keys, self.size = directory, keys, size
        self._quota_bytes = quota_bytes
        directory.mkdir(parents=True, exist_ok=True)
        ports = free_ports(2 * size)
        self.endpoints = [f"127.0.0.1:{port}" for port in ports[:size]]
        self._peers = [f"https://127.0.0.1:{port}" for port in ports[size:]]
        self.members: list[subprocess.Popen[bytes] | None] = [None] * size

    def start(self) -> None:
        """Starts all members, and waits until they serve."""
        for number in range(self.size):
            self.start_member(number)
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.ctl("endpoint", "health", "--cluster", check=False).returncode:
            if time.monotonic() > deadline:
                raise RuntimeError(f"etcd does not serve; its logs are in {self.directory}")
            time.sleep(POLL_S)

    def start_member(self, number: int) -> None:
        """Starts a member, for the first time or on its stored data."""
        own, peer = f"https://{self.endpoints[number]}", self._peers[number]
        cluster = ",".join(f"e{index}={each}" for index, each in enumerate(self._peers))
        command = [
            *("etcd", "--name", f"e{number}", "--data-dir", str(self.directory / f"e{number}")),
            *("--listen-client-urls", own, "--advertise-client-urls", own),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", cluster, "--logger", "zap", "--log-level", "warn"),
            *("--quota-backend-bytes", str(self._quota_bytes)),
        ]
        for prefix in ("", "peer-"):
            command += [
                f"--{prefix}client-cert-auth",
                f"--{prefix}trusted-ca-file",
                str(self.keys / "ca.crt"),
            ]
            command += [f"--{prefix}cert-file", str(self.keys / "member.crt")]
            command += [f"--{prefix}key-file", str(self.keys / "member.key")]
        with (self.directory / f"e{number}.log").open("ab") as log:
            self.members[number] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment()
            )

    def kill(self, number: int) -> None:
        """Kills a member by SIGKILL."""
        member = self.members[number]
        assert member is not None
        member.send_signal(signal.SIGKILL)
        member.wait()

    def fill(self) -> None:
        """Writes until the database has reached its quota, which must be small.

        Raises:
            RuntimeError: the quota was not reached.
        """
        for number in range(FILL_LIMIT):
            done = self.ctl("put", f"/filler/{number}", stdin="x" * FILL_BYTES, check=False)
            if "database space exceeded" in done.stderr:
                return
        raise RuntimeError(f"etcd took {FILL_LIMIT} values, and has space left: {done.stderr}")

    def make_space(self) -> None:
        """Deletes what :meth:`fill` has written, as an administrator would."""
        self.ctl("del", "--prefix", "/filler/")
        (status, *_) = json.loads(self.ctl("endpoint", "status", "-w", "json").stdout)
        self.ctl("compact", str(status["Status"]["header"]["revision"]))
        self.ctl("defrag")
        self.ctl("alarm", "disarm")

    def leader(self) -> int:
        """Returns the number of etcd's leader."""
        statuses = json.loads(self.ctl("endpoint", "status", "-w", "json").stdout)
        return next(
            number
            for number, each in enumerate(statuses)
            if each["Status"]["leader"] == each["Status"]["header"]["member_id"]
        )

    def ctl(
        self, *arguments: str, check: bool = True, cert: tuple[Path, Path] | None = None, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Runs etcdctl, with a member's certificate unless another is given."""
        mine, key = cert or (self.keys / "member.crt", self.keys / "member.key")
        tls = ("--cacert", str(self.keys / "ca.crt"), "--cert", str(mine), "--key", str(key))
        command = [
            "etcdctl",
            "--endpoints",
            ",".join(self.endpoints),
            *tls,
            "--command-timeout",
            "3s",
            *arguments,
        ]
        env = environment() | {"ETCDCTL_API": "3"}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=check, input=stdin)

    def __enter__(self) -> EtcdCluster:
        """Starts the members."""
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Kills the members."""
        self.close()

    def close(self) -> None:
        """Kills the members that run."""
        for member in self.members:
            if member is not None and member.poll() is None:
                member.kill()
                member.wait()
