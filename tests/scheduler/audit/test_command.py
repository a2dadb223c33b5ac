"""``muster audit``: what it says of a log that a real scheduler has written, and of what was done to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.__main__ import main
from muster.scheduler.audit.anchors import PREFIX
from muster.scheduler.audit.audit_log import AuditLog
from muster.scheduler.jobs.journal import Journal
from tests.scheduler.processes import channel, form, leave, scheduler


class Written:
    """Two schedulers' logs of one job, of which the second took over, and their journal's notes."""

    def __init__(self, folder: Path) -> None:
        self.logs = [folder / "a.jsonl", folder / "b.jsonl"]
        self.journal = folder / "journal.sqlite"
        self.heads = folder / "heads"
        told = []
        with Journal(self.journal) as journal:
            for number, path in enumerate(self.logs):
                audit = AuditLog(path)
                self.key = audit.key
                member = {"rank": 0, "node_id": f"n{number}", "host": "gpu-1", "certificate": "AB"}
                facts = {"generation": number + 1, "step": 10 * number, "members": [member]}
                audit.write("formed", {"job_id": "job", **facts})
                if number:
                    audit.write("over", {"job_id": "job", "step": 25})
                head = audit.head
                journal.note(PREFIX + head.log, head.encoded(audit.key))
                told += [f"/muster/job/notes/{PREFIX}{head.log}", head.encoded(audit.key)]
                audit.close()
        self.heads.write_text("\n".join(told) + "\n")


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


@pytest.mark.parametrize("known", ["journal", "heads"])
def test_members_are_listed_by_generation_over_a_takeover(
    written: Written, known: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = list(map(str, written.logs))
    assert main(["audit", "verify", *files, f"--{known}", str(getattr(written, known))]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "job job, generation 1, steps 0 to 9:",
        "  rank 0: node n0 on host gpu-1, certificate AB",
        "job job, generation 2, steps 10 to 24:",
        "  rank 0: node n1 on host gpu-1, certificate AB",
        "5 lines of 2 logs are as they were written.",
    ]
    assert said.err == ""


@pytest.mark.parametrize(("step", "node"), [(9, "n0"), (10, "n1"), (24, "n1"), (25, "")])
def test_who_was_a_member_in_a_step(
    written: Written, step: int, node: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "verify", *map(str, written.logs), "--step", str(step)]) == 0
    said = capsys.readouterr().out
    assert [name for name in ("n0", "n1") if f"node {name} " in said] == ([node] if node else [])
    assert "whether lines are missing at the end is not known" in said


def remove_last(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def change(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"n1"', b'"n7"'))


@pytest.mark.parametrize(("attack", "told"), [(remove_last, "missing at its end"), (change, "was changed")])
def test_what_was_done_to_a_log_is_said_and_ends_with_1(
    written: Written, attack: Callable[[Path], None], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    attack(written.logs[1])
    assert main(["audit", "verify", *map(str, written.logs), "--journal", str(written.journal)]) == 1
    assert told in capsys.readouterr().err


def test_the_key_is_printed_and_another_one_is_not_that_of_the_log(
    written: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(written.logs[1])
    assert main(["audit", "key", log]) == 0
    assert capsys.readouterr().out.split()[0] == written.key
    assert main(["audit", "verify", log, "--key", written.key.upper()]) == 0
    assert main(["audit", "verify", log, "--key", "00" * 32]) == 1


@pytest.mark.parametrize("option", ["--journal", "--heads", ""])
def test_a_file_that_cannot_be_read_is_one_sentence(
    option: str, written: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(written.logs[0])
    arguments = [log, option, f"{log}-none"] if option else [f"{log}-none"]
    assert main(["audit", "verify", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "cannot be read: No such file" in said


def test_heads_that_make_no_sense_are_refused(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    written.heads.write_text(f"/muster/notes/{PREFIX}x\n{json.dumps([1])}\n")
    assert main(["audit", "verify", str(written.logs[0]), "--heads", str(written.heads)]) == 2
    assert "makes no sense" in capsys.readouterr().err


def test_a_real_scheduler_writes_who_its_members_were_and_anchors_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit, kept = tmp_path / "audit.jsonl", tmp_path / "kept"
    env = {"MS_AUDIT_LOG": str(audit), "MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(kept)}
    with scheduler(**env) as running, channel(running.target) as over:
        for stream in form(over):
            stream.put(leave())
            assert stream.next("ended").ended.ok
        assert running.wait() == 0
    [journal] = kept.glob("*.sqlite")
    assert main(["audit", "verify", str(audit), "--journal", str(journal)]) == 0
    said = capsys.readouterr().out
    assert "generation 1, steps 0 to 0:\n  rank 0: node node-0 on host" in said
    assert "rank 1: node node-1 on host" in said
    lines = audit.read_bytes().splitlines(keepends=True)
    over_at = next(number for number, line in enumerate(lines) if b'"event": "over"' in line)
    audit.write_bytes(b"".join(lines[:over_at]))
    assert main(["audit", "verify", str(audit), "--journal", str(journal)]) == 1
    assert "missing at its end" in capsys.readouterr().err
