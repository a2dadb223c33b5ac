"""The job's machine, scene by scene: see transcripts/*.txt and tests/scheduler/core/transcript.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.scheduler.core.transcript import Player

FILES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_transcript(path: Path) -> None:
    text = path.read_text()
    scenes = []
    for scene in text.split("\n====\n"):
        lines = [line for line in scene.split("\n") if not line.startswith("  ") and line != "-"]
        scenes.append("\n".join(Player().play(lines)).strip("\n"))
    now = "\n\n====\n\n".join(scenes) + "\n"
    if os.environ.get("REWRITE_TRANSCRIPTS"):
        path.write_text(now)
    assert text == now
