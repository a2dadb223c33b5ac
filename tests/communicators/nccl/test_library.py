"""The plug-in as a library on this host: where it lies, how it is built, what is said where it cannot be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from muster.communicators.nccl import library
from muster.errors import CommunicatorError, SettingsError
from tests.communicators.nccl.stand_in_plugin import needs_compiler, write_sources

PATHS = {"PATH": os.environ.get("PATH", "")}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package folder with the sources of the stand-in."""
    folder = write_sources(tmp_path / "package")
    monkeypatch.setattr(library, "SOURCES", folder)
    monkeypatch.setattr(library, "LIBRARIES", ())  # the stand-in needs no OpenSSL
    library.digest.cache_clear()
    yield folder
    library.digest.cache_clear()


def fake_compiler(folder: Path, script: str) -> Path:
    path = folder / "fake-cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@needs_compiler
def test_it_is_built_once_beside_muster_and_found_again(sources: Path) -> None:
    assert library.find(PATHS) is None
    path = library.build(PATHS)
    assert path == sources / "build" / library.digest() / library.LIBRARY_NAME
    before = path.stat().st_mtime_ns
    assert library.find(PATHS) == library.build(PATHS) == path and path.stat().st_mtime_ns == before
    assert library.build(PATHS, force=True) == path and path.stat().st_mtime_ns > before
    assert [each.name for each in path.parent.iterdir() if not each.name.startswith(".lock")] == [path.name]


@needs_compiler
def test_where_the_package_cannot_be_written_it_goes_into_the_users_cache(
    sources: Path, tmp_path: Path
) -> None:
    (sources / "build").write_text("a file where the folder would be: root can write anywhere else")
    env = {**PATHS, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    path = library.build(env)
    assert path.parent.parent == tmp_path / "cache" / "muster" / "nccl" and library.find(env) == path
    assert library.digest() in path.parent.name
    with pytest.raises(SettingsError, match="No folder for the plug-in") as caught:
        library.build(PATHS)
    assert "XDG_CACHE_HOME" in caught.value.remedy


@needs_compiler
def test_processes_that_come_at_once_build_it_once(sources: Path, tmp_path: Path) -> None:
    counted = fake_compiler(tmp_path, f'echo x >> {tmp_path / "count"}; exec cc "$@"')
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: library.build({**PATHS, "CC": str(counted)}), range(4)))
    assert len(paths) == 1 and (tmp_path / "count").read_text() == "x\n"


def test_other_sources_are_another_library(sources: Path) -> None:
    before = library.digest()
    (sources / "stand_in.c").write_text("int other;")
    library.digest.cache_clear()
    assert library.digest() != before


@needs_compiler
def test_a_library_that_others_can_write_is_not_loaded(sources: Path) -> None:
    path = library.build(PATHS)
    path.chmod(0o777)
    assert library.find(PATHS) is None
    path.chmod(0o755)
    path.parent.chmod(0o777)
    assert library.find(PATHS) is None


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("net.c:1:10: fatal error: openssl/evp.h: No such file or directory", "libssl-dev"),
        ("net.c:1:10: fatal error: stdio.h: No such file or directory", "libc6-dev"),
        ("/usr/bin/ld: error: cannot find -lcrypto", "libssl-dev"),
        ("net.c:7:1: error: unknown type name", "muster nccl-plugin build"),
    ],
)
def test_a_compilers_failure_is_a_sentence(sources: Path, tmp_path: Path, said: str, remedy: str) -> None:
    fails = fake_compiler(tmp_path, f"echo '{said}' >&2; exit 1")
    with pytest.raises(SettingsError, match="could not build the plug-in") as caught:
        library.build({**PATHS, "CC": str(fails)})
    assert said in caught.value.message and remedy in caught.value.remedy
    assert library.find(PATHS) is None


def test_without_a_compiler_the_sentence_says_how_to_get_one(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="There is no C compiler on this host") as caught:
        library.build({"PATH": str(tmp_path)})
    assert "gcc" in caught.value.remedy
    with pytest.raises(SettingsError, match="CC is 'nonsense'"):
        library.build({**PATHS, "CC": "nonsense -O9"})


def test_an_installation_without_the_sources_says_so(sources: Path) -> None:
    (sources / "stand_in.c").unlink()
    library.digest.cache_clear()
    with pytest.raises(SettingsError, match="lacks the sources"):
        library.build(PATHS)


@needs_compiler
def test_the_library_takes_secrets_and_says_what_ended_a_connection(sources: Path) -> None:
    plugin = library.load(library.build(PATHS))
    plugin.forget_reason()
    assert plugin.reason() == ""
    plugin.use_secret(7, b"\xab" + bytes(30) + b"\xcd")
    assert plugin.reason() == "10.0.0.2:4711 ended it in generation 7 with abcd"
    assert plugin.version() == "stand-in, OpenSSL 3"
    with pytest.raises(CommunicatorError, match="generation 13"):
        plugin.use_secret(13, bytes(32))


def test_what_is_no_library_of_muster_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_bytes(b"\x7fELF nonsense")
    for path in (tmp_path / "x.so", tmp_path / "none.so", Path("libc.so.6")):
        with pytest.raises(SettingsError, match="cannot be loaded") as caught:
            library.load(path)
        assert "--force" in caught.value.remedy


@needs_compiler
def test_a_host_says_what_it_has(sources: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = library.plugin_of_this_host(PATHS)
    assert Path(found.path).is_file() and not found.obstacle
    monkeypatch.setenv("STAND_IN_IS_WRONG", "there is no libcrypto.so.3")
    wrong = library.plugin_of_this_host(PATHS)
    assert (
        "cannot encrypt on this host: there is no libcrypto.so.3" in wrong.obstacle
        and "OpenSSL" in wrong.remedy
    )
    library.build(PATHS).unlink()
    absent = library.plugin_of_this_host({"PATH": str(tmp_path)})
    assert (absent.path, "There is no C compiler" in absent.obstacle) == ("", True) and absent.remedy


def test_infiniband_and_nvlink_between_hosts_are_seen(tmp_path: Path) -> None:
    assert not library.has_infiniband(tmp_path) and not library.has_nvlink_between_hosts(tmp_path)
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "dev/nvidia-caps-imex-channels/channel0").mkdir(parents=True)
    assert library.has_infiniband(tmp_path) and library.has_nvlink_between_hosts(tmp_path)
