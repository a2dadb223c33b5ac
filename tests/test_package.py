"""The package in each form that it is started from: no file is imported under two names, none is missing.

The forms are a checkout, an editable install, a wheel made from the source archive, and the image.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from tests.scheduler.processes import ROOT, environment

MUSTER = ROOT / "muster"
MODULES = list(MUSTER.rglob("*.py"))

NOTE = """
import atexit, json, os, sys

def note():
    held = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path:
            held.setdefault(os.path.realpath(path), {})[id(module)] = name
    with open(os.environ["NOTED_IN"], "w") as out:
        json.dump({path: sorted(names.values()) for path, names in held.items()}, out)

atexit.register(note)
"""
"""Runs as sitecustomize: writes down, at the end, which file was imported as which modules."""


def build(hook: str, source: Path, into: Path) -> Path:
    """What setuptools makes of a source folder."""
    into.mkdir(parents=True, exist_ok=True)
    code = f"from setuptools import build_meta; build_meta.{hook}({str(into)!r})"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    [made] = into.iterdir()
    return made


def copied(into: Path) -> Path:
    """A copy of this checkout, as building leaves files behind."""
    shutil.copytree(
        ROOT, into, symlinks=True, ignore=lambda folder, names: {each for each in names if left_out(each)}
    )
    return into


def left_out(name: str) -> bool:
    kept = (".ci", ".gitignore")
    made = ("build", "dist", "muster-runs", "checkpoints", "device", "__pycache__")
    return (name[0] == "." and name not in kept) or name in made or name.endswith(".egg-info")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("checkout") / "copy")


@pytest.fixture(scope="module")
def source(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the source archive unpacks to."""
    directory = tmp_path_factory.mktemp("source")
    archive = build("build_sdist", checkout, directory / "made")
    with tarfile.open(archive) as packed:
        packed.extractall(directory, filter="data")
    return directory / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_wheel", source, tmp_path_factory.mktemp("wheel") / "made")


def installed(wheel: Path, directory: Path) -> Path:
    """A Python that has this wheel, and for the rest what runs the tests has; the wheel's scripts aside."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    python = directory / "bin" / "python"
    [packages] = directory.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "zz-others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture(scope="module")
def pythons(checkout: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("pythons")
    editable = build("build_editable", checkout, directory / "made")
    return {
        "checkout": Path(sys.executable),
        "editable": installed(editable, directory / "editable"),
        "wheel": installed(wheel, directory / "wheel"),
    }


Noted = dict[str, list[str]]
Started = Callable[..., tuple[int, str, Noted]]


@pytest.fixture
def started(tmp_path: Path) -> Started:
    """Runs a command and returns its code, its output and what each of Muster's files was imported as."""

    def start(
        *command: str | Path, cwd: Path, path: str = "", stop_at: str = "", **env: str
    ) -> tuple[int, str, Noted]:
        (tmp_path / "sitecustomize.py").write_text(NOTE)
        noted = tmp_path / "noted.json"
        every = environment(NOTED_IN=str(noted), **env)
        every["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tmp_path), path]))
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=cwd,
            env=every,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        said = ""
        try:
            while line := process.stdout.readline():
                said += line
                if stop_at and stop_at in line:
                    process.send_signal(signal.SIGTERM)
            code = process.wait(100)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            process.stdout.close()
        held: Noted = json.loads(noted.read_text())
        return code, said, {path: names for path, names in held.items() if "/muster/" in path}

    return start


def twice(held: Noted) -> Noted:
    assert held, "nothing of Muster's was imported"
    return {path: names for path, names in held.items() if len(names) > 1}


SERVE = {"MS_ROLE": "MS_SCHED", "MS_WORKER_NUM": "1", "MS_SCHED_HOST": "127.0.0.1"}


@pytest.mark.parametrize("form", ["checkout", "editable", "wheel"])
def test_a_scheduler_holds_no_file_under_two_names(
    form: str, started: Started, pythons: dict[str, Path], checkout: Path, tmp_path: Path
) -> None:
    cwd = checkout if form == "checkout" else tmp_path
    code, said, held = started(
        pythons[form], "-m", "scheduler", "--port", "0", cwd=cwd, stop_at="scheduler ready on", **SERVE
    )
    assert code == 128 + signal.SIGTERM, said
    assert not twice(held)
    assert any(path.endswith("/muster/scheduler/serve/sessions.py") for path in held)
    where = {str(Path(path).is_relative_to(checkout)) for path in held}
    assert where == {str(form != "wheel")}


@pytest.mark.parametrize("form", ["checkout", "editable", "wheel"])
def test_the_names_at_the_top_are_the_modules_of_muster(
    form: str, started: Started, pythons: dict[str, Path], checkout: Path, tmp_path: Path
) -> None:
    code = "import scheduler, muster.scheduler.config, muster.certs.pki.authority"
    if form == "checkout":
        code += ", certs; assert certs is muster.certs and scheduler is muster.scheduler"
    cwd = checkout if form == "checkout" else tmp_path
    exit_code, said, held = started(pythons[form], "-c", code, cwd=cwd)
    assert (exit_code, twice(held)) == (0, {}), said


def test_a_worker_is_imported_as_muster_only(checkout: Path, started: Started) -> None:
    code, said, held = started(sys.executable, "-c", "import worker", cwd=checkout)
    assert (code, held) == (1, {})
    assert "write `import muster` for `import worker`" in said


@pytest.mark.parametrize("command", [("-m", "pytest"), ("-P", "-m", "pytest")], ids=["python -m", "pytest"])
@pytest.mark.parametrize("folder", [".", "tests/wire"])
def test_tests_hold_no_file_under_two_names(
    folder: str, command: tuple[str, ...], checkout: Path, started: Started
) -> None:
    tests = checkout / "tests/wire/test_patience.py"
    options = ("-q", "-p", "no:cacheprovider", os.path.relpath(tests, checkout / folder))
    code, said, held = started(sys.executable, *command, *options, cwd=checkout / folder)
    assert (code, twice(held)) == (0, {}), said
    assert {Path(path).is_relative_to(checkout) for path in held} == {True}


def test_the_source_archive_holds_each_file_once_and_no_link(source: Path) -> None:
    held = {str(path.relative_to(source)) for path in source.rglob("*")}
    assert not [name for name in held if (source / name).is_symlink()]
    assert {str(path.relative_to(ROOT)) for path in (*MODULES, *(ROOT / "tests").rglob("*.py"))} <= held
    assert not {name.split("/")[0] for name in held} & {"scheduler", "worker", "certs"}


@pytest.mark.system
@pytest.mark.timeout(400)
def test_the_source_archive_tests_itself(source: Path) -> None:
    tests = ("tests/wire", "tests/test_house.py", "tests/test_project.py")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
        timeout=350,
    )
    assert ran.returncode == 0, ran.stdout


def contents(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_muster_and_the_shim_and_nothing_else(wheel: Path) -> None:
    names = contents(wheel)
    assert {name for name in names if not name.startswith("muster/")} == {
        "scheduler/__init__.py",
        "scheduler/__main__.py",
    }
    assert {name for name in names if name.endswith(".py") and name.startswith("muster/")} == {
        str(path.relative_to(ROOT)) for path in MODULES
    }
    assert {"muster/py.typed", "muster/web/assets/style.css"} <= names
    header = MUSTER / "communicators/nccl/sealed/muster_nccl.h"
    sealed = {str(path.relative_to(ROOT)) for path in header.parent.glob("*.[ch]")}
    assert str(header.relative_to(ROOT)) in sealed <= names
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_copies_all_that_the_wheel_is_made_of(
    target: str, checkout: Path, wheel: Path, tmp_path: Path
) -> None:
    lines = DockerfileParser(path=str(ROOT / "deploy/docker/Dockerfile")).structure
    image = tmp_path / "image"
    image.mkdir()
    begin = next(i for i, line in enumerate(lines) if line["value"].endswith(f" AS {target}-build"))
    for line in lines[begin + 1 :]:
        if line["instruction"] == "RUN" and "pip install" in line["value"]:
            break
        if line["instruction"] == "COPY":
            *names, into = line["value"].split()
            for name in names:
                if (checkout / name).is_dir():  # what is in the folder, links as links
                    shutil.copytree(
                        checkout / name, tmp_path / "image" / into, symlinks=True, dirs_exist_ok=True
                    )
                else:
                    (tmp_path / "image").mkdir(exist_ok=True)
                    shutil.copy2(checkout / name, tmp_path / "image" / into)
    made = build("build_wheel", image, tmp_path / "made")
    assert contents(made) == contents(wheel)


def test_without_torch_muster_torch_says_how_to_install_it() -> None:
    program = "import sys; sys.modules['torch'] = None; import muster.torch"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.splitlines()[-1].startswith(
        "ModuleNotFoundError: muster.torch needs torch. Run pip install '.[torch]' in a checkout"
    )
