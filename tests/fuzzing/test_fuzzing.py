"""A short run over every decoder; ``python -m tests.fuzzing`` is the long one."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path

import pytest

from tests.fuzzing.engine import Target, fuzz
from tests.fuzzing.targets import all_targets

CASES = {"a job's conversation": 60, "a worker's conversation": 60, "peers' certificates": 150}
NAMES = (
    "messages to the scheduler",
    "status requests",
    "drain requests",
    "messages to the worker",
    "a job's conversation",
    "a worker's conversation",
    "config.json",
    "rank tables",
    "rank tables to merge",
    "rank tables to look ranks up in",
    "journal records",
    "password files",
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
    "sealed records",
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
