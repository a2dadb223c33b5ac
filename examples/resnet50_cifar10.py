"""ResNet-50 on CIFAR-10 images resized to 224x224, data-parallel, each step one CUDA graph.

    MS_ROLE=MS_WORKER MS_WORKER_NUM=4 MS_SCHED_HOST=10.0.0.1 MS_SCHED_PORT=6667 \\
        DATA_PATH=cifar-10-batches-bin python -m examples.resnet50_cifar10

or, with a scheduler and one worker per GPU of this host at once:

    DATA_PATH=cifar-10-batches-bin muster run --scheduler -- python -m examples.resnet50_cifar10

``--parallel auto`` has a search decide what is divided, which for this model is the batch.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import muster
from examples.cifar10_images import Preparation, augment
from examples.resnet import ResNet, resnet50
from examples.throughput import Throughput
from muster import ElasticLoop, ShardedSampler
from muster.example import datasets
from muster.example.status_line import StatusLine
from muster.torch import DataParallel, TorchTrainingState, capture_step
from muster.torch.transfer import gather_rows
from muster.training import checkpoint
from muster.training.sampler import Batch

CLASSES, SYNTHETIC_SAMPLES = 10, 8192
RATE, MOMENTUM = 0.01, 0.9


def settings(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; None: this process's."""
    option = (parser := argparse.ArgumentParser(description=__doc__.partition("\n")[0])).add_argument
    option(
        "--data",
        choices=["cifar10", "synthetic"],
        default="cifar10" if datasets.path_given() else "synthetic",
    )
    option("--epochs", type=int, default=10)
    option("--steps", type=int, default=0, help="steps in all, at most (0: as many as the epochs have)")
    option("--batch-size", type=int, default=32, help="images per worker")
    option("--image-size", type=int, default=224)
    option("--print-every", type=int, default=50, help="steps between two lines of loss; 1: every step")
    option("--seed", type=int, default=0)
    option("--tiny", action="store_true", help="a small net, for trying this on a CPU")
    option("--parallel", choices=["data", "auto"], default="data", help="auto: divided as a search says")
    option("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    option("--single", type=float, default=0, help="images/s of one worker, to print the scaling at the end")
    option("--checkpoint-dir", default="checkpoints", help="'' writes none; a divided one is taken up")
    option("--resume", nargs="?", const="latest", default="", help="a file, or the last in --checkpoint-dir")
    args = parser.parse_args(argv)
    if min(args.epochs, args.batch_size, args.image_size, args.print_every) < 1 or args.steps < 0:
        parser.error("--epochs, --batch-size, --image-size and --print-every must be >= 1, --steps >= 0")
    return args


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """uint8 images (N, 3, 32, 32) and labels, as NumPy arrays."""
    if args.data == "cifar10":
        data = datasets.load("cifar10")
        return data.train_x.reshape(-1, 3, 32, 32), data.train_y
    random = np.random.default_rng(args.seed)  # noise around one pattern per class: something can be learnt
    labels = random.integers(0, CLASSES, SYNTHETIC_SAMPLES)
    patterns = random.integers(0, 128, (CLASSES, 3, 32, 32))
    return (patterns[labels] + random.integers(0, 128, (SYNTHETIC_SAMPLES, 3, 32, 32))).astype(
        np.uint8
    ), labels


def mean_loss(scores: Any, labels: Any) -> Any:
    """The mean cross entropy."""
    return torch.nn.functional.cross_entropy(scores.float(), labels)


class Job:
    """Model, data, optimizer and step of one worker."""

    def __init__(self, args: argparse.Namespace, session: muster.Session, device: Any) -> None:
        self.args, self.device, self.cuda = args, device, device.type == "cuda"
        torch.manual_seed(args.seed)
        self.divided = args.parallel == "auto"
        fast = self.cuda and not self.divided  # kernels of their own are no operators that rules divide
        net = ResNet((1, 1), CLASSES, width=8) if args.tiny else resnet50(CLASSES, fast=fast)
        net = net.to(device, memory_format=torch.channels_last)
        dtype = torch.bfloat16 if self.cuda else torch.float32
        if self.divided:
            images = torch.zeros(args.batch_size, 3, args.image_size, args.image_size, dtype=dtype)
            example = images.to(device), torch.zeros(args.batch_size, dtype=torch.int64, device=device)
            self.model = muster.parallelize(
                net, example, session=session, loss=mean_loss, batch_norm="local", elastic=True
            )
        else:
            if args.compile:
                net.compile_stages()
            cap = 64 * 2**20
            weights = "bf16" if self.cuda else None
            self.model = DataParallel(
                net, session, elastic=True, weights=weights, bucket_bytes=cap, first_bytes=cap
            )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=MOMENTUM, fused=True)
        images, labels = load(args)
        self.images = torch.from_numpy(images).to(device)  # 150 MB: the whole data set fits beside the model
        self.labels = torch.from_numpy(labels).to(device)
        self.prepare = Preparation(device, args.image_size, dtype)
        sampler = ShardedSampler(
            len(labels), args.batch_size * session.world_size, seed=args.seed, drop_last=True
        )
        self.state: Any
        if self.divided:
            kept = Path(args.checkpoint_dir, "divided") if args.checkpoint_dir else ""
            self.state = muster.ParallelTrainingState(self.model, self.optimizer, sampler, checkpoint=kept)
        else:
            self.state = TorchTrainingState(
                self.model, self.optimizer, sampler, samples_per_rank=args.batch_size
            )
        cast = torch.bfloat16 if self.cuda and self.divided else None
        self.step = capture_step(self.loss, self.model, self.optimizer, capture=self.cuda, autocast=cast)
        torch.manual_seed(args.seed * 100_003 + session.rank)  # each rank draws its own crops

    def loss(self, rows: Any) -> Any:
        """Mean loss of the samples in these rows; all of it is part of the captured step."""
        images = self.prepare(augment(self.images[rows]))
        if self.divided:  # with the loss, which may be divided too
            return self.model(images, self.labels[rows])
        return mean_loss(self.model(images), self.labels[rows])

    def rows(self, batch: Batch) -> Any:
        """The numbers of a batch's samples, which are all that is copied to the GPU."""
        rows = torch.from_numpy(batch.indices)
        return rows.pin_memory() if self.cuda else rows

    def train_step(self, rows: Any) -> Any:
        """One step on these samples."""
        return self.step(rows)


def train(args: argparse.Namespace, job: Job, session: muster.Session, out: StatusLine) -> Throughput:
    """Trains to the end and returns what was done."""
    checkpoints = checkpoint.Folder("" if job.divided else args.checkpoint_dir, job.state, session)
    keeps: Any = {}
    if not job.divided:  # a divided state finds its checkpoint by itself
        checkpoints.resume(args.resume, say=out.line)
        keeps = {"save": checkpoints.save, "take_up": checkpoints.take_up}
    loop = ElasticLoop(
        session,
        job.state,
        epochs=args.epochs,
        steps=args.steps,
        load=job.rows,  # of the next batch, while the GPU trains on this one
        **keeps,
    )
    done = Throughput()
    for step in loop:
        before = job.step.captured, compilations()
        prints = step.number % args.print_every == 0 or step.number == 1 or step.batch.last
        with step:
            if job.divided and args.checkpoint_dir and step.number == 1 and step.epoch > 1:
                job.state.save()  # all ranks, each its parts
            loss = job.train_step(step.data)
            mean = job.step.mean_over_ranks(loss) if prints else 0.0
        if not step.done:
            continue
        captured = job.step.captured
        done.add(
            step.batch.global_size,
            generation=session.generation,
            number=job.state.step,
            captured=captured,
            timed=before == (captured, compilations()),
        )
        if prints:
            out.line(f"epoch: {step.epoch} step: {step.number}, loss is {mean:.7f}")
        if step.batch.last or loop.is_over:
            if session.rank == 0 and not job.divided:
                checkpoints.save()
            done.pause()  # the others wait for it, too
    return done


def compilations() -> int:
    """How often torch.compile has compiled something; a step in which it did is no measure of the others."""
    loaded = sys.modules.get("torch._dynamo.utils")
    return loaded.counters["stats"]["unique_graphs"] if loaded else 0


def report(
    args: argparse.Namespace, job: Job, session: muster.Session, out: StatusLine, done: Throughput
) -> None:
    """Prints the line at the end, on rank 0; all ranks call it."""
    with contextlib.suppress(muster.WorkerError):  # another has gone: what this one has counted, then
        done.take(gather_rows(session.communicator, job.device, done.row()))
    if session.rank == 0:
        kind = "synthetic images" if args.data == "synthetic" else "images"
        out.line(closing_line(done, kind, session.world_size, args.single, job.step.reason))


def closing_line(done: Throughput, kind: str, workers: int, single: float, reason: str | None) -> str:
    """Speed, scaling if ``single`` (images/s of one worker) is given, and how many steps were captured."""
    if not done.steps:
        return "there was no step left to train"
    on, speed = f"{workers} worker{'s' * (workers != 1)}", done.samples_per_s
    if speed is None:
        line = f"too few steps on {on} to measure a speed"
    else:
        line = f"{speed:,.0f} {kind}/s on {on}" if speed >= 10 else f"{speed:.2g} {kind}/s on {on}"
        line += f", scaling {speed / workers / single:.1%} of {single:g}" if single else ""
    why = f" ({reason.splitlines()[0]})" if reason else ""
    return f"{line}; captured: {done.captured:,} of {done.steps:,} steps{why}"


def device_of(session: muster.Session) -> Any:
    """This worker's GPU, made the current one: that of its place among the workers of its host."""
    device = torch.device("cuda", session.device_ordinal)
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    return device


def main() -> None:
    """A wrong setting, say, ends it in words, with exit code 2; SIGTERM, after the step, with 143."""
    args = settings()
    cuda = torch.cuda.is_available() and not args.tiny
    with muster.init("nccl" if cuda else "tcp") as session, StatusLine() as out:
        job = Job(args, session, device_of(session) if cuda else torch.device("cpu"))
        done = train(args, job, session, out)
        if job.divided and session.rank == 0:
            out.line(job.model.plan.verdict)
        report(args, job, session, out, done)


if __name__ == "__main__":
    main()
