"""A GPU that computes longer than the others' is named: its host alone cannot tell why it waits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.gpu.sharing import launch_options, ranks_on

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
if ranks_on(torch.cuda.device_count()) < 2:
    pytest.skip("needs two GPUs, or MS_TEST_RANKS_PER_GPU=2", allow_module_level=True)

ROOT = Path(__file__).parents[2]
TORCH_PROGRAM = str(Path(__file__).with_name("slow_torch_program.py"))

# Rank 1's GPU is given 80 ms more to do in each step, before its forward pass. The other one waits at the end
# of the backward pass (plain), or in the forward pass already. The host reads each loss.
JOB = """
import sys
import torch
import muster

how, kind = sys.argv[1:]
session = muster.init()
torch.manual_seed(0)
batch = torch.ones(8, 64, device="cuda")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)
        self.norm = torch.nn.SyncBatchNorm(64) if kind == "sync_batch_norm" else torch.nn.Identity()

    def forward(self, x):
        return self.norm(self.down(self.up(x).relu()))

if kind == "parallelize":
    split = {"up": {"n": 2}, "down": {"k": 2}}
    mean = torch.nn.MSELoss()
    model = muster.parallelize(Net().cuda(), (batch, batch), loss=mean, mode="semi_auto", strategies=split)
else:
    model = muster.DataParallel(Net().cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)

def loss(batch):
    torch.cuda._sleep(int(1.5e9 * (0.1 if session.rank == 1 else 0.02)))
    return model(batch, batch) if kind == "parallelize" else model(batch).square().mean()

step = muster.capture_step(loss, model, optimizer, capture=how == "captured")
for _ in range(150):
    session.report(loss=step(batch).item())
print("captured:", step.captured)
"""


def launched(directory: Path, *command: str) -> tuple[str, list[tuple[str, str]]]:
    """Runs two ranks; returns what they have printed, and which ranks were named, and why."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = ("-n", "2", "--scheduler", "--tail", "all", *launch_options())
    done = subprocess.run(
        [sys.executable, "-m", "muster", "run", *options, "--", sys.executable, *command],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path, "MS_ALLOW_INSECURE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logs = "\n".join(path.read_text() for path in (directory / "muster-runs/latest").glob("scheduler*.log"))
    return done.stdout, re.findall(r"[Rr]ank (\d+) \([^)]*\) holds the others up: it (\w+)", logs)


@pytest.mark.parametrize("kind", ["plain", "sync_batch_norm", "parallelize"])
@pytest.mark.parametrize("how", ["captured", "eager"])
def test_the_rank_whose_gpu_computes_longer_is_named(tmp_path: Path, how: str, kind: str) -> None:
    (tmp_path / "job.py").write_text(JOB)
    printed, named = launched(tmp_path, "job.py", how, kind)
    assert f"captured: {how == 'captured'}" in printed
    assert set(named) == {("1", "computes")}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tensor parallel", "all_reduce", "sync_batch_norm"])
def test_in_a_torch_program_the_rank_whose_gpu_computes_longer_is_named(tmp_path: Path, kind: str) -> None:
    """Over NCCL, by a program that knows nothing of Muster."""
    printed, named = launched(tmp_path, TORCH_PROGRAM, kind, "1")
    assert printed.count("all steps done") == 2, printed
    assert set(named) == {("1", "computes")}


def test_in_a_torch_program_of_even_ranks_nobody_is_named(tmp_path: Path) -> None:
    printed, named = launched(tmp_path, TORCH_PROGRAM, "fsdp2", "-1")
    assert printed.count("all steps done") == 2, printed
    assert named == []
