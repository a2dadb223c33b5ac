"""A short run over every decoder; ``python -m tests.fuzzing`` is the long one."""

from __future__ import annotations

import contextlib
import functools
import random
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from muster.communicators.tcp.records import LARGE_RECORD_SIZE_LIMIT, RecordLayer, RecordLayerError
from tests.fuzzing.engine import Target, fuzz
from tests.fuzzing.records import OURS, THEIRS, PlainKey, plain_record
from tests.fuzzing.targets import all_targets

CASES = {"a job's conversation": 60, "a worker's conversation": 60, "peers' certificates": 150}
NAMES = (
    "messages to the scheduler",
    "status requests",
    "drain requests",
    "admit requests",
    "messages to the worker",
    "a job's conversation",
    "a worker's conversation",
    "config.json",
    "rank tables",
    "rank tables to merge",
    "rank tables to look ranks up in",
    "journal records",
    "password files",
    "settings",
    "device intervals",
    "host lists",
    "hostfiles",
    "number lists",
    "addresses",
    "visible devices",
    "PKCS#12 files",
    "revocation lists",
    "peers' certificates",
    "authorities",
    "identities",
    "names in gRPC's records",
    "gRPC's records",
    "the communicator's handshake",
    "the communicator's frames",
    "records",
    "records by script",
    "goodbyes",
)


@functools.cache
def targets() -> dict[str, Target]:
    directory = Path(tempfile.mkdtemp(prefix="muster-fuzzing-"))
    return {target.name: target for target in all_targets(directory)}


@pytest.mark.parametrize("name", NAMES)
def test_only_typed_errors(name: str) -> None:
    outcome = fuzz(targets()[name], seed=7, cases=CASES.get(name, 400))
    assert not outcome.findings, outcome.findings
    assert outcome.cases >= 60
    assert outcome.edges > 5


def test_every_decoder_is_tried() -> None:
    assert set(targets()) == set(NAMES)


def test_a_decoder_that_crashes_is_found() -> None:
    def brittle(data: bytes) -> None:
        if data[:2] == b"ab":
            raise ValueError("refused")
        data[3]

    outcome = fuzz(Target("brittle", brittle, (ValueError,), (b"abcd",)), seed=1, cases=300)
    assert [finding.split(" at ")[0] for finding in outcome.findings] == ["IndexError"]
    assert outcome.refused > 0


@pytest.mark.parametrize("who", ["the decoder", "a thread of the decoder's"])
def test_a_thread_that_a_decoder_leaves_behind_is_found(who: str) -> None:
    ended = threading.Event()

    def brittle(data: bytes) -> None:
        left = threading.Thread(target=ended.wait, name="left")
        if who == "the decoder":
            left.start()
        else:
            between = threading.Thread(target=left.start)
            between.start()
            between.join()

    outcome = fuzz(Target("brittle", brittle, (), (b"a",)), seed=1, cases=1)
    ended.set()
    assert list(outcome.findings) == ["a thread was left behind: left"]


def test_a_thread_that_somebody_else_starts_meanwhile_is_no_finding() -> None:
    asked, begun, ended = threading.Event(), threading.Event(), threading.Event()

    def start_another() -> None:
        asked.wait()
        threading.Thread(target=ended.wait).start()
        begun.set()

    other = threading.Thread(target=start_another)
    other.start()

    def decode(data: bytes) -> None:
        asked.set()
        begun.wait()

    outcome = fuzz(Target("sound", decode, (), (b"a",)), seed=1, cases=1)
    ended.set()
    other.join()
    assert not outcome.findings


def test_what_reaches_new_lines_is_kept() -> None:
    from muster.certs.pki.identity import parse_uri

    def run(data: bytes) -> object:
        return parse_uri(data.decode("latin-1"))

    target = Target("uris", run, (Exception,), (b"muster://a/worker",))
    assert fuzz(target, seed=1, cases=200).edges > fuzz(target, seed=1, cases=1).edges


def test_the_same_seed_makes_the_same_cases() -> None:
    seen: list[list[bytes]] = [[], []]
    for each in seen:
        target = Target("x", each.append, (), (b"seed",), lambda chance: random.Random(1).randbytes(3))
        fuzz(target, seed=3, cases=50)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("harm", ["none", "first byte", "last byte", "header", "cut", "one byte more"])
def test_records_as_large_as_they_may_be_open_whole_or_not_at_all(harm: str) -> None:
    """512 KiB at once, as collectives send them; a byte more, or another byte, and nothing comes out."""
    content = random.Random(1).randbytes(LARGE_RECORD_SIZE_LIMIT - 1)
    first, second = PlainKey(THEIRS), b"second"
    longer = content + b"x" if harm == "one byte more" else content
    wire = bytearray(plain_record(first, LARGE_RECORD_SIZE_LIMIT, longer))
    whole = len(wire)
    wire += plain_record(first, LARGE_RECORD_SIZE_LIMIT, second)
    if harm in ("first byte", "last byte", "header"):
        wire[{"first byte": 4, "last byte": whole - 1, "header": 3}[harm]] ^= 1
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        layer, view, found = RecordLayer(near, OURS, THEIRS), memoryview(bytearray(1 << 16)), b""
        with contextlib.suppress(RecordLayerError):
            for start in range(0, whole - 100 if harm == "cut" else len(wire), 1 << 15):
                far.send(wire[start : min(start + (1 << 15), whole - 100 if harm == "cut" else len(wire))])
                with contextlib.suppress(BlockingIOError):
                    while count := layer.read(view):
                        found += view[:count]
    assert found == (content + second if harm == "none" else b"")
