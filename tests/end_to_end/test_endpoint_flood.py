"""A flood of strangers at the workers' own ports, while members die and are replaced."""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.bench.recovery.cpu import Digits, kill_one
from tests.scheduler.processes import environment

RATE = 3000
FLOOD_S = 40.0
CHANGES_APART_S = 4.0


def listening(pid: int) -> list[int]:
    """The ports at which a process listens."""
    with contextlib.suppress(OSError):
        links = [link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir()]
        own = {str(link)[8:-1] for link in links if str(link).startswith("socket:[")}
        rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in own]
    return []


@contextlib.contextmanager
def flooded(job: Digits, figures: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """Floods the ports of all workers that live, newcomers too, from the moment that they listen."""
    ports, over = job.directory / "ports", threading.Event()

    def follow() -> None:
        while not over.wait(0.1):
            found = [port for worker in job.living() for port in listening(worker.process.pid)]
            (job.directory / "ports.new").write_text(json.dumps(found))
            (job.directory / "ports.new").replace(ports)

    follower = threading.Thread(target=follow)
    follower.start()
    flood = subprocess.Popen(
        [sys.executable, "-m", "tests.attacks.flood", str(RATE), str(FLOOD_S), str(ports)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield flood
        figures.update(json.loads(flood.communicate(timeout=100)[0]))
    finally:
        over.set()
        follower.join()
        if flood.poll() is None:
            flood.kill()
        flood.communicate()


@pytest.mark.system
@pytest.mark.alone
@pytest.mark.timeout(300, method="signal")
def test_members_change_while_strangers_flood_the_workers_ports(tmp_path: Path, record_property: Any) -> None:
    chance, changes = random.Random(5), []
    figures: dict[str, Any] = {}
    with Digits(tmp_path / "job", workers=3, worker_min=2, epochs=400, pace_s=0.05, say=print) as job:
        job.begin()
        with flooded(job, figures) as flood:
            while flood.poll() is None:
                time.sleep(CHANGES_APART_S)  # of the flood, between two changes
                changes.append(kill_one(job, chance))
        before = max(worker.steps()[-1]["step"] for worker in job.living())
        job.wait(
            "training goes on",
            lambda: all(worker.steps()[-1]["step"] > before + 20 for worker in job.living()),
            100.0,
        )
        logs = {worker.log.name: worker.log.read_text() for worker in job.workers}
        steps = [[step["step"] for step in worker.steps()] for worker in job.workers]
    figures["changes"] = changes
    record_property("flood", json.dumps(figures))
    print(json.dumps(figures))
    assert figures["connections"] > 10_000, figures  # it was a flood
    assert len(changes) >= 2, figures
    for name, log in logs.items():
        assert "opened again" not in log, log[-3000:]
        assert "Traceback" not in log, log[-3000:]
        assert len(log.splitlines()) < 2000, f"{name} is flooded"
    finished = {step for each in steps for step in each}
    assert finished == set(range(1, max(finished) + 1))
    assert all(len(each) == len(set(each)) for each in steps)
    assert not re.search("not foreseen", "".join(logs.values()))
