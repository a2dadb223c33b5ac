"""The programs of pages that teach, changed step by step as each page says, print what stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scheduler.processes import ROOT, environment

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
PAGES = (
    "index.md",
    "launching.md",
    "training.md",
    "fault_tolerance.md",
    "tutorial.md",
    "torch_training.md",
    "torch.md",
    "in_place.md",
    "snapshots.md",
    "api.md",
)
SHOWN = ("epoch", "[0] ", "muster: worker", "muster: 2 workers", "muster: 4 workers")
"""How lines begin that are the same each time: not those with names of hosts, times and folders."""

LOSS = re.compile(r"loss (\d+\.\d\d)")
RIGHT = re.compile(r"(\d+)% right")


def changed(program: str, diff: str) -> str:
    """A program after a diff without numbers of lines: what each part begins with stands once in it."""
    for part in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = part.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        assert program.count(before) == 1, before
        program = program.replace(before, after)
    return program


def steps(page: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The program of each step, and its commands with what they print."""
    program = ""
    for kind, text in re.findall(r"^```(python|diff|console)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        if kind == "python":
            program = text
        elif kind == "diff":
            program = changed(program, text)
        else:
            parts = re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
            yield program, [(command, printed) for command, printed in parts]


def printed_by(command: str, folder: Path) -> str:
    """What a command shows on a terminal, of the lines that are the same each time."""
    found = folder / "bin"
    found.mkdir(exist_ok=True)
    for name, module in (("muster", "-m muster"), ("python", "")):
        (found / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (found / name).chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env=environment(PATH=f"{found}:{os.environ['PATH']}", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return "".join(f"{line}\n" for line in done.stdout.splitlines() if line.startswith(SHOWN))


def alike(line: str) -> str:
    """What is printed without the numbers in which another release of torch may round otherwise."""
    return RIGHT.sub("% right", LOSS.sub("loss", line))


@pytest.mark.parametrize("page", PAGES)
def test_each_step_of_a_page_prints_what_stands_there(page: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for program, commands in steps((ROOT / "docs" / page).read_text()):
        (tmp_path / "train.py").write_text(program)
        for command, expected in commands:
            shown = printed_by(command, tmp_path)
            assert alike(shown) == alike(expected), command
            for number, tolerance in ((LOSS, 0.1), (RIGHT, 5)):
                found, wanted = ([float(each) for each in number.findall(text)] for text in (shown, expected))
                assert found == pytest.approx(wanted, abs=tolerance), command
