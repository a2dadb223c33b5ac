"""A program of FSDP2 that goes on with another number of ranks, in its processes, from its own checkpoint."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.end_to_end.test_torch_programs import run
from tests.scheduler.processes import Pki

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PROGRAM = """
import hashlib, os, signal, sys, time, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import muster.torch
from pathlib import Path
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

checkpoints, kills, ends = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
assert muster.torch.keep_alive()
first = os.environ["MUSTER_GENERATION"] == "1"


class Batches:
    def __init__(self, number):
        self.number = number

    def __iter__(self):
        for each in range(self.number, ends):
            yield torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * each + rank))


def parts():
    model, adam = get_state_dict(net, optimizer)
    return {"net": model, "optimizer": adam}


def begin():
    global net, optimizer, rank, size
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Dropout(0.1), torch.nn.Linear(24, 16))
    for each in (net[0], net[2], net):
        fully_shard(each)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    number = max((int(each.parent.name) for each in checkpoints.glob("*/.metadata")), default=0)
    if number:
        found = parts()
        dcp.load(found, checkpoint_id=checkpoints / str(number), no_dist=True)  # a newcomer is alone
        set_state_dict(net, optimizer, model_state_dict=found["net"], optim_state_dict=found["optimizer"])
    torch.manual_seed(1000 * number + rank)
    print(f"begins with {number} as {rank} of {size}", flush=True)
    return muster.torch.Resharded({"net": net, "optimizer": optimizer}, Batches(number), number)


begun = begin()
steps = muster.torch.steps(begun.state, begun.loader, first=begun.step, every=3, reshard=begin)
for step, batch in steps:
    with step:
        if int(step) in (4, 8) and not step.rehearses and not (checkpoints / str(int(step))).exists():
            dist.barrier()
            dcp.save(parts(), checkpoint_id=checkpoints / str(int(step)))
        optimizer.zero_grad()
        loss = (net(batch) - batch).square().mean()
        if kills != "none" and int(step) == 6 and rank == 2 and first:
            if kills == "back":
                Path("agent").write_text(str(os.getppid()))
                os.kill(os.getppid(), signal.SIGSTOP)  # or it would be back before the others go on
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        time.sleep(0.1 if size == 2 and kills == "back" else 0)
    if step.rehearses or step.is_broken:
        continue
    if kills == "back" and size == 2 and rank == 0 and int(step) == 9:
        os.kill(int(Path("agent").read_text()), signal.SIGCONT)
    if kills == "back" and size == 3 and int(os.environ["MUSTER_GENERATION"]) > 2 and int(step) == 12:
        break
whole = [each.full_tensor() for each in net.parameters()]
whole += [each.full_tensor() for state in optimizer.state.values() for each in state.values() if each.dim()]
digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in whole)).hexdigest()[:16]
print(f"ended {rank} of {size} lived {first} {digest} {loss.item().hex()}", flush=True)
"""


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


def ends(output: str) -> list[tuple[str, ...]]:
    return sorted(re.findall(r"ended (\d of \d) lived (\w+) (\w+) (\S+)", output))


def only(folder: Path, copy: Path, number: int) -> Path:
    shutil.copytree(folder / str(number), copy / str(number))
    return copy


@pytest.mark.parametrize(
    ("kills", "ranks", "begun_with"),
    [("for-good", 2, [(0, 3), (4, 2)]), ("back", 3, [(0, 3), (4, 2), (8, 3)])],
)
def test_the_same_processes_load_the_checkpoint_divided_among_the_ranks_there_are(
    pki: Pki, tmp_path: Path, kills: str, ranks: int, begun_with: list[tuple[int, int]]
) -> None:
    """Numbers are those of a run that begins with as many ranks and the same checkpoint."""
    pytest.importorskip("torch")
    (tmp_path / "job.py").write_text(PROGRAM)
    options = ("-n", "3", "--min-workers", "2", *(("--max-restarts", "1") if kills == "back" else ()))
    command = (sys.executable, "job.py", str(tmp_path / "kept"), kills, "13" if ranks == 2 else "1000000")
    done = run(tmp_path, pki, *command, options=options, timeout_s=280)
    said = done.stdout + done.stderr
    begins = re.findall(r"begins with (\d+) as (\d) of (\d)", done.stdout)
    lived = {(int(number), int(size)) for number, _, size in begins}
    assert lived == {*begun_with}, said
    assert begins.count(("0", "0", "3")) == 1, said  # nobody was started again
    found = ends(done.stdout)
    assert [each[:2] for each in found] == [(f"{rank} of {ranks}", str(rank < 2)) for rank in range(ranks)], (
        said
    )
    step = begun_with[-1][0]
    alone = only(tmp_path / "kept", tmp_path / "alone", step)
    command = (sys.executable, "job.py", str(alone), "none", "13")
    fresh = run(tmp_path, pki, *command, options=("-n", str(ranks)), timeout_s=280)
    assert fresh.returncode == 0, fresh.stdout + fresh.stderr
    assert [each[2:] for each in ends(fresh.stdout)] == [each[2:] for each in found]
