"""A script that knows nothing of Muster's errors says what is wrong in a sentence and exits with its code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.certs.making import DAY, NOW, PASSWORD, certificate, p12
from tests.scheduler.processes import Pki, environment

SCRIPT = """\
import muster

session = muster.init()
print("rank", session.rank)
"""


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


def run(directory: Path, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of its own."""
    (directory / "mine.py").write_text(script)
    own = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "1", "MS_SCHED_PORT": "1", "MS_TOPO_TIMEOUT": "1", **env}
    return subprocess.run(
        [sys.executable, "mine.py"],
        cwd=directory,
        env=environment(**own),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def wrong_number(pki: Pki, directory: Path) -> dict[str, str]:
    return {"MS_WORKER_NUM": "abc"}


def wrong_password(pki: Pki, directory: Path) -> dict[str, str]:
    return {**pki.env(), "MS_CLIENT_PASSWORD": "guessed"}


def no_authority(pki: Pki, directory: Path) -> dict[str, str]:
    pki.write_config(ca_cert_path=str(directory / "none.crt"))
    return pki.env()


def expired_certificate(pki: Pki, directory: Path) -> dict[str, str]:
    uris = ("muster://default/worker",)
    old = certificate(pki.authority, uris=uris, start=NOW - 2 * DAY, end=NOW - DAY)
    pki.write_config(client_cert_path=str(p12(directory / "old.p12", old)))
    return {**pki.env(), "MS_CLIENT_PASSWORD": PASSWORD.decode()}


def no_scheduler(pki: Pki, directory: Path) -> dict[str, str]:
    return {}


Wrong = Callable[[Pki, Path], dict[str, str]]


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        (wrong_number, 2, "MS_WORKER_NUM must be a whole number from 1 to 65536; it is 'abc'."),
        (wrong_password, 1, "does not open with this password"),
        (no_authority, 1, "none.crt"),
        (expired_certificate, 1, "expired"),
        (no_scheduler, 1, "could not be reached"),
    ],
)
def test_a_wrong_setting_ends_any_script_in_one_sentence(
    wrong: Wrong, code: int, words: str, pki: Pki, tmp_path: Path
) -> None:
    done = run(tmp_path, SCRIPT, MS_LOG_LEVEL="ERROR", **wrong(pki, tmp_path))
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.startswith("muster: ") and done.stderr.count("\n") == 1, done.stderr
    assert words in done.stderr
    pki.write_config()


def test_the_traceback_is_shown_to_who_debugs(tmp_path: Path) -> None:
    done = run(tmp_path, SCRIPT, MS_WORKER_NUM="abc", MS_LOG_LEVEL="debug")
    assert done.returncode == 2
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert "MS_WORKER_NUM must be" in done.stderr.splitlines()[-1]


WITHIN = """
import muster
from muster.errors import ArrayError, WorkerError

def train():
    {line}

muster.set_ps_context(client_password="x")
train()
"""
OWN = """raise ArrayError("This array is not contiguous.") from {cause}"""


@pytest.mark.parametrize(
    ("line", "code", "first", "last"),
    [
        (OWN.format(cause=None), 1, "muster: mine.py, line 6: This array", "is not contiguous."),
        (
            OWN.format(cause="OSError('reset')"),
            1,
            "muster: mine.py, line 6: This array",
            "is not contiguous.",
        ),
        (OWN.format(cause="ValueError('mine')"), 1, "ValueError: mine", "This array is not contiguous."),
        ("raise muster.SettingsError('Wrong.')", 2, "muster: mine.py, line 6: Wrong.", "Wrong."),
        ("raise ValueError('mine')", 1, "Traceback (most recent call last):", "ValueError: mine"),
        ("muster.set_ps_context(enable_ssl=3)", 2, "muster: enable_ssl must be a bool", "it is a int."),
    ],
)
def test_an_error_amid_the_training_says_where_and_a_scripts_own_keeps_its_traceback(
    line: str, code: int, first: str, last: str, tmp_path: Path
) -> None:
    done = run(tmp_path, WITHIN.format(line=line))
    assert done.returncode == code
    lines = done.stderr.splitlines()
    assert lines[0].startswith(first) and lines[-1].endswith(last), done.stderr


def test_an_exception_hook_of_the_scripts_own_goes_before_and_the_exit_code_stays(tmp_path: Path) -> None:
    hook = "import sys\nsys.excepthook = lambda *_: print('mine', file=sys.stderr)\n"
    done = run(tmp_path, hook + SCRIPT, MS_WORKER_NUM="abc")
    assert (done.returncode, done.stderr) == (2, "mine\n")
