"""Crowds that come and go beside a job: at a scheduler that may open few files, and at ``muster web``.

For longer, by hand: ``python -m tests.attacks.scarce scheduler 600``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks.scarce import FILES, at_the_scheduler, at_the_web

pytestmark = [pytest.mark.system, pytest.mark.alone]

SECONDS = 8.0
MB_FOR_ALL = 60.0


def test_a_scheduler_without_descriptors_goes_on_with_its_job(tmp_path: Path) -> None:
    """Asset: the job, descriptors, memory; position: reaches the port; insiders that watch and never read.

    A stranger keeps as many connections as there are descriptors, and more. That no member is lost, that
    descriptors come back and that the next one is answered are asked for inside.
    """
    outcome = at_the_scheduler(tmp_path, SECONDS)
    assert max(each.descriptors for each in outcome.samples) > 0.9 * FILES
    assert outcome.codes == [0, 0, 0]
    assert "Generation 1 is over" not in outcome.log and "Traceback" not in outcome.log
    first, *others = outcome.losses
    assert len(first) > SECONDS and all(each == first for each in others)
    assert outcome.after.memory_mb < outcome.idle.memory_mb + MB_FOR_ALL


def test_the_page_is_there_for_its_owner_in_a_crowd(tmp_path: Path) -> None:
    """Asset: what the owner sees, descriptors, memory; position: another user of the host."""
    outcome = at_the_web(tmp_path, SECONDS)
    assert outcome.crowd.done["the owner"] > 3 * outcome.crowd.failed["the owner"]
    assert outcome.crowd.done["strangers"] > 100
    assert outcome.after.memory_mb < outcome.idle.memory_mb + MB_FOR_ALL
    assert "Traceback" not in outcome.log and len(outcome.log) < 2000
