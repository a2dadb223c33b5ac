"""What all tests share."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# A slow machine is no fault of the code: no test is judged by the clock.
settings.register_profile("muster", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("muster")

ATTACKS = "tests/attacks"


class _AttacksTogether(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """All tests of a file run in one process, and all attacks: they are on one job, judged at last."""

    def _split_scope(self, nodeid: str) -> str:
        return ATTACKS if nodeid.startswith(f"{ATTACKS}/") else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Takes the place of ``--dist loadfile``."""
    return _AttacksTogether(config, log) if config.getoption("dist") == "loadfile" else None
