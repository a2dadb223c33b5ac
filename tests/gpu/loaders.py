"""Jobs of two whose rank 1 is killed while it trains, with the processes of a torch DataLoader or without.

By hand, 20 kills: python -m tests.gpu.loaders
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = "MUSTER_TEST_LOADERS"
KILLED_AT = 6  # steps


@dataclass(frozen=True)
class Row:
    """A DataLoader's processes; 0: none."""

    start: str = "fork"
    processes: int = 0
    persistent: bool = False


TABLE = [
    Row(start, processes, persistent)
    for start in ("fork", "forkserver", "spawn")
    for processes in (2, 8)
    for persistent in (False, True)
]


@dataclass(frozen=True)
class Outcome:
    """What a launch with one kill came to.

    Attributes:
        noticed_s: from the kill until the scheduler has noted the loss.
        restarts: workers that were started again.
        refused: times that a worker was refused a place.
        orphans: processes that are left.
    """

    exit_code: int
    noticed_s: float
    restarts: int
    refused: int
    orphans: int
    text: str


def launched(row: Row, folder: Path) -> Outcome:
    """Runs a job in an empty folder; its workers are this file."""
    name = f"{os.getpid()}-{folder.name}"
    run = [
        sys.executable,
        "-m",
        "muster",
        "run",
        "-n",
        "2",
        "--scheduler",
        "--max-restarts",
        "2",
        "--tail",
        "all",
    ]
    launch = subprocess.run(
        [*run, "--", sys.executable, str(Path(__file__)), json.dumps(vars(row)), str(folder)],
        cwd=folder,
        env=os.environ
        | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join([str(ROOT), *sys.path]), MARK: name},
        capture_output=True,
        text=True,
        timeout=220,
    )
    text = launch.stdout + launch.stderr
    lost = re.search(r"\[scheduler\] (\S+)Z WARNING lost ", text)
    noticed_s = float("nan")
    if lost:
        noticed_s = datetime.fromisoformat(lost[1] + "+00:00").timestamp()
        noticed_s -= float((folder / "killed").read_text())
    return Outcome(
        launch.returncode,
        noticed_s,
        text.count("starting it again"),
        text.count("held by a living process"),
        _left(name),
        text,
    )


def _left(name: str) -> int:
    """How many of a job's processes live on, though they had time to end: some end after the launch."""
    until = time.monotonic() + 20
    while left := sum(f"{MARK}={name}" in each for each in map(_environment, Path("/proc").glob("[0-9]*"))):
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return left


def _environment(process: Path) -> str:
    try:
        return (process / "environ").read_text()
    except OSError:
        return ""


def train(row: Row, folder: Path) -> None:
    """The documented loop."""
    import torch

    import muster
    from muster.torch.state import TorchTrainingState
    from muster.training.loop import ElasticLoop
    from muster.training.sampler import ShardedSampler

    with muster.init("tcp") as session:
        torch.set_num_threads(1)
        model = muster.DataParallel(torch.nn.Linear(4, 1), session, elastic=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sampler = ShardedSampler(64, 8)
        state = TorchTrainingState(model, optimizer, sampler)
        rows = torch.utils.data.TensorDataset(torch.arange(256.0).view(64, 4))
        more = {"multiprocessing_context": row.start, "persistent_workers": row.persistent}
        loader = torch.utils.data.DataLoader(
            rows, batch_sampler=sampler, num_workers=row.processes, **more if row.processes else {}
        )
        for step in ElasticLoop(session, state, epochs=2, load=loader):
            with step:
                optimizer.zero_grad()
                model(step.data[0]).square().mean().backward()
                if session.rank == 1 and state.step == KILLED_AT and not (folder / "killed").exists():
                    (folder / "killed").write_text(str(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()


def main() -> None:
    """Prints a line for each kill, those without a DataLoader's processes first."""
    noticed: dict[str, list[float]] = {}
    for row in [Row()] * 4 + TABLE + TABLE[::3] * 2:
        with tempfile.TemporaryDirectory() as folder:
            found = launched(row, Path(folder))
        kind = row.start if row.processes else "none"
        noticed.setdefault(kind, []).append(found.noticed_s)
        print(row, f"exit {found.exit_code}, noticed after {found.noticed_s:.3f} s,", end=" ")
        print(f"{found.restarts} restarts, {found.refused} refused, {found.orphans} left", flush=True)
    for kind, values in noticed.items():
        print(f"{kind}: median {statistics.median(values):.3f} s of {len(values)}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        train(Row(**json.loads(sys.argv[1])), Path(sys.argv[2]))
    else:
        main()
