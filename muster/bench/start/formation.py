"""Measures the time of a short CPU job, from its start command through one AllReduce to its end.

Muster's command is ``muster run -n N --scheduler``, with mutual TLS on every connection; its time includes
the start of the scheduler. The peer's is ``mpirun -n N python`` with mpi4py, which does not encrypt. Runs of
both are made in turns, so that disturbances affect both. Results are wall-clock time and the processor time
of all processes, which depends less on how busy the machine is. Both use compiled modules, as after an
installation.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from muster.bench.launches import MUSTER, environment, in_turns, make_keys, run_to_end, show_times

HERE = Path(__file__).parent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="workers of the job (8)")
    parser.add_argument(
        "--runs", type=int, default=5, metavar="N", help="measured runs; the median counts (5)"
    )
    parser.add_argument(
        "--warmups", type=int, default=1, metavar="N", help="runs before the measured ones (1)"
    )
    parser.add_argument(
        "--start", choices=("auto", "fork", "exec"), default="auto", help="how the launcher starts workers"
    )
    parser.add_argument("--peer", choices=("openmpi",), help="also run the same job under this launcher")
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
        results = _measured(commands, options, directory)
    if options.peer:
        results["ratio"] = _ratio(results, options.peer, "median_s")
        results["processor_ratio"] = _ratio(results, options.peer, "processor_median_s")
    return {
        "workers": options.workers,
        "start": options.start,
        "tls": {"muster": "mutual TLS", **({options.peer: "none"} if options.peer else {})},
        "peer_versions": _versions(options) if options.peer else {},
        **results,
    }


def _measured(
    commands: Mapping[str, Sequence[str]], options: argparse.Namespace, directory: Path
) -> dict[str, Any]:
    """Runs the commands in turns; adds the processor time to the results of :func:`in_turns`."""
    env = environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # the warm-up compiles a checkout's modules
    spent: dict[str, list[float]] = {name: [] for name in commands}

    def timed(name: str, _index: int) -> float:
        before_s = _children_s()
        taken_s = run_to_end(commands[name], directory, env)
        spent[name].append(round(_children_s() - before_s, 3))
        return taken_s

    results = in_turns(commands, timed, warmups=options.warmups, runs=options.runs)
    for name in commands:
        runs_s = spent[name][options.warmups :]
        results[name] |= {
            "processor_median_s": round(statistics.median(runs_s), 3),
            "processor_runs_s": runs_s,
        }
    return results


def _children_s() -> float:
    """Returns the processor time of all ended child processes and their descendants, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _ratio(results: Mapping[str, Any], peer: str, what: str) -> float:
    ratio: float = results["muster"][what] / max(results[peer][what], 0.001)
    return round(ratio, 3)


def _muster(options: argparse.Namespace, directory: Path) -> list[str]:
    config, password = make_keys(directory / "keys")
    return [
        *(*MUSTER, "run", "-n", str(options.workers), "--oversubscribe", "--scheduler", "--tail", "none"),
        *("--start", options.start, "--devices", "none"),
        *("--config", str(config), "--password-file", str(password)),
        *("--", sys.executable, str(HERE / "formation_worker.py")),
    ]


def _openmpi(options: argparse.Namespace) -> list[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    script = str(HERE / "formation_peer.py")
    count = ["--oversubscribe", "-n", str(options.workers)]
    return [options.mpirun, *root, *count, options.peer_python, script]


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
    show_times(results, {"openmpi": results["ratio"]} if "ratio" in results else {}, show)
    for name in ("muster", "openmpi"):
        if name in results:
            show(f"{name:8} {results[name]['processor_median_s']:.2f} s of processor time")
    if "processor_ratio" in results:
        show(f"muster takes {results['processor_ratio']:.2f} times as much of it")
