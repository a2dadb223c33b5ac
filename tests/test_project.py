"""The rules of the repository itself: generated code, import contracts, types, style, documents."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from muster.worker.launch import options as launch_options

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
STUBS = tuple(f"muster/rendezvous/v1/rendezvous_{name}" for name in ("pb2.py", "pb2.pyi", "pb2_grpc.py"))
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")


def tool(*command: str) -> None:
    """Runs a development tool over the repository; its complaints are the failure's text."""
    run = subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_stubs_are_those_of_the_proto_file(tmp_path: Path) -> None:
    tool(
        *("python", "-m", "grpc_tools.protoc", "-I", "proto", f"--python_out={tmp_path}"),
        *(
            f"--pyi_out={tmp_path}",
            f"--grpc_python_out={tmp_path}",
            "proto/muster/rendezvous/v1/rendezvous.proto",
        ),
    )
    for stub in STUBS:
        assert (tmp_path / stub).read_text() == (ROOT / stub).read_text(), f"{stub} is stale: make proto"


def test_packages_import_only_what_they_may() -> None:
    tool("lint-imports", "--no-cache")


def test_types() -> None:
    tool("mypy")


def test_style() -> None:
    tool("ruff", "check", ".")
    tool("ruff", "format", "--check", ".")


def test_the_main_job_can_be_read_in_one_sitting() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) <= 150


def test_importing_the_packages_loads_nothing_heavy() -> None:
    heavy = "{'grpc', 'numpy', 'cryptography', 'google.protobuf', 'torch', 'cupy', 'asyncio'}"
    code = f"import sys, muster, muster.scheduler, muster.certs; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# ---------------------------------------------------------------- documents


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_of_documents_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        other = (ROOT / path) if path else ROOT / name
        assert other.exists(), f"{name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", other.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{name} links to {target}"


def launches() -> list[str]:
    """Every launch in the the documents and of the example, continued lines joined."""
    names = (*DOCUMENTS, "examples/resnet50_cifar10.py")
    text = "\n".join((ROOT / name).read_text() for name in names).replace("\\\n", " ")
    lines = re.findall(
        r"^\s*(?:[A-Z_]+=\S+ )*(?:python -m )?muster ((?:run|check|ranktable) .*)$", text, re.MULTILINE
    )
    # The check takes the launcher's options, and its command is the check itself.
    lines = [
        f"{line[6:]} -- python" if line.startswith("check ") else line.removeprefix("run ") for line in lines
    ]
    return sorted({line for line in lines if not line.startswith(("ranktable", "--help"))})


def test_the_documents_show_launches() -> None:
    assert len(launches()) >= 4


@pytest.mark.parametrize("line", launches())
def test_the_options_of_documented_launches_exist(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(line, comments=True)
    for option, following in itertools.pairwise(arguments):
        if option in ("--config", "--password-file", "--hostfile"):
            Path(following).parent.mkdir(parents=True, exist_ok=True)
            Path(following).write_text("node1 slots=1\n")
    options = launch_options.parse(arguments)
    launch_options.request(options, {})
    assert options.command[0] in ("python", "train.py")


def test_every_variable_and_key_that_is_read_is_documented() -> None:
    readme = (ROOT / "README.md").read_text()
    files = ("scheduler/config.py", "worker/config.py", "certs/cli/commands.py")
    code = "\n".join((ROOT / name).read_text() for name in files)
    variables = {
        name.removesuffix("_") for name in re.findall(r'"(MS_[A-Z_]+|RANK_TABLE_FILE|DEVICE_ID)"', code)
    }
    undocumented = {name for name in variables - {"MS_SCHED", "MS_WORKER"} if f"`{name}`" not in readme}
    assert not undocumented
    from muster.certs.config import KEYS

    assert not {key for key in KEYS if f"`{key}`" not in readme}
