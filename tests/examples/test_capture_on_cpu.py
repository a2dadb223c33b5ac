"""The examples' steps in a capture that refuses what CUDA refuses, and that this capture does refuse it."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from examples import resnet50_cifar10 as example
from examples.throughput import Throughput
from muster.errors import MembershipChanged
from muster.example.status_line import StatusLine
from muster.torch.capture import capture_step
from tests.gpu import cuda_rules, graphs
from tests.gpu.threads import _Meeting
from tests.torch.test_data_parallel import batch_of, linear_net, loss_function

ARGUMENTS = [
    *("--tiny", "--data=synthetic", "--image-size=32", "--batch-size=4"),
    *("--no-compile", "--print-every=1", "--checkpoint-dir="),
]
WARM_UP = 3


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    graphs.install(monkeypatch)
    monkeypatch.setattr(example, "SYNTHETIC_SAMPLES", 256)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a net gains nothing from more, and loses much on a busy machine
    yield
    torch.set_num_threads(threads)


class LoneSession:
    """A job of one, as far as an elastic loop asks for it."""

    rank, world_size, state_source_rank = 0, 1, -1
    newcomer_ranks: tuple[int, ...] = (0,)
    launch = 0
    membership_event = None

    def __init__(self) -> None:
        self.generation = 0
        self.loses_members_after = -1
        self.rejoin()

    def rejoin(self) -> None:
        self.generation += 1
        self.communicator = graphs.GraphCommunicator(_Meeting(1), 0)

    def step_boundary(self, step: int) -> None:
        if step == self.loses_members_after:
            self.loses_members_after = -1
            self.newcomer_ranks, self.state_source_rank = (), 0
            raise MembershipChanged("a worker has left", generation=self.generation)

    def report(self, step: int, samples_per_s: float, **more: float) -> None: ...

    def report_checkpoint(self, step: int, *, size_bytes: int, seconds: float) -> None: ...

    def busy(self, what: str) -> Any:
        return contextlib.nullcontext()


@contextlib.contextmanager
def job_of(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, capture: bool = True
) -> Iterator[Callable[..., Throughput]]:
    """The example's job on a machine whose CPU stands for a GPU; gives what trains it to its end."""
    options = {"capture": capture}
    monkeypatch.setattr(
        example, "capture_step", lambda *given, **kept: capture_step(*given, **(kept | options))
    )
    with cuda_rules.Machine():
        session: Any = LoneSession()
        args = example.settings([*ARGUMENTS, *arguments])
        job = example.Job(args, session, torch.device("cpu"))
        graphs.watch(job.model, job.optimizer)

        def train(steps: int, **attributes: Any) -> Throughput:
            args.steps = steps
            vars(session).update(attributes)
            return example.train(args, job, session, StatusLine(sys.stderr))

        yield train


def losses(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return re.findall(r"loss is (\S+)", capsys.readouterr().err)


def test_the_example_is_captured_in_the_first_epoch_and_computes_what_eager_steps_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with job_of(monkeypatch) as train:
        done = train(8)
    assert (done.steps, done.captured) == (8, 8 - WARM_UP) and done.samples == 6 * 4
    found = losses(capsys)
    with job_of(monkeypatch, capture=False) as train:
        done = train(8)
    assert (done.steps, done.captured) == (8, 0) and done.samples == 7 * 4
    assert found == losses(capsys) and len(found) == 8


def test_where_the_last_holder_dies_before_it_gives_its_state_the_runs_checkpoint_is_taken_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(LoneSession, "launch", 7)
    with job_of(monkeypatch, f"--checkpoint-dir={tmp_path}") as train:
        train(4)
    sources = itertools.chain([0], itertools.repeat(-1))
    monkeypatch.setattr(LoneSession, "state_source_rank", property(lambda _: next(sources)))
    with job_of(monkeypatch, f"--checkpoint-dir={tmp_path}") as train:
        assert train(6).steps == 2


def test_a_second_loop_of_the_same_members_goes_on_with_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    with job_of(monkeypatch) as train:
        train(8)
        done = train(12)
    assert (done.steps, done.captured) == (4, 4)


def test_a_step_that_compiles_does_not_count_for_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    train_step, calls = example.Job.train_step, [0]

    def compiles(job: Any, rows: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            torch._dynamo.utils.counters["stats"]["unique_graphs"] += 1
        return train_step(job, rows)

    monkeypatch.setattr(example.Job, "train_step", compiles)
    with job_of(monkeypatch, capture=False) as train:
        done = train(6)
    assert done.steps == 6 and done.samples == 4 * 4  # but for the first and the third


def test_the_example_is_captured_after_a_change_of_members(monkeypatch: pytest.MonkeyPatch) -> None:
    with job_of(monkeypatch) as train:
        done = train(12, loses_members_after=6)
    assert (done.steps, done.captured) == (12, 12 - 2 * WARM_UP)


def test_the_example_is_captured_after_a_resume(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = f"--checkpoint-dir={tmp_path}"
    with job_of(monkeypatch, kept) as train:
        train(6)
    with job_of(monkeypatch, kept, "--resume") as train:
        done = train(12)
        assert (done.steps, done.captured) == (6, 6 - WARM_UP)
        assert "resumed after step 6" in capsys.readouterr().err
        assert train(12).steps == 0  # there is none left


def test_no_example_captures_a_step_that_is_not_tried_here() -> None:
    folder = Path(str(example.__file__)).parent
    capture = [path.name for path in sorted(folder.glob("*.py")) if "capture_step(" in path.read_text()]
    divided = ["big_vocabulary.py"]  # the model alone is its step: tests/parallel captures such a one
    assert capture == [*divided, "gpt2.py", "resnet50_cifar10.py"]


# ---------------------------------------------------------------- what is refused

REFUSED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a constant made on the GPU": (cuda_rules.COPY, lambda x: x * torch.tensor([2.0], device=x.device)),
    "an array moved to the GPU": (cuda_rules.COPY, lambda x: x + torch.from_numpy(np.ones(5)).to(x.device)),
    "a list as an index": (cuda_rules.COPY, lambda x: x[[0, 1]]),
    "a copy into a tensor of the GPU": (
        cuda_rules.COPY,
        lambda x: torch.empty_like(x).copy_(torch.ones(x.shape)) + x,
    ),
    "a new tensor from numbers": (cuda_rules.COPY, lambda x: x * x.new_tensor([2.0])),
    "two devices": ("on the same device", lambda x: x + torch.ones(5)),
    "item": (cuda_rules.NOT_PERMITTED, lambda x: x * x.sum().item()),
    "float": (cuda_rules.NOT_PERMITTED, lambda x: x * float(x.detach().sum())),
    "a condition": (cuda_rules.NOT_PERMITTED, lambda x: x if x.sum() > 0 else -x),
    "a list of numbers": (cuda_rules.NOT_PERMITTED, lambda x: x * x.detach().sum(0).tolist()[0]),
    "a NumPy array": (cuda_rules.NOT_PERMITTED, lambda x: x * float(x.detach().numpy()[0, 0])),
    "a copy to the host": (cuda_rules.NOT_PERMITTED, lambda x: x + x.detach().cpu().sum()),
    "a mask": (cuda_rules.NOT_PERMITTED, lambda x: x[x > 0]),
    "nonzero": (cuda_rules.NOT_PERMITTED, lambda x: x * x.nonzero().size(0)),
    "a wait for the GPU": (cuda_rules.NOT_PERMITTED, lambda x: (torch.cuda.synchronize(), x)[1]),
    "a wait for a stream": (
        cuda_rules.NOT_PERMITTED,
        lambda x: (torch.cuda.current_stream().synchronize(), x)[1],
    ),
    "a generator of one's own": (
        "a CUDA generator not in capture mode",
        lambda x: x + torch.rand(x.shape, device=x.device, generator=torch.Generator()),
    ),
}
ALLOWED: dict[str, Callable[[Any], Any]] = {
    "numbers": lambda x: x * 2.0 + torch.full((5,), 3.0, device=x.device),
    "a number on the host": lambda x: x * torch.tensor(2.0),
    "draws": lambda x: x + torch.rand(x.shape, device=x.device),
    "indices of the GPU": lambda x: x[torch.arange(2, device=x.device)],
    "a choice": lambda x: torch.where(x > 0, x, -x),
    "arithmetic on the host": lambda x: x * float(torch.ones(3).sum()),
}


def step_with(operation: Callable[[Any], Any]) -> Any:
    """A step after its warm-up whose loss has this operation in it."""
    with cuda_rules.Machine():
        model = linear_net().to(torch.device("cpu"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        graphs.watch(model, optimizer)
        images, labels = (tensor.to(torch.device("cpu")) for tensor in batch_of(6, 0))
        step = capture_step(
            lambda images, labels: loss_function(model(images), labels) + 0 * operation(model(images)).sum(),
            model,
            optimizer,
        )
        for _ in range(WARM_UP + 1):
            step(images, labels)
    return step


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses_is_refused(name: str) -> None:
    words, operation = REFUSED[name]
    step = step_with(operation)
    assert not step.captured and words in step.reason


@pytest.mark.parametrize("name", ALLOWED)
def test_what_cuda_takes_is_captured(name: str) -> None:
    assert step_with(ALLOWED[name]).captured


def test_a_batch_from_pinned_memory_is_copied_into_the_graph() -> None:
    with cuda_rules.Machine():
        rows = torch.from_numpy(np.arange(3))
        with cuda_rules.capturing():
            torch.zeros(3, dtype=torch.int64, device=torch.device("cpu")).copy_(rows.pin_memory())
            with pytest.raises(RuntimeError, match="unless the CPU tensor is pinned"):
                torch.zeros(3, dtype=torch.int64, device=torch.device("cpu")).copy_(rows)
