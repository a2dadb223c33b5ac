"""Decides which commands are torch or JAX programs that know nothing of Muster, and gives those an agent.

The imports of the command's script and of the modules beside it decide. They are read, never executed.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster.launch import fork as launch_fork
from muster.wire.files import read_regular
from muster.worker.program_environment import JAX_PROGRAM

TORCH = frozenset(
    [
        "torch",
        "accelerate",
        "colossalai",
        "composer",
        "deepspeed",
        "lightning",
        "pytorch_lightning",
        "torchtitan",
        "transformers",
        "trl",
    ]
)
JAX = frozenset(("jax", "flax", "maxtext", "optax"))
MUSTER = frozenset(("muster", "worker"))
REBUILDS = "on_new_generation"
KEEPS_ALIVE = "keep_alive"
"""Functions of :mod:`muster.torch` whose callers get an agent although they import Muster."""

SHELLS = frozenset(("bash", "dash", "ksh", "sh", "zsh"))
LAUNCHERS = frozenset(("accelerate", "deepspeed"))
TORCHRUN = frozenset(("torchrun", "torch.distributed.run", "torch.distributed.launch"))
PYTHON_FLAGS = ("-u", "-B", "-E", "-I", "-O", "-OO", "-P", "-s", "-S")

AGENT = "muster.programs.agent"
"""The module of the agent."""

MOST_FILES = 200
MOST_BYTES = 2 << 20
"""Limits for reading one program; the imports that matter are near its beginning."""


def with_agent(
    command: Sequence[str], kind: str, path: str | None = None, *, in_place: bool = False
) -> tuple[str, ...]:
    """Returns the command that a worker runs: a torch or JAX program gets an agent.

    Args:
        command: the user's command.
        kind: "muster", "torch", "jax", or "auto": looked up in the script.
        path: where commands are searched, in the form of PATH; None: this process's PATH.
        in_place: whether the program stays alive when other ranks are lost; it is then a torch program
            although it imports Muster.
    """
    if kind == "auto":
        kind = program_kind(command, path)
        if in_place and kind == "muster" and not _is_torchrun(command):
            kind = "torch"
    if kind == "muster":
        return tuple(command)
    if kind == "jax":
        command = _with_jax(command)
    return (sys.executable, *launch_fork.own_flags(), "-m", AGENT, "--", *command)


def program_kind(command: Sequence[str], path: str | None = None) -> str:
    """Classifies a command by what its Python script imports: "torch", "jax", or "muster" for all else.

    The imports of modules and packages beside the script count, too, and so do those of the package that an
    installed command runs. If all these import no known library, a script among the arguments decides,
    because the command may run it. Of a shell script, the lines that start Python count. torchrun is
    "muster", because it gives its workers their ranks itself. For all other cases there is ``--program``.
    """
    name = Path(command[0]).name
    if name in LAUNCHERS:
        return "torch"
    if name in SHELLS and len(command) > 1:
        return "torch" if _starts_torch_program(Path(command[1])) else "muster"
    if _is_torchrun(command):
        return "muster"
    found = _script_in(command)
    if found is not None:
        script, at = found
        if not _is_file(script):
            return "muster"  # Python will report the missing file itself
        root = script.resolve().parent if at >= 0 else Path.cwd()  # where Python searches first
        rest = command[at + 1 :] if at >= 0 else ()
        return _kind(_Imports(root).of(script)) or _kind_of_arguments(rest, beside=root) or "muster"
    if name.startswith("python"):
        return "muster"
    installed = _python_command(command[0], path)
    known = _kind(_imported_by_command(installed)) if installed is not None else ""
    return known or _kind_of_arguments(command[1:]) or "muster"


def _is_torchrun(command: Sequence[str]) -> bool:
    return any(Path(word).name in TORCHRUN for word in command)


def script_of(command: Sequence[str]) -> Path | None:
    """Returns the script that a Python command runs, as it names it; None if there is no such file."""
    found = _script_in(command)
    return None if found is None else found[0]


def _script_in(command: Sequence[str]) -> tuple[Path, int] | None:
    """Returns the script that a Python command runs, and the index of the word that names it.

    The index is -1 if the command runs a module.
    """
    if not Path(command[0]).name.startswith("python") or len(command) < 2:
        return (Path(command[0]), 0) if command[0].endswith(".py") else None
    at = _first_argument(command)
    words = list(command[at:])
    if words[:1] == ["-m"] and len(words) > 1:
        module = Path(*words[1].split("."))
        files = [module.with_suffix(".py"), module / "__main__.py"]
        return next(((path, -1) for path in files if _is_file(path)), None)
    return (Path(words[0]), at) if words and words[0].endswith(".py") else None


def _first_argument(command: Sequence[str]) -> int:
    """Returns the index of the first word of a Python command that is not one of Python's flags."""
    at = 1
    while at < len(command) and command[at] in PYTHON_FLAGS:
        at += 1
    return at


def _with_jax(command: Sequence[str]) -> tuple[str, ...]:
    """Changes a Python command so that ``jax.distributed.initialize()`` finds the job."""
    if not Path(command[0]).name.startswith("python"):
        return tuple(command)
    at = _first_argument(command)
    return (*command[:at], "-m", JAX_PROGRAM, *command[at:])


_WORDS = re.compile(r"[\s'\";&|()]+")


def _starts_torch_program(path: Path) -> bool:
    """Whether a shell script's words name a torch program."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    for line in text.replace("\\\n", " ").splitlines():
        words = [word for word in _WORDS.split(line.partition(" #")[0]) if word]
        starts = (
            n for n, word in enumerate(words) if Path(word).name.startswith("python") or word in LAUNCHERS
        )
        start = next(starts, None)
        if start is not None and program_kind(words[start:]) == "torch":
            return True
    return False


def _is_rebuilding(node: ast.Attribute) -> bool:
    """Whether this names such a function; for ``keep_alive``, a common name, the module must match, too."""
    module = node.value
    named_torch = (
        isinstance(module, ast.Attribute)
        and module.attr == "torch"
        and isinstance(module.value, ast.Name)
        and module.value.id in MUSTER
    )
    return node.attr == REBUILDS or (node.attr == KEEPS_ALIVE and named_torch)


def _kind(names: set[str]) -> str:
    """Returns the kind of program with these imports; empty: none of them is known."""
    if REBUILDS in names:
        return "torch"
    if names & MUSTER:
        return "muster"
    return "torch" if names & TORCH else "jax" if names & JAX else ""


def _kind_of_arguments(words: Sequence[str], beside: Path | None = None) -> str:
    """Returns the kind of the first script among arguments that imports a known library; "": none does."""
    for word in words:
        if not word.endswith(".py"):
            continue
        for script in (Path(word), *([beside / word] if beside is not None else [])):
            if _is_file(script):
                found = _kind(_Imports(script.resolve().parent).of(script))
                if found:
                    return found
                break
    return ""


# ---------------------------------------------------------------- installed commands


def _python_command(word: str, path: str | None) -> Path | None:
    """Returns the file of an installed command if it is a Python script, as pip makes them; else None."""
    found = shutil.which(word, path=path)
    if found is None:
        return None
    try:
        with Path(found).open("rb") as file:
            first = file.readline(512)
            # pip writes this if the interpreter's path is too long for the kernel.
            second = file.readline(512) if first.startswith(b"#!/bin/sh") else b""
    except OSError:
        return None
    python = first.startswith(b"#!") and b"python" in first + second
    return Path(found) if python else None


def _imported_by_command(script: Path) -> set[str]:
    """Returns the imports of an installed command; includes those of its package if it names only one."""
    names = _Imports(script.parent).names_in(script)
    others = names - MUSTER - TORCH - JAX - sys.stdlib_module_names
    place = _place_of_package(*others, script=script) if len(others) == 1 else None
    return names if place is None else _Imports(script.parent, dict.fromkeys(others, place)).of(script)


def _place_of_package(name: str, *, script: Path) -> Path | None:
    """Finds the directory of an installed package, with this Python or with that of the command."""
    for site in sorted(script.resolve().parent.parent.glob("lib/python3*/site-packages")):
        if _is_file(site / name / "__init__.py") or _is_file(site / f"{name}.py"):
            return site
    try:
        spec = importlib.util.find_spec(name)  # a name without a dot: nothing is imported
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    file = Path(spec.origin)
    return file.parent.parent if spec.submodule_search_locations is not None else file.parent


# ---------------------------------------------------------------- imports


@dataclass
class _Imports:
    """Collects what a script and the modules beside it import.

    Attributes:
        root: the directory that Python searches first.
    """

    root: Path
    tops: Mapping[str, Path] = field(default_factory=dict)
    """Packages that count like the script although they are elsewhere, with their directories."""

    _todo: deque[Path] = field(default_factory=deque)
    _seen: set[Path] = field(default_factory=set)
    _bytes: int = 0

    def of(self, script: Path) -> set[str]:
        """Returns the names of all imported packages that are not beside the script."""
        self._todo.append(script)
        names: set[str] = set()
        while self._todo:
            names |= self.names_in(self._todo.popleft())
            if REBUILDS in names:
                break
        return names

    def names_in(self, path: Path) -> set[str]:
        """Returns the names that a file imports from elsewhere; queues the files next to it for later."""
        file = path.resolve()
        left = MOST_BYTES - self._bytes
        if file in self._seen or len(self._seen) >= MOST_FILES or left <= 0:
            return set()
        self._seen.add(file)
        try:
            text = read_regular(file, left)
            self._bytes += len(text)
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return set()  # Python will report the error itself
        names: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    names |= self._take(alias.name.split("."), ())
            elif isinstance(node, ast.ImportFrom):
                names |= self._take_from(node, file)
            elif isinstance(node, ast.Attribute) and _is_rebuilding(node):
                names.add(REBUILDS)
        return names

    def _take_from(self, node: ast.ImportFrom, file: Path) -> set[str]:
        parts = node.module.split(".") if node.module else []
        names = [alias.name for alias in node.names]
        if node.level:
            if node.level <= len(file.parents):
                self._todo.extend(_files_of(file.parents[node.level - 1], parts, names))
            return set()
        rebuilds = REBUILDS in names or (KEEPS_ALIVE in names and parts[0] in MUSTER)
        return self._take(parts, names) | ({REBUILDS} if rebuilds else set())

    def _take(self, parts: Sequence[str], names: Sequence[str]) -> set[str]:
        """Follows an import beside the script; returns the name of any other package."""
        if parts[0] not in MUSTER:
            found = list(_files_of(self.tops.get(parts[0], self.root), parts, names))
            if found:
                self._todo.extend(found)
                return set()
        return {parts[0]}


def _files_of(root: Path, parts: Sequence[str], names: Sequence[str] = ()) -> Iterator[Path]:
    """Yields the files that run if ``parts`` is imported, and its submodules among ``names``."""
    place = root
    for part in parts:
        if _is_file(place / f"{part}.py") and not _is_file(place / part / "__init__.py"):
            yield place / f"{part}.py"
            return
        place /= part
        if _is_file(place / "__init__.py"):
            yield place / "__init__.py"
    for name in names:
        if _is_file(place / f"{name}.py"):
            yield place / f"{name}.py"
        elif _is_file(place / name / "__init__.py"):
            yield place / name / "__init__.py"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # for example, the name is too long
        return False
