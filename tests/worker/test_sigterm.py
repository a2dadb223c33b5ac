"""Who reacts to SIGTERM within a block, and who after it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from muster.worker.ending import on_sigterm
from tests.worker.session.scripted import Thread


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What has reacted, in order; the test's own handlers end with it."""
    before = signal.getsignal(signal.SIGTERM)
    yield []
    signal.signal(signal.SIGTERM, before)


def noting(heard: list[str], name: str) -> Callable[..., None]:
    return lambda *_: heard.append(name)


def test_the_second_signal_is_the_scripts_where_the_first_goes_before(heard: list[str]) -> None:
    own = noting(heard, "own")
    signal.signal(signal.SIGTERM, own)
    with on_sigterm(noting(heard, "block"), before_own=True):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert heard == ["block", "own"]
    assert signal.getsignal(signal.SIGTERM) is own


def test_a_scripts_handler_stays_otherwise(heard: list[str]) -> None:
    signal.signal(signal.SIGTERM, noting(heard, "own"))
    with on_sigterm(noting(heard, "block")):
        signal.raise_signal(signal.SIGTERM)
    assert heard == ["own"]


@pytest.mark.parametrize("before_own", [False, True])
def test_without_a_signal_all_is_as_before(heard: list[str], before_own: bool) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with on_sigterm(noting(heard, "block"), before_own=before_own):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert (heard, signal.getsignal(signal.SIGTERM)) == ([], signal.SIG_DFL)


@pytest.mark.parametrize("before_own", [False, True])
def test_a_handler_that_is_set_inside_stays(heard: list[str], before_own: bool) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    own = noting(heard, "own")
    with on_sigterm(noting(heard, "block"), before_own=before_own):
        signal.signal(signal.SIGTERM, own)
    assert signal.getsignal(signal.SIGTERM) is own


def test_another_thread_sets_nothing(heard: list[str]) -> None:
    own = noting(heard, "own")
    signal.signal(signal.SIGTERM, own)

    def block() -> object:
        with on_sigterm(noting(heard, "block"), before_own=True):
            return signal.getsignal(signal.SIGTERM)

    assert Thread(block).result() is own
