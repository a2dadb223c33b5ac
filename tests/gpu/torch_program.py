"""A program of torch.distributed on GPUs that knows nothing of Muster: one way to use NCCL, by its name."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

DEVICE = torch.device("cuda", int(os.environ["DEVICE_ID"]))  # which several workers may share


def total(group: object = None) -> float:
    value = torch.full((1 << 20,), dist.get_rank() + 1.0, device=DEVICE)
    dist.all_reduce(value, group=group)
    return float(value[-1].item())


def lazy() -> None:
    dist.init_process_group("nccl")
    print("sum", total(), total(dist.new_group()), flush=True)


def eager() -> None:
    dist.init_process_group("nccl", device_id=DEVICE)
    halves = dist.split_group(split_ranks=[[rank] for rank in range(dist.get_world_size())])
    print("sum", total(), total(dist.new_group()), "alone", total(halves) == dist.get_rank() + 1, flush=True)


def symmetric() -> None:
    import torch.distributed._symmetric_memory as symm

    dist.init_process_group("nccl", device_id=DEVICE)
    value = symm.empty(1 << 20, dtype=torch.float32, device=DEVICE).fill_(dist.get_rank() + 1.0)
    symm.rendezvous(value, dist.group.WORLD)
    torch.ops.symm_mem.one_shot_all_reduce(value, "sum", dist.group.WORLD.group_name)
    reduced = torch.ops.symm_mem.one_shot_all_reduce(value, "sum", dist.group.WORLD.group_name)
    print("sum", reduced[-1].item(), total(), flush=True)


def fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl", device_id=DEVICE)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).to(DEVICE)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        x = torch.randn(64, 64, device=DEVICE)
        loss = (net(x) - x.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print("learned", losses[-1] < losses[0], "sum", total(), total(), flush=True)


def leave() -> None:
    """Ends without destroy_process_group(), while the watchdog looks at the store."""
    dist.init_process_group("nccl", device_id=DEVICE)
    print("sum", total(), total(), flush=True)


def hold() -> None:
    """Holds the interpreter's lock for longer than every timeout of the session."""
    import ctypes

    dist.init_process_group("nccl", device_id=DEVICE)
    total()
    ctypes.PyDLL(None).sleep(int(os.environ["HOLD_S"]) if dist.get_rank() else 0)
    print("sum", total(), total(), flush=True)


def timeout() -> None:
    """One rank does not come; the others' watchdogs write what they know."""
    dist.init_process_group("nccl", device_id=DEVICE, timeout=timedelta(seconds=10))
    total()
    if dist.get_rank():
        time.sleep(300)
    total()


if __name__ == "__main__":
    torch.cuda.set_device(DEVICE)
    globals()[sys.argv[1]]()
    if sys.argv[1] != "leave":
        dist.destroy_process_group()
