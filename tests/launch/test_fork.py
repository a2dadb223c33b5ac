"""A script sees no difference between a forked worker and ``python SCRIPT``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.launch.command import shadowed_by, why_not_forked
from tests.launch.launching import Place, place

PYTHON = sys.executable
ALONE = {
    "OPENBLAS_NUM_THREADS": "1"
}  # a lone worker may use all cores, and a process with threads is not forked


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path) as made:
        yield made


SCRIPTS = {
    "what a script sees": """
import os, sys
import beside
print(sys.argv, sys.orig_argv, __name__, __file__, __spec__, __package__, __doc__, __cached__)
print(__annotations__, type(__loader__).__name__, __builtins__.__name__, sorted(globals()))
print(sys.path, os.getcwd(), sys.flags, sys.stdin.read() == "", sys.stdout.isatty())
print(sys.modules["__main__"].__dict__ is globals(), beside.__file__)
""",
    "an exception": "def f():\n    raise ValueError('no')\nf()\n",
    "a chained exception": "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError('x') from e\n",
    "no inherited context": "try:\n    raise ValueError\nexcept ValueError as e:\n    print(e.__context__)\n",
    "a syntax error": "print('before')\nx = = 1\n",
    "an exit code": "import sys\nsys.exit(3)\n",
    "an exit sentence": "import sys\nsys.exit('went wrong')\n",
    "an interrupt": "raise KeyboardInterrupt\n",
    "a hard exit": "import os\nos._exit(4)\n",
    "exit functions": "import atexit\natexit.register(print, 'bye')\nprint('hello')\n",
    "a file left open": "f = open('left', 'w')\nf.write('kept')\n",
    "a file left open in a module": """
import sys, types
sys.modules["own"] = own = types.ModuleType("own")
own.file = open("left", "w")
own.file.write("kept")
""",
    "objects that end with it": """
import sys, types
class Thing:
    def __init__(self, name):
        self.name = name
    def __del__(self):
        print(self.name)
sys.modules["own"] = own = types.ModuleType("own")
own.thing, thing, cycle = Thing("of a module"), Thing("of the script"), Thing("of a cycle")
cycle.itself = cycle
del own, cycle
""",
    "a log that imports at its end": """
import json, logging
class Late(logging.Handler):
    def flush(self):
        import json as again
        print(again is json)
handler = Late()
""",
    "a thread left running": """
import threading, time
def late():
    time.sleep(0.05)
    print("late", threading.main_thread().name)
threading.Thread(target=late).start()
""",
    "pickles of its own classes": """
import multiprocessing
class Point:
    x = 1
def area(p):
    return p.x + 1
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(area, [Point()]))
""",
    "an excepthook of its own": "import sys\nsys.excepthook = lambda *a: print('mine', a[0])\n1 / 0\n",
    "signals as they come": """
import signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGUSR1):
    print(number.name, signal.getsignal(number))
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_sees_and_leaves_the_same(here: Place, name: str) -> None:
    here.script("", "beside.py")
    script = here.script(SCRIPTS[name], "a script.py")
    seen = {}
    for start in ("exec", "fork"):
        code, _, err = here.run("-n", "1", "--start", start, command=(PYTHON, script, "--x", "y z"), **ALONE)
        assert "--start fork" not in err
        left = here.directory / "left"
        seen[start] = (code, here.log("0"), left.read_text() if left.exists() else None)
        left.unlink(missing_ok=True)
    assert seen["fork"] == seen["exec"]


@pytest.mark.parametrize("module", ["package.tool", "package", "no_such_module", "muster.errors"])
def test_a_module_sees_and_leaves_the_same(here: Place, module: str) -> None:
    here.script("", "package/__init__.py")
    text = (
        "import sys\nprint(sys.argv, sys.orig_argv, sys.path[0])\n"
        "print(__name__, __package__, __spec__.name, __file__)"
    )
    here.script(text, "package/tool.py")
    here.script(text + "\nprint(1 / 0)", "package/__main__.py")
    seen = {}
    for start in ("exec", "fork"):
        code, _, err = here.run(
            "-n", "1", "--start", start, command=(PYTHON, "-m", module, "-a", "b"), **ALONE
        )
        assert "--start fork" not in err
        seen[start] = (code, here.log("0"))
    assert seen["fork"] == seen["exec"]


def test_a_link_to_a_script_finds_its_neighbours(here: Place) -> None:
    here.script("import neighbour, sys\nprint(__file__, sys.path[0])", "real/script.py")
    here.script("", "real/neighbour.py")
    (here.directory / "link.py").symlink_to("real/script.py")
    seen = []
    for start in ("exec", "fork"):
        assert here.run("-n", "1", "--start", start, command=(PYTHON, "link.py"), **ALONE)[0] == 0
        seen.append(here.log("0"))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(("start", "ends"), [("exec", "gone\n"), ("fork", "")])
def test_what_the_launcher_had_loaded_is_not_taken_apart_in_each_worker(
    here: Place, start: str, ends: str
) -> None:
    """It is shared with the others until somebody writes to it, and that to all of it takes long."""
    thing = "class Thing:\n    def __del__(self): print('gone')\n"
    script = here.script(f"import json\n{thing}json.mine = Thing()")
    here.run("-n", "2", "--start", start, command=(PYTHON, script))
    assert [here.log(label) for label in "01"] == [ends, ends]


HEAVY = ("asyncio", "cryptography", "email", "google", "grpc", "multiprocessing", "numpy", "ssl", "unittest")


def _loaded_by(code: str) -> set[str]:
    """Which of the heavy ones a new Python has loaded after this."""
    show = f"{code}\nimport sys\nprint(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([PYTHON, "-c", show], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_a_launcher_loads_little_before_it_has_read_its_command_line() -> None:
    assert _loaded_by("import muster.__main__, muster.launch.command") == set()


def test_before_the_scheduler_is_forked_neither_grpc_nor_numpy_is_loaded() -> None:
    warm = (
        "from muster.launch import fork, plan\n"
        "recipe = plan.Recipe('scheduler', ('python',), {}, 'log', forked=True)\n"
        "assert fork.warmed_scheduler(recipe, 'config.json').forked"
    )
    assert _loaded_by(warm) == {"asyncio", "cryptography", "email", "google", "ssl"}


def test_a_forked_worker_imports_nothing_up_to_its_first_collective(here: Place) -> None:
    """Each would import it again, and with it all that it needs."""
    from muster.certs.__main__ import main as certs

    keys = here.directory / "keys"
    assert certs(["init", "--dir", str(keys), "--password-file", str(keys / "password")]) == 0
    options = ("--config", "keys/config.json", "--password-file", "keys/password", "--tail", "none")
    script = here.script(
        """
import sys
before = set(sys.modules)
import numpy as np
import muster
muster.init("tcp")
muster.all_reduce(np.ones(4))
muster.release()
print("new", sorted(set(sys.modules) - before))
"""
    )
    code, _, err = here.run(
        *("-n", "2", "--scheduler", "--start", "fork", *options), command=(PYTHON, script)
    )
    assert code == 0, err
    assert [here.log(label).splitlines()[-1] for label in "01"] == ["new []"] * 2


def test_forked_workers_do_not_share_random_numbers(here: Place) -> None:
    script = here.script("import random, numpy\nprint(random.random(), numpy.random.rand())")
    here.run("-n", "2", "--start", "fork", command=(PYTHON, script))
    first, second = (here.log(label).split() for label in "01")
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_no_descriptor_of_the_launcher_stays_open(here: Place) -> None:
    script = here.script("import os\nprint(sorted(os.listdir('/proc/self/fd')))")
    here.run("-n", "3", "--start", "fork", command=(PYTHON, script))
    assert here.log("2") == "['0', '1', '2', '3']\n"  # 3 is the directory that is being listed


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("sh", "-c", "true"), "not run by this Python"),
        ((PYTHON,), "not run by this Python"),
        ((PYTHON, "-O", "script.py"), "not of the form"),
        ((PYTHON, "-c", "pass"), "not of the form"),
        ((PYTHON, "missing.py"), "not of the form"),
        ((PYTHON, "-m"), "names no module"),
    ],
)
def test_other_commands_are_not_forked(command: tuple[str, ...], words: str) -> None:
    assert words in why_not_forked(command, {"PATH": "/usr/bin:/bin"})


def test_a_script_whose_neighbour_would_be_hidden_is_not_forked(here: Place) -> None:
    here.script("", "apart/argparse.py")
    script = here.script("import argparse\nprint(argparse.__file__)", "apart/script.py")
    code, out, err = here.run("-n", "1", "--start", "fork", command=(PYTHON, script))
    assert code == 0
    assert "argparse.py beside the script" in err
    assert out == f"[0] {here.directory / 'apart' / 'argparse.py'}\n"


def test_a_script_of_a_package_that_can_be_run_is_forked_too(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").touch()
    assert shadowed_by(tmp_path) == ""
    (tmp_path / "json.py").touch()
    assert shadowed_by(tmp_path) == "json.py"
