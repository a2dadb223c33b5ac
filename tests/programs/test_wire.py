"""What stands on the wire while torch programs talk: with Gloo all of it, with Muster's backend nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.processes import Pki

torch = pytest.importorskip("torch")

import torch.distributed as dist

from tests.programs import ranks


class Recorder:
    """Looks into every packet on loopback for some bytes.

    Attributes:
        found: in how many packets they were.
    """

    def __init__(self, marker: bytes) -> None:
        self._marker = marker
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.2)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.found = 0

    def _look(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                self.found += self._marker in self._socket.recv(1 << 17)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        self._thread.start()
        try:
            yield self
        finally:
            self._over.set()
            self._thread.join()
            self._socket.close()


def talk(rank: int, marker: bytes) -> str:
    """The marker by a collective, an object and messages, few bytes and many."""
    numbers = torch.tensor(list(marker), dtype=torch.uint8)
    for size in (1, 4000):
        x = numbers.repeat(size)
        dist.broadcast(x, 0)
        dist.all_gather([torch.zeros_like(x) for _ in range(2)], x)
        if rank:
            dist.recv(torch.zeros_like(x), 0)
        else:
            dist.send(x, 1)
    everybodys: list[Any] = [None, None]
    dist.all_gather_object(everybodys, {"marker": marker})
    assert everybodys[1 - rank]["marker"] == marker
    return type(dist.group.WORLD).__name__


@pytest.mark.parametrize(
    ("backend", "variable", "kind", "plain"),
    [
        ("gloo", "", "ProcessGroup", True),  # the recorder sees what there is to see
        ("muster", "", "MusterProcessGroup", False),
        ("gloo", "muster", "GroupNamedGloo", False),
    ],
)
def test_no_tensor_object_or_message_is_on_the_wire_in_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, variable: str, kind: str, plain: bool
) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to see packets")
    pki = Pki.make(tmp_path / "keys")
    monkeypatch.setenv("MS_TORCH_GLOO", variable)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    marker = os.urandom(32)
    with Recorder(marker).recording() as recorder:
        assert ranks.run(2, pki, tmp_path, talk, marker, backend=backend) == [kind, kind]
    assert (recorder.found > 0) is plain


def makes_one_with_options_of_a_newer_torch(rank: int, file: str) -> float:
    group = dist.ProcessGroupGloo(
        dist.FileStore(file, 2), rank, 2, timeout=timedelta(seconds=60), enable_reconfigure=False, newer=True
    )
    x = torch.ones(2)
    group.allreduce([x]).wait()
    return float(x[0])


def test_options_of_gloo_s_that_are_not_known_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MS_TORCH_GLOO", "muster")
    pki = Pki.make(tmp_path / "keys")
    run = makes_one_with_options_of_a_newer_torch
    assert ranks.run(2, pki, tmp_path, run, str(tmp_path / "another"), backend="gloo") == [2.0, 2.0]
