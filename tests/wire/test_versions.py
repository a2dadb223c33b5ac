"""Which versions may meet: the rule of docs/upgrading.md, in both directions."""

from __future__ import annotations

import pytest

from muster.version import __version__
from muster.wire.messages import is_same_series, series_of, version_obstacle


@pytest.mark.parametrize(
    ("scheduler", "worker"),
    [
        ("0.2.0", "0.2.0"),
        ("0.2.0", "0.2.7"),
        ("0.2.7", "0.2.0"),
        ("0.2.0", "0.1.0"),
        ("0.2.0", "0.2.1.dev3+local"),
        ("", "0.1.0"),
        ("1.3.0", "1.2.9"),
    ],
)
def test_a_scheduler_serves_its_own_minor_version_and_the_one_before(scheduler: str, worker: str) -> None:
    assert version_obstacle(scheduler=scheduler, worker=worker) == ""


@pytest.mark.parametrize(
    ("scheduler", "worker", "remedy"),
    [
        ("0.2.0", "0.3.0", "upgrade the scheduler first"),
        ("0.2.0", "1.2.0", "upgrade the scheduler first"),
        ("", "0.2.0", "upgrade the scheduler first"),
        ("0.3.0", "0.1.9", "Upgrade the worker"),
        ("1.2.0", "0.1.0", "Upgrade the worker"),
        ("0.2.0", "newest", "not both are versions"),
        ("\x1b[2J", "0.2.0", "not both are versions"),
    ],
)
def test_others_are_refused_with_both_versions_and_the_remedy(
    scheduler: str, worker: str, remedy: str
) -> None:
    why = version_obstacle(scheduler=scheduler, worker=worker)
    assert remedy in why and worker in why and (scheduler or "0.1 or older") in why.replace("\\x1b", "\x1b")
    assert why.isprintable()


def test_patch_releases_are_one_series() -> None:
    assert is_same_series("0.2.0", "0.2.9") and not is_same_series("0.2.0", "0.3.0")
    assert is_same_series("odd", "odd") and not is_same_series("odd", "even")
    assert series_of(__version__) is not None
