"""``muster run -- python train.py`` with JAX's own jax.distributed, in an environment that has JAX.

`make test-jax` runs it with a Python that JAX 0.12, the first with mutual TLS, needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.certs.pki.identity import Identity
from tests.scheduler.processes import ROOT, Pki, environment

jax = pytest.importorskip("jax")

HAS_TLS = hasattr(jax.config, "jax_mtls_cert_file")
SCRIPT = str(ROOT / "tests" / "end_to_end" / "jax_program.py")


def write_strangers(pki: Pki, directory: Path) -> None:
    """Certificates by which to knock at the coordination service."""
    pki.issue("other-job", Identity("other", "worker"))
    pki.issue("longer-job", Identity("default2", "worker"))
    foreign = Pki.make(directory / "foreign")
    made = {name: pki.credentials(name) for name in ("client", "other-job", "longer-job")}
    for name, each in {**made, "foreign": foreign.credentials("client")}.items():
        (directory / f"{name}.pem").write_bytes(each.key_pem + each.cert_chain_pem)


def run(directory: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "muster", "run", "-n", "2", "--scheduler", "--tail", "all", "--"]
    return subprocess.run(
        [*launch, sys.executable, SCRIPT, "--steps", "3"],
        cwd=directory,
        env=environment(**env, MS_TOPO_TIMEOUT="60", JAX_PLATFORMS="cpu", TEST_STRANGERS=str(directory)),
        capture_output=True,
        text=True,
        timeout=float(os.environ.get("MS_TEST_WAIT_S", "110")),
        check=False,
    )


@pytest.mark.skipif(not HAS_TLS, reason="needs JAX 0.12 or later")
def test_the_coordination_service_speaks_mutual_tls_and_ids_are_ranks(tmp_path: Path) -> None:
    pki = Pki.make(tmp_path / "keys")
    write_strangers(pki, tmp_path)
    done = run(tmp_path, pki.env())
    said = sorted(line.partition("said ")[2] for line in done.stdout.splitlines() if "said " in line)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank} is process {rank} of 2, sum 3" in said
    assert said.count("devices 2") == said.count("argv ['--steps', '3']") == 2
    assert all(line.startswith("key /proc/self/fd/") for line in said if line.startswith("key"))
    assert said.count("prefix muster://default/") == 2
    assert "plaintext b'' stranger False" in said
    assert [line for line in said if "is let in" in line] == [
        "client is let in: True",
        "foreign is let in: False",
        "longer-job is let in: False",
        "other-job is let in: False",
    ]


@pytest.mark.skipif(HAS_TLS, reason="needs a JAX before 0.12")
def test_a_jax_without_tls_is_refused_unless_plaintext_is_allowed(tmp_path: Path) -> None:
    pki = Pki.make(tmp_path / "keys")
    refused = run(tmp_path, pki.env())
    assert refused.returncode != 0
    assert "cannot encrypt its coordination service" in refused.stdout + refused.stderr
    allowed = run(tmp_path, {**pki.env(), "MS_ALLOW_INSECURE": "1"})
    assert allowed.returncode == 0, allowed.stdout + allowed.stderr
    assert "rank 1 is process 1 of 2, sum 3" in allowed.stdout
