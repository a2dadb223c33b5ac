"""An attack in one process: what it is after, where its author stands, and the one defence that stops it."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

Try = Callable[[Path], bool]
Without = Callable[[pytest.MonkeyPatch], object]


@dataclass(frozen=True)
class Attack:
    """One attack.

    Attributes:
        name: what is done.
        asset: what it is after.
        position: what its author has.
        succeeds: carries it out in a folder of its own; whether it has succeeded.
        without: takes the defence away.
    """

    name: str
    asset: str
    position: str
    succeeds: Try
    without: Without


def check(attack: Attack, folder: Path) -> None:
    """Fails unless the attack fails, and succeeds once its defence is gone."""
    with_it, without_it = folder / "with", folder / "without"
    with_it.mkdir()
    without_it.mkdir()
    assert not attack.succeeds(with_it), f"it succeeds: {attack.name}"
    patched: AbstractContextManager[pytest.MonkeyPatch] = pytest.MonkeyPatch.context()
    with patched as patch:
        attack.without(patch)
        assert attack.succeeds(without_it), f"not the defence named here stops it: {attack.name}"


def folder_until_the_end() -> Path:
    """A folder for what several tests share; it goes with the process."""
    made = Path(tempfile.mkdtemp(prefix="muster-test-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made
