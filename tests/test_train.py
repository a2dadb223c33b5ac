"""The main job, piece by piece; ``tests/end_to_end/test_training.py`` runs it for real."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train
from muster.example import datasets
from muster.example.status_line import StatusLine
from muster.training import checkpoint
from tests.fakes import ElasticWorld

ROOT = Path(train.__file__).parent


def settings(monkeypatch: pytest.MonkeyPatch, *arguments: str, data_path: str = "") -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    monkeypatch.setenv("DATA_PATH", data_path)
    return train.settings()


def test_it_can_be_read_in_one_sitting() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) <= 150


def test_nothing_is_imported_before_it_is_needed() -> None:
    heavy = ["sklearn", "safetensors", "rich", "grpc", "cryptography", "torch", "cupy"]
    code = f"import sys, train; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_each_data_set_has_its_recipe_and_options_win_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings(monkeypatch).data == "digits"
    assert settings(monkeypatch, data_path="/data").data == "cifar10"
    args = settings(monkeypatch, "--data=quickstart", "--lr=0.5", "--print-every=0")
    assert (args.epochs, args.width, args.momentum) == (5, 16, 0.1)
    assert (args.lr, args.print_every) == (0.5, 0)


@pytest.mark.parametrize(
    "argument", ["--epochs=0", "--batch-size=-1", "--accumulate=0", "--width=0", "--model=x"]
)
def test_wrong_options_end_with_code_2(
    argument: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        settings(monkeypatch, argument)
    assert caught.value.code == 2
    assert argument.partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize("model", ["linear", "mlp", "deep"])
@pytest.mark.parametrize("data", ["digits", "quickstart"])
def test_the_backward_pass_gives_the_gradient_of_the_forward_pass(
    model: str, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = settings(monkeypatch, f"--data={data}", f"--model={model}", "--width=5", "--dtype=float64")
    loaded = datasets.load(data)
    net = train.Network(np, loaded, args)
    random = np.random.default_rng(3)
    for parameter in net.parameters.values():  # away from zero, where ReLU has a kink
        parameter += random.normal(0, 0.3, parameter.shape)
    x, y = loaded.scaled(loaded.train_x[:6], "float64"), loaded.train_y[:6]

    def loss() -> float:
        return float(net.loss(net.forward(x)[-1], y, 8)[0].item())

    gradients: dict[str, Any] = {}
    layers = net.forward(x)
    net.backward(layers, net.loss(layers[-1], y, 8)[1], gradients.__setitem__)
    assert list(gradients) == list(reversed([*net.parameters]))
    for name, parameter in net.parameters.items():
        flat, step = parameter.reshape(-1), 1e-6
        for i in random.choice(flat.size, min(5, flat.size), replace=False):
            before = flat[i]
            flat[i] = before + step
            above = loss()
            flat[i] = before - step
            below = loss()
            flat[i] = before
            assert gradients[name].reshape(-1)[i] == pytest.approx(
                (above - below) / (2 * step), rel=1e-4, abs=1e-9
            )


def test_an_empty_part_of_a_batch_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = datasets.load("digits")
    net = train.Network(np, loaded, settings(monkeypatch))
    layers = net.forward(loaded.scaled(loaded.train_x[:0], "float32"))
    loss, slope = net.loss(layers[-1], loaded.train_y[:0], 4)
    assert loss.tolist() == [0] and loss.dtype == np.float32  # so also by NumPy 1
    net.backward(layers, slope, lambda name, gradient: np.testing.assert_array_equal(gradient, 0))


def test_probabilities_stay_finite_for_large_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    net = train.Network(np, datasets.load("digits"), settings(monkeypatch))
    loss, slope = net.loss(np.array([[1e4, 0.0] + [0.0] * 8]), np.array([1]), 1)
    assert loss.tolist() == pytest.approx([1e4])
    assert np.isfinite(slope).all()


def trained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> list[str]:
    """Runs ``train`` alone in this process; returns what it printed."""
    (session,) = ElasticWorld(1).members
    session.backend = argparse.Namespace(on_device=False)  # type: ignore[attr-defined]
    args = settings(monkeypatch, *arguments)
    with StatusLine() as out:
        train.train(args, datasets.load(args.data), session, out)  # type: ignore[arg-type]
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("model", "least"), [("mlp", 0.95), ("deep", 0.95), ("linear", 0.94)])
def test_every_model_learns_the_digits(
    model: str, least: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = trained(monkeypatch, capsys, f"--model={model}", "--checkpoint-dir=")
    assert lines[0].startswith("epoch: 1 step: 23, loss is ")
    assert float(lines[-1].removeprefix("test accuracy: ")) >= least


def test_accumulated_pieces_make_the_same_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--data=quickstart", "--dtype=float64", "--checkpoint-dir=")
    whole = trained(monkeypatch, capsys, *common)
    pieces = trained(monkeypatch, capsys, *common, "--accumulate=5")
    losses = [[float(line.rpartition(" ")[2]) for line in lines] for lines in (whole, pieces)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert losses[0] == sorted(losses[0], reverse=True)


def test_resumption_prints_the_lines_that_were_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--dtype=float64", f"--checkpoint-dir={tmp_path}", "--print-every=10")
    whole = trained(monkeypatch, capsys, *common, "--epochs=3")
    for one in checkpoint.find(tmp_path):
        if one.step != 46:
            one.path.unlink()
    resumed = trained(monkeypatch, capsys, *common, "--epochs=3", "--resume")
    assert resumed == [f"resumed after step 46 from {tmp_path}/step_000000046.safetensors", *whole[4:]]


def test_cifar10_trains_when_data_path_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random pixels in the files' own format: what is learnt is how bright a class is."""
    random = np.random.default_rng(0)
    for name in [*datasets.CIFAR10_TRAIN_FILES, datasets.CIFAR10_TEST_FILE]:
        labels = random.integers(0, 10, 60)
        pixels = np.clip(random.normal(25 * labels[:, None], 5, (60, 3072)), 0, 255)
        np.column_stack([labels, pixels]).astype(np.uint8).tofile(tmp_path / name)
    monkeypatch.setattr(datasets, "path_given", lambda: str(tmp_path))
    lines = trained(
        monkeypatch, capsys, "--data=cifar10", "--checkpoint-dir=", "--lr=0.002", "--print-every=0"
    )
    losses = [float(line.rpartition(" ")[2]) for line in lines[:-1]]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert float(lines[-1].removeprefix("test accuracy: ")) > 0.2


def test_errors_are_told_in_one_sentence_with_their_exit_code() -> None:
    command = [sys.executable, "train.py", "--data=cifar10"]
    env = {**os.environ, "DATA_PATH": "", "MS_LOG_LEVEL": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "muster: CIFAR-10 needs the folder of its files. Set DATA_PATH to it.\n"
