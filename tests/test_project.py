"""The rules of the repository itself: generated code, import contracts, types, style, documents."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from muster.communicators import BACKENDS
from muster.launch import options as launch_options
from muster.wire.variables import INTERNAL, TABLE

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
PROTOS = ("etcd", "rendezvous", "store", "watch")
STUBS = tuple(
    f"muster/wire/v1/{proto}_{name}" for proto in PROTOS for name in ("pb2.py", "pb2.pyi", "pb2_grpc.py")
)
DOCUMENTS = (
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "deploy/README.md"),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
)
OF_USERS = {"worker.py"}
"""What documents name as a file of the reader's own."""


def tool(*command: str) -> None:
    """Runs a development tool over the repository; its complaints are the failure's text."""
    run = subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_stubs_are_those_of_the_proto_files(tmp_path: Path) -> None:
    tool(
        *("python", "-m", "grpc_tools.protoc", "-I", "proto", f"--python_out={tmp_path}"),
        *(
            f"--pyi_out={tmp_path}",
            f"--grpc_python_out={tmp_path}",
            *(f"proto/muster/wire/v1/{proto}.proto" for proto in PROTOS),
        ),
    )
    for stub in STUBS:
        assert (tmp_path / stub).read_text() == (ROOT / stub).read_text(), f"{stub} is stale: make proto"


def test_packages_import_only_what_they_may() -> None:
    tool("lint-imports", "--no-cache")


@pytest.mark.system  # without a cache it takes a minute of a core; `make lint` does it too
@pytest.mark.timeout(500)
def test_types() -> None:
    tool("mypy")


def test_style() -> None:
    tool("ruff", "check", ".")
    tool("ruff", "format", "--check", ".")


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
        other = (ROOT / name).parent / path if path else ROOT / name
        assert other.exists(), f"{name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", other.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{name} links to {target}"


def test_code_of_the_site_fits_a_page_of_1280_pixels() -> None:
    """docs/_static/width.css gives it 118 characters; what is longer has to be scrolled."""
    long = [
        f"{page.name}: {line}"
        for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "deploy" / "README.md"]
        for block in re.findall(r"^```(?!\{)\w*\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
        if len(line) > 118
    ]
    assert long == []


def test_files_that_documents_name_exist() -> None:
    files = [each.relative_to(ROOT).as_posix() for each in ROOT.glob("*/**/*.*") if "." not in each.parts[0]]
    named = re.compile(r"`((?:[\w.]+/)*\w+\.(?:py|sh|nft|proto|md))`")
    for name in (each for each in DOCUMENTS if each != "CHANGELOG.md"):
        for path in named.findall((ROOT / name).read_text()):
            exists = (ROOT / path).exists() or any(each.endswith(f"/{path}") for each in files)
            assert exists or path in OF_USERS, f"{name} names {path}"


def test_public_names_are_told_as_muster_has_them() -> None:
    """A remedy or example that says ``worker.init()`` leads nowhere: ``import worker`` is refused."""
    names = "|".join((ROOT / "tests/public_api.txt").read_text().split())
    gone = re.compile(rf"(?<![\w./])worker\.(?:{names})\b")
    for path in (*(ROOT / "muster").rglob("*.py"), *(ROOT / name for name in DOCUMENTS)):
        found = gone.search(path.read_text())
        assert found is None, f"{path}: {found}"


def launches() -> list[str]:
    """Every launch in the documents and of the example, continued lines joined."""
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
    assert options.command[0] in ("python", "train.py", "muster")


@pytest.mark.parametrize("name", ["settings", "troubleshooting"])
def test_a_page_that_is_made_from_the_code_is_that_of_todays(name: str) -> None:
    made = subprocess.run(
        [sys.executable, "-c", f"import {name}_page as it; print(it.page(), end='')"],
        cwd=ROOT / "docs",
        capture_output=True,
        text=True,
        check=True,
    )
    page = (ROOT / "docs" / f"{name}.md").read_text()
    assert made.stdout == page, f"docs/{name}.md is stale: python docs/{name}_page.py"


def test_each_remedy_of_an_error_stands_in_troubleshooting() -> None:
    """By its first words that are not computed, so that the page's own reading of the code is not trusted."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text().replace("\\", "")
    said = re.compile(r"remedy=\(?\s*(?:\w+ if .*)?f?\"([^\"{\\\\]{12,}?)[\"{]")
    rooms = [path for path in (ROOT / "muster").rglob("*.py") if not {"bench", "example"} & set(path.parts)]
    remedies = {found for path in rooms for found in said.findall(path.read_text())}
    assert len(remedies) > 150
    assert [each for each in sorted(remedies) if " ".join(each.split()) not in page] == []


def test_every_variable_that_the_code_names_is_in_the_table() -> None:
    named = re.compile(r"[\"'{ ](MS_[A-Z][A-Z_]*|RANK_TABLE_FILE|DEVICE_ID|DATA_PATH)\b")
    values = {"MS_SCHED", "MS_WORKER", "MS_PSERVER"}
    for path in (ROOT / "muster").rglob("*.py"):
        unknown = set(named.findall(path.read_text())) - TABLE.keys() - INTERNAL - values
        assert not unknown, f"{path}: {unknown}"


def test_the_backends_of_the_table_are_those_that_there_are() -> None:
    assert TABLE["MS_BACKEND"].choices == tuple(BACKENDS)


def test_every_row_of_the_table_is_a_variable_that_is_read() -> None:
    sources = (ROOT / "muster").rglob("*.py")
    code = "\n".join(path.read_text() for path in sources if path.name != "variables.py")
    assert not {name for name in TABLE if f'"{name.removesuffix("_FILE")}' not in code}
