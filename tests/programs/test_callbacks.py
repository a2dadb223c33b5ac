"""Callbacks of collectives that wait, and that call others: no rank hangs, and all have one order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.scheduler.processes import Pki

torch = pytest.importorskip("torch")

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from muster.errors import SettingsError
from tests.programs import ranks


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


def begun(value: float) -> Any:
    """A sum over the ranks that is under way."""
    return dist.all_reduce(torch.full((3,), value), async_op=True)


def total(value: float) -> float:
    return float(begun(value).get_future().wait()[0][0])


def waits(rank: int) -> dict[str, Any]:
    """Each kind of wait within a callback."""
    earlier = [begun(float(each)) for each in range(8)]

    def of_the_program_s(fut: Any) -> float:
        return float(sum(work.get_future().wait()[0][0] for work in reversed(earlier)))

    def of_a_later_one(fut: Any) -> Any:
        go_on.set()
        assert later_is_begun.wait(60)
        return later[0].get_future().then(lambda f: f.value()[0][0]).wait()

    def by_work(fut: Any) -> float:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        begun(1.0).wait()
        dist.barrier()
        return float(tensor[0])

    def all_of_some(fut: Any) -> float:
        some = torch.futures.collect_all([begun(float(each)).get_future() for each in range(3)])
        return float(some.then(lambda f: sum(each.value()[0][0] for each in f.value())).wait())

    def deep(left: int) -> Callable[[Any], Any]:
        return lambda fut: begun(1.0).get_future().then(deep(left - 1)).wait() if left else total(1.0)

    def chained(fut: Any) -> Any:
        return begun(1.0).get_future().then(lambda f: f.value()[0] + total(1.0)).then(lambda f: f.value() + 1)

    found: dict[str, Any] = {}
    for call in (of_the_program_s, by_work, all_of_some, deep(4)):
        found[call.__qualname__.split(".")[-1] + f"{len(found)}"] = begun(0.0).get_future().then(call).wait()
    found["natively attached"] = (
        torch.futures.collect_all([begun(0.0).get_future()]).then(of_the_program_s).wait()
    )
    go_on, later_is_begun, later = threading.Event(), threading.Event(), []
    waiting = begun(0.0).get_future().then(of_a_later_one)
    assert go_on.wait(60)
    later.append(begun(5.0))
    later_is_begun.set()
    found["of a later one"] = float(waiting.wait())
    found["chained"] = float(begun(0.0).get_future().then(chained).then(lambda f: f.value().wait()[0]).wait())
    heard: list[float] = []
    future = begun(2.0).get_future()
    future.add_done_callback(lambda f: heard.append(float(f.value()[0][0])))
    found["heard"] = future.then(lambda f: list(heard)).wait()
    with pytest.raises(ZeroDivisionError):
        begun(1.0).get_future().then(lambda f: 1 // 0).then(lambda f: f.value()).wait()
    if rank == 0:
        dist.send(torch.ones(1), 1)
        dist.send(torch.ones(1), 1, tag=1)
    else:
        works = [dist.irecv(torch.zeros(1), 0, tag=tag) for tag in (1, 0)]
        second = works[1].get_future()
        found["messages"] = float(works[0].get_future().then(lambda f: second.wait()[0]).wait())
    return found


def test_a_callback_may_wait_for_any_other_collective(pki: Pki, tmp_path: Path) -> None:
    first, second = ranks.run(2, pki, tmp_path, waits)
    assert second.pop("messages") == 1.0
    assert first == second
    assert first["heard"] == [4.0]
    assert list(first.values()) == [56.0, 2.0, 6.0, 2.0, 56.0, 10.0, 5.0, [4.0]]


def races(rank: int) -> list[float]:
    """Callbacks that call collectives while the program does, at other times on each rank."""
    pause = random.Random(rank)

    def call(value: float) -> Callable[[Any], Any]:
        def run(fut: Any) -> Any:
            time.sleep(pause.random() / 200)
            return fut.value()[0][0] + total(value) * 10

        return run

    found = []
    for turn in range(40):
        futures = []
        for bucket in range(3):
            future = begun(float(bucket)).get_future()
            time.sleep(pause.random() / 200)
            futures.append(future.then(call(bucket + turn)).then(lambda f: f.value() + total(1.0)))
        found += [float(each.wait()) for each in futures]
    return found


def test_what_callbacks_and_the_program_call_at_once_does_not_mix(pki: Pki, tmp_path: Path) -> None:
    expected = [2.0 * bucket + 20.0 * (bucket + turn) + 2.0 for turn in range(40) for bucket in range(3)]
    assert ranks.run(2, pki, tmp_path, races) == [expected, expected]


def trained(rank: int, hook: str) -> list[float]:
    """What five steps of a model of several buckets give with one of torch's hooks."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    model = DistributedDataParallel(net, bucket_cap_mb=0.015)  # each in a bucket
    if hook == "POST_LOCAL_SGD":
        state = post_localSGD_hook.PostLocalSGDState(None, dist.new_group(range(2)), start_localSGD_iter=2)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    elif "POWER_SGD" in hook:
        power = powerSGD_hook.PowerSGDState(
            None, 1 + hook.endswith("2"), start_powerSGD_iter=2, min_compression_rate=1.0
        )
        model.register_comm_hook(power, powerSGD_hook.powerSGD_hook)
    elif hook.startswith("BUILTIN_"):
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, hook.removeprefix("BUILTIN_")))
    elif hook:
        getattr(DDPCommHookType, hook).value(model=model, state=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=data)).square().mean().backward()
        optimizer.step()
    return [each.double().sum().item() for each in net.parameters()]


PLAIN = ("ALLREDUCE", "FP16_COMPRESS", "BUILTIN_ALLREDUCE", "BUILTIN_FP16_COMPRESS", "POST_LOCAL_SGD")
COMPRESSING = ("POWER_SGD", "POWER_SGD_RANK2")
"""The batched one ends, also with Gloo, with an error of its own: it takes a matrix for a row of matrices."""
QUANTIZING = ("QUANTIZE_PER_TENSOR", "QUANTIZE_PER_CHANNEL")


def all_hooks(rank: int) -> dict[str, list[float]]:
    # PowerSGD waits for a GPU if there is one.
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        if dist.get_backend() == "gloo":  # where PowerSGD's buckets wait for one another for ever
            return {hook: trained(rank, hook) for hook in ("", *PLAIN)}
        for hook in QUANTIZING:
            with pytest.raises(SettingsError, match=r"quantization_per\w+_hook works only with NCCL"):
                trained(rank, hook)
        return {hook: trained(rank, hook) for hook in ("", *PLAIN, *COMPRESSING)}


def test_torch_s_hooks_of_ddp_train_the_same_on_all_ranks(pki: Pki, tmp_path: Path) -> None:
    first, second = ranks.run(2, pki, tmp_path, all_hooks)
    assert first == second
    (tmp_path / "gloo").mkdir()
    for gloo in ranks.run(2, pki, tmp_path / "gloo", all_hooks, backend="gloo"):
        assert {hook: first[hook] for hook in gloo} == gloo
    for hook in PLAIN:
        assert first[hook] == pytest.approx(first[""], rel=1e-3, abs=1e-4), hook
    for hook in COMPRESSING:  # an approximation of the gradients, not the gradients
        assert first[hook] == pytest.approx(first[""], rel=0.1, abs=0.1), hook
        assert first[hook] != first[""], hook


def fails(rank: int) -> list[str]:
    """What DDP says, without a hook and with one, where its collective fails."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    other = DistributedDataParallel(torch.nn.Linear(4, 4))
    DDPCommHookType.ALLREDUCE.value(model=other, state=None)
    dist.barrier()
    losses = [each(torch.ones(1, 4)).sum() for each in (model, other)]
    dist.group.WORLD.abort()
    said = []
    for loss in losses:
        with pytest.raises(RuntimeError) as error:
            loss.backward()
        said.append(str(error.value))
    return said


def test_ddp_says_why_its_collective_failed(pki: Pki, tmp_path: Path) -> None:
    for said in ranks.run(2, pki, tmp_path, fails):
        for each in said:
            assert "The process group was aborted." in each
