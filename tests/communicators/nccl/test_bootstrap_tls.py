"""NCCL's own TLS for its bootstrap: which builds have it, and what sets the key."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.communicators.nccl.bootstrap_tls import BootstrapTls, offers_tls, was_built_with_tls
from muster.errors import CommunicatorError

OPENSSL = b"\0SSL_CTX_new\0SSL_CTX_set_psk_use_session_callback\0"
NONE = b"\0NCCL was built without TLS support but a pre-shared key was configured\0"
BINDINGS = SimpleNamespace(set_encryption=lambda config: None, EncryptionConfig=SimpleNamespace)


@pytest.mark.parametrize(
    ("text", "has"),
    [(OPENSSL, True), (NONE, False), (OPENSSL + NONE, False), (b"\0older\0", False), (b"", False)],
)
def test_which_build_has_tls_is_read_in_the_library(tmp_path: Path, text: bytes, has: bool) -> None:
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(text and b"\x7fELF" * 5000 + text)
    assert was_built_with_tls(library) is has
    maps = tmp_path / "maps"
    maps.write_text(
        f"7f0-7f1 r-xp 0 fe:00 1 {library}\n7f1-7f2 r-xp 0 00:00 0 [vdso]\n7f2-7f3 rw-p 0 0 0\n"
        f"7f3-7f4 r--p 0 fe:00 1 {tmp_path}/libnccl.so.2 (deleted)\n"
    )
    assert offers_tls(BINDINGS, maps) is has


def test_what_is_not_there_has_none(tmp_path: Path) -> None:
    assert not was_built_with_tls(tmp_path / "libnccl.so.2")
    assert not offers_tls(BINDINGS, tmp_path / "maps") and not offers_tls(BINDINGS)
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(OPENSSL)
    maps = tmp_path / "maps"
    maps.write_text(f"7f0-7f1 r-xp 0 fe:00 1 {library}\n")
    assert not offers_tls(SimpleNamespace(), maps)  # bindings before 2.32


class Refusing:
    """Bindings of an NCCL that takes one key, as its documentation asks for."""

    class NCCLError(Exception):
        pass

    class EncryptionConfig(SimpleNamespace):
        ptr = 1

    def __init__(self) -> None:
        self.calls = 0

    def set_encryption(self, config: Any) -> None:
        self.calls += 1
        if self.calls > 1:
            raise self.NCCLError("invalid usage")


def test_a_key_is_set_once_and_a_refusal_says_what_to_do() -> None:
    nccl = Refusing()
    tls = BootstrapTls(nccl)
    key = tls.key()
    assert tls.key() == tls.take(key) == key and len(key) == 32 and nccl.calls == 1
    with pytest.raises(
        CommunicatorError, match="refused another TLS key for its bootstrap: invalid usage"
    ) as caught:
        tls.take(bytes(32))
    assert "Start the job again" in caught.value.remedy and "00" * 8 not in str(caught.value)
    assert tls.key() == key
