"""What the GPU tests ask of a communicator, in each process of a fleet; each asserts, or returns facts."""

from __future__ import annotations

import dataclasses
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
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorError,
    FormationTimeoutError,
    MembershipChanged,
)
from muster.torch.data_parallel import DataParallel
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
