"""After all attacks: the job's losses, the scheduler's memory, and every byte that anybody wrote."""

from __future__ import annotations

import base64
import datetime as dt
import re
from pathlib import Path

import pytest

from muster.communicators.tcp.frames import FRAME, MAGIC, FrameKind
from tests.attacks.field import WORKERS, Field, environment_of, memory_of, start_victims
from tests.attacks.on_one_job.test_transport import HALF_HANDSHAKES
from tests.scheduler.processes import PASSWORD, scheduler
from tests.waiting import LIMIT_S, wait_for

MB = 1 << 20
LEAST_STEPS = 20
LEAST_ATTACKS = 100


@pytest.fixture(scope="module")
def losses(field: Field) -> list[str]:
    """Ends the job under attack in good order."""
    assert len(field.attacks) >= LEAST_ATTACKS, "nothing to judge: run the whole folder at once"
    wait_for(lambda: field.steps() >= LEAST_STEPS)
    field.memory_after = field.memory()
    field.memory_peak = memory_of(field.running.process.pid, "VmHWM")
    (field.directory / "stop").touch()
    for victim in field.victims:
        assert victim.wait(LIMIT_S) == 0
    assert field.running.wait() == 0
    found = [(field.directory / f"losses-{rank}").read_text().split() for rank in range(WORKERS)]
    assert all(each == found[0] for each in found)
    return found[0]


def test_a_crash_would_leave_no_core_file_and_no_argument_shows_the_password(field: Field) -> None:
    for pid in (field.running.process.pid, *(victim.pid for victim in field.victims)):
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert re.search(r"^Max core file size +0 ", limits, re.MULTILINE)
        assert PASSWORD not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_the_losses_are_those_of_an_undisturbed_run(field: Field, losses: list[str], tmp_path: Path) -> None:
    env = environment_of(tmp_path, field.pki)
    with scheduler(**env) as quiet:
        workers = start_victims(tmp_path, env, quiet.port, len(losses), 0.0)
        assert [worker.wait(LIMIT_S) for worker in workers] == [0] * WORKERS
        assert quiet.wait() == 0
    assert len(losses) >= LEAST_STEPS
    assert (tmp_path / "losses-0").read_text().split() == losses


def test_the_job_was_never_disturbed(field: Field, losses: list[str]) -> None:
    assert "Generation 2" not in field.running.log
    assert "lost job_id=default" not in "".join(
        line for line in field.running.log.splitlines() if "node_id=victim-" in line
    )
    assert "Traceback" not in field.running.log
    assert "fault in" not in field.running.log


def test_the_schedulers_memory_grew_by_less_than_100_mb(field: Field, losses: list[str]) -> None:
    assert field.memory_after - field.memory_before < 100 * MB


def spellings(secret: bytes) -> list[bytes]:
    """A secret as it stands, in hexadecimal, in base64 and as Python shows it."""
    return [secret, secret.hex().encode(), base64.b64encode(secret)[:-4], repr(secret)[2:-1].encode()]


def secrets_of(field: Field) -> dict[str, bytes]:
    """Parts of all that must stay secret, each long enough to be no coincidence."""
    found = {"password": PASSWORD}
    for name in ("server", "client", "operator"):
        pem = field.pki.credentials(name).key_pem
        found[f"key of {name}"] = base64.b64decode(b"".join(pem.splitlines()[1:-1]))[36:68]
    ids = (field.directory / "secrets" / "unique-ids").read_bytes()
    assert len(ids) >= 128
    found["unique id"] = ids[:32]
    return found


def written(field: Field) -> dict[str, bytes]:
    """Everything that the processes of the job wrote, the recordings of the wire included."""
    found = {
        "scheduler's log": field.running.log.encode(),
        "its ready line": field.running.ready_line.encode(),
    }
    found["wire to the scheduler"] = field.proxy.seen
    for path in field.directory.rglob("*"):
        apart = {"secrets", "pki", "attacker"} & set(path.relative_to(field.directory).parts)
        if path.is_file() and not apart and path.name != "password":
            found[str(path.relative_to(field.directory))] = path.read_bytes()
    return found


def test_no_secret_stands_in_anything_that_was_written(field: Field, losses: list[str]) -> None:
    files = written(field)
    assert {"audit.jsonl", "victim-0.log", "wire-0", "wire-2"} <= files.keys()
    assert any(name.startswith("journal") for name in files)
    for what, secret in secrets_of(field).items():
        for where, data in files.items():
            assert not [s for s in spellings(secret) if s in data], f"{what} stands in {where}"


def test_no_private_key_lies_about_unencrypted(field: Field, losses: list[str]) -> None:
    for path in field.directory.rglob("*"):
        # The audit log's key opens nothing: it signs what whoever can read it could write anyway.
        if path.is_file() and "attacker" not in path.parts and path.name != "audit.jsonl.key":
            assert not re.search(rb"BEGIN (EC |RSA )?PRIVATE KEY", path.read_bytes()), path
    assert not list(field.directory.rglob("core*"))


def test_the_wire_shows_nothing_of_the_protocol(field: Field, losses: list[str]) -> None:
    files = written(field)
    wire = [files["wire to the scheduler"], *(files[f"wire-{rank}"] for rank in range(WORKERS))]
    assert all(len(each) > 10_000 for each in wire)
    # Among megabytes of ciphertext words of four bytes turn up by chance: none is shorter than six.
    frames = [FRAME.pack(MAGIC, kind, 0, 0)[:6] for kind in FrameKind]
    words = [b"victim-", b"default", b"muster", b"rendezvous", b"all_reduce", b"application/grpc", *frames]
    for each in wire:
        assert not [word for word in words if word in each]


def test_whoever_was_in_stands_in_the_audit_log(field: Field, losses: list[str]) -> None:
    entries = field.audit()
    for rank in range(WORKERS):
        mine = [entry["event"] for entry in entries if entry.get("node_id") == f"victim-{rank}"]
        assert mine[0] == "joined"
        assert mine[-1] == "left"
    assert all({"time", "event", "text"} <= entry.keys() for entry in entries)
    assert ((field.directory / "audit.jsonl").stat().st_mode & 0o777) == 0o600


def test_handshakes_that_failed_are_in_the_log_as_few_lines_and_in_its_counts_all(
    field: Field, losses: list[str]
) -> None:
    entries = [entry for entry in field.audit() if entry.get("call") == "handshake"]
    first, last = (dt.datetime.fromisoformat(entries[index]["time"]) for index in (0, -1))
    assert 2 <= len(entries) <= 2 + (last - first).total_seconds() / 10  # all attacks are of one address
    assert sum(entry.get("count", 1) for entry in entries) >= HALF_HANDSHAKES
    text = " ".join(entry["text"] for entry in entries)
    for reason in ("timed_out", "expired", "not_yet_valid", "unknown_ca", "no_tls", "plaintext_http"):
        assert reason in text or any(entry["code"] == reason for entry in entries), reason
    # Of gRPC's own trace nothing is left; what an attacker forged stands on a line marked as gRPC's.
    traced = [line for line in field.running.log.splitlines() if "handshaker" in line]
    assert all("forged" in line and " gRPC (ssl_transport_security.cc:" in line for line in traced), traced


def test_figures(field: Field, losses: list[str]) -> None:
    """Shown with ``-rP``: what the attacks met and cost."""
    grown = (field.memory_after - field.memory_before) / MB
    peak = (field.memory_peak - field.memory_before) / MB
    print(f"{len(losses)} steps; scheduler's memory +{grown:.1f} MB, at its peak +{peak:.1f} MB")
    assert grown <= peak
