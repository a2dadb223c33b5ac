"""The shape of the code: one import name, rooms that stay small, layers without circles."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import grimp
import pytest

import muster
from tests.scheduler.processes import ROOT, environment

PACKAGES = ("scheduler", "worker", "certs", "rendezvous", "bench")


def modules() -> list[Path]:
    """Every module of the packages that is not generated."""
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return [path for path in found if path.parent.name != "v1"]


# ---------------------------------------------------------------- one name


def test_the_public_api_is_the_one_that_is_written_down() -> None:
    assert sorted(muster.__all__) == (ROOT / "tests" / "public_api.txt").read_text().split()


def test_every_public_name_is_typed_as_well_as_loaded_when_used() -> None:
    tree = ast.parse((ROOT / "muster" / "__init__.py").read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {
        alias.asname: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    lazy = dict(vars(muster)["_MODULE_OF"])
    assert {name: module for name, (module, _) in typed.items() if name != "errors"} == lazy


def test_an_old_script_learns_the_name(tmp_path: Path) -> None:
    script = tmp_path / "old.py"
    script.write_text("import worker\nworker.init()\n")
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 1
    assert "write `import muster` for `import worker`" in run.stderr


OWN = """
import numpy as np
import worker, certs, bench
import muster

assert worker.OWN and certs.OWN and bench.OWN
with muster.init() as session:
    total = muster.all_reduce(np.ones(1))
    print("sum", int(total[0]), session.world_size)
"""


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_modules_of_a_users_own_beside_the_script_change_nothing(tmp_path: Path, start: str) -> None:
    for name in ("worker.py", "scheduler.py", "bench.py", "rendezvous.py"):
        (tmp_path / name).write_text("OWN = True\n")
    (tmp_path / "certs").mkdir()
    (tmp_path / "certs" / "__init__.py").write_text("OWN = True\n")
    (tmp_path / "train.py").write_text(OWN)
    launch = [
        sys.executable,
        "-m",
        "muster",
        "run",
        "-n",
        "2",
        "--scheduler",
        "--start",
        start,
        "--tail",
        "all",
    ]
    done = subprocess.run(
        [*launch, "--", sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment(MS_BACKEND="tcp", MS_TOPO_TIMEOUT="60", PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("sum 2 2") == 2, done.stdout


@pytest.mark.parametrize("module", ["muster.scheduler", "scheduler"])
def test_the_scheduler_starts_beside_modules_of_a_users_own(tmp_path: Path, module: str) -> None:
    for name in ("worker.py", "certs.py", "bench.py", "rendezvous.py"):
        (tmp_path / name).write_text("OWN = True\n")
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "packaging")])},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == f"muster {muster.__version__}\n", done.stderr


def test_the_wheel_holds_muster_and_the_shim_and_nothing_else(tmp_path: Path) -> None:
    copy = tmp_path / "copy"  # what is built leaves files behind
    for name in ("muster", "packaging", *PACKAGES):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("results"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy2(ROOT / name, copy)
    build = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(copy))
    built = subprocess.run([sys.executable, *build], capture_output=True, text=True, check=False, timeout=110)
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"muster", "scheduler"}
    shim = sorted(name for name in names if name.startswith("scheduler/"))
    assert shim == ["scheduler/__init__.py", "scheduler/__main__.py"]
    assert "muster/py.typed" in names
    assert {f"muster/{package}/__init__.py" for package in PACKAGES} <= set(names)


# ---------------------------------------------------------------- rooms and layers


def test_rooms_are_small_enough_to_look_at() -> None:
    assert len(list((ROOT / "worker").glob("*.py"))) <= 10
    rooms = {path.parent for path in modules()}
    crowded = {
        str(room.relative_to(ROOT)): len([path for path in room.glob("*.py") if path.name[:2] != "__"])
        for room in rooms
    }
    assert not {room: count for room, count in crowded.items() if count > 14}


def test_no_module_is_a_fragment_without_a_reason() -> None:
    small = {
        str(path.relative_to(ROOT))
        for path in modules()
        if path.name not in ("__init__.py", "__main__.py") and len(path.read_text().splitlines()) < 40
    }
    assert small <= SMALL.keys()


SMALL: dict[str, str] = {
    "bench/start/formation_peer.py": "a script of its own, run by mpirun",
    "bench/start/formation_worker.py": "a script of its own, run by the launcher",
    "bench/recovery/digits.py": "a script of its own: train.py that notes its steps",
    "bench/scale/reader.py": "a process of its own",
    "bench/training/cifar10_files.py": "also what tests of the example write",
    "scheduler/serve/health.py": "gRPC's health service beside ours",
    "worker/control/compatibility.py": "each worker loads it, so it imports nothing",
    "worker/control/pace.py": "pure: the watcher has the thread and the clock",
    "worker/launch/last_words.py": "workers write what the launcher reads",
}


def test_no_circle_of_imports() -> None:
    """Imports within functions and those for types alone are counted, too."""
    graph = grimp.build_graph("muster", cache_dir=None)
    remaining = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    while free := {module for module, imported in remaining.items() if not imported & remaining.keys()}:
        for module in free:
            del remaining[module]
    # What is left imports something that is left: take away what nothing left imports.
    while ends := remaining.keys() - set().union(*remaining.values()):
        for module in ends:
            del remaining[module]
    assert not sorted(remaining)


FOREIGN = ("'torch", "'cupy", "'numpy", "loaded_library", "library", "name")
"""What begins the argument of import_module where it loads somebody else's library."""


def test_nothing_hides_an_import() -> None:
    """Modules are imported by statements; only what loads by name does it by name."""
    by_name = {"bench/__main__.py": "a benchmark when it is named", "worker/launch/fork.py": "before a fork"}
    by_name["worker/parallel/command.py"] = "the user's module, which the command line names"
    hiding = set()
    for path in modules():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
                argument = ast.unparse(node.args[0])
                if not argument.startswith(
                    ("'torch", "'cupy", "'numpy", "'cupy' if", "loaded_library", "library", "name")
                ):
                    hiding.add(str(path.relative_to(ROOT)))
        if any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
            hiding.add(str(path.relative_to(ROOT)))
    assert hiding <= by_name.keys()
