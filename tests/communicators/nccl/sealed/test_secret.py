"""Where a process has its secret from: a call, or an inherited memfd that nobody can change."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.communicators.nccl.sealed.kit import BOTH_OK, SECRET, meet, move, ranks

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@contextmanager
def memfd(
    generation: int, secret: str = SECRET, seals: int = SEALS, magic: bytes = b"MSNCCLK1"
) -> Iterator[int]:
    """A descriptor as the contract has it."""
    descriptor = os.memfd_create("secret", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        os.write(descriptor, magic + struct.pack("<Q", generation) + bytes.fromhex(secret))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


def inherits(descriptor: int) -> dict[str, str]:
    """The settings of a rank that has its secret from a descriptor."""
    return {"secret": "", "MS_NCCL_SECRET_FD": str(descriptor)}


def test_several_heirs_read_one_descriptor_and_meet_who_was_told(driver: Path) -> None:
    with memfd(1) as one, ranks(driver, {}, inherits(one), inherits(one)) as (told, first, second):
        meet(told, first)
        meet(told, second, listener=1)
        assert move(told, first, 5000) == BOTH_OK
        told.tell("move 1 5000 0 1 1 0 9")
        assert second.ask("move 0 5000 0 1 1 0 9") == "ok"
        assert told.hear() == "ok"


@pytest.mark.parametrize(
    ("seals", "magic", "wrong"),
    [
        (0, b"MSNCCLK1", "is not sealed against changes"),
        (fcntl.F_SEAL_WRITE, b"MSNCCLK1", "is not sealed against changes"),
        (SEALS & ~fcntl.F_SEAL_WRITE, b"MSNCCLK1", "is not sealed against changes"),
        (SEALS, b"MSNCCLK2", "holds no secret of NCCL's"),
        (SEALS, b"", "holds no secret of NCCL's"),
    ],
)
def test_a_descriptor_that_is_not_as_it_should_be_is_refused(
    driver: Path, seals: int, magic: bytes, wrong: str
) -> None:
    with memfd(1, seals=seals, magic=magic) as one, ranks(driver, inherits(one), init=False) as (rank,):
        answer = rank.ask("init")
        assert answer.startswith(
            f"error 5 NCCL's traffic cannot be encrypted: descriptor {one} of MS_NCCL_SECRET_FD"
        )
        assert wrong in answer
        assert "start this program from its Muster worker" in answer


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("1000", "is not open"), ("three", "is no number"), ("", "is no number"), ("0", "is no sealed memory")],
)
def test_what_is_no_descriptor_is_refused(driver: Path, text: str, wrong: str) -> None:
    with ranks(driver, {"secret": "", "MS_NCCL_SECRET_FD": text}, init=False) as (rank,):
        answer = rank.ask("init")
        assert answer.startswith("error 5"), answer
        assert wrong in answer


def test_without_a_secret_nothing_begins(driver: Path) -> None:
    with ranks(driver, {"secret": ""}, init=False) as (rank,):
        answer = rank.ask("init")
        assert answer.startswith("error 5 NCCL's traffic cannot be encrypted: this process has no secret"), (
            answer
        )
        assert rank.ask("secret 1 00") == "-1"
        assert rank.ask(f"secret 1 {SECRET}") == "0"
        assert rank.ask("init") == "ok"


def test_a_secret_that_was_handed_over_goes_before_the_descriptor_s(driver: Path) -> None:
    with (
        memfd(7, secret="00" * 32) as one,
        ranks(driver, {}, {"MS_NCCL_SECRET_FD": str(one)}) as (first, second),
    ):
        meet(first, second)
        assert move(first, second, 100) == BOTH_OK


def test_the_secret_is_in_no_core_dump_and_in_no_forked_child(driver: Path) -> None:
    with ranks(driver, {}) as (rank,):
        maps = Path(f"/proc/{rank.process.pid}/smaps").read_text().split("VmFlags:")
        kept = [part for part in maps if " dd" in part.splitlines()[0] and " wf" in part.splitlines()[0]]
        assert len(kept) == 1  # do not dump, wipe on fork
