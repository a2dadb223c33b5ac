"""What the GPU tests train, in each process of a fleet; each asserts, or returns facts for the test."""

from __future__ import annotations

import io
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from muster.communicators.reduce_ops import ReduceOp
from muster.errors import (
    CollectiveMismatchError,
    MembershipChanged,
    WorkerError,
)
from muster.torch.capture import capture_step
from muster.torch.data_parallel import DataParallel
from muster.torch.sharded_optimizer import ShardedOptimizer
from muster.torch.state import TorchTrainingState
from muster.torch.transfer import CopiesAside
from muster.training.sampler import ShardedSampler
from tests.gpu.sharing import RANKS_PER_GPU
from tests.waiting import threads_end


def net(channels_last: bool = False) -> Any:
    torch.manual_seed(11)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, stride=2, bias=False),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, bias=False),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 5 * 5, 10),
    )
    layers = layers.cuda()
    return layers.to(memory_format=torch.channels_last) if channels_last else layers


def data(step: int, samples: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(samples, 3, 15, 15, generator=generator).cuda()
    return images, torch.randint(0, 10, (samples,), generator=generator).cuda()


def exact() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def train(model: Any, rank: int, size: int, steps: int = 20) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        images, labels = data(step, 16)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[rank::size]), labels[rank::size]).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def check_data_parallel(comm: Any) -> float:
    """After 20 steps the parameters are those of one process on the whole batches; returns the difference."""
    exact()
    worst = 0.0
    for channels_last, bucket_bytes in ((False, 1 << 20), (True, 4096)):
        options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "first_bytes": bucket_bytes}
        model = DataParallel(net(channels_last), communicator=comm, **options)
        ours = train(model, comm.rank, comm.world_size)
        alone = train(net(channels_last), 0, 1)
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(ours, alone, strict=True)))
    assert worst < 1e-5, worst
    return worst


def check_compression(comm: Any) -> None:
    exact()
    model = DataParallel(net(), communicator=comm, compression="bf16")
    ours, alone = train(model, comm.rank, comm.world_size, 5), train(net(), 0, 1, 5)
    assert any(not torch.equal(a, b) for a, b in zip(ours, alone, strict=True))
    for a, b in zip(ours, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


def check_sparse_gradients(comm: Any) -> None:
    """Embeddings' gradients are the mean over ranks, eagerly; a step that has some is not captured."""
    torch.manual_seed(0)
    model = DataParallel(torch.nn.Embedding(50, 8, sparse=True).cuda(), communicator=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.zeros(50, 8, device="cuda")
    for rank in range(comm.world_size):
        rows = torch.arange(rank, rank + 3, device="cuda")
        expected[rows] += 1 / comm.world_size
    mine = torch.arange(comm.rank, comm.rank + 3, device="cuda")
    model(mine).sum().backward()
    assert model.module.weight.grad.is_sparse
    torch.testing.assert_close(model.module.weight.grad.to_dense(), expected)
    step = capture_step(lambda rows: model(rows).sum(), model, optimizer)
    for _ in range(6):
        step(mine)
    assert not step.captured and step.reason and "sparse gradients cannot be captured" in step.reason


def check_sharded_optimizer(comm: Any) -> tuple[int, int]:
    """AdamW in parts ends where the undivided one does on whole batches; returns bytes held and undivided."""
    exact()
    kind = torch.optim.AdamW
    parts = net()
    sharded = ShardedOptimizer(
        parts, communicator=comm, make=lambda part: kind(part, lr=1e-3, eps=1e-3, fused=True)
    )
    alone = net()
    whole = kind(alone.parameters(), lr=1e-3, eps=1e-3, fused=True)
    for step in range(24):
        if step == 20:  # goes on from what was read with map_location="cpu"
            written = io.BytesIO()
            torch.save(sharded.state_dict(), written)
            written.seek(0)
            sharded.load_state_dict(torch.load(written, map_location="cpu"))
        images, labels = data(step, 16)
        mine = slice(comm.rank, None, comm.world_size)
        for model, optimizer, rows in ((parts, sharded, mine), (alone, whole, slice(None))):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            if step >= 12 and optimizer is sharded:
                sharded.clip_grad_norm_(0.5)
            elif step >= 12:
                torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            optimizer.step()
    for one, other in zip(parts.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    held, undivided = sharded.state_bytes()
    assert undivided == held * comm.world_size
    assert undivided >= 8 * sum(parameter.numel() for parameter in alone.parameters())
    return held, undivided


def losses_of(comm: Any, capture: bool, steps: int = 20) -> tuple[list[float], Any]:
    """Trains through changes of the learning rate and the weight decay, and through uneven batches."""
    model = DataParallel(net(), communicator=comm, bucket_bytes=4096, first_bytes=1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    step = capture_step(
        lambda images, labels: torch.nn.functional.cross_entropy(model(images), labels),
        model,
        optimizer,
        capture=capture,
        clip_norm=5.0,
    )
    losses = []
    for number in range(steps):
        optimizer.param_groups[0]["lr"] = 0.05 if number < 2 else 0.04 if number < 8 else 0.01
        optimizer.param_groups[0]["weight_decay"] = 0.0 if number < 14 else 0.1
        images, labels = data(number, 16 if number != 9 else 8)  # one batch of another shape
        mine, samples = slice(comm.rank, None, comm.world_size), None
        if number in (10, 11):
            samples = 3 if comm.rank == 0 else 5 * (number - 10)
            mine = slice(0, samples)
        losses.append(step(images[mine], labels[mine], samples=samples).item())
    return losses, step


def check_capture(comm: Any) -> None:
    """Same losses as eagerly, whatever changes."""
    exact()
    eager, _ = losses_of(comm, capture=False)
    captured, step = losses_of(comm, capture=True)
    assert step.reason is None and step.captured, step.reason
    np.testing.assert_allclose(captured, eager, rtol=1e-5)
    assert eager[0] != eager[-1]
    images, labels = data(99, 16)
    step.feed(images.cpu().pin_memory(), labels.cpu().pin_memory())
    fed = float(step())
    assert np.isfinite(fed)
    step.release()
    assert not step.captured
    comm.barrier()


def normalising(synchronised: bool) -> Any:
    """With layers whose statistics are of all samples, or (alone) of the batch."""
    planes, rows = (
        (torch.nn.SyncBatchNorm,) * 2 if synchronised else (torch.nn.BatchNorm2d, torch.nn.BatchNorm1d)
    )
    torch.manual_seed(12)
    first, middle, last = (
        torch.nn.Conv2d(3, 8, 3, stride=2),
        torch.nn.Linear(8 * 49, 6),
        torch.nn.Linear(6, 2),
    )
    layers = (first, planes(8), torch.nn.Tanh(), torch.nn.Flatten(), middle, rows(6), last)
    return torch.nn.Sequential(*layers).cuda().double()


def check_sync_batch_norm(comm: Any) -> float:
    """As one process on the whole batch, also in uneven batches and in a graph; returns the difference."""
    worst = 0.0
    for uneven, capture in ((True, False), (False, False), (False, True)):
        model = DataParallel(normalising(True), communicator=comm)
        alone = normalising(False)
        makes = [torch.optim.SGD(each.parameters(), lr=0.03125, fused=True) for each in (model, alone)]
        step = capture_step(lambda x, m=model: m(x).square().mean(), model, makes[0], capture=capture)
        for number in range(6):
            images = data(number, 4 * comm.world_size + 2 * uneven)[0].double() + 1
            begin, end = comm.rank * 4 + 2 * uneven * (comm.rank > 0), (comm.rank + 1) * 4 + 2 * uneven
            mine = images[begin:end].contiguous()
            step(mine, samples=len(mine) if uneven else None)
            makes[1].zero_grad()
            alone(images).square().mean().backward()
            makes[1].step()
        assert step.captured is capture, step.reason
        pairs = zip(model.state_dict().values(), alone.state_dict().values(), strict=True)
        worst = max(worst, *(float((ours - theirs).abs().max()) for ours, theirs in pairs))
        step.release()
        comm.barrier()
    assert worst < 1e-12, worst
    return worst


def check_a_rank_that_goes_on_after_an_error(comm: Any) -> list[str]:
    """It is named by all ranks, when the host next looks after the GPU was there; returns what they say."""
    said = []
    for capture in (False, True):
        model = DataParallel(net(), communicator=comm, bucket_bytes=4096, first_bytes=1024)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
        step = capture_step(
            lambda images, labels, m=model: torch.nn.functional.cross_entropy(m(images), labels),
            model,
            optimizer,
            capture=capture,
        )
        for number in range(8):
            step(*data(number, 8))
        assert step.captured is capture, step.reason
        if comm.rank == 1:
            images, labels = data(8, 7)
            with pytest.raises(ValueError, match="to match target batch_size"):
                step(images, labels[:5])
        step(*data(9, 8))
        torch.cuda.synchronize()
        with pytest.raises(CollectiveMismatchError, match=r"rank 1 .* left a training pass") as caught:
            step(*data(10, 8))
        said.append(str(caught.value))
        step.release()
        comm.barrier()
    return said


def check_bf16_weights(comm: Any) -> None:
    """Captured with bfloat16 weights: losses near autocast's; float32 masters alike on all ranks."""
    curves = []
    for weights in (None, "bf16"):
        model = DataParallel(net(channels_last=True), communicator=comm, weights=weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
        dtype = torch.float32 if weights is None else torch.bfloat16
        step = capture_step(
            lambda images, labels, model=model: torch.nn.functional.cross_entropy(
                model(images).float(), labels
            ),
            model,
            optimizer,
            autocast=torch.bfloat16 if weights is None else None,
        )
        losses = []
        for number in range(12):
            images, labels = data(number, 16)
            images = images.to(dtype)[comm.rank :: comm.world_size].contiguous()
            losses.append(step(images, labels[comm.rank :: comm.world_size].contiguous()).item())
        assert step.captured, step.reason
        curves.append(losses)
        step.release()
    np.testing.assert_allclose(curves[0], curves[1], rtol=0.05)
    for value in model.state_dict().values():
        assert value.dtype == torch.float32
        mine = value.detach().clone().contiguous()
        theirs = mine.clone()
        comm.broadcast(theirs, 0)
        assert torch.equal(mine, theirs)
    comm.barrier()


def check_capture_falls_back(comm: Any) -> str:
    """A step that reads the GPU cannot be captured: it goes on eagerly, with the reason."""
    model = DataParallel(net(), communicator=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = capture_step(
        lambda images, labels: (
            torch.nn.functional.cross_entropy(model(images), labels) * float(labels.sum().item() > 0)
        ),
        model,
        optimizer,
    )
    images, labels = data(0, 8)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(5):
        step(images, labels)
    assert step.reason and not step.captured
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    comm.barrier()
    return str(step.reason)


class SyncsInCapture(torch.autograd.Function):  # type: ignore[misc]
    """Does nothing, but reads the GPU in the backward pass, which no graph can hold."""

    @staticmethod
    def forward(context: Any, tensor: Any) -> Any:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            gradient.sum().item()
        return gradient


def check_capture_fails_in_backward(comm: Any) -> None:
    """Later steps are reduced as before, on all ranks."""
    exact()
    ends = []
    for capture in (False, True):
        model = DataParallel(net(), communicator=comm, bucket_bytes=4096, first_bytes=1024)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)

        def loss(images: Any, labels: Any, layers: Any = model.module) -> Any:
            hidden = SyncsInCapture.apply(layers[:5](images))
            return torch.nn.functional.cross_entropy(layers[5](hidden), labels)

        step = capture_step(loss, model, optimizer, capture=capture)
        for number in range(8):
            images, labels = data(number, 16)
            step(images[comm.rank :: comm.world_size], labels[comm.rank :: comm.world_size])
        assert step.reason and not step.captured
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    for ours, eager in zip(*reversed(ends), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
        theirs = ours.clone()
        comm.broadcast(theirs, 0)
        assert torch.equal(ours, theirs)
    comm.barrier()


_captured: list[Any] = []


def capture_a_step(comm: Any) -> None:
    """Leaves a captured step for :func:`check_abort_with_graph`."""
    _captured.append(losses_of(comm, capture=True)[1])


def check_abort_with_graph(comm: Any) -> float:
    """Rank 0 hangs in a captured step that no other rank runs; an abort from a thread frees it."""
    step = _captured.pop()
    images, labels = data(0, 16)
    half = images[:: comm.world_size].contiguous(), labels[:: comm.world_size].contiguous()
    error = MembershipChanged("rank 1 is gone", generation=1)
    taken: list[float] = []
    launched = threading.Event()

    def abort() -> None:
        launched.wait(30)
        begin = time.monotonic()
        comm.abort(error)
        taken.append(time.monotonic() - begin)

    thread = threading.Thread(target=abort)
    thread.start()
    step(*half)
    assert not torch.cuda.current_stream().query()  # it hangs
    launched.set()
    with pytest.raises(MembershipChanged):
        comm.synchronize()
    thread.join()
    with pytest.raises(MembershipChanged):
        comm.all_reduce(images, images, ReduceOp.SUM)
    torch.cuda.synchronize()
    threads_end("muster-nccl-abort")
    return taken[0]


LATE_CYCLES = 20_000_000 if RANKS_PER_GPU == 1 else 1_000_000_000
"""Of a copy: where ranks share a GPU they take turns on it, and a step lasts longer."""


class Copied:
    """A model with its state and captured step, whose copy aside begins late, as beside other work."""

    def __init__(self, comm: Any) -> None:
        torch.manual_seed(comm.rank)
        layers = [torch.nn.Linear(512, 512) for _ in range(4)]
        net = torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(512)).cuda()
        self.model = DataParallel(net, communicator=comm)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, capturable=True)
        sampler = ShardedSampler(1000, 8 * comm.world_size, rank=comm.rank, world_size=comm.world_size)
        self.state = TorchTrainingState(self.model, self.optimizer, sampler)
        self.state.enter(comm, 0)
        self.batch = torch.ones(8, 512, device="cuda")
        self.shrinking = capture_step(self._shrink_and_rate, self.model, self.optimizer)
        self.usual = capture_step(lambda x: self.model(x).square().mean(), self.model, self.optimizer)
        for step in (self.shrinking, self.usual):
            self.step = step
            for _ in range(5):
                self.train()
            assert step.captured
        assert self.model.updates_last

    def _shrink_and_rate(self, x: Any) -> Any:
        """A loss that changes a parameter before the optimizer does."""
        with torch.no_grad():
            self.model.module[0].weight.mul_(0.5)
        return self.model(x).square().mean()

    def train(self, *, undo: bool = False, before: Any = None) -> bool:
        """Trains a step; returns whether one that is undone leaves all as it was."""
        with pytest.MonkeyPatch.context() as patch:
            take = CopiesAside.take
            cycles = LATE_CYCLES if undo else 0
            patch.setattr(CopiesAside, "take", lambda copies: (torch.cuda._sleep(cycles), take(copies)))
            return self._train(undo, before)

    def _train(self, undo: bool, before: Any) -> bool:
        kept = [each.clone() for each in self.state.arrays.values()] if undo else []
        torch.cuda.synchronize()
        self.state.begin()
        if before is not None:
            before()
        self.step(self.batch)
        if undo:
            self.state.roll_back()
            return all(map(torch.equal, kept, self.state.arrays.values()))
        self.state.commit()
        self.state.sampler.advance()
        self.state.step += 1
        return True


def check_copies_beside_a_step(comm: Any) -> None:
    job = Copied(comm)
    first = job.model.module[0].weight.clone()
    for _ in range(3):
        assert job.train(undo=True)
        job.train()
    assert not torch.equal(first, job.model.module[0].weight)
    wait, job.model.before_update = job.model.before_update, lambda: None
    assert not job.train(undo=True), "the copy is not beside the step: nothing is shown"
    job.model.before_update = wait
    job.step = job.shrinking
    assert job.train(undo=True), "its passes began before the copy"


def check_what_changes_parameters_before_a_captured_step(comm: Any) -> None:
    """A copy beside the step would hold some of them from before and some from after."""
    job = Copied(comm)

    def decay() -> None:
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.mul_(0.5)

    with pytest.raises(WorkerError, match="cannot be undone, as its parameters were changed before"):
        job.train(undo=True, before=decay)
    job.state.commit()
    assert job.train(undo=True, before=decay)  # from now on it waits for copies
