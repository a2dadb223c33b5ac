"""The drivers, built once a run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.communicators.nccl.sealed import kit


@pytest.fixture(scope="session", autouse=True)
def compiler() -> None:
    """Skips all of these where the plug-in cannot be built."""
    command, text = ["cc", "-fsyntax-only", "-x", "c", "-"], b"#include <openssl/evp.h>\n"
    if shutil.which("cc") is None or subprocess.run(command, input=text, check=False).returncode:
        pytest.skip("needs a C compiler and the headers of OpenSSL")


def _shared(factory: pytest.TempPathFactory) -> Path:
    """A folder of this run's that all its processes share."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "nccl-sealed"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver under the sanitizers of addresses and of undefined behaviour."""
    return kit.built_driver(_shared(tmp_path_factory), "driver", *kit.ADDRESS)


@pytest.fixture(scope="session")
def thread_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver under the sanitizer of threads."""
    return kit.built_driver(_shared(tmp_path_factory), "thread-driver", *kit.THREAD)


@pytest.fixture(scope="session")
def plain_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver without ciphers: the build that a benchmark compares with."""
    return kit.built_driver(_shared(tmp_path_factory), "plain-driver", "-DMUSTER_PLAIN_FOR_BENCH")
