"""Groups that torch makes in a program that lives on; in a process of its own, for it changes torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
    pytest.skip("needs torch 2.9", allow_module_level=True)

from muster.programs.lasting_world import lacking_nccl, unlike
from tests.scheduler.processes import ROOT, environment

PROGRAM = """
import sys, torch, torch.distributed as dist
from muster.programs.lasting_world import LastingWorld
from torch.distributed._functional_collectives import all_reduce

world = LastingWorld()
assert world.lacks() == ""
world.install()
world.rehearses = "rehearses" in sys.argv
size = 4 if world.rehearses else 1
dist.init_process_group("gloo", rank=0, world_size=size, store=dist.HashStore())
group = dist.new_group([0], group_desc="one")
gone = dist.new_group([0])
dist.destroy_process_group(gone)
assert dist.get_world_size() == size and dist.get_backend(group) == "gloo"
assert type(dist.group.WORLD).__name__ == type(group).__name__ == "LastingProcessGroup"
mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
assert mesh.get_group().size() == size

def total(of):
    return all_reduce(torch.ones(2), "sum", of).wait().tolist()

assert total(dist.group.WORLD) == total(group) == [1.0, 1.0]
names = [name for name, _ in world.groups]
assert names[:2] == [dist.group.WORLD.group_name, group.group_name] and gone.group_name not in names
world.break_off("it is over")
failed = 0
for each in (dist.group.WORLD, group):
    try:
        total(each)
    except Exception as error:
        assert "it is over" in str(error), error
        failed += 1
assert failed == (0 if world.rehearses else 2), failed
if world.rehearses:  # as pipelines do
    sent, received = torch.ones(1), torch.zeros(1)
    messages = [dist.P2POp(dist.isend, sent, 1), dist.P2POp(dist.irecv, received, 1)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    assert received.tolist() == [1.0]
else:
    world.connect(dist.HashStore(), 2)
    assert total(dist.group.WORLD) == total(group) == [1.0, 1.0]
    assert [name for name, _ in world.groups] == names
    dist.monitored_barrier()
world.break_off("another number of ranks")
world.destroy()
world.rehearses = False
assert not dist.is_initialized()
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
assert [name for name, _ in world.groups] == names[:1] and total(dist.group.WORLD) == [1.0, 1.0]
dist.destroy_process_group()
print("well")
"""

TEARS_DOWN = """
import os, torch.distributed as dist
from muster.programs.lasting_world import LastingWorld

NAME = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
world, found = LastingWorld(), []

def made(store, rank, size, timeout):
    found.append(os.environ[NAME])
    return dist.ProcessGroupGloo(store, rank, size, timeout)

dist.Backend.register_backend("noting", made, devices=["cpu"])
world.install()
os.environ[NAME] = "3"  # as torchtitan does
dist.init_process_group("noting", rank=0, world_size=1, store=dist.HashStore())
world.break_off("a rank is lost")
del os.environ[NAME]
world.connect(dist.HashStore(), 2)
assert found == ["0"] * 2, found
dist.destroy_process_group()
print("well")
"""


@pytest.mark.parametrize(
    ("mine", "theirs", "why"),
    [
        ([("a", [0, 1]), ("b", [0, 2])], [("a", [0, 1]), ("c", [1, 2])], ""),
        ([("a", [0, 1])], [], "Only one of the ranks 0 and 1 has made the process group 'a'."),
        ([], [("a", [0, 1])], "Only one of the ranks 0 and 1 has made the process group 'a'."),
        ([("a", [0, 1]), ("b", [0, 1])], [("b", [0, 1]), ("a", [0, 1])], "in different orders"),
    ],
)
def test_ranks_that_have_made_other_groups_are_told(mine: list[Any], theirs: list[Any], why: str) -> None:
    said = unlike(mine, theirs, 0, 1)
    assert why in said
    assert bool(said) is bool(why)


def says(program: str, *arguments: str) -> None:
    """Runs a program, which has to end with the word "well"."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout == "well\n", done.stdout + done.stderr


@pytest.mark.parametrize("how", ["alone", "rehearses"])
def test_functional_collectives_meshes_and_subgroups_find_the_lasting_group(how: str) -> None:
    says(PROGRAM, how)


def test_no_group_of_nccl_ends_the_process_when_a_rank_is_lost_whatever_the_program_has_set() -> None:
    says(TEARS_DOWN)


@pytest.mark.parametrize(
    ("version", "lacks"),
    [(None, False), ((2, 28, 2), False), ((2, 28, 3), True), ((2, 28, 8), True), ((2, 28, 9), False)],
)
def test_an_nccl_that_hangs_in_an_abort_is_refused(version: tuple[int, ...] | None, lacks: bool) -> None:
    assert ("can hang" in lacking_nccl(version)) is lacks
