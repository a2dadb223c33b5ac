"""Torch programs that go on with a replica less, and take it in again."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.end_to_end.test_torch_programs import run
from tests.scheduler.processes import Pki

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

RANKS = 4

PROGRAM = """
import hashlib, os, signal, sys, time, torch, torch.distributed as dist
import muster.torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

assert muster.torch.keep_alive()
first = os.environ["MUSTER_GENERATION"] == "1"
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 16))
if sys.argv[1] == "ddp":
    net = DistributedDataParallel(net)
else:
    net = torch.nn.Sequential(net[0], net[2])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for each in (net[0], net[1], net):
        fully_shard(each, mesh=mesh)
torch.manual_seed(rank)
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
loader = [torch.randn(4, 16, generator=torch.Generator().manual_seed(rank + 10 * each)) for each in range(5)]
seen, ends, back = {}, 10**9, None
for step, batch in muster.torch.steps({"net": net, "optimizer": optimizer}, loader, epochs=10**6, every=4):
    with step:
        optimizer.zero_grad()
        loss = (net(batch) - batch).square().mean()
        if int(step) == 6 and rank == 3 and first:
            with open("agent", "w") as file:
                file.write(str(os.getppid()))
            os.kill(os.getppid(), signal.SIGSTOP)  # or it would be back before the others have made a step
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        mean = torch.tensor([float(rank)])
        dist.all_reduce(mean)
        optimizer.step()
        time.sleep(0.05)
    if step.rehearses or step.is_broken:
        continue
    assert dist.get_world_size() == 4 == int(os.environ["WORLD_SIZE"]) and dist.get_rank() == rank
    generation = int(os.environ["MUSTER_GENERATION"])
    if generation not in seen:
        seen[generation] = mean.item() / 4
        print(f"mean {rank} in {generation}: {seen[generation]:.2f}", flush=True)
        if generation == 2 and rank == 0:
            back = int(step) + 5
        ends = int(step) + 9 if generation > 1 and seen[generation] == 1.5 else 10**9
    if int(step) == back:
        with open("agent") as file:
            os.kill(int(file.read()), signal.SIGCONT)
    if int(step) == ends:
        break
values = [each.to_local() if hasattr(each, "to_local") else each for each in net.parameters()]
weights = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in values)).hexdigest()
print(f"ended {rank} {first} {weights}", flush=True)
"""


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


@pytest.mark.parametrize(("kind", "mean", "node_timeout_s"), [("ddp", "1.00", 12), ("hsdp", "0.50", 5)])
def test_a_replica_less_goes_on_until_the_lost_rank_is_back(
    pki: Pki, tmp_path: Path, kind: str, mean: str, node_timeout_s: int
) -> None:
    """Means are those of who is there; rank 2 of HSDP waits for rank 3, with which it has a replica.

    Connections break at once, and the scheduler does not see the loss before MS_NODE_TIMEOUT.
    """
    pytest.importorskip("torch")
    (tmp_path / "job.py").write_text(PROGRAM)
    options = ("-n", str(RANKS), "--min-workers", "2", "--max-restarts", "1")
    env = {"MS_NODE_TIMEOUT": str(node_timeout_s)}
    done = run(tmp_path, pki, sys.executable, "job.py", kind, options=options, timeout_s=280, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"mean (\d) in (\d+): (.*)", done.stdout)
    went_on = {rank for rank, generation, _ in found if generation == "2"}
    assert went_on == ({"0", "1", "2"} if kind == "ddp" else {"0", "1"}), done.stdout
    assert {each for _, generation, each in found if generation == "2"} == {mean}
    ends = re.findall(r"ended (\d) (\w+) (\w+)", done.stdout)
    assert sorted((rank, lived) for rank, lived, _ in ends) == [
        ("0", "True"),
        ("1", "True"),
        ("2", "True"),
        ("3", "False"),
    ]
    weights = {rank: each for rank, _, each in ends}
    assert (weights["0"], weights["1"]) == (weights["2"], weights["3"])
