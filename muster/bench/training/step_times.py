"""Measures what MS_STEP_TIMES costs a torch program: GPT-2 with and without it, in turns.

    muster bench step-times --json results.json --check 0.3

Two jobs of one rank each run the same torch program on one GPU: GPT-2 of 124 million parameters in
DistributedDataParallel over NCCL, with autocast to bfloat16, fused AdamW and clipped gradients. While one
job trains, the other waits. --check P ends with exit code 1 if the measured steps are more than P % longer,
in the median over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from muster.bench.gpu_fleet import SAFE_ENVIRONMENT, require_gpus
from muster.bench.gpu_machine import describe_machine
from muster.bench.launches import MUSTER, environment
from muster.bench.report import describe_machine as describe_host
from muster.bench.training import gpt2

SOCKET_VARIABLE = "BENCH_SOCKET"
WARM_UP_STEPS = 12
START_S = 300.0
KINDS = {"on": "1", "off": "0"}
"""Values of MS_STEP_TIMES."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This benchmark's arguments."""
    parser.add_argument("--batch", type=int, default=32, help="windows of 1,024 per step (32)")
    parser.add_argument("--rounds", type=int, default=21, help="turns of each job (21)")
    parser.add_argument("--steps", type=int, default=25, help="steps per turn (25)")
    parser.add_argument("--tiny", action="store_true", help="a small net on CPUs, to try this benchmark")
    parser.add_argument(
        "--check", type=float, metavar="P", help="exit with 1 if it costs more than P percent"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures and returns the results.

    Raises:
        RuntimeError: a program did not start, or ended before it was to.
    """
    if not options.tiny:
        require_gpus(1)
    rounds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with contextlib.ExitStack() as jobs:
        programs = {kind: jobs.enter_context(_program(options, kind)) for kind in KINDS}
        facts = {kind: program.recv() for kind, program in programs.items()}
        if [facts[kind]["is_measured"] for kind in KINDS] != [True, False]:
            raise RuntimeError("MS_STEP_TIMES has not turned the measuring on and off.")
        for turn in range(options.rounds):
            for kind in sorted(KINDS, reverse=turn % 2 == 0):
                rounds[kind].append(1e3 * _steps(programs[kind], options.steps))
    costs = [100.0 * (on / off - 1.0) for on, off in zip(rounds["on"], rounds["off"], strict=True)]
    return {
        "model": "tiny" if options.tiny else "gpt2",
        "gpu": facts["on"]["machine"],
        "batch": options.batch,
        "steps_a_round": options.steps,
        "results": {
            kind: {"step_ms": statistics.median(taken), "rounds_ms": taken} for kind, taken in rounds.items()
        },
        "cost_percent": statistics.median(costs),
    }


def report(result: dict[str, Any]) -> None:
    """Prints the figures."""
    for kind, row in result["results"].items():
        print(f"MS_STEP_TIMES {kind:4} {row['step_ms']:9.3f} ms a step")
    print(f"measuring costs {result['cost_percent']:.2f} % of a step, round by round, in the median")


def check(result: dict[str, Any], most_percent: float) -> int:
    """Compares with what ``--check`` demands; returns the exit code."""
    failed = result["cost_percent"] > most_percent
    print(
        f"{result['cost_percent']:.2f} %, {'ABOVE' if failed else 'at most'} {most_percent:g} %", flush=True
    )
    return int(failed)


@contextlib.contextmanager
def _program(options: argparse.Namespace, kind: str) -> Iterator[Connection]:
    """A job of the program, to its end; yields the connection to it."""
    with tempfile.TemporaryDirectory(prefix="muster-steps-") as name:
        address, log = f"{name}/socket", Path(name, "log")
        command = [
            *(*MUSTER, "run", "-n", "1", "--scheduler", "--program", "torch"),
            *(("--devices", "none") if options.tiny else ()),
            *("--", sys.executable, "-m", "muster.bench.training.step_times", str(options.batch)),
            *(("tiny",) if options.tiny else ()),
        ]
        env = environment(MS_STEP_TIMES=KINDS[kind], **{SOCKET_VARIABLE: address}, **SAFE_ENVIRONMENT)
        with socket.socket(socket.AF_UNIX) as listener, log.open("w") as out:
            listener.bind(address)
            listener.listen()
            job = subprocess.Popen(command, cwd=name, env=env, stdout=out, stderr=subprocess.STDOUT)
            try:
                with _accepted(listener, job) as program:
                    yield program
            except (EOFError, OSError):
                raise RuntimeError(
                    f"The program of MS_STEP_TIMES={KINDS[kind]} has ended, or does not start:\n"
                    + log.read_text()[-2000:]
                ) from None
            finally:
                job.terminate()
                job.wait()


def _accepted(listener: socket.socket, job: subprocess.Popen[bytes]) -> Connection:
    """The program's connection, once it has come to that."""
    listener.settimeout(1.0)
    deadline = time.monotonic() + START_S
    while job.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            return Connection(listener.accept()[0].detach())
    raise TimeoutError


def _steps(program: Connection, steps: int) -> float:
    """Lets it make steps; returns seconds a step."""
    program.send(steps)
    return float(program.recv()) / steps


# ------------------------------------------------------------ the program


def main() -> int:
    """Makes steps, as many as it is told each time, until it is told no more; returns the exit code."""
    import torch
    import torch.distributed as dist

    tiny = "tiny" in sys.argv[2:]
    device = torch.device("cpu") if tiny else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not tiny:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if tiny else "nccl", device_id=None if tiny else device)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        gpt2.make_module("ddp", device, tiny=tiny),
        device_ids=None if tiny else [device.index],
        gradient_as_bucket_view=True,
    )
    optimizer = gpt2.make_optimizer(model, device)
    batch = gpt2.make_batch(device, int(sys.argv[1]), torch.Generator(device).manual_seed(0), tiny=tiny)

    def train(steps: int) -> float:
        begun = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = gpt2.loss_of(model, *batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), gpt2.CLIP_NORM, foreach=True)
            optimizer.step()
        if not tiny:
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    train(WARM_UP_STEPS)
    with Client(os.environ[SOCKET_VARIABLE]) as bench:
        bench.send(
            {"machine": describe_host() if tiny else describe_machine(), "is_measured": _is_measured()}
        )
        with contextlib.suppress(EOFError):  # nothing more is wanted
            while True:
                bench.send(train(bench.recv()))
    dist.destroy_process_group()
    return 0


def _is_measured() -> bool:
    """Whether Muster times this program's steps: then it has wrapped what waits."""
    import torch.distributed as dist

    return hasattr(dist.Work.wait, "__wrapped__")


if __name__ == "__main__":
    sys.exit(main())
