"""A torch program that knows nothing of Muster: DDP, FSDP2, DTensor, a checkpoint, spawned processes."""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


def say(what: str, value: object) -> None:
    # One write for the line: processes that share a pipe would mix the pieces.
    sys.stdout.write(f"said {os.environ['RANK']} {what} {value}\n")
    sys.stdout.flush()


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


def train(net: torch.nn.Module, name: str) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(5):
        x = torch.randn(16, 8, generator=data)
        loss = (net(x) - x[:, :4]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(f"{name} {step}", loss.item().hex())


def checkpoint(net: torch.nn.Module, directory: str) -> None:
    before = {name: value.full_tensor().clone() for name, value in net.state_dict().items()}
    dcp.save({"net": net.state_dict()}, checkpoint_id=directory)
    for parameter in net.parameters():
        parameter.data.zero_()
    state = net.state_dict()
    dcp.load({"net": state}, checkpoint_id=directory)
    net.load_state_dict(state)
    after = {name: value.full_tensor() for name, value in net.state_dict().items()}
    say("checkpoint", all(torch.equal(after[name], value) for name, value in before.items()))


def spawned(local: int, rank: int) -> None:
    """One of two processes of each worker: ranks of their own, as mp.spawn's users set them."""
    os.environ["RANK"] = str(2 * rank + local)
    os.environ["WORLD_SIZE"] = str(2 * int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    say("spawned", total.item())
    dist.destroy_process_group()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train(DistributedDataParallel(network()), "ddp")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = network()
    fully_shard(sharded, mesh=mesh)
    train(sharded, "fsdp2")
    checkpoint(sharded, sys.argv[1])
    torch.manual_seed(1)
    matrix = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
    say("dtensor", (matrix @ matrix).full_tensor().sum().item().hex())
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"rank": rank})
    say("objects", gathered)
    lines = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout.splitlines()
    own = [line.split()[3] for line in lines if f"pid={os.getpid()}," in line]
    print("listens", rank, *own, flush=True)
    print("group", type(dist.group.WORLD).__name__, flush=True)
    dist.destroy_process_group()
    if "spawn" in sys.argv:
        mp.spawn(spawned, (rank,), nprocs=2)


if __name__ == "__main__":
    main()
