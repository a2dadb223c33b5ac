from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from muster.wire.process_stat import stat_fields


def test_a_name_with_blanks_and_brackets_is_passed_over() -> None:
    """The name is the caller's to choose, and stands unescaped before the fields."""
    found: list[list[str]] = []

    def read() -> None:
        folder = f"/proc/self/task/{threading.get_native_id()}"
        Path(folder, "comm").write_text("a) Z (1 2")
        found.append(stat_fields(folder))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert found[0][:2] == ["R", str(os.getppid())]


def test_who_does_not_exist_is_an_error() -> None:
    with pytest.raises(OSError, match="stat"):
        stat_fields("/proc/0")
