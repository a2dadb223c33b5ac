"""The library as it is built for use: warnings, symbols, and what it says of itself."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.communicators.nccl.sealed import kit

EXPORTED = {
    "muster_nccl_forget_reason",
    "muster_nccl_reason",
    "muster_nccl_self_test",
    "muster_nccl_use_secret",
    "muster_nccl_version",
    "ncclNetPlugin_v8",
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("library") / "libmuster-nccl.so"
    kit.compile_c(path, *kit.LIBRARY, "-D_FORTIFY_SOURCE=2", *kit.WARNINGS, *kit.sources(), *kit.LINKED)
    return path


def test_every_compiler_here_builds_it_without_a_warning(library: Path, tmp_path: Path) -> None:
    assert library.stat().st_size > 0  # by cc
    for compiler in kit.compilers():
        if Path(shutil.which(compiler) or "").resolve() != Path(shutil.which("cc") or "").resolve():
            output = tmp_path / compiler
            arguments = (*kit.LIBRARY, *kit.WARNINGS, *kit.sources(), *kit.LINKED)
            kit.compile_c(output, *arguments, compiler=compiler)


def test_it_exports_the_contract_alone(library: Path) -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    assert {line.split()[-1] for line in listed.stdout.splitlines()} == EXPORTED


def test_it_stays_loaded_when_nccl_closes_it(library: Path) -> None:
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "NODELETE" in dynamic
    assert "BIND_NOW" in dynamic or "NOW" in dynamic
    assert "libcrypto.so.3" in dynamic


def test_the_build_for_use_neither_skips_sealing_nor_reads_what_tests_set(library: Path) -> None:
    text = library.read_bytes()
    assert b"MSNCCLH1" in text
    assert b"MSNPLAIN" not in text
    assert b"MUSTER_TEST" not in text


ASK = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.muster_nccl_version.restype = ctypes.c_char_p
text = ctypes.create_string_buffer(200)
print(library.muster_nccl_self_test(text, 200), text.value)
print(library.muster_nccl_version().decode())
print(library.muster_nccl_use_secret(ctypes.c_uint64(3), bytes(32)))
print(library.muster_nccl_use_secret(ctypes.c_uint64(3), None))
print(library.muster_nccl_reason(text, 20), text.value)
print(library.muster_nccl_reason(None, 20), library.muster_nccl_reason(text, 0))
"""


def test_python_asks_it_by_ctypes(library: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ASK, library], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    self_test, version, used, refused, reason, nothing = done.stdout.splitlines()
    assert self_test == "0 b''"
    assert version.startswith("MusterSealed protocol 1, OpenSSL 3.")
    assert used == "0"
    length, text = reason.split(maxsplit=1)
    assert (refused, text) == ("-1", 'b"NCCL\'s traffic cann"')
    assert int(length) > 60
    assert nothing == "-1 -1"


def test_pointer_sizes_of_the_table_are_nccl_s(library: Path) -> None:
    """Eighteen functions behind a name."""
    table = (ctypes.c_void_p * 19).in_dll(ctypes.CDLL(str(library)), "ncclNetPlugin_v8")
    name = ctypes.cast(table[0] or 0, ctypes.c_char_p).value
    assert name == b"MusterSealed"
    absent = {8, 17, 18}  # DMA-BUF, device handles and their receives: of networks that reach into a GPU
    assert {index for index in range(1, 19) if not table[index]} == absent
