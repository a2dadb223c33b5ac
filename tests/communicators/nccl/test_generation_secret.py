"""The secret of a generation's NCCL connections, and the file of memory that hands it to programs."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.communicators.nccl.generation_secret import (
    HandedSecret,
    derive_secret,
    read_secret_file,
    secret_file,
)
from muster.errors import CommunicatorError
from muster.scheduler.core import events
from muster.wire.messages import UniqueIds
from tests.scheduler.core.scenes import three

MINTED = (os.urandom(128),)
SECRET = bytes(range(32))


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = secret_file(7, SECRET)
    yield made
    os.close(made)


def test_members_of_a_generation_come_to_the_same_secret_and_nobody_else() -> None:
    def secret(ids: tuple[bytes, ...] = MINTED, job: str = "job", generation: int = 3) -> bytes:
        return derive_secret(ids, job_id=job, generation=generation)

    assert len(secret()) == 32 and secret() == secret()
    others = [secret((os.urandom(128),)), secret(job="another"), secret(generation=4), secret(MINTED * 2)]
    assert len({secret(), *others}) == 5


def test_the_secret_is_not_what_proves_membership_over_tcp() -> None:
    """That is a digest of the same bytes, of which each peer is shown a proof."""
    import hashlib

    assert derive_secret(MINTED, job_id="job", generation=3) != hashlib.sha256(b"".join(MINTED)).digest()


@pytest.mark.parametrize("ids", [(), (b"",), (b"short",)])
def test_without_a_secret_there_is_none_to_be_had(ids: tuple[bytes, ...]) -> None:
    with pytest.raises(CommunicatorError, match="generation 3 has no secret"):
        derive_secret(ids, job_id="job", generation=3)


def test_the_file_is_as_the_plug_in_reads_it(descriptor: int) -> None:
    assert os.pread(descriptor, 100, 0) == b"MSNCCLK1" + (7).to_bytes(8, "little") + SECRET
    assert read_secret_file(descriptor) == (7, SECRET)


def test_nobody_can_change_the_file_or_its_size(descriptor: int) -> None:
    for change in (
        lambda: os.pwrite(descriptor, b"x", 0),
        lambda: os.ftruncate(descriptor, 0),
        lambda: os.ftruncate(descriptor, 4096),
        lambda: mmap.mmap(descriptor, 48, mmap.MAP_SHARED, mmap.PROT_WRITE),
    ):
        with pytest.raises(PermissionError):
            change()
    assert read_secret_file(descriptor) == (7, SECRET)


READ_AT_ONCE = """
import os, sys
from multiprocessing import get_context
from muster.communicators.nccl.generation_secret import read_secret_file

def loader(number):
    for _ in range(2000):
        found = read_secret_file(DESCRIPTOR)
    return found

DESCRIPTOR = int(os.environ["MS_NCCL_SECRET_FD"])
with get_context("fork").Pool(2) as pool:
    said = set(pool.map(loader, range(2))) | {loader(2)}
print(said == {(7, bytes(range(32)))})
"""


def test_a_program_and_its_loaders_read_it_at_once(descriptor: int) -> None:
    """They share one place in the file, which reading must not move."""
    done = subprocess.run(
        [sys.executable, "-c", READ_AT_ONCE],
        env={**os.environ, "MS_NCCL_SECRET_FD": str(descriptor)},
        pass_fds=(descriptor,),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "True\n", done.stderr


def test_a_program_gets_no_descriptor_that_it_is_not_given(descriptor: int) -> None:
    code = f"import os; os.pread({descriptor}, 1, 0)"
    done = subprocess.run([sys.executable, "-c", code], close_fds=False, capture_output=True, timeout=60)
    assert b"Bad file descriptor" in done.stderr


def test_something_else_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"x" * 100)
    (tmp_path / "short").write_bytes(b"MSNCCLK1")
    for name in ("long", "short"):
        other = os.open(tmp_path / name, os.O_RDONLY)
        try:
            with pytest.raises(CommunicatorError, match=f"descriptor {other}"):
                read_secret_file(other)
        finally:
            os.close(other)
    with pytest.raises(CommunicatorError, match="descriptor 999999"):
        read_secret_file(999_999)


def test_a_secret_is_forgotten_with_its_generation() -> None:
    held = HandedSecret()
    first = held.replace(1, SECRET)
    file = os.fstat(first)
    second = held.replace(2, SECRET[::-1])
    assert read_secret_file(held.descriptor) == (2, SECRET[::-1]) and second == held.descriptor
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed by now, such as that of the folder itself
            assert not os.path.samestat(path.stat(), file)
    held.forget()
    held.forget()
    assert held.descriptor == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(second)


def test_a_member_that_is_expelled_gets_no_secret_of_the_next_generation() -> None:
    """As one is whose certificate is revoked."""
    job = three(worker_min=2)
    job.step(events.Expel("c", "its certificate was revoked"), 0.0)
    asked = job.step(events.UniqueIdsPublished(1, 2, MINTED), 0.0)
    told = {session: message for session, message in asked.messages if isinstance(message, UniqueIds)}
    assert set(told) == {1, 2}
    [ids] = {message.unique_ids for message in told.values()}
    assert derive_secret(ids, job_id="red", generation=2) != derive_secret(
        (os.urandom(128),), job_id="red", generation=1
    )


def test_the_secret_stands_in_no_error() -> None:
    try:
        derive_secret((b"geheim",), job_id="job", generation=1)
    except CommunicatorError as error:
        assert "geheim" not in repr(error) + str(error)
