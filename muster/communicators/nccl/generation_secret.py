"""The secret of a generation's NCCL connections: from what its members alone know; handed to programs.

Nothing more is on the wire for it. Rank 0 mints random bytes with each unique id, the scheduler hands them to
the members of that generation over mutual TLS, and forgets them when the group is built; this secret is
derived from them by HKDF under a label of its own. NCCL's own ids are no part of it: they are sent in the
clear.

A program gets it in a sealed file of memory, as an inherited descriptor: never in its environment's values, a
file of a disk or a log. Every process reads it at its place (pread), so any number may.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Sequence

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from muster.errors import CommunicatorError

SECRET_BYTES = 32
DESCRIPTOR_VARIABLE = "MS_NCCL_SECRET_FD"
"""Which descriptor of its process the plug-in reads."""

MAGIC = b"MSNCCLK1"
RECORD = struct.Struct(f"<8sQ{SECRET_BYTES}s")
"""What the file holds: a magic number, the generation, the secret."""

_LABEL = b"muster nccl between hosts 1"
_FEWEST_BYTES = 32
_MFD_NOEXEC_SEAL = 8
"""A flag of Linux 6.3 and later, which a system may require."""

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def derive_secret(secrets: Sequence[bytes], *, job_id: str, generation: int) -> bytes:
    """Derives the secret of a generation's NCCL connections from its unique ids.

    Args:
        secrets: the random bytes that its rank 0 has minted, in their order; not NCCL's ids.
        job_id: the job.
        generation: its number.

    Raises:
        CommunicatorError: the unique ids are missing, or too short for a secret.
    """
    minted = b"".join(secrets)
    if len(minted) < _FEWEST_BYTES:
        raise CommunicatorError(
            f"generation {generation} has no secret for the keys of NCCL's encrypted connections",
            remedy="Run the same version of Muster on all hosts.",
        )
    info = b"\0".join((_LABEL, job_id.encode(), str(generation).encode()))
    return HKDF(algorithm=SHA256(), length=SECRET_BYTES, salt=None, info=info).derive(minted)


def secret_file(generation: int, secret: bytes) -> int:
    """Makes a sealed file in memory that holds the secret; nobody can change it.

    Returns:
        Its descriptor, which children do not inherit unless given it. Closing the last forgets it.

    Raises:
        CommunicatorError: the system makes no such files.
    """
    try:
        descriptor = _memory_file()
        try:
            os.write(descriptor, RECORD.pack(MAGIC, generation, secret))
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(descriptor)
            raise
    except OSError as error:
        raise CommunicatorError(
            f"the secret of NCCL's connections cannot be handed to the program: {error.strerror}",
            remedy="Allow memfd_create for this user, or set MS_NCCL_ENCRYPTION=off.",
        ) from error
    return descriptor


def _memory_file() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("muster-nccl", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create("muster-nccl", flags)


def read_secret_file(descriptor: int) -> tuple[int, bytes]:
    """Reads generation and secret from the file behind ``descriptor``.

    Raises:
        CommunicatorError: the file holds something else.
    """
    try:
        magic, generation, secret = RECORD.unpack(os.pread(descriptor, RECORD.size, 0))
    except (OSError, struct.error) as error:
        raise CommunicatorError(f"descriptor {descriptor} has no secret of NCCL's connections") from error
    if magic != MAGIC:
        raise CommunicatorError(f"descriptor {descriptor} is no secret of NCCL's connections")
    return generation, secret


class HandedSecret:
    """The secret that this process hands to its programs: that of one generation, replaced by the next."""

    def __init__(self) -> None:
        self._descriptor = -1

    @property
    def descriptor(self) -> int:
        """The file descriptor of the secret in this process; -1: there is none."""
        return self._descriptor

    def replace(self, generation: int, secret: bytes) -> int:
        """Replaces the secret by the next generation's; returns the new file descriptor."""
        made = secret_file(generation, secret)
        self.forget()
        self._descriptor = made
        return made

    def forget(self) -> None:
        """Closes the secret's file; idempotent."""
        held, self._descriptor = self._descriptor, -1
        if held >= 0:
            os.close(held)
