"""NCCL's own TLS for its bootstrap: since 2.32, in builds with OpenSSL (the wheels are built without).

A build without OpenSSL accepts a key all the same (seen with 2.32.3) and fails at the first connection, so
the library itself is searched for TLS. NCCL wants one key for all processes of a job and their whole runtime.
Rank 0 of the first generation mints it. In each generation, rank 0 sends its key with the ids, over mutual
TLS. If rank 0 is a new process, it mints another key, and the others take that between two communicators.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

from muster.errors import CommunicatorError

KEY_BYTES = 32
_WITH, _WITHOUT = b"SSL_CTX_set_psk_use_session_callback", b"built without TLS support"
_LOOKED_AT_BYTES = 64 << 20
"""How many bytes of the library are searched for texts; the rest, hundreds of MiB, is GPU code."""

_PSK_MODE = 1


def offers_tls(nccl: Any, maps: Path = Path("/proc/self/maps")) -> bool:
    """Whether the NCCL behind these bindings can put its bootstrap into TLS."""
    if not hasattr(nccl, "set_encryption") or not hasattr(nccl, "EncryptionConfig"):
        return False
    return any(was_built_with_tls(path) for path in _loaded(maps))


def _loaded(maps: Path) -> list[Path]:
    """Returns the NCCL libraries that this process has loaded."""
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    paths = (line.partition("/") for line in lines)
    return sorted(
        {Path(f"/{path}") for _, _, path in paths if path.rpartition("/")[2].startswith("libnccl.so")}
    )


def was_built_with_tls(library: Path) -> bool:
    """Whether this library of NCCL uses OpenSSL's pre-shared keys."""
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as text:
            end = min(len(text), _LOOKED_AT_BYTES)
            return text.find(_WITHOUT, 0, end) < 0 <= text.find(_WITH, 0, end)
    except (OSError, ValueError):
        return False


class BootstrapTls:
    """The key of this process's NCCL.

    Args:
        nccl: the bindings.
    """

    def __init__(self, nccl: Any) -> None:
        self._nccl = nccl
        self._key = b""

    def key(self) -> bytes:
        """Returns this process's key for the other ranks; mints and sets it first if there is none yet.

        To be called before an id is minted.
        """
        return self._key or self.take(os.urandom(KEY_BYTES))

    def take(self, key: bytes) -> bytes:
        """Sets ``key`` for the connections that NCCL makes from now on, unless it is set already.

        Returns:
            The key.

        Raises:
            CommunicatorError: NCCL does not accept the key.
        """
        if key == self._key:
            return key
        config = self._nccl.EncryptionConfig()
        config.mode, config.psk = _PSK_MODE, key.hex()
        try:
            self._nccl.set_encryption(config.ptr)
        except self._nccl.NCCLError as error:
            raise CommunicatorError(
                f"NCCL refused {'another' if self._key else 'the'} TLS key for its bootstrap: {error}",
                remedy="Start the job again, or take an NCCL without TLS, whose bootstrap stays open.",
            ) from None  # the configuration holds the key
        self._key = key
        return key
