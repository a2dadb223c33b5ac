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

# Rank 1's GPU is given 80 ms more to do in each step, within its forward pass. The host reads each loss.
JOB = """
import sys
import torch
import muster

session = muster.init()
torch.manual_seed(0)
model = muster.DataParallel(torch.nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)

def loss(batch):
    torch.cuda._sleep(int(1.5e9 * (0.1 if session.rank == 1 else 0.02)))
    return model(batch).square().mean()

step = muster.capture_step(loss, model, optimizer, capture=sys.argv[1] == "captured")
batch = torch.ones(8, 64, device="cuda")
for _ in range(150):
    session.report(loss=step(batch).item())
print("captured:", step.captured)
"""


@pytest.mark.parametrize("how", ["captured", "eager"])
def test_the_rank_whose_gpu_computes_longer_is_named(tmp_path: Path, how: str) -> None:
    (tmp_path / "job.py").write_text(JOB)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = ("run", "-n", "2", "--scheduler", *launch_options(), "--", sys.executable, "job.py", how)
    done = subprocess.run(
        [sys.executable, "-m", "muster", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "MS_ALLOW_INSECURE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"captured: {how == 'captured'}" in done.stdout
    logs = "\n".join(path.read_text() for path in (tmp_path / "muster-runs/latest").glob("scheduler*.log"))
    named = re.findall(r"[Rr]ank (\d+) \([^)]*\) holds the others up: it (\w+)", logs)
    assert named and set(named) == {("1", "computes")}, logs
