"""Trains ResNet-50 on CIFAR-like images with captured steps, and records them, for ``bench recovery``.

In each generation it checks values: after the first step that all ranks hold the same bits, and that an
AllReduce of known numbers is right; in the second, that the step equals that of a plain average of the
ranks' gradients.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import torch

import muster
from examples.resnet import ResNet, resnet50
from muster.bench.recovery.loop import RecordingLoop
from muster.communicators.reduce_ops import ReduceOp
from muster.errors import MembershipChanged
from muster.torch.capture import capture_step
from muster.torch.data_parallel import DataParallel
from muster.torch.state import TorchTrainingState
from muster.torch.transfer import array_of, gather_rows
from muster.training.sampler import ShardedSampler

CLASSES, SAMPLES = 10, 8192
RATE, MOMENTUM = 0.01, 0.9


class Trainer:
    """The model, the data and the step of one worker.

    Args:
        args: the command line's options.
        device: the device on which to train.
    """

    def __init__(self, args: argparse.Namespace, device: Any) -> None:
        self.args, self.device = args, device
        torch.manual_seed(0)
        net = ResNet((1, 1), CLASSES, width=8) if args.tiny else resnet50(CLASSES)
        self.net = net.to(device, memory_format=torch.channels_last)
        generator = torch.Generator(device).manual_seed(1)
        self.labels = torch.randint(0, CLASSES, (SAMPLES,), device=device, generator=generator)
        patterns = torch.rand(CLASSES, 3, 32, 32, device=device, generator=generator)
        noise = torch.rand(SAMPLES, 3, 32, 32, device=device, generator=generator)
        self.images = (patterns[self.labels] + noise - 1).to(
            torch.bfloat16 if device.type == "cuda" else None
        )

    def batch(self, indices: Any) -> tuple[Any, Any]:
        """Returns images, enlarged to ``args.size``, and their labels."""
        rows = torch.as_tensor(indices, device=self.device)
        images = self.images[rows]
        if self.args.size != 32:
            images = torch.nn.functional.interpolate(images, size=self.args.size)
        return images.contiguous(memory_format=torch.channels_last), self.labels[rows]

    def warm_up(self) -> None:
        """Loads and tunes the kernels before joining, so that no rank waits for it; changes no parameter."""
        cuda = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=cuda):
            images, labels = self.batch(range(self.args.images))
            torch.nn.functional.cross_entropy(self.net(images).float(), labels).backward()
        torch.optim.SGD(self.net.parameters(), lr=0.0, momentum=MOMENTUM, fused=cuda).step()
        self.net.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize()

    def join(self, session: muster.Session) -> None:
        """Makes the parts that need a session: model, optimizer, state and step."""
        cuda = self.device.type == "cuda"
        self.session = session
        self.model = DataParallel(self.net, session, elastic=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=MOMENTUM, fused=cuda)
        sampler = ShardedSampler(SAMPLES, self.args.images * session.world_size, drop_last=True)
        self.state = TorchTrainingState(
            self.model, self.optimizer, sampler, samples_per_rank=self.args.images
        )
        self.step = capture_step(
            self.loss, self.model, self.optimizer, autocast=torch.bfloat16 if cuda else None, capture=cuda
        )

    def loss(self, images: Any, labels: Any) -> Any:
        """Returns the mean loss of a batch."""
        return torch.nn.functional.cross_entropy(self.model(images).float(), labels)

    # ------------------------------------------------------------ checks

    def same_everywhere(self) -> bool:
        """Whether all ranks hold the same bits, and an AllReduce of known numbers comes out right."""
        communicator = self.session.communicator
        bits = sum(_digest(tensor) for tensor in self.state.arrays.values())
        finite = all(
            bool(torch.isfinite(tensor).all())
            for tensor in self.state.arrays.values()
            if tensor.is_floating_point()
        )
        rows = gather_rows(communicator, self.device, [bits % 2**62, int(finite)])
        known = torch.full((1 << 20,), float(communicator.rank + 1), device=self.device)
        communicator.all_reduce(*(array_of(communicator, known),) * 2, ReduceOp.SUM)
        expected = communicator.world_size * (communicator.world_size + 1) / 2
        return len({tuple(row) for row in rows}) == 1 and bool(rows[0][1]) and bool((known == expected).all())

    def expected_head(self, images: Any, labels: Any) -> tuple[Any, Any]:
        """Returns the classifier's weights after a step by plainly averaged gradients, and those before."""
        weight = self.net.head.classify.weight
        cuda = self.device.type == "cuda"
        self.optimizer.zero_grad(set_to_none=True)
        with self.model.no_sync(), torch.autocast(self.device.type, torch.bfloat16, enabled=cuda):
            self.loss(images, labels).backward()
        gradient = weight.grad.detach().clone()
        self.optimizer.zero_grad(set_to_none=True)
        communicator = self.session.communicator
        communicator.all_reduce(*(array_of(communicator, gradient),) * 2, ReduceOp.MEAN)
        momentum = self.optimizer.state[weight]["momentum_buffer"]
        return weight.detach() - RATE * (MOMENTUM * momentum + gradient), weight.detach().clone()

    def close_to(self, expected: tuple[Any, Any]) -> float:
        """Returns the distance of the weights from the expected ones, relative to the step's length."""
        after, before = expected
        weight = self.net.head.classify.weight.detach()
        return float((weight - after).norm() / (after - before).norm())


def _digest(tensor: Any) -> int:
    """Returns a checksum of a tensor's bytes and their places."""
    data = tensor.detach().reshape(-1).view(torch.uint8).to(torch.int64)
    return int((data * (torch.arange(data.numel(), device=data.device) % 65_521 + 1)).sum())


def train(trainer: Trainer, session: muster.Session, steps: int) -> None:
    """Trains ``steps`` steps, through changes of members."""
    epochs = 1 + steps // (SAMPLES // (trainer.args.images * session.world_size))
    loop = RecordingLoop(session, trainer.state, epochs=epochs)
    generation, since = 0, 0
    for step in loop:
        begun = time.monotonic()
        with step:
            images, labels = trainer.batch(step.batch.indices)
            since = since + 1 if session.generation == generation else 1
            expected = trainer.expected_head(images, labels) if since == 2 else None
            was = trainer.step.captured
            loss = trainer.step(images, labels)
            loop.facts = {"seconds": time.monotonic() - begun, "since": since}
            if trainer.step.captured:
                loop.facts["captured"] = "replayed" if was else "made"
        if step.done:
            generation = session.generation
            check(loop, trainer, expected, since)
            if since % 50 == 0:
                loop.record.note("loss", step=trainer.state.step, loss=float(loss))


def check(loop: RecordingLoop, trainer: Trainer, expected: Any, since: int) -> None:
    """Checks the values in the first two steps of a generation, after the steps' times were recorded."""
    try:
        if since == 1:
            good = trainer.same_everywhere()
            loop.record.note("same bits", good=good, generation=trainer.session.generation)
        elif expected is not None:
            error = trainer.close_to(expected)
            loop.record.note(
                "right step", good=error < 0.05, error=error, generation=trainer.session.generation
            )
    except MembershipChanged:
        return


def main() -> int:
    """Trains as one worker; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=32, help="images per rank and step (32)")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--tiny", action="store_true", help="a small net, for trying this on a CPU")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    device = torch.device("cpu") if args.cpu else torch.device("cuda", int(os.environ.get("DEVICE_ID", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    else:
        torch.set_num_threads(1)
    try:
        trainer = Trainer(args, device)
        trainer.warm_up()
        with muster.init("tcp" if args.cpu else "nccl") as session:
            trainer.join(session)
            train(trainer, session, args.steps)
    except muster.WorkerError as error:
        print(f"recovery_resnet: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
