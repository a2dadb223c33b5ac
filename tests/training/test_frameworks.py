"""Frameworks that take a rank for the only one: what they say stands where the real ones keep it.

The real ones are in tests/frameworks.
"""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any

import pytest

from muster.errors import DataNotDividedWarning
from muster.training.frameworks import warn_if_data_is_not_divided


def module(name: str, **content: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(content)
    return made


def accelerate(monkeypatch: pytest.MonkeyPatch, **state: Any) -> None:
    kept = types.SimpleNamespace(_shared_state=state)
    monkeypatch.setitem(sys.modules, "accelerate.state", module("accelerate.state", PartialState=kept))


@pytest.mark.parametrize(
    ("processes", "ranks", "words"),
    [
        (1, 2, "Accelerate knows of this process alone, and there are 2 ranks"),
        (2, 4, "Accelerate knows of 2 processes, and there are 4 ranks"),
    ],
)
def test_accelerate_that_counts_fewer_processes(
    monkeypatch: pytest.MonkeyPatch, processes: int, ranks: int, words: str
) -> None:
    accelerate(monkeypatch, num_processes=processes)
    with pytest.warns(DataNotDividedWarning, match=words):
        warn_if_data_is_not_divided(ranks)


@pytest.mark.parametrize(("state", "ranks"), [({}, 2), ({"num_processes": 2}, 2), ({"num_processes": 1}, 1)])
def test_accelerate_that_counts_all_or_is_not_used(
    monkeypatch: pytest.MonkeyPatch, state: dict[str, Any], ranks: int
) -> None:
    accelerate(monkeypatch, **state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_data_is_not_divided(ranks)


LOOP = """
class Loop:
    def __init__(self, trainer):
        if trainer is not None:
            self.trainer = trainer

    def advance(self, step):
        step()
"""


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize(("processes", "warns"), [(1, True), (2, False), (None, False)])
def test_lightning_s_trainer_is_found_among_the_callers(
    monkeypatch: pytest.MonkeyPatch, name: str, processes: int | None, warns: bool
) -> None:
    loops = module(f"{name}.loops")
    exec(LOOP, vars(loops))
    monkeypatch.setitem(sys.modules, name, module(name))
    trainer = None if processes is None else types.SimpleNamespace(world_size=processes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loops.Loop(trainer).advance(lambda: warn_if_data_is_not_divided(2))
        warn_if_data_is_not_divided(2)  # outside of the loop
    ours = [each for each in caught if each.category is DataNotDividedWarning]  # others' garbage may warn
    assert len(ours) == warns
    assert all("Lightning knows of this process alone" in str(each.message) for each in ours)
