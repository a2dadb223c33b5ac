"""The Python of the README and of the site, run as it stands there by two workers, and what comes out."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduler.processes import ROOT, environment

PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}


def snippet(page: str) -> str:
    """The first Python block of a page."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)
    return blocks[0]


def run_by_two(directory: Path, *parts: str) -> None:
    """Runs the parts as one script on two workers, over ``tcp``."""
    script = directory / "script.py"
    script.write_text("\n".join((*parts, 'print("checked")')))
    launcher = [sys.executable, "-m", "muster", "run", "-n", "2", "--scheduler", "--tail", "all", "--"]
    done = subprocess.run(
        [*launcher, sys.executable, str(script)],
        cwd=directory,
        env=environment(MS_BACKEND="tcp", MS_TOPO_TIMEOUT="60", CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("] checked") == 2, done.stdout


@pytest.mark.parametrize("page", sorted(name for name in PAGES if "```python" in PAGES[name]))
def test_all_python_of_a_page_can_be_read_by_python(page: str) -> None:
    for block in re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL):
        compile(block, page, "exec")


def test_the_readme_is_short() -> None:
    assert PAGES["README.md"].count("\n") <= 120


def test_the_readme_s_job_finds_the_weights(tmp_path: Path) -> None:
    run_by_two(tmp_path, snippet("README.md"), "assert np.allclose(weights, [1, 2, 3], atol=0.05), weights")


IN_PLACE = """
import numpy as np
import muster
with muster.init():
    rank = muster.get_rank()
    x = np.full(2, float(rank))
    assert muster.broadcast(x, root=1) is x and x.tolist() == [1, 1]
    x[:] = rank
    if rank == 0:
        muster.send(x, 1)
    else:
        assert muster.recv(x, 0) is x and x.tolist() == [0, 0]
    x[:] = rank
    for collective in (muster.all_reduce, muster.reduce, muster.all_gather, muster.gather, muster.all_to_all,
                       muster.reduce_scatter, muster.scatter):
        result = collective(x)
        assert result is not x and x.tolist() == [rank] * 2, collective
    assert muster.all_reduce(x, op="sum", out=x) is x and x.tolist() == [1, 1]
"""


def test_what_is_in_place_is_what_the_page_says(tmp_path: Path) -> None:
    words = "Only `broadcast` and `recv` change the array that they are given"
    assert words in PAGES["training.md"]
    run_by_two(tmp_path, IN_PLACE)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_the_job_with_torch_ends_where_one_process_on_the_whole_batch_does(tmp_path: Path) -> None:
    after = """
assert state.step == 256 and model.communicator.world_size == 2
torch.manual_seed(0)
torch.randn(5120, 8)
alone = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
sampler = ShardedSampler(len(dataset), batch_size=64)
sampler.reshard(0, 1)
plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
for _ in range(256):
    rows = torch.as_tensor(sampler.batch().indices)
    plain.zero_grad()
    loss_function(alone(inputs[rows]), labels[rows]).backward()
    plain.step()
    sampler.advance()
for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
"""
    run_by_two(tmp_path, "", snippet("torch_training.md"), after)
