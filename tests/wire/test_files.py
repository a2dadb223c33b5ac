"""Files named from outside hold nobody up and fill no memory, whatever they are."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.certs.config import load_config
from muster.certs.errors import CertificateError
from muster.certs.pki.certificates import MAX_CERTIFICATES, load_authorities
from muster.certs.pki.revocation import MAX_LISTS, load_revocations
from muster.certs.runtime.passwords import read_password
from muster.certs.runtime.store import read_p12
from muster.errors import SettingsError as WorkerSettingsError
from muster.launch.rank_table import read_json
from muster.scheduler.audit.audit_log import AuditLog
from muster.scheduler.config import load_settings
from muster.scheduler.errors import SchedulerSettingsError
from muster.scheduler.jobs.journal import Journal, JournalError
from muster.wire.files import (
    beside,
    open_own,
    open_regular,
    path_of,
    read_regular,
    readable_by_others,
    remove_left,
)

READERS: dict[str, Callable[[Path], object]] = {
    "config.json": load_config,
    "PKCS#12": lambda path: read_p12(path, b"x"),
    "password": lambda path: read_password(path, "x"),
    "rank table": lambda path: load_settings({"MS_WORKER_NUM": "2", "RANK_TABLE_FILE": str(path)}),
    "rank table of the launcher": read_json,
    "journal": lambda path: Journal(path).close(),
    "audit log": lambda path: AuditLog(path).close(),
}
REFUSALS = (CertificateError, SchedulerSettingsError, WorkerSettingsError, JournalError)


@pytest.fixture(params=["FIFO", "device", "directory", "socket"])
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "odd"
    if request.param == "FIFO":
        os.mkfifo(path)
    elif request.param == "device":
        path = Path("/dev/zero")
    elif request.param == "directory":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    return path


@pytest.mark.parametrize("reader", READERS)
def test_only_regular_files_are_read(reader: str, odd: Path) -> None:
    with pytest.raises(REFUSALS) as refused:
        READERS[reader](odd)
    assert str(odd) in str(refused.value)
    assert "regular file" in str(refused.value) or "irectory" in str(refused.value)


def test_the_audit_log_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("keep")
    (tmp_path / "log").symlink_to(tmp_path / "victim")
    with pytest.raises(SchedulerSettingsError, match="it is a link"):
        AuditLog(tmp_path / "log")
    assert (tmp_path / "victim").read_text() == "keep"


def test_a_file_to_append_to_is_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (b"one", b"two"):
        descriptor = open_own(tmp_path / "log")
        os.write(descriptor, text)
        os.close(descriptor)
    assert (tmp_path / "log").read_bytes() == b"onetwo"
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    # Of a file system that gives new files to another user, one of that user's is ours.
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    os.close(open_own(tmp_path / "log"))
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_no_more_than_the_bound_is_read(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(OSError, match="more than 1000 bytes"):
        read_regular(tmp_path / "huge", 1000)
    for reader in ("config.json", "PKCS#12", "password", "rank table", "rank table of the launcher"):
        with pytest.raises(REFUSALS, match="has more than"):
            READERS[reader](tmp_path / "huge")


def test_a_link_is_followed_where_one_may_stand(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "file").write_bytes(b"mounted secret")
    (tmp_path / "file").symlink_to("..data/file")
    assert read_regular(tmp_path / "file", 100) == b"mounted secret"
    with pytest.raises(OSError, match="it is a link"):
        open_regular(tmp_path / "file", os.O_RDONLY | os.O_NOFOLLOW)


def test_who_may_read_a_secret_is_said(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"")
    secret.chmod(0o640)
    assert readable_by_others(secret) == ""
    secret.chmod(0o644)
    assert readable_by_others(secret) == f"{secret} may be read by every user of this host (mode 0644)"
    assert readable_by_others(tmp_path / "none") == ""


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    old, young = beside(tmp_path / "ca.crt"), beside(tmp_path / "ca.crt")
    for each in (old, young, tmp_path / ".ca.crt.part", tmp_path / "ca.crt"):
        each.write_bytes(b"")
        os.utime(each, (1, 1))
    os.utime(young)
    remove_left(tmp_path)
    assert not old.exists()
    assert {young.name, ".ca.crt.part", "ca.crt"} == {each.name for each in tmp_path.iterdir()}


def test_what_another_host_writes_now_stays_whatever_this_hosts_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint was taken from under the worker that wrote it, by one whose clock was an hour ahead."""
    now = beside(tmp_path / "step")
    now.touch()
    ahead = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: ahead)
    remove_left(tmp_path)
    assert now.exists()


def test_too_many_authorities_or_lists_are_refused_in_words() -> None:
    pem = b"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"
    with pytest.raises(
        CertificateError, match=f"holds 50000 certificates; legal are at most {MAX_CERTIFICATES}"
    ):
        load_authorities(50_000 * pem, "ca.crt")
    pem = pem.replace(b"CERTIFICATE", b"X509 CRL")
    with pytest.raises(CertificateError, match=f"holds 100000 .*lists; legal are at most {MAX_LISTS}"):
        load_revocations(100_000 * pem, [], "crl.pem")


def test_a_home_that_nobody_has_is_a_name_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir("/")
    assert (path_of("~/x"), path_of("y")) == (Path("/home/me/x"), Path("/y"))
    assert path_of("~nobody-here/x") == Path("/~nobody-here/x")
