"""The shape of the code: one import name, layers without circles."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path

import grimp
import pytest

import muster
from muster.communicators import BACKENDS
from tests.scheduler.processes import ROOT, environment

MUSTER = ROOT / "muster"


def modules() -> list[Path]:
    """Every module of Muster's packages that is not generated."""
    return [path for path in MUSTER.rglob("*.py") if path.parent not in (MUSTER, MUSTER / "wire" / "v1")]


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A module's tree, which several tests look through."""
    return ast.parse(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def without_collector() -> Iterator[None]:
    """Keeps the collector from walking 300 MB of trees, here and in what this process tests later."""
    gc.disable()
    yield
    parsed.cache_clear()
    gc.enable()


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
    for name in ("worker.py", "scheduler.py", "bench.py", "wire.py"):
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
    for name in ("worker.py", "certs.py", "bench.py", "wire.py"):
        (tmp_path / name).write_text("OWN = True\n")
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "packaging")])},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.stdout == f"muster {muster.__version__}\n", done.stderr


# ---------------------------------------------------------------- rooms and layers


@pytest.mark.parametrize("name", ["RefusalCode", "is_loopback", "canonical_address", "_check_role"])
def test_what_both_sides_need_is_defined_once(name: str) -> None:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    where = [
        path
        for path in modules()
        if name in path.read_text()
        for node in ast.walk(parsed(path))
        if isinstance(node, kinds) and node.name == name
    ]
    assert [path.parent.name for path in where] == ["wire"]


def places_of_classes(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Where each class is defined, nested ones too: by name, its files and lines."""
    places: dict[str, list[str]] = {}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    return places


def named_twice(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """The names that several classes have, and where these are defined."""
    return {name: places for name, places in places_of_classes(sources).items() if len(places) > 1}


def test_a_name_that_two_classes_have_is_found_with_both_places() -> None:
    one, other = "class Job: ...\nclass _Only: ...", "def f():\n    class Job: ..."
    assert named_twice({"a.py": one, "b.py": other}) == {"Job": ["a.py:1", "b.py:2"]}


def test_each_class_name_stands_for_one_thing() -> None:
    """In generated code, too; not in its stubs for types, which name messages as the product does."""
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in MUSTER.rglob("*.py")}
    assert named_twice(sources) == {}


def circles(arrows: Mapping[str, set[str]]) -> set[str]:
    """What is in a circle of the arrows, or on the way from one to another."""
    remaining = {name: arrows[name] - {name} for name in arrows}
    while ends := {
        name
        for name, imported in remaining.items()
        if not imported & remaining.keys() or all(name not in others for others in remaining.values())
    }:
        for name in ends:
            del remaining[name]
    return set(remaining)


def rooms_in_circles(imports: Iterable[tuple[str, str]]) -> set[str]:
    """The folders and modules in a circle with others of their folder, by names as in ``muster.worker``.

    An import belongs to the deepest folder that both of its modules lie in; there it is an arrow between what
    lies in that folder directly, a subfolder standing for all that is in it. A folder's own ``__init__`` is
    one of its modules.
    """
    levels: dict[str, dict[str, set[str]]] = {}
    for importer, imported in imports:
        ways = importer.split("."), imported.split(".")
        same = len(list(takewhile(lambda names: names[0] == names[1], zip(*ways, strict=False))))
        level = levels.setdefault(".".join(ways[0][:same]), {})
        start, end = (".".join(way[: same + 1]) if way[same:] else "__init__" for way in ways)
        level.setdefault(end, set())
        level.setdefault(start, set()).add(end)
    return {name for arrows in levels.values() for name in circles(arrows)}


@pytest.mark.parametrize(
    ("imports", "found"),
    [
        ([("m.a.x", "m.b.y"), ("m.b.y", "m.c")], set()),
        ([("m.a.x", "m.b.y"), ("m.b.z", "m.a.w")], {"m.a", "m.b"}),
        ([("m.a.x", "m.b.y"), ("m.b.z", "m.c"), ("m.c", "m.a.w")], {"m.a", "m.b", "m.c"}),
        ([("m.a.r.x", "m.a.s.y"), ("m.a.s.z", "m.a.r.w"), ("m.b", "m.a.r.x")], {"m.a.r", "m.a.s"}),
        ([("m.a", "m.a.x"), ("m.a.y", "m.a")], set()),
        ([("m.a", "m.a.x"), ("m.a.x", "m.a")], {"__init__", "m.a.x"}),
    ],
)
def test_circles_of_rooms_are_found(imports: list[tuple[str, str]], found: set[str]) -> None:
    assert rooms_in_circles(imports) == found


def test_no_two_rooms_import_each_other() -> None:
    """Nor do more of them in a circle; imports within functions and those for types alone count, too."""
    graph = grimp.build_graph("muster", cache_dir=None)
    imports = [
        (importer, imported)
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
    ]
    assert {len(way.split(".")) for pair in imports for way in pair} >= {2, 3, 4}
    assert not rooms_in_circles(imports)


NAMED_IN_SETTINGS = {
    "muster/bench/allreduce/command.py": "what to measure is an option",
    "muster/bench/recovery/command.py": "what to measure is an option",
    "muster/launch/report.py": "words: what travels encrypted",
}


def test_a_backend_is_not_asked_for_its_name() -> None:
    """What one can do is a property of its communicators, so that another one can have it, too."""
    names = set(BACKENDS)

    def asked(node: ast.expr) -> bool:
        parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
        return any(isinstance(part, ast.Constant) and part.value in names for part in parts)

    asking = set()
    for path in (*modules(), ROOT / "train.py", *(ROOT / "examples").glob("*.py")):
        for node in ast.walk(parsed(path)):
            compared = isinstance(node, ast.Compare) and any(map(asked, [node.left, *node.comparators]))
            matched = isinstance(node, ast.MatchValue) and asked(node.value)
            if compared or matched:
                asking.add(f"{path.relative_to(ROOT)}")
    assert asking <= NAMED_IN_SETTINGS.keys()


FOREIGN = ("'torch", "'cupy", "'numpy", "loaded_library", "library", "name")
"""What begins the argument of import_module where it loads somebody else's library."""


def test_threads_are_started_where_their_failure_is_told() -> None:
    """A thread that cannot be started leaves a process half alive: start_thread ends it in a sentence."""
    texts = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in (ROOT / "muster").rglob("*.py")
        if "bench" not in path.parts
    }
    starting = re.compile(r"threading\.(Thread|Timer)\(|ThreadPoolExecutor\(")
    looping = re.compile(r"asyncio\.run\(|new_event_loop\(")
    found = {name for name, text in texts.items() if starting.search(text)}
    its_last_words = {"muster/scheduler/serve/server.py"}
    assert found == {"muster/wire/threads.py"} | its_last_words
    loops = [name for name, text in texts.items() if looping.search(text)]
    assert len(loops) >= 4
    assert [name for name in loops if ".set_default_executor(Pool(" not in texts[name]] == []


def test_nothing_hides_an_import() -> None:
    """Modules are imported by statements; only what loads by name does it by name."""
    by_name = {
        "muster/bench/__main__.py": "a benchmark when it is named",
        "muster/bench/snapshots/nursery.py": "the job whose workers it forks",
        "muster/launch/fork.py": "before a fork",
    }
    by_name["muster/parallel/command.py"] = "the user's module, which the command line names"
    by_name["muster/training/writer.py"] = "what an order is written by: torch only where it is needed"
    by_name["muster/scheduler/__init__.py"] = by_name["muster/certs/__init__.py"] = "the link at the top"
    hiding = set()
    for path in modules():
        tree = parsed(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
                argument = ast.unparse(node.args[0])
                if not argument.startswith(FOREIGN):
                    hiding.add(str(path.relative_to(ROOT)))
        if any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
            hiding.add(str(path.relative_to(ROOT)))
    assert hiding <= by_name.keys()


# ---------------------------------------------------------------- tests speak to behaviour


def defined(tree: ast.AST) -> set[str]:
    """Private names that a module defines, and attributes that it sets."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in found if name[0] == "_" and name[:2] != "__" and len(name) > 2}


def reached_for(tree: ast.AST) -> set[str]:
    """Private names of others that a module reads, sets, imports or names to monkeypatch."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
            if not own and not (isinstance(owner, ast.Call) and ast.unparse(owner.func) == "super"):
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("muster"):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(BY_NAME):
            texts = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            found |= {text.rpartition(".")[2] for text in texts if isinstance(text, str)}
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).startswith("vars("):
            found |= {str(node.slice.value)} if isinstance(node.slice, ast.Constant) else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            with contextlib.suppress(SyntaxError, ValueError):  # a script that a test runs
                found |= reached_for(ast.parse(node.value)) - defined(ast.parse(node.value))
    return {name for name in found if name[0] == "_" and name[:2] != "__"}


BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "patch", "patch.object", "attrgetter")
"""What reaches an attribute whose name is a text."""

NOT_OURS = {"_sleep", "_foreach_copy_", "_pytree", "_dynamo", "_exit", "_state"}
"""Names of torch, gRPC and os that the product happens to have, too."""


def test_no_test_reaches_for_a_private_name_of_the_product() -> None:
    private = set().union(*(defined(parsed(path)) for path in modules())) - NOT_OURS
    reached = {}
    for path in (ROOT / "tests").rglob("*.py"):
        tree = parsed(path)
        names = (reached_for(tree) & private) - defined(tree)
        if names:
            reached[str(path.relative_to(ROOT))] = sorted(names)
    assert not reached
