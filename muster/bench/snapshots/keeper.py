"""A second process on the host that receives, checks and keeps snapshots, as a partner rank does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from muster.certs.files import write_file
from muster.certs.pki.authority import create_authority
from muster.certs.pki.identity import Identity
from muster.certs.runtime.store import load_credentials
from muster.communicators import create_backend
from muster.communicators.membership import Membership, Peer
from muster.communicators.tcp.backend import TcpBackend
from muster.training.carrier import Carrier, NumpyLibrary
from muster.training.copy_exchange import CopyExchange
from muster.training.part_copy import HeldCopies
from muster.training.snapshots.parts import PartKey, SnapshotId
from muster.training.snapshots.retention import Retention
from muster.wire import messages

JOB = "bench-snapshots"
_PASSWORD = b"of a bench that ends soon"
TIMEOUT_S = 60.0


def write_keys(directory: Path) -> None:
    """Makes a certificate that both processes use."""
    authority = create_authority(directory / "authority", _PASSWORD)
    write_file(directory / "worker.p12", authority.issue(Identity(JOB, "worker", None)).p12(_PASSWORD))


def open_backend(directory: Path) -> tuple[TcpBackend, str]:
    """Opens an encrypted backend; returns it, and the address of its endpoint."""
    credentials = load_credentials(directory / "worker.p12", _PASSWORD, directory / "authority" / "ca.crt")
    backend = create_backend("tcp", tls=credentials, job_id=JOB)
    assert isinstance(backend, TcpBackend)
    return backend, backend.open_endpoint("127.0.0.1")


def connect(backend: TcpBackend, rank: int, addresses: list[str], secret: bytes) -> Any:
    """Connects the communicator of the two processes."""
    peers = tuple(Peer(n, str(n), n + 1, str(n), str(n), each) for n, each in enumerate(addresses))
    membership = Membership(JOB, 1, "world", rank, peers, (secret,))
    return backend.connect(membership, timeout_s=TIMEOUT_S, cancelled=lambda: None)


class PairSession:
    """A session with one partner; a snapshot counts as soon as it is complete.

    Args:
        directory: the folder with the keys.
    """

    def __init__(self, directory: Path) -> None:
        backend, address = open_backend(directory)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "muster.bench.snapshots.keeper", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        secret = os.urandom(128)
        self._process.stdin.write(json.dumps([address, secret.hex()]) + "\n")
        self._process.stdin.flush()
        other = self._process.stdout.readline().strip()
        self.communicator = connect(backend, 0, [address, other], secret)
        self._backend = backend
        self.completed: list[tuple[int, float]] = []
        self.snapshot_word: messages.SnapshotWord | None = None

    @property
    def members(self) -> tuple[messages.Member, ...]:
        """This process, and the one that keeps the snapshots."""
        hosts = [messages.Host(str(rank), str(rank), "127.0.0.1") for rank in range(2)]
        return tuple(
            messages.Member(rank, str(rank), rank + 1, host, messages.Device(), 0, 1)
            for rank, host in enumerate(hosts)
        )

    def report_snapshot(self, report: messages.SnapshotReport) -> None:
        """Declares a snapshot valid as soon as it is complete."""
        if report.complete:
            latest = max(report.taken, report.passed)
            self.snapshot_word = messages.SnapshotWord(report.generation, report.taken, latest + 1)
            if not self.completed or self.completed[-1][0] != report.taken:
                self.completed.append((report.taken, report.seconds))

    def close(self) -> list[int]:
        """Ends the other process; returns the steps for which it held complete copies."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        held = json.loads(self._process.stdout.readline())
        self._process.wait(TIMEOUT_S)
        self.communicator.close()
        self._backend.close()
        return [int(step) for step in held]


def main() -> int:
    """Keeps arriving snapshots until standard input ends, and then prints the steps that it holds."""
    backend, mine = open_backend(Path(sys.argv[1]))
    address, secret = json.loads(sys.stdin.readline())
    print(mine, flush=True)
    communicator = connect(backend, 1, [address, mine], bytes.fromhex(secret))
    sizes = Carrier(communicator, NumpyLibrary(np)).gather([0])
    held, retention = HeldCopies(), Retention(1)
    retention.enter(1, rank=1, world_size=2, step=0, keep=None)

    def accept(key: PartKey, agreed: SnapshotId | None) -> bool:
        change = retention.accept(key, agreed)
        held.drop(change.drop)
        return key not in change.drop

    exchange = CopyExchange(
        communicator.membership,
        backend.endpoint,
        partners=(),
        wards={0: sizes[0][0]},
        held=held,
        accept=accept,
        completed=lambda _: None,
        failed=lambda _key, _reason: None,
    )
    sys.stdin.read()
    for copy in held.all():
        copy.check()
    print(json.dumps([copy.key.snapshot.step for copy in held.all()]), flush=True)
    exchange.close()
    communicator.close()
    backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
