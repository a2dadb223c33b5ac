"""py-spy, where it is installed; a stand-in answers for it here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from muster.worker.stacks import native


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a test puts into this folder is found."""
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def install(tmp_path: Path, script: str) -> None:
    tool = tmp_path / "py-spy"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def test_that_it_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.native_frames(os.getpid()) == native.ABSENT


def test_it_is_asked_for_the_native_frames_of_the_process(tmp_path: Path) -> None:
    install(tmp_path, 'echo "$@"')
    assert native.native_frames(42) == "dump --native --pid 42"


def test_why_it_could_not_attach_is_said(tmp_path: Path) -> None:
    install(tmp_path, "echo 'Permission Denied: try sudo' >&2; echo more >&2; exit 1")
    assert native.native_frames(42) == "not taken: py-spy: Permission Denied: try sudo"


def test_one_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIMIT_S", 0.05)
    install(tmp_path, "exec sleep 600")
    assert native.native_frames(42) == "not taken: py-spy took over 0.05 s"
