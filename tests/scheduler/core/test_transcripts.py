"""The job's machine, scene by scene: see transcripts/*.txt and tests/scheduler/core/transcript.py."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scheduler.core.transcript import Player

HERE = Path(__file__).parent
FILES = sorted((HERE / "transcripts").glob("*.txt"))
SCENE = "\n====\n"


def commands(scene: str) -> list[str]:
    return [line for line in scene.split("\n") if not line.startswith("  ") and line != "-"]


def compare(path: Path, now: str) -> None:
    text = path.read_text() if path.exists() else ""
    if os.environ.get("REWRITE_TRANSCRIPTS"):
        path.write_text(now)
    assert text == now


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_transcript(path: Path) -> None:
    scenes = path.read_text().split(SCENE)
    played = ["\n".join(Player().play(commands(scene))).strip("\n") for scene in scenes]
    compare(path, f"\n{SCENE}\n".join(played) + "\n")


def sentences() -> Iterator[str]:
    """All that is said in the transcripts."""
    for path in FILES:
        for scene in path.read_text().split(SCENE):
            player = Player()
            list(player.play(commands(scene)))
            for said in player.said:
                yield from re.split(r"(?<=\.) (?=[A-Z0-9])", said)


def kind(sentence: str) -> str:
    """The sentence without numbers and names."""
    return re.sub(r"\b[Nn]ode \w+( on host [\w-]+)?|\([^)]*\)|: [a-z0-9, ]+(?=;)|[0-9.]+", "_", sentence)


def test_wording() -> None:
    """One sentence of each kind that the scheduler says."""
    table: dict[str, str] = {}
    for sentence in filter(None, sentences()):
        table.setdefault(kind(sentence), sentence)
    compare(HERE / "wording.txt", "\n".join(table.values()) + "\n")
