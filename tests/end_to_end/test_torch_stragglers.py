"""Four ranks of a torch program that knows nothing of Muster, one of them slow: it is named, and no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduler.processes import ROOT, Pki, environment, scheduler

RANKS, SLOW = 4, 2
PROGRAM = str(ROOT / "tests" / "end_to_end" / "slow_torch_program.py")

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


@pytest.mark.parametrize(
    ("kind", "backend", "named"),
    [
        ("ddp", "gloo", "computing"),
        ("ddp", "muster", "computing"),
        ("data", "gloo", "data"),
        ("fsdp2", "gloo", "computing"),
        ("tensor parallel", "gloo", "computing"),
        ("tensor parallel", "muster", "computing"),
        ("in place", "gloo", "computing"),
        ("in place", "muster", "computing"),
    ],
)
def test_who_is_slow_is_named_and_nobody_else(
    kind: str, backend: str, named: str, pki: Pki, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    env = {**pki.env(), "MS_WORKER_NUM": str(RANKS), "MS_NODE_TIMEOUT": "20"}
    with scheduler(**env) as sched:
        launch = [sys.executable, "-m", "muster", "run", "-n", str(RANKS), "--program", "torch", "--"]
        command = [sys.executable, PROGRAM, kind, backend, str(SLOW)]
        job = subprocess.Popen(
            [*launch, *command],
            cwd=tmp_path,
            env=environment(**env, MS_SCHED_PORT=str(sched.port)),
        )
        try:
            line = sched.await_log("holds the others up: ")
            shown = json.loads(sched.command("status", "--json", **pki.env()).stdout)
        finally:
            job.terminate()
            job.wait(60)
        assert ("waits for data" if named == "data" else "computes") in line
        stragglers = [each for each in shown["stragglers"] if each["kind"] != "one-off"]
        assert [(each["rank"], each["kind"]) for each in stragglers] == [(SLOW, named)]
        assert stragglers[0]["slowdown"] > 1.2
        assert sched.log.count("up: it") == 1
