"""The secret of a generation's NCCL connections: how it is derived, and how programs get it.

Rank 0 mints random bytes with each unique id. The scheduler hands them to the members of that generation over
mutual TLS, and forgets them when the group is built. This secret is derived from them by HKDF under a label
of its own, so nothing more is sent for it. NCCL's own ids are not part of it, because they are sent in the
clear.

A program gets the secret in a sealed file in memory, as an inherited descriptor. It is never in a value of
the environment, in a file on a disk or in a log. Processes read it with pread, so any number of them may.
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
"""Names the descriptor that the plug-in reads in its process."""

MAGIC = b"MSNCCLK1"
RECORD = struct.Struct(f"<8sQ{SECRET_BYTES}s")
"""The file's contents: a magic number, the generation, the secret."""

_LABEL = b"muster nccl between hosts 1"
_FEWEST_BYTES = 32
_MFD_NOEXEC_SEAL = 8
"""A flag of Linux 6.3 and later, which a system may require."""

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def derive_secret(secrets: Sequence[bytes], *, job_id: str, generation: int) -> bytes:
    """Derives the secret of a generation's NCCL connections from its unique ids.

    Args:
        secrets: the random bytes that the generation's rank 0 has minted, in order; not NCCL's ids.
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
    """Makes a sealed file in memory that holds the secret and that no process can change.

    Returns:
        Its descriptor, which children inherit only if it is passed to them. The secret is gone when the last
        descriptor is closed.

    Raises:
        CommunicatorError: the system does not support such files.
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
    """The secret of the present generation, which this process hands to its programs."""

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
