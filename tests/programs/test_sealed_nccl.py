"""How a program's NCCL gets its generation's secret: from an agent, over the line to it, under torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.communicators.membership import Membership, Peer
from muster.communicators.nccl.encryption import NcclProtection
from muster.communicators.nccl.generation_secret import HandedSecret, read_secret_file, secret_file
from muster.errors import CommunicatorError, MembershipChanged
from muster.programs.sealed_nccl import (
    hand_over,
    path_for_workers,
    take_new_secret,
    take_secret_of_torchrun,
)

SEALED = NcclProtection("require", True, {"NCCL_NET": "MusterSealed"})
FIRST, SECOND = bytes(32), bytes([1]) * 32


class HoldingSession:
    """An agent's session in one generation after the other."""

    def __init__(self, nccl: NcclProtection) -> None:
        self.nccl = nccl
        self.next(1)

    def next(self, generation: int) -> None:
        peers = tuple(Peer(rank, f"w{rank}", 1, "h", "host", "") for rank in range(2))
        self.membership = Membership("job", generation, "world", 0, peers, (os.urandom(128),))
        self.over: Exception | None = None

    @property
    def communicator(self) -> Any:
        if self.over is not None:
            raise self.over
        return SimpleNamespace(membership=self.membership)


def test_programs_get_the_secret_of_the_generation_that_stands() -> None:
    session: Any = HoldingSession(SEALED)
    handed = HandedSecret()
    assert hand_over(session, handed) == {"NCCL_NET": "MusterSealed"}
    number, secret = read_secret_file(handed.descriptor)
    session.next(2)
    hand_over(session, handed)
    assert number == 1 and read_secret_file(handed.descriptor)[0] == 2
    assert read_secret_file(handed.descriptor)[1] != secret
    handed.forget()


def test_one_that_is_out_gets_no_secret() -> None:
    session: Any = HoldingSession(SEALED)
    session.over = MembershipChanged("expelled", generation=1)
    handed = HandedSecret()
    with pytest.raises(MembershipChanged):
        hand_over(session, handed)
    assert handed.descriptor == -1


def test_where_nothing_is_sealed_programs_find_nothing() -> None:
    session: Any = HoldingSession(NcclProtection("prefer"))
    handed = HandedSecret()
    assert hand_over(session, handed) == {} and handed.descriptor == -1


def test_a_new_secret_takes_the_number_of_the_one_before() -> None:
    held, new = secret_file(1, FIRST), secret_file(2, SECOND)
    env = {"MS_NCCL_SECRET_FD": str(held)}
    take_new_secret(new, env)
    assert env == {"MS_NCCL_SECRET_FD": str(held)} and read_secret_file(held) == (2, SECOND)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(new)
    os.close(held)


@pytest.mark.parametrize("before", [{}, {"MS_NCCL_SECRET_FD": "nonsense"}, {"MS_NCCL_SECRET_FD": "999999"}])
def test_a_program_that_holds_none_keeps_the_new_one(before: dict[str, str]) -> None:
    new, env = secret_file(2, SECOND), dict(before)
    take_new_secret(new, env)
    assert env == {"MS_NCCL_SECRET_FD": str(new)} and os.get_inheritable(new)
    os.close(new)


def test_what_the_program_has_opened_under_that_number_stays(tmp_path: Path) -> None:
    """A program may close all descriptors that it does not know."""
    (tmp_path / "own").write_bytes(b"its own file" * 10)
    own, new = os.open(tmp_path / "own", os.O_RDONLY), secret_file(2, SECOND)
    env = {"MS_NCCL_SECRET_FD": str(own)}
    take_new_secret(new, env)
    assert os.pread(own, 12, 0) == b"its own file" and env == {"MS_NCCL_SECRET_FD": str(new)}
    os.close(own)
    os.close(new)


def test_a_worker_of_torchrun_opens_what_its_agent_holds() -> None:
    handed = HandedSecret()
    handed.replace(3, SECOND)
    env = {"MUSTER_NCCL_SECRET": path_for_workers(handed)}
    take_secret_of_torchrun(env)
    own = int(env["MS_NCCL_SECRET_FD"])
    handed.forget()  # the worker's is its own
    assert read_secret_file(own) == (3, SECOND) and os.get_inheritable(own)
    os.close(own)


def forgotten(folder: Path) -> str:
    handed = HandedSecret()
    handed.replace(3, SECOND)
    path = path_for_workers(handed)
    handed.forget()
    return path


def another_file(folder: Path) -> str:
    (folder / "other").write_bytes(b"x" * 100)
    return str(folder / "other")


@pytest.mark.parametrize("where", [forgotten, another_file])
def test_a_worker_that_finds_no_secret_ends_before_nccl_is_loaded(
    tmp_path: Path, where: Callable[[Path], str]
) -> None:
    env = {"MUSTER_NCCL_SECRET": where(tmp_path)}
    with pytest.raises(CommunicatorError, match="cannot open the secret") as caught:
        take_secret_of_torchrun(env)
    assert "MS_NCCL_SECRET_FD" not in env and caught.value.remedy
    child = {**env, "MS_NCCL_SECRET_FD": "7"}  # a loader of a worker's needs none
    take_secret_of_torchrun(child)
    assert child["MS_NCCL_SECRET_FD"] == "7"


def test_without_encryption_nothing_is_opened() -> None:
    env: dict[str, str] = {}
    take_secret_of_torchrun(env)
    assert env == {}
