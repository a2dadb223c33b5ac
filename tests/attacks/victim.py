"""A member of the job under attack. It steps until it is asked to stop and writes down its losses.

``python -m tests.attacks.victim DIRECTORY STEPS PAUSE``. What passes its data port is recorded, and what
must stay secret is written where the test looks for it; nothing else may ever hold it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

import muster
from muster.communicators.tcp.backend import TcpBackend
from tests.attacks.proxy import Proxy

SIZE = 4096


def main() -> None:
    directory, steps, pause_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    proxies = record_data_port(directory)
    session = muster.init()
    losses = train(session, directory / "stop", steps, pause_s)
    rank = session.rank
    (directory / f"losses-{rank}").write_text("\n".join(losses))
    muster.release()
    for proxy in proxies:
        (directory / f"wire-{rank}").write_bytes(proxy.seen)


def train(session: muster.Session, stop: Path, steps: int, pause_s: float) -> list[str]:
    weights, losses = np.zeros(SIZE, np.float32), []
    random = np.random.default_rng(session.rank)
    for step in range(steps):
        session.step_boundary(step)
        gradient = weights - random.standard_normal(SIZE).astype(np.float32)
        told = np.float32(session.rank == 0 and stop.exists())
        sent = np.concatenate([gradient, [np.float32((gradient * gradient).mean()), told]]).astype(np.float32)
        mean = muster.all_reduce(sent, op="mean")
        weights -= np.float32(0.1) * mean[:SIZE]
        losses.append(float(mean[SIZE]).hex())
        session.report(step + 1, 1.0)
        if mean[-1] > 0:
            break
        time.sleep(pause_s)
    return losses


def record_data_port(directory: Path) -> list[Proxy]:
    """Puts a recording proxy before the communicator's port; notes port and unique ids for the test."""
    proxies: list[Proxy] = []
    open_endpoint, mint = TcpBackend.open_endpoint, TcpBackend.mint_unique_ids

    def opened(self: TcpBackend, address: str) -> str:
        proxies.append(Proxy(int(open_endpoint(self, address).rpartition(":")[2])))
        return f"127.0.0.1:{proxies[0].port}"

    def minted(self: TcpBackend, count: int) -> tuple[bytes, ...]:
        ids = mint(self, count)
        (directory / "secrets").mkdir(exist_ok=True)
        (directory / "secrets" / "unique-ids").write_bytes(b"".join(ids))
        return ids

    TcpBackend.open_endpoint = opened  # type: ignore[method-assign]
    TcpBackend.mint_unique_ids = minted  # type: ignore[method-assign]
    return proxies


if __name__ == "__main__":
    main()
