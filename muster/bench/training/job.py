"""Runs all variants of ``muster bench train`` in turns, in each process of one job."""

from __future__ import annotations

import abc
import argparse
import contextlib
import io
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import muster
from examples import gpt2 as gpt2_example
from examples import resnet50_cifar10 as example
from muster.bench.gpu_machine import describe_machine
from muster.bench.report import describe_machine as describe_host
from muster.bench.report import write
from muster.bench.training import gpt2
from muster.bench.training.command import MODELS, CapturedByHand, make_model, make_step, start_clean
from muster.example.status_line import StatusLine
from muster.torch.transfer import gather_rows

WARM_UP_STEPS = 12
ENDLESS = 10**6
"""The number of epochs of an example, so large that each turn's number of steps sets the end."""


class Runner(abc.ABC):
    """A variant that is ready to run.

    Args:
        step: the function that trains; it may have ``captured``, ``reason`` and ``release``.
        losses: the losses of its first steps.
    """

    def __init__(self, step: Any, losses: Sequence[float] = ()) -> None:
        self._step, self.losses = step, list(losses)

    @property
    def captured(self) -> bool:
        """Whether its steps are launched as graphs."""
        return bool(getattr(self._step, "captured", False))

    @property
    def reason(self) -> str | None:
        """Why its steps are not captured, if that is known."""
        return getattr(self._step, "reason", None)

    @abc.abstractmethod
    def run(self, steps: int) -> float:
        """Trains; returns seconds a step."""

    def release(self) -> None:
        """Releases its graph, if it has one; idempotent."""
        getattr(self._step, "release", _nothing)()


class Bare(Runner):
    """Trains steps on one batch that stays on the device."""

    def __init__(self, options: argparse.Namespace, session: Any, device: Any, name: str, batch: int) -> None:
        size, tiny = (32 if options.tiny else 224), options.tiny
        generator = torch.Generator(device).manual_seed(session.rank)
        if options.model == "gpt2":
            images, labels = gpt2.make_batch(device, batch, generator, tiny=tiny)
        else:
            images = torch.randn(batch, 3, size, size, device=device, generator=generator)
            dtype = torch.float32 if tiny else torch.bfloat16
            images = images.to(dtype).contiguous(memory_format=torch.channels_last)
            labels = torch.randint(0, 10, (batch,), device=device, generator=generator)
        kind = {"model_name": options.model}

        def make() -> tuple[Any, Any]:
            return make_model(
                session.communicator, name, init_file=options.init_file, device=device, tiny=tiny, **kind
            )

        self._device, self._batch = device, (images, labels)
        if name.startswith("ddp-captured"):
            by_hand = CapturedByHand(make, images, labels, **kind)
            super().__init__(by_hand)
            losses = [*by_hand.losses, by_hand().clone()]
        else:
            super().__init__(make_step(*make(), name, exact=tiny, device=device.type, **kind))
            losses = [self._once().clone() for _ in range(WARM_UP_STEPS)]
        self.losses = [float(loss) for loss in losses]

    def _once(self) -> Any:
        if isinstance(self._step, CapturedByHand):
            return self._step()
        # Once captured, the batch is in the graph's own buffers, so that a step needs no copy.
        return self._step(*(self._step._static if self.captured else self._batch))

    def run(self, steps: int) -> float:
        """Trains; returns seconds a step."""
        begun = time.perf_counter()
        for _ in range(steps):
            self._once()
        _synchronize(self._device)
        return (time.perf_counter() - begun) / steps


class Example(Runner):
    """Trains by the job and the loop of examples/resnet50_cifar10.py or gpt2.py, made by its command line."""

    def __init__(self, options: argparse.Namespace, session: Any, device: Any, data: str, batch: int) -> None:
        if options.model == "gpt2":
            self._module: Any = gpt2_example
            arguments = gpt2.arguments(Path(os.environ["DATA_PATH"]), batch, tiny=options.tiny)
        else:
            self._module = example
            arguments = [
                f"--data={data}",
                f"--batch-size={batch}",
                f"--epochs={ENDLESS}",
                "--checkpoint-dir=",
            ]
            if options.tiny:
                arguments += ["--tiny", "--image-size=32", "--no-compile"]
        self._args, self._session = self._module.settings(arguments), session
        self.job = self._module.Job(self._args, session, device)
        super().__init__(self.job.step)
        self.run(WARM_UP_STEPS)

    def run(self, steps: int) -> float:
        """Trains; returns seconds a step, by the speed that the example itself measures."""
        self._args.steps = self.job.state.step + steps + 1  # the first one of a loop is not timed
        done = self._module.train(self._args, self.job, self._session, StatusLine(io.StringIO()))
        if done.samples_per_s is None:
            raise RuntimeError("too few steps to measure a speed")
        return float(self._args.batch_size * self._session.world_size / done.samples_per_s)


class ExampleStep(Runner):
    """The step of an :class:`Example` without its loop."""

    def __init__(self, whole: Example) -> None:
        super().__init__(whole.job.step)
        self._job = whole.job

    def run(self, steps: int) -> float:
        """Trains; returns seconds a step."""
        sampler = self._job.state.sampler
        begun = time.perf_counter()
        for _ in range(steps):
            self._job.train_step(self._job.rows(sampler.batch()))
            sampler.advance()
        _synchronize(self._job.device)
        return (time.perf_counter() - begun) / steps


def _nothing() -> None:
    return


def _synchronize(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    options: argparse.Namespace, session: Any, device: Any, batch: int, say: Any
) -> list[dict[str, Any]]:
    """Makes all variants, runs them in turns, and returns their rows; every rank calls it.

    A peer's variant that cannot be made has a row with ``error`` instead of figures.
    """
    runners: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as releases:
        for name in options.variants:
            rows[name] = {"variant": name, "gpus": session.world_size, "batch_per_gpu": batch}
            before = _memory(device)
            session.communicator.barrier()
            begun = time.perf_counter()
            try:
                runner = _make(options, session, device, name, batch, runners)
            except RuntimeError as error:
                if not name.startswith("ddp"):
                    raise
                rows[name]["error"] = str(error)
                say(f"{name}: {error}")
                continue
            runners[name] = runner
            releases.callback(runner.release)
            setup_s, memory = time.perf_counter() - begun, _memory(device, peak=True) - before
            rows[name] |= {"setup_s": setup_s, "memory_gib": memory / 2**30, "losses": runner.losses}
            say(f"{name}: ready after {setup_s:.1f} s")
        steps = {name: _agree(session, device, runners[name], options.seconds) for name in runners}
        turns: dict[str, list[float]] = {name: [] for name in runners}
        order = list(runners)
        for turn in range(options.rounds):
            first = turn % len(order)
            for name in order[first:] + order[:first]:
                session.communicator.barrier()
                turns[name].append(runners[name].run(steps[name]))
        for name, runner in runners.items():
            mine = [round(seconds * 1e9) for seconds in turns[name]]
            slowest = [max(column) / 1e6 for column in zip(*_gather(session, device, mine), strict=True)]
            step_ms = statistics.median(slowest)
            rows[name] |= {
                _rate(options): session.world_size * batch * _samples(options) / step_ms * 1e3,
                "step_ms": step_ms,
                "rounds_ms": slowest,
                "steps_a_round": steps[name],
                "captured": runner.captured,
                "reason": runner.reason,
            }
            say(_line(rows[name], _rate(options)))
    return list(rows.values())


def _make(
    options: argparse.Namespace, session: Any, device: Any, name: str, batch: int, others: dict[str, Any]
) -> Any:
    if not name.startswith("example"):
        return Bare(options, session, device, name, batch)
    whole = name.replace("-step", "")
    data = "synthetic" if name.endswith("synthetic") else "cifar10"
    if whole != name:
        return ExampleStep(others.get(whole) or Example(options, session, device, data, batch))
    return Example(options, session, device, data, batch)


def _agree(session: Any, device: Any, runner: Any, seconds: float) -> int:
    """Returns the number of steps that take about ``seconds``, at least 5; the same on all ranks."""
    return _gather(session, device, [max(5, int(seconds / runner.run(5)))])[0][0]


def _gather(session: Any, device: Any, row: list[int]) -> list[list[int]]:
    return gather_rows(session.communicator, device, row)


def _memory(device: Any, *, peak: bool = False) -> int:
    """Returns the bytes in use, and resets the peak; with ``peak`` returns the peak since then."""
    if device.type != "cuda":
        return 0
    if peak:
        return int(torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def _rate(options: argparse.Namespace) -> str:
    """Returns the key of a row's speed."""
    return "tokens_per_s" if options.model == "gpt2" else "images_per_s"


def _samples(options: argparse.Namespace) -> int:
    """Returns the number of tokens per window, or 1 for images: what a row's speed counts per sample."""
    return gpt2.shape(options.tiny)["context"] if options.model == "gpt2" else 1


def _line(row: dict[str, Any], rate: str) -> str:
    note = "captured" if row["captured"] else row["reason"] or "eager"
    speed = f"{row[rate]:9.0f} {rate.replace('_per_', '/')}"
    return (
        f"{row['gpus']} GPUs  {row['variant']:22} batch {row['batch_per_gpu']:4}"
        f"  {speed}  {row['step_ms']:8.3f} ms  setup {row['setup_s']:5.1f} s"
        f"  ({note})"
    )


def main() -> int:
    """Measures, and writes the results of rank 0; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    option = parser.add_argument
    option("--model", choices=MODELS, required=True)
    option("--variants", nargs="+", required=True)
    option("--batch", type=int, nargs="+", required=True)
    option("--rounds", type=int, required=True)
    option("--seconds", type=float, required=True)
    option("--init-file", required=True)
    option("--out", type=Path, required=True)
    option("--tiny", action="store_true")
    options = parser.parse_args()
    # The compiler counts the variants' modules as recompilations, because they have the same code.
    torch._dynamo.config.recompile_limit = 64
    results: list[dict[str, Any]] = []
    with muster.init("tcp" if options.tiny else "nccl") as session:
        device = torch.device("cpu") if options.tiny else example.device_of(session)

        def say(line: str) -> None:
            if session.rank == 0:
                print(line, flush=True)

        for batch in options.batch:
            if not options.tiny:
                start_clean()
            results += measure(options, session, device, batch, say)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        if session.rank == 0:
            machine = describe_host() if options.tiny else describe_machine(session.communicator)
            write(options.out, "train", {"machine": machine, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
