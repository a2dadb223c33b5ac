from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from muster.certs.errors import FileError
from muster.certs.files import read_file, write_file


def test_a_file_is_private_from_the_first_byte_and_whole(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_file(tmp_path / "secret", b"one")
        write_file(tmp_path / "public", b"two", mode=0o644)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "public").stat().st_mode) == 0o644
    write_file(tmp_path / "secret", b"three")
    assert (tmp_path / "secret").read_bytes() == b"three"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["public", "secret"]


def test_nothing_is_overwritten_unless_wanted(tmp_path: Path) -> None:
    write_file(tmp_path / "x", b"old", replace=False)
    with pytest.raises(FileError, match=r"exists already.*--force"):
        write_file(tmp_path / "x", b"new", replace=False)
    assert (tmp_path / "x").read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def test_failures_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none/x.*cannot be written: No such file"):
        write_file(tmp_path / "none" / "x", b"")
    with pytest.raises(FileError, match=r"The thing .*none.*cannot be read: No such file"):
        read_file(tmp_path / "none", "The thing")
    with pytest.raises(FileError, match="cannot be read"):
        read_file("a\0b", "The thing")


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(11))
    with pytest.raises(FileError, match="more than 10 bytes"):
        read_file(tmp_path / "x", "The thing", limit=10)
