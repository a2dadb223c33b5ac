"""Helps benchmarks to start jobs: makes keys and environments, and runs commands one after the other."""

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
    """Makes certificates in a folder, for this machine and schedulers on ``hosts``, unless it has some.

    Returns:
        The paths of the folder's config.json and password file.

    Raises:
        RuntimeError: ``muster certs init`` failed.
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
    """Returns this process's environment without Muster's variables, with this source tree in PYTHONPATH."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MS_")}
    path = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))
    return {**env, "PYTHONPATH": path, **more}


def free_ports(count: int = 1, host: str = "127.0.0.1") -> list[int]:
    """Returns ports on which nothing listens, and which stay free while their listener is restarted.

    They are below the range from which Linux takes ports of outgoing connections, which could take one of
    them at any time.
    """
    chance = random.SystemRandom()  # unseeded, so that processes side by side draw different ports
    ports: list[int] = []
    while len(ports) < count:
        port = chance.randrange(_LOWEST_PORT, _HIGHEST_PORT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            ports += [port] if port not in ports else []
    return ports


def stopwatch() -> Callable[[str], None]:
    """Returns a function that prints a text with the seconds since this call."""
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:8.1f} s  {text}", flush=True)

    return say


@contextlib.contextmanager
def by_pipes(workers: int, target: Callable[..., None], *arguments: Any) -> Iterator[list[Connection]]:
    """Starts processes that call ``target(rank, pipe, *arguments)``; yields our ends of the pipes, by rank.

    The processes have ten seconds to end after the context.
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
    """Receives a worker process's result.

    Raises:
        RuntimeError: the process sent an error's text, or ended.
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
        RuntimeError: the command failed; the message has the end of its output.
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
    """Measures commands in turns, so that other load of the machine affects all of them alike.

    Args:
        commands: the commands by name.
        timed: runs a command, given its name and the number of the run from 0; returns seconds.
        warmups: the number of runs that do not count.
        runs: the number of runs that count.

    Returns:
        For each name ``median_s``, ``min_s``, ``max_s`` and ``runs_s``.
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
    """Prints the measured times, and for those in ``ratios`` how many times as long Muster takes."""
    for name in ("muster", "torchrun", "mpirun", "openmpi"):
        if name in results:
            one = results[name]
            note = f"; muster takes {ratios[name]:.2f} times as long" if name in ratios else ""
            show(f"{name:8} {one['median_s']:.2f} s  ({one['min_s']:.2f} to {one['max_s']:.2f}){note}")
