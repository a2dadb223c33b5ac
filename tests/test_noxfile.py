"""The sessions of ``noxfile.py``: what they install and run, with a stand-in for nox's session."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import nox
import pytest
from nox.command import CommandFailed

import noxfile
from tests.scheduler.processes import ROOT


class NothingToDoError(Exception):
    """What a session says that has nothing to do."""


@dataclass
class StandIn:
    """Notes what a session asks of nox."""

    folder: Path
    python: str | bool = "3.99"
    posargs: Sequence[str] = ("--allowed",)
    installs: bool = True
    installed: list[tuple[str, ...]] = field(default_factory=list)
    ran: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def virtualenv(self) -> SimpleNamespace:
        return SimpleNamespace(location=str(self.folder))

    def install(self, *words: str) -> None:
        self.installed.append(words)
        if not self.installs:
            raise CommandFailed("no such version")

    def run(self, *words: str, **_: object) -> None:
        self.ran.append(words)

    def skip(self, why: str) -> None:
        raise NothingToDoError(why)

    def log(self, _: str) -> None: ...


def play(session: Any, stand_in: StandIn) -> StandIn:
    session(cast("nox.Session", stand_in))
    return stand_in


def arguments(line: Sequence[str]) -> str:
    return " ".join(line).partition("-m pytest -q")[2]


def test_what_needs_torch_and_what_takes_minutes_run_in_one_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    [torch] = play(noxfile.test_torch, StandIn(tmp_path)).ran
    waits, alone = play(noxfile.test_system, StandIn(tmp_path)).ran
    assert torch[0] == waits[0] == alone[0] == ".nox/torch/bin/python"
    assert "--dist loadfile" in arguments(torch) and "--dist loadfile" in arguments(waits)
    assert "-m system and not alone" in arguments(waits)
    assert "-m system and alone" in arguments(alone) and "-n" not in alone
    assert "tests/end_to_end/test_soak.py" in waits and "tests/attacks/test_flood.py" in alone
    assert all(each[-1] == "--allowed" for each in (torch, waits, alone))


@pytest.mark.parametrize(
    "session",
    [noxfile.torch, noxfile.test_torch_oldest, noxfile.test_frameworks, noxfile.test_jax, noxfile.docs],
)
def test_what_was_installed_is_installed_again_only_when_something_else_is_wanted(
    session: Any, tmp_path: Path
) -> None:
    first = play(session, StandIn(tmp_path))
    assert len(first.installed) == 1 and first.installed[0][0] == "-e"
    assert not play(session, StandIn(tmp_path)).installed
    (tmp_path / "installed").write_text("another")
    assert play(session, StandIn(tmp_path)).installed == first.installed


def test_an_install_that_fails_is_tried_again(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(CommandFailed):
            play(noxfile.torch, StandIn(tmp_path, installs=False))
    assert play(noxfile.torch, StandIn(tmp_path)).installed


def test_a_python_that_is_too_new_for_what_the_tests_need_is_no_failure(tmp_path: Path) -> None:
    with pytest.raises(NothingToDoError, match=r"cannot be installed for 3\.99"):
        play(noxfile.test_newest, StandIn(tmp_path, installs=False))
    assert play(noxfile.test_newest, StandIn(tmp_path)).ran


def test_the_lowest_versions_are_those_that_the_project_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    session = play(noxfile.test_lowest, StandIn(tmp_path))
    [installed] = session.installed
    pinned = {each.partition("==")[0] for each in installed if "==" in each}
    assert {"grpcio", "protobuf", "cryptography", "numpy", "starlette", "opentelemetry-sdk"} <= pinned
    assert not [each for each in installed if ">" in each or "<" in each]
    assert session.ran[-1][-4:] == ("-n", "2", "--epochs", "1")  # a launch, after the tests


@pytest.mark.parametrize("session", [noxfile.test_newest, noxfile.test_lowest, noxfile.test_jax])
def test_a_machine_without_such_a_python_is_no_failure(session: Any, tmp_path: Path) -> None:
    stand_in = StandIn(tmp_path, python=False)
    with pytest.raises(NothingToDoError, match="Python"):
        play(session, stand_in)
    assert not stand_in.installed and not stand_in.ran


def test_the_newest_python_that_runs_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("python3.9", "python3.12", "python3.14", "mine", "python3.16"):
        (tmp_path / name).write_text("#!/bin/sh\n" if name != "python3.16" else "#!/bin/sh\nexit 127\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert noxfile.python_of(12) == "python3.14"
    assert noxfile.python_of(12, "mine") == "mine"
    assert noxfile.python_of(12, "no-such-python") == "python3.14"
    assert noxfile.python_of(9, newest=11) == "python3.9"
    assert noxfile.python_of(11, newest=11) is None
    assert noxfile.python_of(15) is None  # a name that leads nowhere, as those of version managers may


def test_every_test_that_needs_torch_is_run_with_it() -> None:
    """Where only system tests of a file need torch, ``make test-system`` runs them."""
    needs = re.compile(r'importorskip\("torch[."]|reason=["]needs torch')
    marked = re.compile(r"^pytestmark = .*\bsystem\b|^@pytest\.mark\.system", re.MULTILINE)
    listed = [each.partition("::")[0] for each in noxfile.WITH_TORCH]
    for path in (ROOT / "tests").rglob("test_*.py"):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        if needs.search(text) and not name.startswith("tests/frameworks/"):
            run = any(name == each or name.startswith(f"{each}/") for each in listed)
            assert run or marked.search(text), f"{name} needs torch: noxfile.py has it in no session"


def test_what_sessions_name_exists() -> None:
    for each in (*noxfile.WITH_TORCH, *noxfile.PURE, *noxfile.WITH_SPIFFE):
        path, _, test = each.partition("::")
        assert (ROOT / path).exists(), each
        assert not test or f"def {test}(" in (ROOT / path).read_text(), each
    assert noxfile.WITH_OLDEST_TORCH
