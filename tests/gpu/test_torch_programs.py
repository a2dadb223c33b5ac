"""Programs of torch.distributed with NCCL over Muster's store, as users start them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.gpu.sharing import launch_options, ranks_on
from tests.scheduler.processes import Pki, environment

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]
RANKS = min(2, ranks_on(torch.cuda.device_count()))
if RANKS < 2:
    pytest.skip("needs two GPUs, or MS_TEST_RANKS_PER_GPU=2", allow_module_level=True)

PROGRAM = str(Path(__file__).with_name("torch_program.py"))


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


def launch(directory: Path, pki: Pki, way: str, **env: str) -> subprocess.CompletedProcess[str]:
    options = ("-n", str(RANKS), "--scheduler", "--tail", "all", *launch_options())
    return subprocess.run(
        [sys.executable, "-m", "muster", "run", *options, "--", sys.executable, PROGRAM, way],
        cwd=directory,
        env=environment(**pki.env(), **env),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("nccl2", ["0", "1"])
@pytest.mark.parametrize("way", ["lazy", "eager", "symmetric", "fsdp2"])
def test_nccl_meets_by_the_store(pki: Pki, tmp_path: Path, way: str, nccl2: str) -> None:
    if way == "symmetric" and torch.cuda.device_count() < RANKS:
        pytest.skip("symmetric memory takes a GPU for each rank")
    done = launch(tmp_path, pki, way, TORCH_DIST_USE_NCCL2=nccl2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("sum 3.0 3.0") == RANKS, done.stdout
    if way == "eager":
        assert done.stdout.count("alone True") == RANKS
    if way == "fsdp2":
        assert done.stdout.count("learned True") == RANKS


def test_ten_ends_without_destroy_are_all_good(pki: Pki, tmp_path: Path) -> None:
    """An end while the watchdogs look at the store ended one of two processes with a segmentation fault."""
    for _ in range(10):
        done = launch(tmp_path, pki, "leave")
        assert done.returncode == 0, done.stdout + done.stderr


def test_an_interpreter_s_lock_that_is_held_for_a_minute_harms_nothing(pki: Pki, tmp_path: Path) -> None:
    done = launch(tmp_path, pki, "hold", HOLD_S="60", MS_NODE_TIMEOUT="3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("sum 3.0 3.0") == RANKS, done.stdout


def test_a_timeout_leaves_the_flight_recorder_s_dumps(pki: Pki, tmp_path: Path) -> None:
    dumps = tmp_path / "trace_"
    names = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
    env = dict.fromkeys(names, "2000") | dict.fromkeys(
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"), str(dumps)
    )
    done = launch(tmp_path, pki, "timeout", TORCH_NCCL_DUMP_ON_TIMEOUT="1", **env)
    assert done.returncode != 0
    assert list(tmp_path.glob("trace_*")), done.stdout + done.stderr
