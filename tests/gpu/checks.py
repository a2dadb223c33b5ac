"""What the GPU tests run in each process of a fleet; each asserts, or returns facts for the test."""

from __future__ import annotations

import dataclasses
import io
import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from muster.communicators.following import FollowingBackend
from muster.communicators.membership import Membership
from muster.communicators.nccl.communicator import NcclBackend
from muster.communicators.reduce_ops import PreMultipliedSum, ReduceOp
from muster.communicators.tcp.backend import TcpBackend
from muster.errors import (
    ArrayError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorError,
    FormationTimeoutError,
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

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int32", "int64")


def part_of(rank: int, count: int, dtype: str) -> Any:
    """Small numbers, exact in every dtype, different by rank and place."""
    return ((torch.arange(count) % 3) + rank + 1).to(getattr(torch, dtype)).cuda()


def check_all_reduce(comm: Any) -> None:
    def parts(dtype: str) -> list[Any]:
        return [part_of(rank, 17, dtype).cpu().double() for rank in range(comm.world_size)]

    expected: dict[ReduceOp, Any] = {
        ReduceOp.SUM: lambda p: torch.stack(p).sum(0),
        ReduceOp.MAX: lambda p: torch.stack(p).max(0).values,
        ReduceOp.MIN: lambda p: torch.stack(p).min(0).values,
        ReduceOp.PROD: lambda p: torch.stack(p).prod(0),
        ReduceOp.MEAN: lambda p: torch.stack(p).mean(0),
    }
    for dtype in (*FLOATS, *INTEGERS):
        for op, reduce in expected.items():
            if op is ReduceOp.MEAN and dtype in INTEGERS:
                continue
            if op is ReduceOp.PROD and dtype in ("int8", "uint8") and comm.world_size > 3:
                continue  # beyond 255
            send = part_of(comm.rank, 17, dtype)
            recv = torch.full_like(send, -1 if dtype != "uint8" else 99)
            comm.all_reduce(send, recv, op)
            result: Any = reduce(parts(dtype))
            torch.testing.assert_close(recv.cpu().double(), result, msg=f"{dtype} {op}")
            comm.all_reduce(send, send, op, async_op=True).wait()
            assert torch.equal(send, recv), f"{dtype} {op} in place"
    for dtype in FLOATS:
        data = part_of(comm.rank, 9, dtype)
        comm.all_reduce(data, data, PreMultipliedSum(0.5))
        torch.testing.assert_close(
            data.cpu().double(), sum(part_of(r, 9, dtype).cpu().double() for r in range(comm.world_size)) / 2
        )


def check_others(comm: Any) -> None:
    size, rank = comm.world_size, comm.rank
    own = torch.arange(5, device="cuda") + 100 * rank
    everything = torch.cat([torch.arange(5) + 100 * r for r in range(size)])
    recv = torch.zeros(5 * size, dtype=torch.int64, device="cuda")
    comm.all_gather(own, recv)
    assert torch.equal(recv.cpu(), everything)
    for root in range(size):
        target = torch.zeros_like(recv)
        comm.gather(own, target if rank == root else None, root)
        assert rank != root or torch.equal(target.cpu(), everything)
        part = torch.zeros_like(own)
        comm.scatter(recv + root if rank == root else None, part, root)
        assert torch.equal(part, own + root)
        buffer = own.clone()
        comm.broadcast(buffer, root)
        assert torch.equal(buffer.cpu(), torch.arange(5) + 100 * root)
        total = torch.zeros_like(own)
        comm.reduce(own, total if rank == root else None, ReduceOp.SUM, root)
        assert rank != root or torch.equal(total.cpu(), everything.view(size, 5).sum(0))
    scattered = torch.zeros_like(own)
    comm.reduce_scatter(recv, scattered, ReduceOp.SUM)
    assert torch.equal(scattered, own * size)
    send = torch.arange(size * 2, device="cuda") + 10 * rank
    back = torch.zeros_like(send)
    comm.all_to_all(send, back, async_op=True).wait()
    assert back.cpu().tolist() == [2 * rank + j + 10 * peer for peer in range(size) for j in range(2)]
    comm.barrier()


def check_dtypes(comm: Any) -> None:
    """Every collective takes short floats; what NCCL cannot compute with it moves all the same."""
    size, rank = comm.world_size, comm.rank
    for dtype in ("float16", "bfloat16"):
        parts = [part_of(each, 6, dtype) for each in range(size)]
        own, result = parts[rank], torch.zeros_like(parts[rank])
        check_moves(comm, parts)
        for root in range(size):
            comm.reduce(own, result if rank == root else None, ReduceOp.SUM, root)
            assert rank != root or torch.equal(result, torch.stack(parts).sum(0)), dtype
        comm.reduce_scatter(torch.cat(parts), result, ReduceOp.SUM)
        assert torch.equal(result, own * size), dtype
        comm.reduce_scatter(torch.cat(parts), result, ReduceOp.MAX, async_op=True).wait()
        assert torch.equal(result, own), dtype
    for dtype in ("bool", "int16", "complex64"):
        check_moves(
            comm, [((torch.arange(6) + each) % 2).to(getattr(torch, dtype)).cuda() for each in range(size)]
        )


def check_moves(comm: Any, parts: list[Any]) -> None:
    """All collectives that compute nothing, where rank r has ``parts[r]``."""
    size, rank, own = comm.world_size, comm.rank, parts[comm.rank]
    everything = torch.cat(parts)
    recv = torch.zeros_like(everything)
    comm.all_gather(own, recv)
    assert torch.equal(recv, everything), own.dtype
    for root in range(size):
        buffer = own.clone()
        comm.broadcast(buffer, root)
        assert torch.equal(buffer, parts[root]), own.dtype
        recv = torch.zeros_like(everything)
        comm.gather(own, recv if rank == root else None, root)
        assert rank != root or torch.equal(recv, everything), own.dtype
        part = torch.zeros_like(own)
        comm.scatter(everything if rank == root else None, part, root)
        assert torch.equal(part, own), own.dtype
    recv = torch.zeros_like(everything)
    comm.all_to_all(everything, recv)
    assert torch.equal(recv, own.repeat(size)), own.dtype
    got = torch.zeros_like(own)
    with comm.group():
        comm.send(own, (rank + 1) % size)
        comm.recv(got, (rank - 1) % size)
    assert torch.equal(got, parts[(rank - 1) % size]), own.dtype


def check_buffers_of_all_dtypes(comm: Any) -> None:
    """A module's masks and other buffers are rank 0's from the start and after each training step."""
    net = torch.nn.Linear(4, 2).cuda()
    for dtype in (torch.bool, torch.int16, torch.complex64, torch.bfloat16):
        value = (torch.arange(6) + comm.rank) % 2
        net.register_buffer(f"of_{dtype}".replace(".", "_"), value.to(dtype).cuda())
    model = DataParallel(net, communicator=comm)
    for first in (0, 1):
        for name, buffer in net.named_buffers():
            assert torch.equal(buffer.cpu(), ((torch.arange(6) + first) % 2).to(buffer.dtype)), name
            buffer.copy_((torch.arange(6) + comm.rank + 1) % 2)
        model(torch.ones(1, 4, device="cuda")).sum().backward()


def check_send_recv_and_group(comm: Any) -> None:
    size, rank = comm.world_size, comm.rank
    own, got = torch.full((3,), float(rank), device="cuda"), torch.zeros(3, device="cuda")
    with comm.group():
        comm.send(own, (rank + 1) % size)
        comm.recv(got, (rank - 1) % size)
    assert got.tolist() == [float((rank - 1) % size)] * 3
    if rank == 0:
        comm.send(own + 7, 1)
    if rank == 1:
        comm.recv(got, 0)
        assert got.tolist() == [7.0] * 3
    first, second = torch.ones(4, device="cuda"), torch.ones(4, device="cuda", dtype=torch.bfloat16)
    with comm.group():
        comm.all_reduce(first, first, ReduceOp.SUM)
        comm.all_reduce(second, second, ReduceOp.MEAN)
    assert first.tolist() == [size] * 4 and second.tolist() == [1] * 4
    with pytest.raises(CommunicatorError, match="async_op inside group"), comm.group():
        comm.all_reduce(first, first, ReduceOp.SUM, async_op=True)


def check_streams(comm: Any) -> None:
    """A collective must wait for what its own stream does, and be waited for on it."""
    for kind in ("current", "async"):
        stream = torch.cuda.Stream()
        data = torch.zeros(1 << 20, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            data.fill_(comm.rank + 1)
            before = torch.cuda.Event()
            before.record()
            work = comm.all_reduce(data, data, ReduceOp.SUM, async_op=kind == "async")
            early = work.done()  # asked first: however slow this host is, it cannot be done before its stream
            assert not early or before.query()
            work.wait()
            result = data * 2
        stream.synchronize()
        expected = float(comm.world_size * (comm.world_size + 1))
        assert bool((result == expected).all()), kind
        assert work.done()


def check_cupy_and_interfaces(comm: Any) -> None:
    import cupy

    cupy.cuda.Device(comm.device_index).use()
    size = comm.world_size
    array = cupy.full(6, comm.rank + 1, dtype=cupy.float32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        array *= 2
        comm.all_reduce(array, array, ReduceOp.SUM)
        array += 1
        stream.synchronize()
    assert array.get().tolist() == [size * (size + 1) + 1] * 6
    work = comm.all_reduce(array, array, ReduceOp.MEAN, async_op=True)
    work.wait()
    assert array.get().tolist() == [size * (size + 1) + 1] * 6

    class Interface:
        def __init__(self, inner: Any) -> None:
            self.__cuda_array_interface__ = inner.__cuda_array_interface__
            self.inner = inner

    class DLPack:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __dlpack__(self, **options: Any) -> Any:
            return self.inner.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.inner.__dlpack_device__()

    for wrap in (Interface, DLPack):
        inner = cupy.ones(3, dtype=cupy.float64)
        cupy.cuda.Device().synchronize()
        comm.all_reduce(wrap(inner), wrap(inner), ReduceOp.SUM)
        torch.cuda.synchronize()
        assert inner.get().tolist() == [size] * 3
    for exporting in (
        cupy.cuda.Stream.null,
        cupy.cuda.Stream(non_blocking=True),
    ):  # the latter waits for none
        for reducing in (torch.cuda.default_stream(), torch.cuda.Stream()):
            with exporting, torch.cuda.stream(reducing):
                late = cupy.zeros(1 << 26, dtype=cupy.float32)
                for _ in range(20):
                    late += 1
                comm.all_reduce(Interface(late), Interface(late), ReduceOp.SUM)
                reducing.synchronize()
                assert float(late.min()) == float(late.max()) == 20 * size
    with pytest.raises(ArrayError, match="not C-contiguous"):
        comm.broadcast(cupy.zeros((4, 4))[:, ::2], 0)
    with pytest.raises(ArrayError, match="not C-contiguous"):
        comm.broadcast(Interface(cupy.zeros((4, 4))[:, ::2]), 0)


def check_wrong_use(comm: Any) -> None:
    good = torch.zeros(8, device="cuda")
    wrong = {
        "not C-contiguous": torch.zeros(8, 8, device="cuda")[:, ::2],
        r"torch\.Tensor on the CPU.*array on a GPU": torch.zeros(8),
        r"numpy\.ndarray on the CPU.*array on a GPU": np.zeros(8),
        "no dtype complex64": torch.zeros(8, dtype=torch.complex64, device="cuda"),
    }
    if torch.cuda.device_count() > 1:
        other = (comm.device_index + 1) % 2
        wrong[f"on GPU {other}"] = torch.zeros(8, device=f"cuda:{other}")
    for words, array in wrong.items():
        with pytest.raises(ArrayError, match=words):
            comm.all_reduce(array, array, ReduceOp.SUM)
    with pytest.raises(ArrayError, match="do not fit"):
        comm.all_reduce(good, torch.zeros(9, device="cuda"), ReduceOp.SUM)
    with pytest.raises(ArrayError, match="do not fit"):
        comm.all_gather(good, good)
    with pytest.raises(ArrayError, match="do not fit"):
        comm.all_reduce(good, good.double(), ReduceOp.SUM)
    with pytest.raises(ArrayError, match="divided"):
        odd = torch.zeros(2 * comm.world_size + 1, device="cuda")
        comm.all_to_all(odd, odd.clone())
    with pytest.raises(CommunicatorError, match="root is 9"):
        comm.broadcast(good, 9)
    comm.all_reduce(good, good, ReduceOp.SUM)  # and nothing is broken
    comm.barrier()


def check_groups(comm: Any) -> None:
    """Rank order of a group is that of its list; ranks outside get None."""
    order = [comm.world_size - 1, 0]
    group = comm.split("ends", order)
    assert (group is not None) == (comm.rank in order)
    if group is not None:
        assert group.rank == order.index(comm.rank) and group.world_size == 2
        data = torch.full((2,), float(comm.rank), device="cuda")
        group.broadcast(data, 0)
        assert data.tolist() == [comm.world_size - 1.0] * 2
        group.close()
        with pytest.raises(CommunicatorAbortedError):
            group.barrier()
    comm.barrier()


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


def check_abort_of_a_close(comm: Any) -> None:
    """Rank 0 closes after a collective that no other rank calls; an abort during that frees it."""
    values = torch.ones(1 << 20, device="cuda")
    comm.all_reduce(values, values, ReduceOp.SUM)  # connects the ranks
    comm.barrier()
    if comm.rank:
        return
    comm.all_reduce(values, values, ReduceOp.SUM)
    closing = threading.Thread(target=comm.close, daemon=True)
    closing.start()
    while not comm.closing:
        closing.join(0.001)
    comm.abort(MembershipChanged("rank 1 is gone", generation=1))
    closing.join(30)
    assert not closing.is_alive()
    threads_end("muster-nccl-abort")
    torch.cuda.synchronize()
    assert float(torch.ones(3, device="cuda").sum()) == 3  # the GPU is of use


def abort(comm: Any) -> None:
    comm.abort(MembershipChanged("rank 0 is gone", generation=1))
    threads_end("muster-nccl-abort")


def check_timeout(comm: Any) -> str:
    """A barrier that only this rank calls ends at the deadline; :func:`come_late` is what the others do."""
    comm.timeout_s = 1.0
    with pytest.raises(CollectiveTimeoutError) as caught:
        comm.barrier()
    comm.timeout_s = 60.0
    return str(caught.value)


def come_late(comm: Any) -> None:
    """The barrier that rank 0 has called, and given up, ends when the others call it after all."""
    if comm.rank:
        comm.barrier()
    torch.cuda.synchronize()


def fresh_ids(comm: Any, count: int) -> tuple[bytes, ...]:
    return NcclBackend(device_index=comm.device_index).mint_unique_ids(count)


def check_several_ids(comm: Any, ids: tuple[bytes, ...]) -> None:
    """A communicator of all ranks forms from several unique ids, as it does where there are many ranks."""
    backend = NcclBackend(device_index=comm.device_index)
    membership = Membership("job", 2, "world", comm.rank, comm.membership.peers, ids)
    other = backend.connect(membership, timeout_s=60, cancelled=lambda: None)
    values = torch.full((4,), float(comm.rank + 1), device="cuda")
    other.all_reduce(values, values, ReduceOp.SUM)
    assert values.tolist() == [comm.world_size * (comm.world_size + 1) / 2] * 4
    other.close()
    backend.close()
    comm.barrier()


def check_formation_deadline(comm: Any) -> str:
    """A member that never comes is named when the deadline is over."""
    backend = FollowingBackend(NcclBackend(device_index=comm.device_index), TcpBackend(tls=None))
    address = backend.open_endpoint("127.0.0.1")
    peers = tuple(
        dataclasses.replace(
            peer, host_name="host", data_address=address if peer.rank == comm.rank else "127.0.0.1:9"
        )
        for peer in comm.membership.peers
    )
    membership = Membership("job", 2, "world", comm.rank, peers, backend.mint_unique_ids(1))
    with pytest.raises(FormationTimeoutError) as caught:
        backend.connect(membership, timeout_s=1.5, cancelled=lambda: None)
    backend.close()
    return str(caught.value)


def check_formation_cancelled(comm: Any) -> float:
    backend = NcclBackend(device_index=comm.device_index)
    membership = Membership("job", 2, "world", comm.rank, comm.membership.peers, backend.mint_unique_ids(1))
    begin, polls = time.monotonic(), itertools.count()
    stop = MembershipChanged("another generation came", generation=2)
    with pytest.raises(MembershipChanged):
        backend.connect(membership, timeout_s=30, cancelled=lambda: stop if next(polls) > 9 else None)
    return time.monotonic() - begin


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

    with pytest.raises(WorkerError, match="cannot be undone: its parameters were changed before"):
        job.train(undo=True, before=decay)
    job.state.commit()
    assert job.train(undo=True, before=decay)  # from now on it waits for copies
