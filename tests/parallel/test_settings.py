"""A divided model's settings: what is given goes before the context, and that before defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import muster
from muster.errors import SettingsError
from muster.parallel.planning.context import inherited_by
from muster.parallel.settings import ParallelSettings, settings_of

pytestmark = pytest.mark.usefixtures("fresh_context")


def of(net: Any = None, plan: str | Path | None = None, **given: Any) -> ParallelSettings:
    _, inherited = inherited_by(net)
    return settings_of(inherited.keywords, plan=plan, batch_norm=None, **given)


def test_what_is_given_goes_before_the_context_and_that_before_defaults() -> None:
    assert of() == ParallelSettings()
    muster.set_auto_parallel_context(
        parallel_mode="semi_auto_parallel", dataset_strategy="full_batch", enable_parallel_optimizer=True
    )
    found = of(mode="auto", shard_updates=None)
    assert (found.mode, found.dataset_strategy, found.shard_updates) == ("auto", "full_batch", "always")
    assert not found.gradients_mean  # MindSpore's default, once anything is set
    assert of(shard_updates=False, gradients_mean=True) == ParallelSettings(
        mode="semi_auto", dataset_strategy="full_batch", shard_updates=False, parameter_broadcast=False
    )


@pytest.mark.parametrize(
    ("name", "search"),
    [
        ("exact", "exact"),
        ("recursive_programming", "exact"),
        ("dynamic_programming", "exact"),
        ("propagation", "propagation"),
        ("sharding_propagation", "propagation"),
    ],
)
def test_five_names_stand_for_two_searches(name: str, search: str) -> None:
    assert of(search=name).search == search
    muster.set_auto_parallel_context(search_mode=name)
    assert of().search == search


def test_another_search_is_refused() -> None:
    with pytest.raises(SettingsError, match="search is one of exact, propagation, sharding_propagation"):
        of(search="best")


def test_a_plan_that_is_given_goes_before_the_contexts_files(tmp_path: Path) -> None:
    muster.set_auto_parallel_context(strategy_ckpt_load_file="a.json", strategy_ckpt_save_file="b.json")
    assert (of().load, of().save) == ("a.json", "b.json")
    file = tmp_path / "plan.json"
    assert (of(plan=file).load, of(plan=file).save) == ("", str(file))
    file.write_text("{}")
    assert (of(plan=file).load, of(plan=file).save) == (str(file), "")
