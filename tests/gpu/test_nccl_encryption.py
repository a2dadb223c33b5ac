"""NCCL over Muster's plug-in: ranks that share a GPU count as hosts, so NCCL takes its network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.gpu.sharing import RANKS_PER_GPU, launch_options, ranks_on
from tests.scheduler.processes import Pki, environment

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]
if ranks_on(torch.cuda.device_count()) < 2 or RANKS_PER_GPU < 2:
    pytest.skip("needs a GPU, and MS_TEST_RANKS_PER_GPU=2", allow_module_level=True)

TORCH = """
import os, torch, torch.distributed as dist

torch.cuda.set_device(0)
dist.init_process_group("nccl")
values = torch.full((1 << 20,), dist.get_rank() + 1.0, device="cuda")
dist.all_reduce(values)
print("sum", set(values.tolist()), flush=True)
dist.barrier()
dist.destroy_process_group()
"""

OWN = """
import os, sys, torch, muster

with muster.init() as session:
    while True:
        try:
            values = torch.full((1 << 20,), session.rank + 1.0, device="cuda")
            muster.all_reduce(values)
            torch.cuda.synchronize()
            print("sum", session.generation, session.world_size, set(values.tolist()), flush=True)
            if session.world_size == 2:
                break
            if session.rank == 2:
                os._exit(3)
            muster.barrier()
        except muster.MembershipChanged:
            session.rejoin()
        except muster.CommunicatorError as error:
            print("broken", error, flush=True)
            session.rejoin()
"""


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


def launch(folder: Path, pki: Pki, *options: str) -> subprocess.CompletedProcess[str]:
    debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_SOCKET_IFNAME": "lo"}
    words = ("--scheduler", "--tail", "all", "--encrypt-nccl", *launch_options(), *options)
    return subprocess.run(
        [sys.executable, "-m", "muster", "run", *words, "--", sys.executable, "job.py"],
        cwd=folder,
        env=environment(**pki.env(), **debug),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_torch_program_computes_the_same_over_the_plug_in(pki: Pki, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(TORCH)
    done = launch(tmp_path, pki, "-n", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("sum {3.0}") == 2, done.stdout
    assert "Using network MusterSealed" in done.stdout, done.stdout
    assert "scheduler and nccl between hosts encrypted" in done.stderr


def test_survivors_of_a_loss_get_the_next_generation_s_secret(pki: Pki, tmp_path: Path) -> None:
    if ranks_on(torch.cuda.device_count()) < 3:
        pytest.skip("needs a GPU for three ranks: MS_TEST_RANKS_PER_GPU=4")
    (tmp_path / "job.py").write_text(OWN)
    done = launch(tmp_path, pki, "-n", "3", "--min-workers", "2")
    assert done.stdout.count(" 3 {6.0}") == 3 and done.stdout.count(" 2 {3.0}") == 2, (
        done.stdout + done.stderr
    )
    assert "Using network MusterSealed" in done.stdout
    assert "nccl, scheduler and nccl between hosts encrypted" in done.stderr
