"""How long a short job takes: from the start command, through one AllReduce of all workers, to its end.

Muster's side is ``muster run -n N --scheduler`` with mutual TLS on every connection, the scheduler's
start included. The peer's is ``mpirun -n N python`` with mpi4py, which encrypts nothing. Both are measured
in turn, run by run, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RUN_TIMEOUT_S = 300.0
HERE = Path(__file__).parent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="workers of the job (8)")
    parser.add_argument(
        "--runs", type=int, default=5, metavar="N", help="measured runs; the median counts (5)"
    )
    parser.add_argument("--warmups", type=int, default=1, metavar="N", help="runs before those (1)")
    parser.add_argument(
        "--start", choices=("auto", "fork", "exec"), default="auto", help="how the launcher starts workers"
    )
    parser.add_argument("--peer", choices=("openmpi",), help="run the same job under this one too")
    parser.add_argument("--mpirun", default="mpirun", metavar="PROGRAM", help="the peer's launcher")
    parser.add_argument(
        "--peer-python", default=sys.executable, metavar="PROGRAM", help="a Python that has mpi4py and NumPy"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures and returns the results.

    Raises:
        RuntimeError: a run failed; shows the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="muster-formation-") as scratch:
        directory = Path(scratch)
        commands = {"muster": _muster(options, directory)}
        if options.peer:
            commands[options.peer] = _openmpi(options)
        times: dict[str, list[float]] = {name: [] for name in commands}
        for index in range(options.warmups + options.runs):
            for name, command in commands.items():
                taken_s = _timed(command, directory)
                if index >= options.warmups:
                    times[name].append(taken_s)
    results: dict[str, Any] = {name: _summary(taken) for name, taken in times.items()}
    if options.peer:
        results["ratio"] = round(results["muster"]["median_s"] / results[options.peer]["median_s"], 3)
    return {
        "workers": options.workers,
        "start": options.start,
        "tls": {"muster": "mutual TLS", **({options.peer: "none"} if options.peer else {})},
        "peer_versions": _versions(options) if options.peer else {},
        **results,
    }


def _muster(options: argparse.Namespace, directory: Path) -> list[str]:
    keys = directory / "keys"
    password = keys / "password"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "muster",
            "certs",
            "init",
            "--dir",
            str(keys),
            "--password-file",
            str(password),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return [
        *(
            sys.executable,
            "-m",
            "muster",
            "run",
            "-n",
            str(options.workers),
            "--oversubscribe",
            "--scheduler",
            "--tail",
            "none",
        ),
        *("--start", options.start, "--devices", "none"),
        *("--config", str(keys / "config.json"), "--password-file", str(password)),
        *("--", sys.executable, str(HERE / "formation_worker.py")),
    ]


def _openmpi(options: argparse.Namespace) -> list[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    script = str(HERE / "formation_peer.py")
    count = ["--oversubscribe", "-n", str(options.workers)]
    return [options.mpirun, *root, *count, options.peer_python, script]


def _timed(command: Sequence[str], directory: Path) -> float:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MS_")}
    env |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    started = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=directory,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    taken_s = time.perf_counter() - started
    if done.returncode:
        end = done.stdout.decode(errors="replace")[-4000:]
        raise RuntimeError(f"{command[0]} ended with code {done.returncode}:\n{end}")
    return taken_s


def _summary(taken: Sequence[float]) -> dict[str, Any]:
    return {
        "median_s": round(statistics.median(taken), 3),
        "min_s": round(min(taken), 3),
        "max_s": round(max(taken), 3),
        "runs_s": [round(seconds, 3) for seconds in taken],
    }


def _versions(options: argparse.Namespace) -> dict[str, str]:
    return {
        "openmpi": _first_line([options.mpirun, "--version"]),
        "mpi4py": _first_line([options.peer_python, "-c", "import mpi4py; print(mpi4py.__version__)"]),
    }


def _first_line(command: Sequence[str]) -> str:
    if shutil.which(command[0]) is None:
        raise RuntimeError(
            f"{command[0]} is not found; name the peer's programs with --mpirun and --peer-python."
        )
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return out.splitlines()[0].strip()


def report(results: dict[str, Any], show: Callable[[str], None] = print) -> None:
    """Prints the results for people."""
    for name in ("muster", "openmpi"):
        if name in results:
            one = results[name]
            show(f"{name:8} {one['median_s']:.2f} s  ({one['min_s']:.2f} to {one['max_s']:.2f})")
    if "ratio" in results:
        show(f"muster takes {results['ratio']:.2f} times as long as openmpi")
