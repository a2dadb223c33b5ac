"""A torch program whose processes live on when one is killed: the numbers are those of a run without that."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.test_torch_programs import run
from tests.scheduler.processes import Pki, environment, scheduler

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

RANKS, STEPS, KILLED = 4, 15, 2

PROGRAM = """
import hashlib, os, signal, sys, time, torch, torch.distributed as dist
import muster.torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

kind, backend, dies_in = sys.argv[1], sys.argv[2], int(sys.argv[3])
assert os.environ.get("MS_IN_PLACE") or muster.torch.keep_alive()
first = os.environ["MUSTER_GENERATION"] == "1"
dying = os.environ.get("DYING", "2").split(",")
copying = {"every": 4, "copies": int(os.environ.get("COPIES", "1"))}
if "CHECKPOINT" in os.environ:
    copying |= {"checkpoint": os.environ["CHECKPOINT"], "checkpoint_every": 4}
dist.init_process_group(backend)
rank = dist.get_rank()
pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 16))
if kind == "ddp":
    net = DistributedDataParallel(net, bucket_cap_mb=0.0005)
else:
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for each in (net[0], net[2], net):
        fully_shard(each, mesh=mesh)
torch.manual_seed(rank)
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
rows = torch.randn(20, 16, generator=torch.Generator().manual_seed(rank))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4, shuffle=True)
losses = {}
for step, (batch,) in muster.torch.steps({"net": net, "optimizer": optimizer}, loader, epochs=3, **copying):
    with step:
        optimizer.zero_grad()
        loss = (net(batch) - batch).square().mean()
        if int(step) == dies_in and os.environ["MUSTER_GENERATION"] == "1":  # all die at once
            dist.barrier()
        if int(step) == dies_in and str(rank) in dying and first:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total, group=pair)
        optimizer.step()
        if not step.rehearses:
            losses[int(step)] = f"{loss.item()!r} {total.item()!r}"
if dies_in == 99 and first:  # after the last step
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(8)
values = [each.to_local() if hasattr(each, "to_local") else each for each in net.parameters()]
weights = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in values)).hexdigest()
for step, loss in losses.items():
    print(f"loss {rank} {step}: {loss}", flush=True)
print(f"ended {rank} {os.getpid()} {first} {weights}", flush=True)
"""


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


WITHOUT_LOOP = """
import os, signal, torch, torch.distributed as dist

first = os.environ["MUSTER_GENERATION"] == "1"
dist.init_process_group("gloo")
for step in range(5):
    if first and step == 3 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
print("ended", dist.get_rank(), first, flush=True)
"""


def train(
    directory: Path, pki: Pki, kind: str, backend: str, dies_in: int, **env: str
) -> tuple[dict[str, str], ...]:
    """Losses by rank and step, weights by rank, and by rank whether its first process came to the end.

    DDP is told to live on by the option, FSDP2 by a line.
    """
    (directory / "job.py").write_text(PROGRAM)
    command = (sys.executable, "job.py", kind, backend, str(dies_in))
    options = ("-n", str(RANKS), "--max-restarts", "1", *(["--in-place"] if kind == "ddp" else []))
    done = run(directory, pki, *command, options=options, timeout_s=280, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = dict(re.findall(r"loss (\d \d+): (.*)", done.stdout))
    (directory / "out").write_text(done.stdout + done.stderr)
    ends = re.findall(r"ended (\d) \d+ (\w+) (\w+)", done.stdout)
    assert len(ends) == RANKS, done.stdout
    return losses, {rank: weights for rank, _, weights in ends}, {rank: first for rank, first, _ in ends}


@pytest.mark.parametrize(("kind", "backend", "dies_in"), [("ddp", "gloo", 6), ("fsdp2", "muster", 11)])
def test_a_killed_rank_is_replaced_and_all_others_go_on_in_their_processes(
    pki: Pki, tmp_path: Path, kind: str, backend: str, dies_in: int
) -> None:
    """Also in subgroups, on a mesh of two dimensions, with dropout, and with a loader that shuffles."""
    pytest.importorskip("torch")
    losses, weights, _ = train(tmp_path, pki, kind, backend, -1)
    assert len(losses) == RANKS * STEPS
    found, ended_with, lived = train(tmp_path, pki, kind, backend, dies_in)
    assert ended_with == weights
    assert found.items() <= losses.items()
    assert all(f"{rank} {step}" in found for rank in range(RANKS) for step in range(dies_in, STEPS))
    assert lived == {str(rank): str(rank != KILLED) for rank in range(RANKS)}


def test_a_rank_that_is_lost_after_the_last_step_does_not_wait_for_the_others(
    pki: Pki, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "job.py").write_text(PROGRAM)
    command = (sys.executable, "job.py", "ddp", "gloo", "99")
    done = run(tmp_path, pki, *command, options=("-n", str(RANKS), "--max-restarts", "1"), timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\nended ") + done.stdout.count("] ended ") == RANKS - 1, done.stdout
    assert "The others have completed the training" in done.stdout


@pytest.mark.parametrize("case", ["two copies", "one copy and a checkpoint", "one copy"])
def test_two_ranks_that_hold_each_other_s_copies_are_lost_at_once(
    pki: Pki, tmp_path: Path, case: str
) -> None:
    """On one host of four ranks, with one copy each, rank 0 has that of 2, and 2 that of 0."""
    pytest.importorskip("torch")
    losses, weights, _ = train(tmp_path, pki, "fsdp2", "gloo", -1)
    env = {"DYING": "0,2", "COPIES": "2" if case == "two copies" else "1"}
    if "checkpoint" in case:
        env["CHECKPOINT"] = str(tmp_path / "kept")
    found, ended_with, lived = train(tmp_path, pki, "fsdp2", "gloo", 10, **env)
    assert ended_with == weights
    assert found.items() <= losses.items()
    said = (tmp_path / "out").read_text()
    if case == "one copy":
        assert set(lived.values()) == {"False"}
        assert "Of step 8 the parts of ranks 0, 2 are in nobody's memory." in said
        return
    assert lived == {"0": "False", "1": "True", "2": "False", "3": "True"}
    assert ("The state is that of the checkpoint" in said) is ("checkpoint" in case)
    if "checkpoint" in case:  # and a further run begins with it
        found, ended_with, _ = train(tmp_path, pki, "fsdp2", "gloo", -1, **env)
        assert ended_with == weights
        assert set(found) == {f"{rank} {step}" for rank in range(RANKS) for step in range(12, STEPS)}
        assert found.items() <= losses.items()


def test_a_program_without_the_loop_is_started_again(pki: Pki, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "job.py").write_text(WITHOUT_LOOP)
    options = ("-n", "3", "--max-restarts", "1", "--in-place")
    done = run(tmp_path, pki, sys.executable, "job.py", options=options, timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"ended (\d \w+)", done.stdout)) == ["0 False", "1 False", "2 False"]


def test_a_spare_takes_the_lost_rank_s_number(pki: Pki, tmp_path: Path) -> None:
    """The scheduler counts it last; the program's ranks stay as they are."""
    pytest.importorskip("torch")
    losses, weights, _ = train(tmp_path, pki, "ddp", "gloo", -1)
    sizes = {"MS_WORKER_NUM": str(RANKS), "MS_WORKER_MIN": str(RANKS)}
    with scheduler(MS_SPARES="1", **sizes, **pki.env()) as served:
        env = environment(
            MS_ROLE="MS_WORKER", MS_SCHED_PORT=str(served.port), OMP_NUM_THREADS="1", **sizes, **pki.env()
        )
        command = [sys.executable, "-m", "muster.programs.agent", "--"]
        agents = [
            subprocess.Popen(
                [*command, sys.executable, "job.py", "ddp", "gloo", "6"],
                cwd=tmp_path,
                env={**env, "MS_NODE_ID": f"node{index}", "MS_WORKER_SPARE": str(index // RANKS)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for index in range(RANKS + 1)
        ]
        try:
            outputs = [agent.communicate(timeout=280)[0] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
        assert served.wait() == 0, "\n".join(outputs)
    found = dict(re.findall(r"loss (\d \d+): (.*)", "".join(outputs)))
    assert dict(re.findall(r"ended (\d) \d+ \w+ (\w+)", "".join(outputs))) == weights, "\n".join(outputs)
    assert found.items() <= losses.items()
    assert f"ended {KILLED} " in outputs[RANKS]


def test_a_rank_that_is_lost_before_there_is_a_copy_has_all_start_again(pki: Pki, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found, _, lived = train(tmp_path, pki, "ddp", "gloo", 1)
    assert set(lived.values()) == {"False"}
    assert len(found) == RANKS * STEPS
