"""FSDP2 in a loop of its own: a lost rank's shard comes from another rank's memory, bit for bit."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.end_to_end.test_torch_programs import run
from tests.scheduler.processes import Pki

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

PROGRAM = """
import hashlib, os, signal, sys, time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import muster
import muster.torch

folder, killed = Path(sys.argv[1]), int(sys.argv[2])
STEPS = 60
snapshots = muster.torch.Snapshots(every=2)


def make(session):
    if dist.is_initialized():
        dist.destroy_process_group()
    meeting = f"file://{folder}/meeting-{session.generation}"
    dist.init_process_group("gloo", meeting, timedelta(minutes=1), session.world_size, session.rank)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 2)).double()
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def train(session, net, optimizer, step):
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + session.rank))
    loss = net(rows.double()).square().mean()
    time.sleep(0.1)  # as work would that leaves this machine alone
    complete = snapshots.complete
    if (session.rank, session.generation) == (killed, 1) and complete is not None and complete.step > 0:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


with muster.init() as session:
    while True:
        try:
            net, optimizer = make(session)
            step = begun = snapshots.restore({"net": net, "optimizer": optimizer}) or 0
            while step < STEPS:
                try:
                    train(session, net, optimizer, step)
                except RuntimeError:  # of Gloo: a rank is gone; Muster may not know it yet
                    muster.barrier()
                    raise
                step += 1
                snapshots.step(step)
            break
        except muster.MembershipChanged:
            session.rejoin()
    whole = hashlib.sha256()
    for _, value in sorted(net.state_dict().items()):
        whole.update(value.full_tensor().numpy().tobytes())
    print(f"ended {session.rank} {session.generation} {begun} {whole.hexdigest()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    snapshots.close()
"""


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


def weights(pki: Pki, folder: Path, killed: int) -> tuple[set[str], set[str], set[str]]:
    """Runs the program; returns the generations, the steps that they began at, and the weights of the end."""
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    command = (sys.executable, "program.py", str(folder), str(killed))
    done = run(folder, pki, *command, options=("-n", "3", "--spares", "1"), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout
    found = re.findall(r"ended \d (\d) (\d+) (\w{64})", printed)
    assert len(found) == 3, printed
    generations, begun, ends = (set(column) for column in zip(*found, strict=True))
    return generations, begun, ends


def test_a_killed_ranks_shard_is_restored_at_another_rank(pki: Pki, tmp_path: Path) -> None:
    """Rank 2 becomes rank 1, and its modules are made again: all of torch's tensors are of the new mesh."""
    (first, _, undisturbed) = weights(pki, tmp_path / "undisturbed", killed=-1)
    (second, begun, ends) = weights(pki, tmp_path / "killed", killed=1)
    assert (first, second) == ({"1"}, {"2"})
    assert int(begun.pop()) > 0, "a snapshot was complete, and was restored"
    assert not begun
    assert ends == undisturbed
    assert len(ends) == 1
