"""A torch program of even ranks but for one: ``slow_torch_program KIND BACKEND SLOW``, until it is killed."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEP_S, SLOW_S = 0.1, 0.15
KIND, BACKEND, SLOW = sys.argv[1], sys.argv[2], int(sys.argv[3])


class Rows(torch.utils.data.Dataset):  # type: ignore[misc]  # torch has no types here
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        if KIND == "data" and dist.get_rank() == SLOW:
            time.sleep(SLOW_S)
        return torch.ones(16)


def make_net() -> Any:
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 16))
    if KIND == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        net[1] = torch.nn.LayerNorm(64)
        for each in (net[0], net[2], net):
            fully_shard(each)
        return net
    if KIND == "tensor parallel":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import parallel

        plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
        net[1] = torch.nn.ReLU()
        return parallel.parallelize_module(net, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return DistributedDataParallel(net)


def train(net: Any, optimizer: Any, batch: Any) -> None:
    time.sleep(STEP_S)  # as work would that leaves this machine alone
    if KIND != "data" and dist.get_rank() == SLOW:
        time.sleep(SLOW_S)
    optimizer.zero_grad()
    net(batch).square().mean().backward()
    optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    if KIND == "in place":
        import muster.torch

        assert muster.torch.keep_alive()
    dist.init_process_group(BACKEND)
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=1 if KIND == "data" else 4)
    if KIND == "in place":
        for step, batch in muster.torch.steps({"net": net, "optimizer": optimizer}, loader, every=1000):
            with step:
                train(net, optimizer, batch.repeat(2, 1))
        return
    for batch in loader:
        train(net, optimizer, batch.repeat(2, 1))


main()
