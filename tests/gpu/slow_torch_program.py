"""A program of torch over NCCL in which one rank's GPU has more to do: ``slow_torch_program KIND SLOW``."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

KIND, SLOW = sys.argv[1], int(sys.argv[2])
DEVICE = torch.device("cuda", int(os.environ["DEVICE_ID"]))  # which several workers may share
STEPS, STEP_S, SLOW_S = 200, 0.05, 0.1
CYCLES_PER_S = 1.5e9


def make_net() -> Any:
    """Of two layers, divided or wrapped."""
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)).to(DEVICE)
    if KIND == "ddp":
        return torch.nn.parallel.DistributedDataParallel(net, device_ids=[DEVICE.index])
    if KIND == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for each in (net[0], net[2], net):
            fully_shard(each)
    elif KIND == "tensor parallel":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import parallel

        plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
        return parallel.parallelize_module(net, init_device_mesh("cuda", (dist.get_world_size(),)), plan)
    elif KIND == "sync_batch_norm":
        net[1] = torch.nn.SyncBatchNorm(128).to(DEVICE)
    return net


def main() -> None:
    """Makes all steps; the host reads each loss."""
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", device_id=DEVICE)
    torch.manual_seed(0)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    batch = torch.ones(8, 64, device=DEVICE)
    spin_s = STEP_S + (SLOW_S if dist.get_rank() == SLOW else 0.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.cuda._sleep(int(CYCLES_PER_S * spin_s))
        loss = net(batch).square().mean()
        loss.backward()
        if KIND in ("all_reduce", "sync_batch_norm"):
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        loss.item()
    print("all steps done", flush=True)


main()
