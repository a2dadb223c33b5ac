from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from muster.certs.errors import FileError
from muster.certs.files import read_file, write_file
from muster.certs.pki.authority import create_authority, open_authority
from muster.certs.pki.identity import Identity
from muster.certs.runtime.passwords import read_password
from muster.certs.runtime.store import load_credentials
from tests.certs.making import PASSWORD


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


def test_a_secret_that_others_may_read_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Passwords, PKCS#12 files and authorities' keys alike."""
    create_authority(tmp_path, PASSWORD)
    worker = open_authority(tmp_path, PASSWORD).issue(Identity("job", "worker"))
    write_file(tmp_path / "client.p12", worker.p12(PASSWORD))
    write_file(tmp_path / "password", PASSWORD + b"\n")

    def read_all() -> None:
        open_authority(tmp_path, PASSWORD)
        password = read_password(tmp_path / "password", "MS_CLIENT_PASSWORD_FILE")
        load_credentials(tmp_path / "client.p12", password, tmp_path / "ca.crt")

    read_all()
    assert caplog.messages == []
    for name in ("ca.key", "password", "client.p12"):
        (tmp_path / name).chmod(0o644)
    read_all()
    read_all()
    remedy = "may be read by every user of this host (mode 0644): chmod 600 it."
    assert caplog.messages == [
        f"The authority's key {tmp_path / 'ca.key'} {remedy}",
        f"MS_CLIENT_PASSWORD_FILE: the password file {tmp_path / 'password'} {remedy}",
        f"The PKCS#12 file {tmp_path / 'client.p12'} {remedy}",
    ]
