"""NCCL over Muster's plug-in: ranks that share a GPU count as hosts, so NCCL takes its network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.gpu.sharing import RANKS_PER_GPU, launch_options, ranks_on
from tests.scheduler.processes import ROOT, Pki, environment

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

MODEL = """
import hashlib, os, sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from examples.resnet import ResNet

torch.use_deterministic_algorithms(True)
torch.cuda.set_device(0)
dist.init_process_group("nccl")
torch.manual_seed(7)
resnet = sys.argv[1] == "resnet"
if resnet:
    model = torch.nn.parallel.DistributedDataParallel(ResNet((1, 1), width=16).cuda())
else:
    layers = [torch.nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True) for _ in range(2)]
    model = torch.nn.Sequential(*layers).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
torch.manual_seed(100 + dist.get_rank())
for step in range(5):
    batch = torch.randn((16, 3, 32, 32) if resnet else (8, 32, 256), device="cuda")
    loss = model(batch).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
digest = hashlib.sha256()
for value in model.parameters():  # the running statistics are each rank's own
    whole = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()
    digest.update(whole.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
print("weights", digest.hexdigest(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""

KILLED = """
import os, signal, time, torch, torch.distributed as dist

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent would end it before it has said why
torch.cuda.set_device(0)
dist.init_process_group("nccl")
values = torch.ones(8 << 20, device="cuda")
began = time.monotonic()
try:
    for step in range(100_000):
        began = time.monotonic()
        work = dist.all_reduce(values, async_op=True)
        if step == 20 and dist.get_rank() == 1:
            print("killing itself", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        work.wait()
except Exception as error:
    print("broken after", round(time.monotonic() - began, 2), "s:", error, flush=True)
    print("end of what broke it", flush=True)
    os._exit(5)
"""

OWN = """
import os, sys, torch, muster

with muster.init() as session:
    while True:
        try:
            values = torch.full((1 << 20,), session.rank + 1.0, device="cuda")
            values = muster.all_reduce(values)
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


def launch(
    folder: Path, pki: Pki, *options: str, sealed: bool = True, argument: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    env = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_SOCKET_IFNAME": "lo", **env}
    words = ("--scheduler", "--tail", "all", *launch_options(), *options)
    words = ("--encrypt-nccl", *words) if sealed else words
    return subprocess.run(
        [sys.executable, "-m", "muster", "run", *words, "--", sys.executable, "job.py", argument],
        cwd=folder,
        env=environment(**pki.env(), **env),
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


@pytest.mark.parametrize("model", ["fsdp2", "resnet"])
def test_models_get_the_same_weights_over_the_plug_in_as_over_nccl_s_own_sockets(
    pki: Pki, tmp_path: Path, model: str
) -> None:
    (tmp_path / "job.py").write_text(MODEL)
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    found = set()
    for sealed in (True, False):
        done = launch(tmp_path, pki, "-n", "2", sealed=sealed, argument=model, **paths)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("Using network MusterSealed" in done.stdout) == sealed, done.stdout
        assert ("Using network Socket" in done.stdout) != sealed, done.stdout
        weights = re.findall(r"weights ([0-9a-f]{64})", done.stdout)
        assert len(weights) == 2, done.stdout
        found.update(weights)
    assert len(found) == 1


def test_a_torch_program_whose_peer_is_killed_hears_what_became_of_the_connection(
    pki: Pki, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(KILLED)
    began = time.monotonic()
    done = launch(tmp_path, pki, "-n", "2", TORCH_NCCL_BLOCKING_WAIT="1")
    took = f"exit code {done.returncode} after {time.monotonic() - began:.1f} s"
    everything = f"{took}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}"
    assert done.returncode != 0, everything
    assert "killing itself" in done.stdout, everything
    said = done.stdout.partition("broken after ")[2].partition("end of what broke it")[0]
    assert "it was cut, or the peer's process died" in said, everything
    print("broken after", said[:200])
