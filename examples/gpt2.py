"""GPT-2 on the bytes of a text file: data-parallel, captured, compiled, elastic, with checkpoints.

    muster run --scheduler -- python -m examples.gpt2 book.txt
    muster run --scheduler --max-restarts 3 -- python -m examples.gpt2 book.txt --resume
    muster run --scheduler -- python -m examples.gpt2 book.txt --parallel auto

A worker may die, leave or come at any time: the others go on from the step that broke.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import muster
from examples.throughput import Throughput
from muster import ElasticLoop, ShardedSampler
from muster.example.status_line import StatusLine
from muster.torch import DataParallel, TorchTrainingState, capture_step
from muster.training import checkpoint
from muster.training.sampler import Batch

BYTES = 256
WARM_UP_STEPS = 200


def settings(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; None: this process's."""
    option = (parser := argparse.ArgumentParser(description=__doc__.partition("\n")[0])).add_argument
    option("text", type=Path, help="any file: its bytes are the tokens")
    option("--layers", type=int, default=12)
    option("--heads", type=int, default=12)
    option("--width", type=int, default=768)
    option("--context", type=int, default=512, help="bytes that a prediction sees")
    option("--batch-size", type=int, default=16, help="windows of that length per worker")
    option("--steps", type=int, default=5000, help="steps in all")
    option("--rate", type=float, default=6e-4, help="highest learning rate")
    option("--print-every", type=int, default=50, help="steps between two lines of loss")
    option("--save-every", type=int, default=500, help="steps between two checkpoints")
    option("--sample", type=int, default=200, help="bytes to write at the end; 0: none")
    option("--seed", type=int, default=0)
    option("--parallel", choices=["data", "auto"], default="data", help="auto: divided as a search says")
    option("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    option("--checkpoint-dir", default="checkpoints", help="'' writes none; a divided one is taken up")
    option("--resume", nargs="?", const="latest", default="", help="a file, or the last in --checkpoint-dir")
    args = parser.parse_args(argv)
    if args.width % args.heads or not args.text.is_file() or args.text.stat().st_size <= args.context:
        parser.error("--width must be a multiple of --heads, and the text longer than --context bytes")
    return args


class Block(nn.Module):  # type: ignore[misc]
    """Attention to what comes before, and a hidden layer of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden, self.output = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        """[windows, positions, width] to the same."""
        parts = self.attention(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).flatten(2))
        return x + self.output(functional.gelu(self.hidden(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):  # type: ignore[misc]
    """GPT-2 with bytes for tokens; the first and the last layer share their weights."""

    def __init__(self, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                last = name.endswith(("projection.weight", "output.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if last else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Any) -> Any:
        """[windows, positions] of int64 to [windows, positions, 256] scores of the next byte."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mean_loss(scores: Any, following: Any) -> Any:
    """The mean cross entropy of the following bytes, in nats."""
    return functional.cross_entropy(scores.flatten(0, 1), following.flatten())


class Job:
    """Model, text, optimizer and step of one worker."""

    def __init__(self, args: argparse.Namespace, session: muster.Session, device: Any) -> None:
        self.args, self.device, self.cuda = args, device, device.type == "cuda"
        torch.manual_seed(args.seed)
        net = Gpt2(args.layers, args.heads, args.width, args.context).to(device)
        text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
        windows = (len(text) - 1) // args.context
        batch = min(args.batch_size, windows // session.world_size)
        self.divided = args.parallel == "auto"
        if self.divided:
            rows = torch.zeros(batch, args.context, dtype=torch.int64, device=device)
            self.model = muster.parallelize(net, (rows, rows), session=session, loss=mean_loss, elastic=True)
        else:
            if args.compile:
                for block in net.blocks:
                    block.compile()
            self.model = DataParallel(net, session, elastic=True)
        decayed = [each for _, each in self.model.named_parameters() if each.dim() > 1]
        others = [each for _, each in self.model.named_parameters() if each.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=args.rate, betas=(0.9, 0.95), fused=True, capturable=self.cuda
        )
        self.text = text.to(device)  # made once: a CUDA graph cannot hold copies from the host
        self.offsets = torch.arange(args.context + 1, device=device)
        sampler = ShardedSampler(windows, batch * session.world_size, seed=args.seed, drop_last=True)
        if self.divided:
            kept = Path(args.checkpoint_dir, "divided") if args.checkpoint_dir else ""
            self.state: Any = muster.ParallelTrainingState(
                self.model, self.optimizer, sampler, checkpoint=kept
            )
        else:
            self.state = TorchTrainingState(self.model, self.optimizer, sampler, samples_per_rank=batch)
        cast = torch.bfloat16 if self.cuda else None
        self.step = capture_step(self.loss, self.model, self.optimizer, autocast=cast, clip_norm=1.0)

    def loss(self, rows: Any) -> Any:
        """Mean loss of these windows, in nats a byte."""
        window = self.text[rows[:, None] * self.args.context + self.offsets].long()
        tokens, following = window[:, :-1], window[:, 1:]
        if self.divided:  # with the loss, which may be divided too
            return self.model(tokens, following)
        return mean_loss(self.model(tokens), following)

    def rows(self, batch: Batch) -> Any:
        """The numbers of a batch's windows, made ready while the step before runs."""
        rows = torch.from_numpy(batch.indices)
        return rows.pin_memory() if self.cuda else rows

    def train_step(self, rows: Any) -> Any:
        """One step; the learning rate is a function of the state's step, so it is the same on all ranks."""
        done = min(1.0, self.state.step / self.args.steps)
        rate = self.args.rate * min(1.0, (self.state.step + 1) / WARM_UP_STEPS)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        return self.step(rows)

    def whole(self) -> Any:
        """The module with all its parameters; all ranks call it."""
        if not self.divided:
            return self.model
        args = self.args
        net = Gpt2(args.layers, args.heads, args.width, args.context).to(self.device)
        net.load_state_dict(self.model.full_state_dict())
        return net

    @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
    def sample(self, model: Any, count: int) -> str:
        """Text that the model writes."""
        found = self.text[:1].long()[None]
        model.eval()
        for _ in range(count):
            scores = model(found[:, -self.args.context :])[:, -1].float()
            found = torch.cat([found, torch.multinomial(scores.softmax(1), 1)], 1)
        model.train()
        return bytes(found[0].tolist()).decode(errors="replace")


def train(args: argparse.Namespace, job: Job, session: muster.Session, out: StatusLine) -> Throughput:
    """Trains to the end and returns what was done."""
    files = checkpoint.Folder("" if job.divided else args.checkpoint_dir, job.state, session)
    keeps: Any = {}
    if not job.divided:  # a divided state finds its checkpoint by itself
        files.resume(args.resume, say=out.line)
        keeps = {"save": files.save, "take_up": files.take_up}
    done = Throughput()
    for step in ElasticLoop(session, job.state, epochs=10**9, steps=args.steps, load=job.rows, **keeps):
        number = job.state.step + 1
        with step:
            if job.divided and args.checkpoint_dir and number > 1 and number % args.save_every == 1:
                job.state.save()  # all ranks, each its parts
            loss = job.train_step(step.data)
            prints = number % args.print_every == 0 or number == args.steps
            mean = job.step.mean_over_ranks(loss) if prints else 0.0
        if not step.done:
            continue
        captured = job.step.captured
        done.add(step.batch.global_size, generation=session.generation, number=number, captured=captured)
        if prints:
            speed = (done.samples_per_s or 0) * args.context
            out.line(f"epoch: {step.epoch} step: {number}, loss is {mean:.4f}, {speed:,.0f} bytes/s")
        if number % args.save_every == 0 or number == args.steps:
            if session.rank == 0 and not job.divided:
                files.save()
            done.pause()  # the others wait for it, too
    return done


def main() -> None:
    """A wrong setting ends it in words; SIGTERM, after the step, with 143."""
    args = settings()
    with muster.init("nccl" if torch.cuda.is_available() else "tcp") as session, StatusLine() as out:
        device = torch.device("cpu")
        if torch.cuda.is_available():
            torch.cuda.set_device(device := torch.device("cuda", session.device_ordinal))
        job = Job(args, session, device)
        done = train(args, job, session, out)
        model = job.whole()
        if job.divided and session.rank == 0:
            out.line(job.model.plan.verdict)
        if session.rank == 0:
            out.line(
                f"{done.steps:,} steps, captured: {done.captured:,} ({job.step.reason or 'a CUDA graph'})"
            )
            out.line(job.sample(model, args.sample) if args.sample else "")


if __name__ == "__main__":
    main()
