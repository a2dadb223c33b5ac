"""``muster nccl-plugin`` on a host that has a compiler, or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.__main__ import main
from muster.communicators.nccl import library
from tests.communicators.nccl.stand_in_plugin import needs_compiler, write_sources


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package folder with the sources of the stand-in."""
    folder = write_sources(tmp_path / "package")
    monkeypatch.setattr(library, "SOURCES", folder)
    monkeypatch.setattr(library, "LIBRARIES", ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.digest.cache_clear()
    yield folder
    library.digest.cache_clear()


@needs_compiler
def test_build_says_where_it_is_and_that_it_works(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nccl-plugin", "show"]) == 1
    assert "is not built on this host. Run muster nccl-plugin build." in capsys.readouterr().err
    for _ in range(2):
        assert main(["nccl-plugin", "build"]) == 0
        path, version, tested = capsys.readouterr().out.splitlines()
        assert path.startswith(f"path: {package}/build/") and path.endswith(library.LIBRARY_NAME)
        assert (version, tested) == ("version: stand-in, OpenSSL 3", "self test: passed")
    assert main(["nccl-plugin", "show"]) == 0


@needs_compiler
def test_a_plug_in_that_cannot_encrypt_here_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_IS_WRONG", "no AES-GCM in this libcrypto")
    assert main(["nccl-plugin", "build"]) == 1
    assert "self test: no AES-GCM in this libcrypto" in capsys.readouterr().out


def test_without_a_compiler_a_sentence_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert main(["nccl-plugin", "build"]) == 1
    said = capsys.readouterr().err
    assert "There is no C compiler on this host" in said and "gcc" in said
