"""What ``make`` runs in environments of their own: each session is the target of its name.

``nox -l`` lists them, and ``nox -s test-torch -- -x -k capture`` gives one further options of pytest. The
environments stay in ``.nox``: ``.nox/torch/bin/python -m pytest tests/torch/test_step.py`` runs one file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.options.sessions = ["test-torch", "test-system"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.download_python = "never"

# The newest torch that the index has, and the oldest that Muster takes. The frameworks change with nothing of
# ours, so they and their torch are pinned.
TORCH = os.environ.get("TORCH", "torch")
OLDEST_TORCH = os.environ.get("OLDEST_TORCH", "torch==2.5.1")
FRAMEWORKS_TORCH = os.environ.get("TORCH", "torch==2.13.0")
FRAMEWORKS = ("accelerate==1.15.0", "transformers==5.23.0", "lightning==2.6.6", "deepspeed==0.19.8")
GPU_EXTRA = os.environ.get("CUDA", "")
TORCH_PYTHON = ".nox/torch/bin/python"

# What the lowest versions are tried on: the oldest Python, for which all of them have wheels.
OLDEST_PYTHON = 11
LOWEST_EXTRAS = ("otel", "train", "web")
# The extra spiffe asks for a newer grpcio.
WITH_SPIFFE = ("tests/certs/cli/test_show.py", "tests/certs/runtime/test_workload_api.py")

# JAX has mutual TLS since 0.12, which needs Python 3.12.
LEAST_FOR_JAX, NEWEST = 12, 20

PARALLEL = ("-n", "auto", "--maxprocesses", "8", "--dist", "loadfile")

# What needs torch, and no test that ``make test`` runs too.
WITH_TORCH = (
    "tests/bench/parallel",
    "tests/bench/test_torch_groups.py",
    "tests/bench/training",
    "tests/communicators/nccl/test_communicator.py",
    "tests/communicators/test_arithmetic.py",
    "tests/communicators/test_arrays.py",
    "tests/communicators/test_host_communicator.py",
    "tests/contracts/test_collectives.py::test_every_collective_takes_torchs_tensors_in_the_hosts_memory",
    "tests/contracts/test_collectives.py::test_gradients_travel_in_bfloat16",
    "tests/end_to_end/test_readme.py",
    "tests/examples/test_capture_on_cpu.py",
    "tests/examples/test_gpt2.py",
    "tests/examples/test_parallel.py",
    "tests/gpu",
    "tests/parallel",
    *(f"tests/programs/test_{each}.py" for each in ("against_gloo", "callbacks", "differential", "failures")),
    *(f"tests/programs/test_{each}.py" for each in ("fresh_reads", "plugin", "torchrun", "wire")),
    *(f"tests/programs/test_{each}.py" for each in ("lasting_group", "lasting_world", "rehearsal", "stacks")),
    "tests/programs/test_fewer_ranks.py",
    "tests/programs/test_step_times.py",
    "tests/torch",
    "tests/worker/gpu_health/test_torch_gpu.py",
    "tests/worker/test_old_meshes.py",
)
WITH_OLDEST_TORCH = tuple(
    each
    for each in WITH_TORCH
    if each.startswith(("tests/communicators", "tests/programs", "tests/torch", "tests/worker/test_old"))
)
PURE = (
    "tests/wire",
    "tests/certs",
    "tests/scheduler/core",
    "tests/scheduler/test_config.py",
    "tests/worker/test_config.py",
    "tests/worker/session/test_machine.py",
    "tests/worker/session/test_progress.py",
    "tests/worker/session/test_leave.py",
    "tests/worker/session/test_pace.py",
    "tests/launch/test_plan.py",
    "tests/launch/test_worker_counts.py",
    "tests/launch/test_parsing.py",
    "tests/launch/test_rank_table.py",
    "tests/training",
    "tests/test_train.py",
    "tests/simulation",
)


def python_of(least: int, first: str = "", newest: int = NEWEST) -> str | None:
    """The interpreter named first, if it runs; else the newest of 3.``least`` to 3.``newest`` that does."""
    names = (first, *(f"python3.{minor}" for minor in range(newest, least - 1, -1)))
    found = (name for name in names if name and shutil.which(name))
    return next(
        (name for name in found if not subprocess.run([name, "-c", ""], capture_output=True).returncode), None
    )


def lowest_versions() -> list[str]:
    """What Muster needs, each in the lowest version that ``pyproject.toml`` takes."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in LOWEST_EXTRAS for each in project["optional-dependencies"][extra]),
    ]
    return [each.partition(",")[0].replace(">=", "==") for each in wanted]


def install(session: nox.Session, *packages: str, extras: str = "dev") -> None:
    """Installs Muster with the extras, and the packages; nothing where that has been done."""
    wanted = ["-e", f".[{extras}]", *packages]
    done = Path(session.virtualenv.location, "installed")
    state = "\n".join([*wanted, Path("pyproject.toml").read_text()])
    if not done.exists() or done.read_text() != state:
        session.install(*wanted)
        done.write_text(state)


def install_for_tests(session: nox.Session, *packages: str) -> None:
    """Installs what tests need, on a machine with GPUs what those need besides."""
    install(session, *packages, extras=f"dev,{GPU_EXTRA}" if GPU_EXTRA else "dev")


def with_torch(session: nox.Session, *arguments: str) -> None:
    """Runs pytest in the environment of the session ``torch``."""
    session.run(TORCH_PYTHON, "-m", "pytest", "-q", *arguments, *session.posargs, external=True)


def marked(mark: str) -> list[str]:
    """The files that have such a mark: all others need not even be collected."""
    return sorted(
        str(path) for path in Path("tests").rglob("test_*.py") if f"mark.{mark}" in path.read_text()
    )


@nox.session
def torch(session: nox.Session) -> None:
    """Make the environment with torch, of which several sessions run their tests."""
    install_for_tests(session, TORCH)
    session.run("python", "-c", "import torch; print('With torch', torch.__version__)")


@nox.session(name="test-torch", venv_backend="none", requires=["torch"])
def test_torch(session: nox.Session) -> None:
    """Run the tests that need torch, on the CPU where there is no GPU."""
    with_torch(session, *PARALLEL, *WITH_TORCH)


@nox.session(name="test-system", venv_backend="none", requires=["torch"])
def test_system(session: nox.Session) -> None:
    """Run what takes minutes: three at a time, the slow first, and then one by one what needs the machine."""
    waits = ("-n", "3", "--dist", "loadfile", "-m", "system and not alone")
    failed: CommandFailed | None = None
    for arguments in ((*waits, *marked("system")), ("-m", "system and alone", *marked("alone"))):
        try:
            with_torch(session, *arguments)
        except CommandFailed as error:  # the others are run all the same
            failed = error
    if failed is not None:
        raise failed


@nox.session(name="test-torch-oldest")
def test_torch_oldest(session: nox.Session) -> None:
    """Run a short set of the tests that need torch on the oldest torch that Muster takes."""
    install_for_tests(session, OLDEST_TORCH)
    session.run("python", "-c", "import torch; print('With torch', torch.__version__)")
    session.run("python", "-m", "pytest", "-q", *PARALLEL, *WITH_OLDEST_TORCH, *session.posargs)


@nox.session(name="test-frameworks")
def test_frameworks(session: nox.Session) -> None:
    """Run Accelerate, the Trainer, Lightning and DeepSpeed on top of torch."""
    install_for_tests(session, FRAMEWORKS_TORCH, *FRAMEWORKS)
    session.run("python", "-m", "pytest", "-q", *session.posargs, "tests/frameworks")


@nox.session(name="test-jax", python=python_of(LEAST_FOR_JAX, os.environ.get("JAX_PYTHON", "")) or False)
def test_jax(session: nox.Session) -> None:
    """Run JAX's own jax.distributed; a machine without a Python that is new enough is no failure."""
    if not session.python:
        session.skip("JAX with mutual TLS needs Python 3.12 or later (JAX_PYTHON=...)")
    install(session, "jax>=0.12")
    session.run("python", "-m", "pytest", "-q", *session.posargs, "tests/end_to_end/test_jax.py")


@nox.session(name="test-newest", python=python_of(sys.version_info.minor + 1) or False)
def test_newest(session: nox.Session) -> None:
    """Run the pure unit tests on the newest Python found; one too new for what they need is no failure."""
    if not session.python:
        session.skip(f"no Python newer than {sys.version.split()[0]} is found")
    try:
        install(session)
    except CommandFailed:
        session.skip(f"what the tests need cannot be installed for {session.python}")
    session.run("python", "-m", "pytest", "-q", *PARALLEL, *session.posargs, *PURE)


@nox.session(name="test-lowest", python=python_of(OLDEST_PYTHON, newest=OLDEST_PYTHON) or False)
def test_lowest(session: nox.Session) -> None:
    """Run the pure unit tests, and train, with the lowest versions of what Muster needs."""
    if not session.python:
        session.skip(f"the lowest versions are tried on Python 3.{OLDEST_PYTHON}, which is not found")
    tools = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "PyYAML")
    install(session, *lowest_versions(), *tools, extras=",".join(LOWEST_EXTRAS))
    ignored = (f"--ignore={each}" for each in WITH_SPIFFE)
    session.run("python", "-m", "pytest", "-q", *PARALLEL, *ignored, *session.posargs, *PURE)
    session.run("python", "-m", "muster", "train", "-n", "2", "--epochs", "1")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site in build/docs; warnings are errors."""
    install(session, extras="docs")
    options = ("-q", "-E", "-W", "--keep-going", "-b", "html")
    session.run("python", "-m", "sphinx", *options, "docs", "build/docs")
    session.log("The site is build/docs/index.html")
