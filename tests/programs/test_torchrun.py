"""What torchrun's options become."""

from __future__ import annotations

import pytest

pytest.importorskip("torch.distributed")

from torch.distributed.elastic.rendezvous import RendezvousParameters

from muster.programs.torchrun import settings_of
from muster.worker.config import load_settings


@pytest.mark.parametrize(
    ("said", "seconds"), [({}, 30.0), ({"last_call_timeout": "7"}, 7.0), ({"last_call_timeout": 0}, 0.1)]
)
def test_more_agents_than_needed_are_waited_for_as_long_as_torchrun_does(
    said: dict[str, str], seconds: float
) -> None:
    parameters = RendezvousParameters("muster", "host7:6001", "job", 1, 4, **said)
    settings = load_settings(settings_of(parameters, {"MS_ALLOW_INSECURE": "1", "RANK": "3"}))
    assert settings.last_call_s == seconds
    assert (settings.worker_num, settings.worker_min, settings.job_id) == (4, 1, "job")
    assert settings.scheduler_address == "host7:6001"
