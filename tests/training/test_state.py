from __future__ import annotations

import json

import numpy as np
import pytest

from muster.training.sampler import ShardedSampler
from muster.training.state import StateMismatchError, TrainingState


def make(seed: int = 0, generator: type[np.random.BitGenerator] = np.random.PCG64) -> TrainingState:
    arrays = {"w": np.full((2, 3), float(seed)), "momentum.w": np.zeros((2, 3), "float32")}
    return TrainingState(arrays, ShardedSampler(10, 4, seed=seed), rng=np.random.Generator(generator(seed)))


@pytest.mark.parametrize("generator", [np.random.PCG64, np.random.Philox, np.random.MT19937, np.random.SFC64])
def test_position_step_generator_and_extra_survive_the_description(
    generator: type[np.random.BitGenerator],
) -> None:
    old = make(1, generator)
    old.sampler.advance()
    old.step, old.extra = 7, {"rate": 0.5, "best": np.float64(0.25)}
    assert old.rng is not None
    old.rng.random(5)
    description = old.describe()
    new = make(2, generator)
    new.check(description, "here")
    new.restore(description)
    assert new.rng is not None
    assert new.rng.random(3).tolist() == old.rng.random(3).tolist()
    assert (new.step, new.extra) == (7, {"rate": 0.5, "best": 0.25})
    assert new.sampler.batch().indices.tolist() == old.sampler.batch().indices.tolist()


def test_another_model_is_refused_with_what_differs() -> None:
    other = make()
    other.arrays = {"w": np.zeros((2, 4)), "momentum.w": np.zeros((2, 3), "float32"), "b": np.zeros(4)}
    with pytest.raises(StateMismatchError) as caught:
        make().check(other.describe(), "rank 3")
    assert "The state in rank 3 is of another model" in str(caught.value)
    assert "w is float64[2, 4] there and float64[2, 3] here" in str(caught.value)
    assert "b is float64[4] there and absent here" in str(caught.value)


def test_a_run_without_a_generator_ignores_a_saved_one() -> None:
    state = TrainingState({"w": np.zeros((2, 3))}, ShardedSampler(10, 4))
    state.restore(make(3).describe())
    assert state.rng is None
    assert json.loads(state.describe())["rng"] is None


def test_what_json_cannot_hold_is_refused_when_it_is_saved() -> None:
    state = make()
    state.extra = {"odd": object()}
    with pytest.raises(TypeError, match="object is not JSON"):
        state.describe()
