"""Device meshes of a generation that has ended: torch's DTensors refer to those of the present one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.scheduler.processes import ROOT, environment

pytest.importorskip("torch")

PROGRAM = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from muster.worker.old_meshes import forget_meshes


def rows_of(rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    mesh = init_device_mesh("cpu", (3,))
    local = torch.zeros(4 if rank < 2 else 2, 6)
    size = {"shape": torch.Size((10, 6)), "stride": (6, 1)}
    whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **size)
    found = torch.nn.Parameter(whole).device_mesh.get_coordinate()
    dist.destroy_process_group()
    return found[0]


print(rows_of(2), end=" ")
forget_meshes()
print(rows_of(1))
"""


def output_of(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_tensor_of_the_next_generation_is_of_its_mesh() -> None:
    """Torch keeps layouts by the mesh's shape, and with them the rank that this process had before."""
    assert output_of(PROGRAM) == "2 1\n"


def test_torch_is_not_loaded_for_it() -> None:
    program = (
        "import sys; from muster.worker.old_meshes import forget_meshes; forget_meshes();"
        " print('torch' in sys.modules)"
    )
    assert output_of(program) == "False\n"
