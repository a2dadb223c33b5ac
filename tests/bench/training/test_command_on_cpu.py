"""``bench train`` on the CPU: the example's loop beside the others, what --check says, the peer's graph."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from examples import resnet50_cifar10 as example
from muster.bench.training import command as train
from muster.bench.training import job as train_job
from tests.gpu import graphs

ROOT = Path(__file__).parents[3]


def bench(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "muster",
            "bench",
            "train",
            "--tiny",
            "--json",
            str(tmp_path / "out.json"),
            *arguments,
        ],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=220,
    )


def test_all_kinds_of_variants_run_in_turns_and_a_ratio_too_low_ends_with_1(tmp_path: Path) -> None:
    variants = ["example", "example-step-synthetic", "muster", "ddp"]
    done = bench(
        tmp_path,
        *("--gpus", "2", "--batch", "4", "--rounds", "3", "--seconds", "0.02", "--variants", *variants),
        *("--check", "example/muster=0.0001", "muster/ddp=10000"),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "example/muster: " in done.stdout and ", BELOW 10000" in done.stdout
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["machine"]["packages"]["torch"] and report["machine"]["date"]
    rows = report["results"]
    assert [row["variant"] for row in rows] == variants
    for row in rows:
        assert row["images_per_s"] > 0 and len(row["rounds_ms"]) == 3 and row["gpus"] == 2
    losses = {row["variant"]: row["losses"] for row in rows}
    assert losses["muster"] == pytest.approx(losses["ddp"], rel=1e-4)  # the peers train the same


def test_gpt2_s_variants_train_the_same_as_its_peer(tmp_path: Path) -> None:
    variants = ["example", "example-step", "muster", "ddp"]
    done = bench(
        tmp_path,
        *("--model", "gpt2", "--gpus", "2", "--batch", "4", "--rounds", "1", "--seconds", "0.02"),
        *("--variants", *variants),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    rows = {row["variant"]: row for row in report["results"]}
    assert list(rows) == variants and report["context"] == 32
    assert all(row["tokens_per_s"] > 0 for row in rows.values())
    assert rows["muster"]["losses"] == pytest.approx(rows["ddp"]["losses"], rel=1e-4)
    assert rows["muster"]["losses"][-1] < rows["muster"]["losses"][0]


def test_the_benchmark_s_job_is_the_example_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class and its loop, not copies of them; and the speed is the one that the example measures."""
    made: list[Any] = []

    class Job:
        step, state = SimpleNamespace(captured=True, reason=None), SimpleNamespace(step=0)

        def __init__(self, *given: Any) -> None:
            made.append(given)

    monkeypatch.setattr(example, "Job", Job)
    asked: list[int] = []

    def trains(args: Any, job: Any, session: Any, out: Any) -> Any:
        asked.append(args.steps)
        return SimpleNamespace(samples_per_s=100.0)

    monkeypatch.setattr(example, "train", trains)
    options: Any = SimpleNamespace(tiny=False, model="resnet50")
    session: Any = SimpleNamespace(world_size=2)
    runner = train_job.Example(options, session, torch.device("cpu"), "synthetic", 10)
    assert len(made) == 1 and made[0][0].data == "synthetic" and made[0][0].batch_size == 10
    assert runner.captured and runner.run(5) == pytest.approx(2 * 10 / 100.0)
    assert asked[-1] == 6  # the first step of a loop is not timed


# ---------------------------------------------------------------- --check


def row(variant: str, *rounds_ms: float, batch: int = 32) -> dict[str, Any]:
    return {"variant": variant, "gpus": 2, "batch_per_gpu": batch, "rounds_ms": list(rounds_ms)}


def test_speeds_are_compared_round_by_round(capsys: pytest.CaptureFixture[str]) -> None:
    results = [row("example", 10.0, 20.0, 12.0), row("muster", 8.0, 16.0, 3.0)]  # the machine slowed down
    assert train.check(results, [("example", "muster", 0.79)]) == 0
    assert train.check(results, [("example", "muster", 0.81)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "2 GPUs  batch   32  example/muster: 0.800, at least 0.79"
    assert out[1] == "2 GPUs  batch   32  example/muster: 0.800, BELOW 0.81"


def test_each_batch_size_is_compared() -> None:
    fast = [row("muster", 1.0), row("ddp", 2.0)]
    slow = [row("muster", 3.0, batch=256), row("ddp", 2.0, batch=256)]
    assert train.check(fast, [("muster", "ddp", 1.0)]) == 0
    assert train.check(fast + slow, [("muster", "ddp", 1.0)]) == 1


def test_what_was_not_measured_is_not_passed(capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"variant": "ddp-captured", "gpus": 2, "batch_per_gpu": 32, "error": "no graph"}
    assert train.check([row("muster", 1.0), failed], [("muster", "ddp-captured", 1.0)]) == 1
    assert capsys.readouterr().out == "muster/ddp-captured: not measured together\n"


def test_steps_that_were_not_captured_are_not_passed(capsys: pytest.CaptureFixture[str]) -> None:
    results = [row("example", 1.0) | {"reason": "Cannot copy"}, row("muster", 1.0) | {"reason": None}]
    assert train.check(results, [("example", "muster", 0.5)]) == 1
    assert capsys.readouterr().out.startswith("2 GPUs  example was not captured: Cannot copy\n")


@pytest.mark.parametrize("text", ["example=1", "example/nobody=1", "example/muster", "example/muster=fast"])
def test_a_bound_that_makes_no_sense_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    from muster.bench.__main__ import main

    with pytest.raises(SystemExit):
        main(["train", "--check", text])
    assert "is no bound, as example/muster=0.8 is" in capsys.readouterr().err


def test_a_check_of_what_is_not_measured_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from muster.bench.__main__ import main

    assert main(["train", "--tiny", "--variants", "muster", "--check", "muster/ddp=1"]) == 1
    assert capsys.readouterr().err == "bench: --check needs what --variants leaves out: ddp\n"


# ---------------------------------------------------------------- the peer that is captured by hand


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[str]:
    meet, threads = str(tmp_path / "meet"), torch.get_num_threads()
    torch.set_num_threads(1)
    yield meet
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_the_peer_is_captured_as_pytorch_s_documentation_says(
    monkeypatch: pytest.MonkeyPatch, gloo: str
) -> None:
    """Built and warmed up for eleven steps on the stream of the capture; replays are what steps would be."""
    current: list[Any] = [None]

    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    graphs.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "stream", on)
    captures: list[Any] = []
    graph = torch.cuda.graph

    def noted(*given: Any, **options: Any) -> Any:
        captures.append(options)
        return graph(*given, **options)

    monkeypatch.setattr(torch.cuda, "graph", noted)
    communicator: Any = SimpleNamespace(rank=0, world_size=1)
    images, labels = torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))
    built_on: list[Any] = []

    def make() -> tuple[Any, Any]:
        built_on.append(current[-1])
        model, optimizer = train.make_model(
            communicator, "ddp-captured", init_file=gloo, device=torch.device("cpu"), tiny=True
        )
        graphs.watch(model, optimizer)
        return model, optimizer

    by_hand = train.CapturedByHand(make, images, labels)
    assert captures[0]["stream"] is built_on[0] is not None
    assert captures[0]["capture_error_mode"] == "thread_local"
    losses = [float(loss) for loss in by_hand.losses] + [float(by_hand()) for _ in range(4)]
    assert len(by_hand.losses) == 11 and by_hand.captured
    model, optimizer = make()
    step = train.make_step(model, optimizer, "ddp", device="cpu")
    assert losses == pytest.approx([float(step(images, labels)) for _ in range(15)], rel=1e-3)
    by_hand.release()
