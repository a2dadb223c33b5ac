"""The audit log's file: private, chained over restarts and rotations, whole after a full disk."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from muster.scheduler.audit.audit_log import AuditLog
from muster.scheduler.audit.chain import AuditVerdict, verify
from muster.scheduler.errors import SchedulerSettingsError


def verdict(*paths: Path) -> AuditVerdict:
    return verify(
        (f"{path.name}:{number}", line)
        for path in paths
        for number, line in enumerate(path.read_bytes().splitlines(), 1)
        if line
    )


def events(*paths: Path) -> list[str]:
    found = verdict(*paths)
    assert found.problems == []
    return [str(line.entry["event"]) for line in found.lines]


def write(path: Path, *names: str, facts: Mapping[str, object] = {}) -> None:
    audit = AuditLog(path)
    for name in names:
        audit.write(name, facts)
    audit.close()


def test_the_audit_log_and_its_key_are_private_and_it_goes_on_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    write(path, "joined", facts={"node_id": "a"})
    write(path, "left")
    assert events(path) == ["began", "joined", "left"]
    assert json.loads(path.read_text().splitlines()[1])["node_id"] == "a"
    for file in (path, tmp_path / "audit.jsonl.key"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_log_that_is_renamed_goes_on_in_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path)
    audit.write("joined", {})
    path.rename(tmp_path / "audit.jsonl.1")
    audit.write("left", {})
    audit.close()
    assert events(path, tmp_path / "audit.jsonl.1") == ["began", "joined", "left"]
    assert len(path.read_text().splitlines()) == 1
    [told] = verdict(path).problems
    assert told.startswith(f"The key of log {audit.head.log} is not known")


def test_a_line_that_a_full_disk_cut_off_takes_none_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path)
    real = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: real(fd, data[:20]))
        audit.write("joined", {})
    audit.write("left", {})
    audit.close()
    found = verdict(path)
    assert [line.entry["event"] for line in found.lines] == ["began", "left"]
    assert found.problems == ["audit.jsonl:2 is damaged: it is cut off, or no line of an audit log."]


def test_a_file_whose_end_a_power_cut_took_goes_on_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    write(path, "joined", "lost")
    data = path.read_bytes()
    path.write_bytes(data[:-30])
    write(path, "left")
    found = verdict(path)
    assert [line.entry["event"] for line in found.lines] == ["began", "joined", "left"]
    assert len(found.problems) == 1


def test_a_log_of_a_version_that_did_not_sign_begins_a_chain_behind_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"time": "t", "event": "joined"}\n')
    write(path, "left")
    assert verdict(path).unsigned == 1
    assert events(path) == ["began", "left"]


@pytest.mark.parametrize("key", ["no key", ""])
def test_a_key_that_is_damaged_is_a_settings_error(key: str, tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl.key").write_text(key)
    with pytest.raises(SchedulerSettingsError, match=r"audit\.jsonl\.key is damaged"):
        AuditLog(tmp_path / "audit.jsonl")


def test_a_link_in_the_place_of_the_key_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere")
    (tmp_path / "audit.jsonl.key").symlink_to(tmp_path / "elsewhere.key")
    with pytest.raises(SchedulerSettingsError, match="none is followed"):
        AuditLog(tmp_path / "audit.jsonl")


def test_an_audit_log_that_cannot_be_opened_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SchedulerSettingsError, match="MS_AUDIT_LOG"):
        AuditLog(tmp_path / "no" / "folder")
