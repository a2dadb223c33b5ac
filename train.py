"""The main job: a small network, trained data-parallel by as many workers as the scheduler gathers.

    MS_ROLE=MS_WORKER MS_WORKER_NUM=2 MS_SCHED_HOST=10.0.0.1 MS_SCHED_PORT=6667 python train.py

Forward and backward pass are written out, for NumPy and CuPy. Members may come, leave or die at any time:
``ElasticLoop`` redoes the broken step, and nothing else.
"""

import argparse
from typing import Any

import numpy as np

import muster
from muster import ElasticLoop, ShardedSampler, TrainingState
from muster.example import datasets
from muster.example.status_line import StatusLine
from muster.training import checkpoint
from muster.training.carrier import module_for
from muster.training.gradient_reducer import GradientReducer

MODELS = {"linear": 0, "mlp": 1, "deep": 2}  # number of hidden layers
# A batch is one step of all workers; a line has the mean loss since the last one, 0: one line an epoch.
OPTIONS = {"epochs": int, "batch_size": int, "width": int, "lr": float, "momentum": float, "print_every": int}
RECIPES = {
    "digits": (20, 64, 64, 0.1, 0.9, 0),
    "quickstart": (5, 16, 16, 0.2, 0.1, 1),
    "cifar10": (10, 128, 256, 0.02, 0.9, 50),
}


def settings() -> argparse.Namespace:
    """Returns the command line's options, completed by the data set's recipe and the defaults."""
    option = (parser := argparse.ArgumentParser(description=__doc__)).add_argument
    option("--data", choices=RECIPES, default="cifar10" if datasets.path_given() else "digits")
    option("--model", choices=MODELS, default="mlp", help="hidden layers: none, one, two")
    for name, kind in OPTIONS.items():
        option(f"--{name.replace('_', '-')}", type=kind, help="default: by --data")
    option("--accumulate", type=int, default=1, help="pieces that a worker computes its part of a batch in")
    option("--seed", type=int, default=0)
    option("--dtype", choices=["float32", "float64"], default="float32")
    option("--checkpoint-dir", default="checkpoints", help="'' writes none")
    option("--resume", nargs="?", const="latest", default="", help="a file, or the last in --checkpoint-dir")
    args = parser.parse_args()
    for name, value in zip(OPTIONS, RECIPES[args.data], strict=True):
        vars(args)[name] = value if vars(args)[name] is None else vars(args)[name]
    if min(args.epochs, args.batch_size, args.width, args.accumulate) < 1:
        parser.error("--epochs, --batch-size, --width and --accumulate must be >= 1")
    return args


class Network:
    """Fully connected layers with ReLU between them; biases only for classification."""

    def __init__(self, xp: Any, data: datasets.Dataset, args: argparse.Namespace) -> None:
        sizes = [data.inputs, *[args.width] * MODELS[args.model], data.outputs]
        self.xp, self.classify, self.layers = xp, data.classes > 0, len(sizes) - 1
        self.parameters, random = dict[str, Any](), np.random.default_rng(args.seed)
        for i in range(self.layers):
            weights = random.normal(0, np.sqrt(2 / sizes[i]) if self.classify else 0.01, sizes[i : i + 2])
            self.parameters[f"w{i}"] = xp.asarray(weights.astype(args.dtype))
            if self.classify:
                self.parameters[f"b{i}"] = xp.zeros(sizes[i + 1], args.dtype)

    def forward(self, x: Any) -> list[Any]:
        """Returns the activations of all layers, from the input to the output."""
        activations = [x]
        for i in range(self.layers):
            x = activations[-1] @ self.parameters[f"w{i}"] + self.parameters.get(f"b{i}", 0)
            activations.append(self.xp.maximum(x, 0) if i < self.layers - 1 else x)
        return activations

    def loss(self, output: Any, target: Any, count: int) -> tuple[Any, Any]:
        """Returns these samples' part of the mean loss of ``count`` samples, shape (1,), and its gradient."""
        if not self.classify:  # mean squared error
            error, values = output - target.astype(output.dtype), count * output.shape[1]
            return (error * error).sum().reshape(1) / values, 2 * error / values
        shifted = output - output.max(axis=1, keepdims=True)  # softmax cross-entropy
        log_p = shifted - self.xp.log(self.xp.exp(shifted).sum(axis=1, keepdims=True))
        hot = target[:, None] == self.xp.arange(output.shape[1])
        return -(log_p * hot).sum().reshape(1) / count, (self.xp.exp(log_p) - hot) / count

    def backward(self, activations: list[Any], gradient: Any, ready: Any) -> None:
        """Calls ``ready(name, gradient)`` as soon as a gradient is known, last layer first."""
        for i in reversed(range(self.layers)):
            if self.classify:
                ready(f"b{i}", gradient.sum(axis=0))
            ready(f"w{i}", activations[i].T @ gradient)
            if i:
                gradient = (gradient @ self.parameters[f"w{i}"].T) * (activations[i] > 0)


def train(args: argparse.Namespace, data: datasets.Dataset, session: muster.Session, out: StatusLine) -> None:
    """Trains to the end and tests; a worker that is asked to leave does not run the test."""
    xp = module_for(session)
    net = Network(xp, data, args)
    momentum = {name: xp.zeros_like(array) for name, array in net.parameters.items()}
    sampler = ShardedSampler(len(data.train_x), args.batch_size, seed=args.seed, shuffle=data.classes > 0)
    state = TrainingState(net.parameters | {f"momentum.{n}": a for n, a in momentum.items()}, sampler)
    checkpoints = checkpoint.Folder(args.checkpoint_dir, state, session)
    checkpoints.resume(args.resume, say=out.line)
    loss = xp.zeros(1, args.dtype)  # reduced together with the gradients
    reducer = GradientReducer(session, net.parameters | {"loss": loss}, gradients_mean=False)
    save, take_up = checkpoints.save, checkpoints.take_up
    loop = ElasticLoop(session, state, epochs=args.epochs, save=save, take_up=take_up)
    for step in loop:
        with step:
            for piece, rows in enumerate(step.batch.split(args.accumulate), 1):
                with reducer.no_sync(piece < args.accumulate):
                    layers = net.forward(xp.asarray(data.scaled(data.train_x[rows], args.dtype)))
                    loss, slope = net.loss(layers[-1], xp.asarray(data.train_y[rows]), step.batch.global_size)
                    reducer.ready("loss", loss)
                    net.backward(layers, slope, reducer.ready)
            gradients = reducer.finish()
            for name, parameter in net.parameters.items():
                momentum[name][...] = args.momentum * momentum[name] + gradients[name]
                parameter -= args.lr * momentum[name]
        if step.done:
            losses = state.extra.setdefault("losses", [])  # since the last line; part of the state
            losses.append(float(gradients["loss"][0]))
            session.report(loss=losses[-1], learning_rate=args.lr)
            text = f"epoch: {step.epoch} step: {step.number}, loss is {sum(losses) / len(losses):.4g}"
            out.show(state.step, args.epochs * sampler.steps_per_epoch, text)
            if step.number % args.print_every == 0 if args.print_every else step.batch.last:
                out.line(text)
                losses.clear()
            if step.batch.last and session.rank == 0:
                checkpoints.save()
    if data.classes:
        output = net.forward(xp.asarray(data.scaled(data.test_x, args.dtype)))[-1]
        out.line(f"test accuracy: {float((output.argmax(axis=1) == xp.asarray(data.test_y)).mean()):.4f}")


def main() -> None:
    """Trains with the command line's options; a wrong setting ends it with one sentence and exit code 2."""
    args = settings()
    data = datasets.load(args.data)
    with muster.init() as session, StatusLine() as out:  # released at the end of the block
        train(args, data, session, out)


if __name__ == "__main__":
    main()
