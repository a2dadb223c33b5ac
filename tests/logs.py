"""What a test's code has logged, without what threads of earlier tests log."""

from __future__ import annotations

import pytest


def said(caplog: pytest.LogCaptureFixture, logger: str = "muster.worker") -> list[str]:
    """Returns the messages of one logger."""
    return [record.getMessage() for record in caplog.records if record.name == logger]
