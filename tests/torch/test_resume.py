"""A resumed run of a torch model equals the uninterrupted one, bit for bit; on the CPU, among threads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from muster.errors import RanksDifferError, SettingsError
from muster.torch.data_parallel import DataParallel
from muster.torch.state import TorchTrainingState
from muster.training import checkpoint
from muster.training.loop import ElasticLoop
from muster.training.sampler import ShardedSampler
from muster.training.state import StateMismatchError, TrainingState
from tests.fakes import ElasticFakeSession, ElasticWorld

ROOT = Path(__file__).parents[2]
SAMPLES, STEPS, SAVED_AT = 48, 9, 4
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(SAMPLES, 12, generator=GENERATOR)
LABELS = torch.randint(0, 3, (SAMPLES,), generator=GENERATOR)
optim, rates = torch.optim, torch.optim.lr_scheduler


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


@dataclass(frozen=True)
class Case:
    """What a script trains with."""

    optimizer: Callable[[Any], Any] = lambda p: optim.SGD(p, lr=0.1, momentum=0.9)
    scheduler: Callable[[Any], Any] | None = None
    ranks: int = 1
    dropout: float = 0.0
    scaler: bool = False
    average: bool = False
    weights: str | None = None


CASES = {
    "dropout": Case(dropout=0.5),
    "AdamW": Case(lambda p: optim.AdamW(p, lr=0.01)),
    "a scheduler": Case(scheduler=lambda o: rates.StepLR(o, 2, 0.5)),
    "milestones": Case(scheduler=lambda o: rates.MultiStepLR(o, [2, 5, 6])),
    "betas move": Case(lambda p: optim.AdamW(p, lr=0.01), lambda o: rates.OneCycleLR(o, 0.1, STEPS)),
    "warm up, then decay": Case(
        scheduler=lambda o: rates.SequentialLR(
            o, [rates.LinearLR(o, 0.1, total_iters=5), rates.CosineAnnealingLR(o, 5)], [5]
        )
    ),
    "a scaler": Case(scaler=True),
    "averaged parameters": Case(average=True),
    "masters": Case(weights="bf16"),
    "three ranks": Case(ranks=3),
    "three ranks, all of it": Case(
        lambda p: optim.AdamW(p, lr=0.01),
        lambda o: rates.StepLR(o, 2, 0.5),
        ranks=3,
        scaler=True,
        average=True,
    ),
    "all of it": Case(
        lambda p: optim.AdamW(p, lr=0.01),
        lambda o: rates.ExponentialLR(o, 0.8),
        dropout=0.3,
        scaler=True,
        average=True,
    ),
}


class Job:
    """One rank's objects, made as a script makes them."""

    def __init__(self, case: Case, session: Any, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        # Gradients come in another order than that of the parameters: buckets are made again.
        layers = [torch.nn.Linear(16, 3), torch.nn.BatchNorm1d(16), torch.nn.Linear(12, 16)]
        self.net = torch.nn.ModuleList(layers)
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.case, self.session = case, session
        self.model = DataParallel(
            Net(self.net, case), session, elastic=True, bucket_bytes=256, weights=case.weights
        )
        self.optimizer = case.optimizer(self.model.parameters())
        self.also: dict[str, Any] = {}
        if case.scheduler:
            self.also["scheduler"] = case.scheduler(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11, growth_interval=3, enabled=case.scaler)
        if case.scaler:
            self.also["scaler"] = self.scaler
        if case.average:
            self.also["average"] = optim.swa_utils.AveragedModel(self.model.module)
        self.state = TorchTrainingState(
            self.model, self.optimizer, ShardedSampler(SAMPLES, 12, seed=3), also=self.also
        )

        self.losses: list[float] = []
        self.orders: list[list[int]] = []
        """Of the parameters in buckets, before each step: sums over three ranks and more depend on it."""

    def train(self, steps: int, after: Callable[[Job], object] = lambda job: None) -> list[float]:
        before = len(self.losses)
        for step in ElasticLoop(self.session, self.state, epochs=100, steps=steps):
            with step:
                self.orders.append(self.model.bucket_order())
                self.optimizer.zero_grad()
                loss = self.loss(step.batch.indices)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                if self.case.average:
                    self.also["average"].update_parameters(self.model.module)
            if step.done:
                if self.case.scheduler:
                    self.also["scheduler"].step()  # outside of the step, as many do it
                self.losses.append(float(loss.detach()))
                after(self)
        return self.losses[before:]

    def loss(self, rows: Any) -> Any:
        output = self.model(IMAGES[rows].to(self.net[2].weight.dtype))
        return torch.nn.functional.cross_entropy(output.float(), LABELS[rows])

    def everything(self) -> dict[str, Any]:
        values = {name: tensor.clone() for name, tensor in self.state.arrays.items()}
        return values | {"description": json.loads(self.state.describe())}


class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, layers: Any, case: Case) -> None:
        super().__init__()
        self.layers, self.dropout = layers, case.dropout
        self.register_buffer("low", None if case.weights else torch.arange(3, dtype=torch.bfloat16) / 3)

    def forward(self, x: Any) -> Any:
        last, norm, first = self.layers
        hidden = torch.nn.functional.dropout(torch.relu(norm(first(x))), self.dropout, self.training)
        return last(hidden) + (0 if self.low is None else self.low)


def on_all_ranks(ranks: int, function: Callable[[ElasticFakeSession], Any]) -> list[Any]:
    world = ElasticWorld(ranks)
    with ThreadPoolExecutor(ranks) as threads:
        futures = [threads.submit(function, session) for session in world.members]
        try:
            return [future.result(60) for future in futures]
        except BaseException as error:
            world.end(RuntimeError(f"another rank: {error}"))
            raise


def check_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        same = torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value
        assert same, name


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # torch 2.5's own
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, name: str) -> None:
    case = CASES[name]

    def save(job: Job) -> None:
        if job.state.step == SAVED_AT and job.session.rank == 0:
            assert checkpoint.save(tmp_path, job.state).name == f"step_{SAVED_AT:09d}.safetensors"

    def whole(session: ElasticFakeSession) -> Any:
        job = Job(case, session)
        return job.train(STEPS, save), job.orders, job.everything()

    def resumed(session: ElasticFakeSession) -> Any:
        job = Job(case, session, seed=7 + session.number)
        if session.number == case.ranks - 1:  # the others take it from there
            checkpoint.load_latest(tmp_path, job.state)
        return job.train(STEPS), job.orders, job.everything()

    torch.manual_seed(5)
    expected = on_all_ranks(case.ranks, whole)
    torch.manual_seed(6)
    found = on_all_ranks(case.ranks, resumed)
    for (losses, orders, values), (losses_0, orders_0, values_0) in zip(found, expected, strict=True):
        assert (losses, orders) == (losses_0[SAVED_AT:], orders_0[SAVED_AT:])
        check_equal(values, values_0)


def printed(folder: Path, source: str, *options: str, killed: str = "") -> list[str]:
    """The lines of a job of two processes, sorted; a step that was redone has one."""
    script = [sys.executable, str(ROOT / "tests/gpu/resume_job.py"), str(folder / "kept"), source, killed]
    run = [sys.executable, "-m", "muster", "run", "-n", "2", "--scheduler", "--tail", "all", *options]
    done = subprocess.run(
        [*run, "--", *script],
        cwd=folder,
        env={
            "CUDA_VISIBLE_DEVICES": "",
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": ":".join([str(ROOT), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(set(re.findall("rank . (?:step|ends with).*", done.stdout)))


@pytest.mark.timeout(700)
def test_so_it_does_among_processes_each_with_generators_of_its_own(tmp_path: Path) -> None:
    """Also one whose members are killed and replaced: who comes draws what the lost rank would have drawn."""
    whole, resumed = printed(tmp_path, ""), printed(tmp_path, "latest")
    assert len(whole) == 2 * STEPS + 2
    assert len({line.partition("loss ")[2] for line in whole}) > STEPS + 1, "the ranks draw the same masks"
    assert resumed == [line for line in whole if not re.search(rf"step [1-{SAVED_AT}] ", line)]
    killed = "1:2:between 0:4:during 1:6:during 0:7:between"
    assert printed(tmp_path, "", "--max-restarts", "4", killed=killed) == whole


NEW = {"also", "generators"}
"""What descriptions of version 0.1 lack."""


class Host:
    """A tensor as version 0.1 wanted arrays: ``get`` to the host, ``set`` from it."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.dtype, self.shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)

    def get(self) -> Any:
        return self.tensor.detach().numpy()

    def set(self, array: Any) -> None:
        self.tensor.copy_(torch.from_numpy(array).view(self.tensor.shape))


class OnDisk(TrainingState):
    """An adapter of a torch state as scripts for version 0.1 have one."""

    def __init__(self, state: TorchTrainingState) -> None:
        exact = {name: Host(t) for name, t in state.arrays.items() if t.dtype != torch.bfloat16}
        super().__init__(exact, state.sampler)
        self.inner = state

    def describe(self) -> str:
        self.step = self.inner.step
        values = json.loads(self.inner.describe()) | {"arrays": self.layout()}
        return json.dumps({key: value for key, value in values.items() if key not in NEW})

    def restore(self, description: str) -> None:
        self.inner.restore(description)
        self.step = self.inner.step


@pytest.mark.parametrize("order", ["arrays first", "description first", "by checkpoint.load"])
def test_an_adapters_state_is_named_by_its_step_and_restored_in_any_order(tmp_path: Path, order: str) -> None:
    def one(session: ElasticFakeSession) -> None:
        old, new = Job(Case(), session), Job(Case(), session, seed=2)
        old.train(3)
        path = checkpoint.save(tmp_path, OnDisk(old.state))
        assert path.name == "step_000000003.safetensors"
        if order == "by checkpoint.load":
            checkpoint.load(path, OnDisk(new.state))
        elif order == "description first":
            new.state.restore(old.state.describe())
        for name, tensor in old.state.arrays.items() if order != "by checkpoint.load" else ():
            new.state.arrays[name].copy_(tensor)
        if order == "arrays first":
            new.state.restore(old.state.describe())
        new.train(3)  # enters the loop, which has nothing to do any more
        check_equal(new.everything(), old.everything())

    on_all_ranks(1, one)


def test_a_file_of_version_0_1_is_read_by_its_contents_whatever_its_name(tmp_path: Path) -> None:
    def one(session: ElasticFakeSession) -> None:
        old, new = Job(Case(weights="bf16"), session), Job(Case(weights="bf16"), session, seed=2)
        old.train(3)
        right = checkpoint.save(tmp_path, OnDisk(old.state))
        right.rename(tmp_path / "step_000000000.safetensors")
        assert [found.step for found in checkpoint.find(tmp_path)] == [3]
        checkpoint.load_latest(tmp_path, new.state)
        assert new.train(5) == old.train(5)

    on_all_ranks(1, one)


def test_what_a_script_changes_between_two_loops_counts() -> None:
    def one(session: ElasticFakeSession) -> float:
        job = Job(Case(), session)
        job.train(2)
        with torch.no_grad():
            job.net[0].bias.fill_(7.0)
        job.train(2)
        return float(job.net[0].bias.detach().mean())

    assert on_all_ranks(1, one) == [7.0]


def test_a_file_of_masters_has_them_alone_and_any_reader_opens_it(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    def one(session: ElasticFakeSession) -> None:
        for case in (Case(weights="bf16"), Case()):
            job = Job(case, session)
            job.train(1)
            arrays = load_file(checkpoint.save(tmp_path, job.state))
            assert ("optimizer.0.0" in arrays) == (case.weights is not None)
            assert ("layers.0.weight" in arrays) == (case.weights is None)
            assert case.weights or arrays["low"].dtype == np.float32

    on_all_ranks(1, one)


# ---------------------------------------------------------------- what else is part of the state


def test_a_step_that_broke_leaves_scheduler_scaler_and_rates_as_they_were() -> None:
    case = CASES["all of it"]

    def one(session: ElasticFakeSession) -> None:
        job = Job(case, session)
        job.train(3)
        before = job.everything()
        job.state.begin()
        job.scaler.scale(job.loss(np.arange(4)) * torch.inf).backward()
        job.scaler.step(job.optimizer)
        job.scaler.update()
        job.also["scheduler"].step()
        job.also["average"].update_parameters(job.model.module)
        assert job.everything()["description"] != before["description"]
        job.state.roll_back()
        check_equal(job.everything(), before)

    on_all_ranks(1, one)


def test_a_newcomer_gets_them() -> None:
    world = ElasticWorld(1)
    case = CASES["three ranks, all of it"]
    first = Job(case, world.members[0])
    first.train(4)
    comes = world.plan()
    assert comes is not None
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(first.train, 7)
        late = Job(case, comes, seed=4)  # there when the group is
        losses = late.train(7)
        done.result(60)
    assert len(losses) == 3
    check_equal(late.everything(), first.everything())
    assert late.also["scheduler"].last_epoch == 7


def test_names_that_differ_and_objects_without_a_state_are_refused(tmp_path: Path) -> None:
    def one(session: ElasticFakeSession) -> None:
        path = checkpoint.save(tmp_path, Job(CASES["a scheduler"], session).state)
        with pytest.raises(StateMismatchError, match="scheduler there and none here"):
            checkpoint.load(path, Job(Case(), session).state)
        job = Job(Case(), session)
        with pytest.raises(SettingsError, match=r"also: ema is a dict, which lacks state_dict\(\)"):
            TorchTrainingState(job.model, job.optimizer, job.state.sampler, also={"ema": {}})

    on_all_ranks(1, one)


# ---------------------------------------------------------------- what is not, and differs


def set_rate(job: Job) -> None:
    job.optimizer.param_groups[0]["lr"] = 0.05


def step_once_more(job: Job) -> None:
    job.optimizer.step()


def set_beta(job: Job) -> None:
    job.optimizer.param_groups[0]["betas"] = (0.9, 0.9)


def test_a_scheduler_that_is_no_part_of_the_state_shows_where_a_replacement_comes() -> None:
    world = ElasticWorld(1)
    case = CASES["a scheduler"]

    def make(session: Any) -> Job:
        job = Job(case, session)
        job.state = TorchTrainingState(job.model, job.optimizer, ShardedSampler(SAMPLES, 12, seed=3))
        return job

    first = make(world.members[0])
    first.train(3)
    comes = world.plan()
    with ThreadPoolExecutor(1) as threads:
        going = threads.submit(first.train, STEPS)
        words = r'learning rate .* also=\{"scheduler": scheduler\}'
        with pytest.raises(RanksDifferError, match=words):
            make(comes).train(STEPS)
        with pytest.raises(RanksDifferError, match=words):
            going.result(60)


@pytest.mark.parametrize("last", [False, True], ids=["", "in the last step"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_rate, r"the learning rate of parameter group 0 is 0\.01 on rank 0 and 0\.05 on rank 1"),
        (step_once_more, "the step count of parameter group 0 is 3 on rank 0 and 4 on rank 1"),
        (set_beta, r"betas\[1\] of parameter group 0 is 0\.999 on rank 0 and 0\.9 on rank 1"),
    ],
)
def test_what_differs_between_ranks_is_named_within_a_step(
    change: Callable[[Job], None], words: str, last: bool
) -> None:
    jobs: dict[int, Job] = {}

    def at_two(job: Job) -> None:
        if job.state.step == 2 and job.session.rank == 1:
            change(job)

    steps = 3 if last else STEPS

    def one(session: ElasticFakeSession) -> str:
        jobs[session.rank] = Job(CASES["AdamW"], session)
        with pytest.raises(RanksDifferError) as caught:
            jobs[session.rank].train(steps, at_two)
        return str(caught.value)

    said = on_all_ranks(2, one)
    assert len(set(said)) == 1
    assert re.search(words, said[0]), said
    assert {job.state.step for job in jobs.values()} == {3}


def test_a_checkpoint_of_version_0_1_loads() -> None:
    [session] = ElasticWorld(1).members
    model = DataParallel(torch.nn.Linear(2, 1), session, elastic=True)
    optimizer = optim.Adam(model.parameters(), lr=0.5)
    state = TorchTrainingState(model, optimizer, ShardedSampler(8, 4, seed=7))
    checkpoint.load(ROOT / "tests" / "golden" / "checkpoint-torch-0.1.safetensors", state)
    assert optimizer.param_groups[0]["lr"] == 0.125
    weight = torch.tensor([[-0.4531058371067047, -0.30983778834342957]])
    assert torch.equal(model.module.weight, weight)
    [kept, _] = optimizer.state.values()
    assert float(kept["step"]) == 2.0
