"""Jobs that benchmarks start: their keys, their environment, and one job after the other, run to its end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 300.0
MUSTER = (sys.executable, "-m", "muster")
_LOWEST_PORT, _HIGHEST_PORT = 10_000, 32_000


def make_keys(directory: Path, *, hosts: str = "") -> tuple[Path, Path]:
    """Makes certificates for this machine in a folder, and for schedulers on ``hosts``, if it has none.

    Returns:
        Its config.json and password file.
    """
    config, password = directory / "config.json", directory / "password"
    if not config.exists():
        certs = [*MUSTER, "certs", "init", "--dir", str(directory), "--password-file", str(password)]
        certs += ["--hosts", hosts] if hosts else []
        done = subprocess.run(certs, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"muster certs init ended with code {done.returncode}:\n{done.stderr}")
    return config, password


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what Muster reads, with this source tree to import, and ``more``."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MS_")}
    path = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))
    return {**env, "PYTHONPATH": path, **more}


def free_ports(count: int = 1, host: str = "127.0.0.1") -> list[int]:
    """Ports at which nothing listens, and which stay free while what listens there is started again.

    They are below those that Linux gives to connections: of these one may be taken at any time.
    """
    chance = random.SystemRandom()  # what runs beside draws others
    ports: list[int] = []
    while len(ports) < count:
        port = chance.randrange(_LOWEST_PORT, _HIGHEST_PORT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            ports += [port] if port not in ports else []
    return ports


def stopwatch() -> Callable[[str], None]:
    """Prints what it is called with, each line with the seconds since this call."""
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:8.1f} s  {text}", flush=True)

    return say


@contextlib.contextmanager
def by_pipes(workers: int, target: Callable[..., None], *arguments: Any) -> Iterator[list[Connection]]:
    """Starts processes that call ``target(rank, pipe, *arguments)``; yields our ends of the pipes, by rank.

    At the context's end they have ten seconds to end.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(workers):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(rank, theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        yield pipes
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def receive(pipe: Connection) -> Any:
    """What a worker process has sent.

    Raises:
        RuntimeError: it sent an error's text, or ended.
    """
    try:
        result = pipe.recv()
    except EOFError:
        raise RuntimeError("a worker ended early; its words are above") from None
    if isinstance(result, str):
        raise RuntimeError(result)
    return result


def run_to_end(command: Sequence[str], directory: Path, env: Mapping[str, str]) -> float:
    """Runs a command in a folder; returns the seconds that it took.

    Raises:
        RuntimeError: it failed; shows the end of its output.
    """
    begun = time.monotonic()
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
    taken_s = time.monotonic() - begun
    if done.returncode:
        end = done.stdout.decode(errors="replace")[-4000:]
        raise RuntimeError(f"{command[0]} ended with code {done.returncode}:\n{end}")
    return taken_s


def in_turns(
    commands: Mapping[str, Sequence[str]], timed: Callable[[str, int], float], *, warmups: int, runs: int
) -> dict[str, Any]:
    """Measures commands in turns, so that whatever else the machine does meets all of them.

    Args:
        commands: by name.
        timed: runs the one of this name, for the so-manieth time; returns seconds.
        warmups: runs that do not count.
        runs: those that do.

    Returns:
        Of each name: ``median_s``, ``min_s``, ``max_s`` and ``runs_s``.
    """
    times: dict[str, list[float]] = {name: [] for name in commands}
    for index in range(warmups + runs):
        for name in commands:
            times[name].append(timed(name, index))
    return {name: _summary(taken[warmups:]) for name, taken in times.items()}


def _summary(taken: Sequence[float]) -> dict[str, Any]:
    return {
        "median_s": round(statistics.median(taken), 3),
        "min_s": round(min(taken), 3),
        "max_s": round(max(taken), 3),
        "runs_s": [round(seconds, 3) for seconds in taken],
    }


def show_times(
    results: Mapping[str, Any], ratios: Mapping[str, float], show: Callable[[str], None] = print
) -> None:
    """Prints the times of those that were measured, and to those in ``ratios`` how long Muster took."""
    for name in ("muster", "torchrun", "mpirun", "openmpi"):
        if name in results:
            one = results[name]
            note = f"; muster takes {ratios[name]:.2f} times as long" if name in ratios else ""
            show(f"{name:8} {one['median_s']:.2f} s  ({one['min_s']:.2f} to {one['max_s']:.2f}){note}")
