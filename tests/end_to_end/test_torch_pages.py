"""The commands on the pages about torch and JAX: each is run, as it stands there, or listed with a reason."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scheduler.processes import ROOT, environment, scheduler

PAGES = ("torch.md", "jax.md")
RANKS = 4
"""In the place of the page's eight: each takes seconds to load torch."""

CERTIFICATES = "muster certs init --dir keys --password-file keys/password"
LAUNCH = "muster run -n {} --scheduler --config keys/config.json --password-file keys/password -- python {}"
TORCHRUN = (
    "torchrun --rdzv-backend=muster --rdzv-endpoint=head:6667 --rdzv-id=my-job --nnodes=1:4"
    " --nproc-per-node=8 --max-restarts=3 ddp.py"
)
ELSEWHERE = {
    ("jax.md", LAUNCH.format(2, "train.py")): "tests/end_to_end/test_jax.py, where there is a Python for JAX",
    ("torch.md", LAUNCH.format(2, "train.py")): "tests/frameworks, in their own environment",
    ("torch.md", "MS_SCHED_HOST=head muster scheduler --serve --config keys/config.json"): (
        "with torchrun, by the tests' own scheduler: it stays until it is ended"
    ),
    ("torch.md", "export MS_CONFIG_FILE=keys/config.json MS_CLIENT_PASSWORD_FILE=keys/password"): (
        "with torchrun, as variables of the process"
    ),
}
RUN = {
    ("torch.md", CERTIFICATES),
    ("torch.md", LAUNCH.format(8, "ddp.py")),
    ("torch.md", "MS_TORCH_GLOO=muster " + LAUNCH.format(8, "ddp.py")),
    ("torch.md", TORCHRUN),
}

DDP = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
for step in range(3):
    loss = (model(torch.full((2, 4), 1.0 + dist.get_rank())) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weight = float(model.module.weight.sum().detach()).hex()
group = type(dist.distributed_c10d._get_default_group()).__name__
os.write(1, f"trained {dist.get_rank()} of {dist.get_world_size()} to {weight} by {group}\\n".encode())
dist.destroy_process_group()
"""


def trained_alone() -> float:
    """The sum of weights that one process ends with on the samples of all ranks."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    samples = torch.arange(1.0, RANKS + 1.0)[:, None].expand(RANKS, 4)
    for _ in range(3):
        loss = (model(samples) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(model.weight.sum().detach())


def commands(page: str) -> Iterator[str]:
    """A page's commands, in lines without comments; those with output are test_taught_pages's."""
    text = (ROOT / "docs" / page).read_text()
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for line in ("" if block.startswith("$ ") else block).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield " ".join(words)


def test_every_command_of_the_pages_is_run_or_has_a_reason() -> None:
    assert {(page, command) for page in PAGES for command in commands(page)} == RUN | ELSEWHERE.keys()


def play(folder: Path, command: str, **env: str) -> str:
    """Runs a command as a shell does, with this Python's ``muster``, ``python`` and ``torchrun``."""
    found = folder / "bin"
    if not found.exists():
        found.mkdir()
        for name, module in (
            ("muster", "-m muster"),
            ("python", ""),
            ("torchrun", "-m torch.distributed.run"),
        ):
            (found / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
            (found / name).chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env=environment(**{"PATH": f"{found}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **env}),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    made = tmp_path_factory.mktemp("user")
    (made / "ddp.py").write_text(DDP)
    play(made, CERTIFICATES)
    return made


def trained(output: str) -> tuple[set[str], set[str], set[str]]:
    """What the ranks say: who they are, the weights that they end with, the groups' types."""
    lines = re.findall(r"trained (\d of \d) to (\S+) by (\w+)", output)
    return {who for who, _, _ in lines}, {weight for _, weight, _ in lines}, {group for _, _, group in lines}


@pytest.mark.system
@pytest.mark.timeout(600)
def test_what_torch_s_page_says_trains_and_all_ways_to_the_same_weights(folder: Path) -> None:
    launch = LAUNCH.format(RANKS, "ddp.py").replace("muster run", "muster run --tail all")
    plain = trained(play(folder, launch))
    encrypted = trained(play(folder, "MS_TORCH_GLOO=muster " + launch))
    keys = {"MS_CONFIG_FILE": "keys/config.json", "MS_CLIENT_PASSWORD_FILE": "keys/password"}
    held = {name: str(folder / path) for name, path in keys.items()}
    password = {"MS_SERVER_PASSWORD_FILE": str(folder / "keys" / "password")}
    with scheduler("--serve", **held, **password) as served:
        alone = TORCHRUN.replace("--nnodes=1:4", "--nnodes=1:1")  # no other host
        alone = alone.replace("--nproc-per-node=8", f"--nproc-per-node={RANKS}")
        here = alone.replace("head:6667", f"127.0.0.1:{served.port}")
        torchrun = trained(play(folder, here, **keys))
    ranks = {f"{rank} of {RANKS}" for rank in range(RANKS)}
    assert plain[0] == encrypted[0] == torchrun[0] == ranks
    assert plain[1] == torchrun[1]
    for found in (plain, encrypted):  # whose sums are of another order
        assert [float.fromhex(weight) for weight in found[1]] == pytest.approx([trained_alone()], rel=1e-4)
    assert (plain[2], encrypted[2], torchrun[2]) == ({"ProcessGroup"}, {"GroupNamedGloo"}, {"ProcessGroup"})
