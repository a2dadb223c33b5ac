"""A job whose processes have certificates of a SPIFFE Workload API that rotates while it trains.

``muster bench identities --minutes 10`` does for ten minutes what this does for seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduler.processes import environment


@pytest.mark.system
def test_rotations_cost_no_step_and_who_loses_its_identity_ends_in_words(tmp_path: Path) -> None:
    """Three rotations: a new authority, the old one forgotten, and new certificates alone."""
    options = ["--minutes", "0.1", "--every", "2", "--ends", "1", "--json", "found.json"]
    done = subprocess.run(
        [sys.executable, "-m", "muster", "bench", "identities", *options],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout[-5000:], done.stderr[-20_000:])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["did_not_hold"] == [] and found["wrong_steps"] == 0
    assert (found["rotations"], found["new_authorities"], found["not_taken_up"]) == (3, 1, 0)
    assert found["checked_steps"] > 4 * found["steps"] > 0
    assert [len(found["ends"][way]) for way in ("revoked", "unmapped", "stranger")] == [1, 1, 1]
