"""What ``tests/conftest.py`` adds to pytest: slow files begin, and a skip without leave fails the run."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduler.processes import ROOT

TESTS = """
import pytest

def test_passes():
    pass

@pytest.mark.skip(reason="no such device")
def test_skips():
    pass
"""
MODULE = "import pytest\npytest.skip('no such library', allow_module_level=True)\n"
SLOW = "import pytest\n\n@pytest.mark.slow\ndef test_alone():\n    pass\n"


def run_pytest(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the tests in a directory with this project's conftest, and with none of its settings."""
    pytest_there = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(directory)]
    return subprocess.run(
        [*pytest_there, "-p", "tests.conftest", *options, str(directory)],
        cwd=directory,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_a_file_with_a_slow_test_begins_before_one_with_many_tests(tmp_path: Path) -> None:
    (tmp_path / "test_many.py").write_text("".join(f"def test_{each}():\n    pass\n\n" for each in range(9)))
    (tmp_path / "test_slow.py").write_text(SLOW)
    run = run_pytest(
        tmp_path, "-v", "-n", "1", "--dist", "loadfile", "-W", "ignore::pytest.PytestUnknownMarkWarning"
    )
    assert re.findall(r"PASSED.* (test_\w+)\.py", run.stdout) == ["test_slow"] + 9 * ["test_many"], run.stdout


@pytest.mark.parametrize(
    ("allowed", "code", "parallel"),
    [
        ("test_one.py::test_skips | no such device\ntest_two.py | no such library\n", 0, ("-n", "1")),
        ("# all\n* | no such *  # of both kinds\n", 0, ()),
        ("* | no such device\n", 1, ("-n", "1")),
        ("test_two.py | no such library\n", 1, ()),
    ],
)
def test_a_skip_without_leave_fails_the_run(
    tmp_path: Path, allowed: str, code: int, parallel: tuple[str, ...]
) -> None:
    (tmp_path / "test_one.py").write_text(TESTS)
    (tmp_path / "test_two.py").write_text(MODULE)
    (tmp_path / "allowed.txt").write_text(allowed)
    run = run_pytest(tmp_path, "--allowed-skips", "allowed.txt", *parallel)
    assert run.returncode == code, run.stdout + run.stderr
    assert ("not in the list of allowed skips" in run.stdout) == bool(code)


def test_the_lists_name_tests_that_exist() -> None:
    for path in (ROOT / "tests" / "skips").iterdir():
        for line in path.read_text().splitlines():
            node = line.partition("#")[0].partition("|")[0].strip().partition("::")[0]
            assert not node or list(ROOT.glob(node)), f"{path.name}: nothing is called {node}"


def test_modules_that_need_torch_may_be_skipped_where_there_is_none() -> None:
    """Seen here already, and not only where somebody runs with the list."""
    listed = (ROOT / "tests/skips/test.txt").read_text().splitlines()
    allowed = [line.partition(" | ")[0] for line in listed if "torch" in line.partition(" | ")[2]]
    for path in (ROOT / "tests").rglob("test_*.py"):
        if re.search(r'^(torch = )?pytest\.importorskip\("torch', path.read_text(), re.M):
            name = str(path.relative_to(ROOT))
            assert any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed), name
