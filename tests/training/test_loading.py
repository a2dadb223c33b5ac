"""What a step trains on, made ready ahead, by loaders that are no torch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.errors import SettingsError
from muster.training.loading import Loading
from muster.training.sampler import Batch, ShardedSampler
from muster.training.state import TrainingState


class Loader:
    """Reads some batches ahead, as a DataLoader with processes does."""

    def __init__(self, sampler: Any, ahead: int = 3, fails_at: int = -1) -> None:
        self.batch_sampler, self._ahead, self._fails_at = sampler, ahead, fails_at
        self.begun = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.begun += 1
        batches = iter(self.batch_sampler)
        ready = [batch for _, batch in zip(range(self._ahead), batches, strict=False)]
        while ready:
            batch = ready.pop(0)
            if self._fails_at in batch:
                raise ValueError(f"sample {self._fails_at} cannot be read")
            yield batch
            ready += [batch for _, batch in zip(range(1), batches, strict=False)]


def state_of(size: int = 20, batch_size: int = 4, **options: Any) -> TrainingState:
    return TrainingState({}, ShardedSampler(size, batch_size, seed=2, **options))


def indices(state: TrainingState) -> list[int] | None:
    return state.sampler.batch().indices.tolist() or None


EVENTS = st.lists(
    st.one_of(
        st.just("step"),
        st.just("break"),
        st.just("break later"),
        st.tuples(st.integers(1, 7), st.integers(0, 6)),
    ),
    min_size=1,
    max_size=30,
)


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 5), EVENTS)
def test_the_data_is_that_of_the_batch_whatever_happens(
    size: int, batch_size: int, ahead: int, events: list[Any]
) -> None:
    """Steps that break before or after the next data was made ready, other members, short last batches."""
    state = state_of(size, batch_size)
    loading = Loading(Loader(state.sampler, ahead), state)
    for event in events:
        assert loading.take() == indices(state)
        if event == "break":
            continue
        loading.prepare()
        if event == "step":
            state.sampler.advance()
        elif isinstance(event, tuple):
            world_size, rank = event
            state.sampler.reshard(rank % world_size, world_size)
    assert loading.take() == indices(state)


def test_an_epoch_is_one_pass_and_a_step_that_is_redone_begins_none() -> None:
    state = state_of()
    loader = Loader(state.sampler)
    loading = Loading(loader, state)
    for step in range(10):
        first = loading.take()
        loading.prepare()
        assert loading.take() is first
        assert loader.begun == 1 + step // 5
        state.sampler.advance()


def test_a_resumed_position_begins_a_new_pass_there() -> None:
    state = state_of()
    loader = Loader(state.sampler)
    loading = Loading(loader, state)
    loading.take()
    loading.prepare()
    state.sampler.restore({**state.sampler.state(), "epoch": 1, "position": 8})
    assert loading.take() == indices(state) and loader.begun == 2
    assert len(state.sampler) == 3


def test_a_function_is_called_once_for_each_batch_and_ahead() -> None:
    state = state_of()
    asked: list[tuple[int, int]] = []

    def load(batch: Batch) -> Any:
        asked.append((batch.epoch, batch.step))
        return batch.indices.tolist()

    loading = Loading(load, state)
    for _ in range(7):
        assert loading.take() == indices(state)
        loading.prepare()
        state.sampler.advance()
    assert asked == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2)]


def test_an_error_ahead_is_raised_when_its_batch_comes() -> None:
    state = state_of()
    second = state.sampler.following().batch().indices.tolist()
    loading = Loading(Loader(state.sampler, fails_at=second[0]), state)
    loading.take()
    loading.prepare()
    state.sampler.advance()
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be read"):
            loading.take()


def test_a_loader_of_another_sampler_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"DataLoader\(dataset, batch_sampler=state\.sampler"):
        Loading(Loader(ShardedSampler(20, 4)), state_of())


def test_a_loader_that_ends_early_is_named() -> None:
    state = state_of()
    loader = Loader(state.sampler)
    loading = Loading(loader, state)
    loader.batch_sampler = [[1]]
    assert loading.take() == [1]
    state.sampler.advance()
    with pytest.raises(SettingsError, match="the loader ended before the epoch did"):
        loading.take()
