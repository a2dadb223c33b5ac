from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muster.errors import SettingsError, WorkerError
from muster.training.sampler import ShardedSampler


def world(size: int, batch_size: int, world_size: int, **options: int | bool) -> list[ShardedSampler]:
    return [
        ShardedSampler(size, batch_size, rank=rank, world_size=world_size, **options)  # type: ignore[arg-type]
        for rank in range(world_size)
    ]


def global_batch(samplers: list[ShardedSampler]) -> list[int]:
    batches = [sampler.batch() for sampler in samplers]
    assert len({(b.epoch, b.step, b.global_size, b.last) for b in batches}) == 1
    assert sum(len(b.indices) for b in batches) == batches[0].global_size
    return [int(i) for b in batches for i in b.indices]


def advance(samplers: list[ShardedSampler]) -> None:
    for sampler in samplers:
        sampler.advance()


@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 9), st.integers(0, 5))
def test_any_world_sees_the_batches_of_one_process_and_every_sample_once(
    size: int, batch_size: int, world_size: int, seed: int
) -> None:
    alone = ShardedSampler(size, batch_size, seed=seed)
    many = world(size, batch_size, world_size, seed=seed)
    for epoch in range(2):
        seen: list[int] = []
        for step in range(alone.steps_per_epoch):
            batch = alone.batch()
            assert (batch.epoch, batch.step) == (epoch, step)
            assert batch.last == (step == alone.steps_per_epoch - 1)
            assert global_batch(many) == batch.indices.tolist()
            seen += batch.indices.tolist()
            alone.advance()
            advance(many)
        assert sorted(seen) == list(range(size))
    assert alone.epoch == 2


@given(st.integers(1, 60), st.integers(1, 20), st.lists(st.integers(1, 6), min_size=1, max_size=40))
def test_changing_the_world_between_steps_loses_and_doubles_nothing(
    size: int, batch_size: int, world_sizes: list[int]
) -> None:
    alone = ShardedSampler(size, batch_size, seed=3)
    state = alone.state()
    for world_size in world_sizes:
        samplers = world(size, batch_size, world_size)  # newcomers know nothing but the state
        for sampler in samplers:
            sampler.restore(state)
        assert global_batch(samplers) == alone.batch().indices.tolist()
        advance(samplers)
        alone.advance()
        state = samplers[-1].state()
        assert state == alone.state()


def test_reshard_keeps_the_position() -> None:
    sampler = ShardedSampler(10, 4, rank=1, world_size=2)
    sampler.advance()
    whole = ShardedSampler(10, 4)
    whole.advance()
    sampler.reshard(0, 1)
    assert sampler.batch().indices.tolist() == whole.batch().indices.tolist()


def test_a_batch_is_told_again_until_it_is_consumed() -> None:
    sampler = ShardedSampler(10, 4)
    first = sampler.batch().indices.tolist()
    assert sampler.batch().indices.tolist() == first
    sampler.advance()
    assert not set(sampler.batch().indices.tolist()) & set(first)


def test_shares_of_an_uneven_batch_give_the_mean_over_all_samples() -> None:
    values = np.arange(7.0) ** 2
    batches = [sampler.batch() for sampler in world(7, 7, 3, seed=1)]
    assert sorted(len(b.indices) for b in batches) == [2, 2, 3]
    summed = sum(b.share * values[b.indices].mean() for b in batches)
    averaged = np.mean([b.weight * values[b.indices].mean() for b in batches])
    assert summed == pytest.approx(values.mean())
    assert averaged == pytest.approx(values.mean())


def test_order_depends_on_seed_and_epoch_alone() -> None:
    def orders(seed: int) -> list[list[int]]:
        sampler = ShardedSampler(50, 50, seed=seed)
        first = sampler.batch().indices.tolist()
        sampler.advance()
        return [first, sampler.batch().indices.tolist()]

    assert orders(1) == orders(1)
    assert len({tuple(order) for seed in (1, 2) for order in orders(seed)}) == 4


def test_without_shuffle_the_order_is_the_data_sets_own() -> None:
    sampler = ShardedSampler(5, 3, shuffle=False)
    assert sampler.batch().indices.tolist() == [0, 1, 2]
    sampler.advance()
    assert sampler.batch().indices.tolist() == [3, 4]


def test_drop_last_leaves_out_the_rest_also_after_the_batch_size_changed() -> None:
    sampler = ShardedSampler(10, 4, drop_last=True, shuffle=False)
    assert sampler.steps_per_epoch == 2
    lasts = []
    for _ in range(2):
        lasts.append(sampler.batch().last)
        sampler.advance()
    assert lasts == [False, True]
    assert (sampler.epoch, sampler.position) == (1, 0)
    bigger = ShardedSampler(10, 7, drop_last=True)
    bigger.restore({"epoch": 0, "position": 4, "seed": 0, "size": 10, "shuffle": False})
    assert (bigger.epoch, bigger.position) == (1, 0)


def test_restored_with_another_batch_size_it_goes_on_at_the_same_sample() -> None:
    sampler = ShardedSampler(10, 4, seed=5)
    order = ShardedSampler(10, 10, seed=5).batch().indices.tolist()
    sampler.advance()
    other = ShardedSampler(10, 3, seed=99)
    other.restore(json.loads(json.dumps(sampler.state())))
    seen = []
    while other.epoch == 0:
        seen += other.batch().indices.tolist()
        other.advance()
    assert seen == order[4:]


def test_restoring_an_unshuffled_state_undoes_the_shuffle() -> None:
    sampler = ShardedSampler(20, 20, seed=1)
    assert sampler.batch().indices.tolist() != list(range(20))
    sampler.restore(ShardedSampler(20, 20, shuffle=False).state())
    assert sampler.batch().indices.tolist() == list(range(20))


def test_split_divides_a_ranks_samples_for_accumulation() -> None:
    batch = ShardedSampler(10, 7).batch()
    pieces = batch.split(3)
    assert [len(piece) for piece in pieces] == [3, 2, 2]
    assert np.concatenate(pieces).tolist() == batch.indices.tolist()


def test_state_of_another_data_set_is_refused() -> None:
    with pytest.raises(WorkerError, match="data set of 9 samples, this one has 10"):
        ShardedSampler(10, 4).restore(ShardedSampler(9, 4).state())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"size": 0}, "size is 0, it must be >= 1"),
        ({"batch_size": 0}, "batch_size is 0, it must be >= 1"),
        ({"batch_size": 11, "drop_last": True}, "batch_size is 11, it must be <= 10 with drop_last"),
        ({"seed": -1}, "seed is -1"),
        ({"world_size": 0}, "world_size is 0"),
        ({"rank": 2, "world_size": 2}, "rank is 2, it must be 0 to 1"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, int], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        ShardedSampler(**{"size": 10, "batch_size": 4, **arguments})  # type: ignore[arg-type]


@example(8, 3, 5, 0, False)  # some batches have none for some ranks
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5), st.integers(0, 9), st.booleans())
def test_iterating_gives_what_is_left_of_the_epoch_and_consumes_nothing(
    size: int, batch_size: int, world_size: int, done: int, drop_last: bool
) -> None:
    for sampler in world(size, min(batch_size, size), world_size, drop_last=drop_last):
        for _ in range(done):
            sampler.advance()
        before = sampler.state()
        found = list(sampler)
        assert sampler.state() == before
        left, expected = len(sampler), []
        for _ in range(left):
            assert sampler.epoch == before["epoch"]
            expected.append(sampler.batch().indices.tolist())
            sampler.advance()
        assert sampler.epoch == before["epoch"] + 1
        assert found == [each for each in expected if each]


@pytest.mark.parametrize("seed", range(8))
def test_kills_and_resumes_on_any_number_of_ranks_lose_and_double_nothing(seed: int) -> None:
    """What a run keeps is each sample once an epoch, however often it goes back to a state of before."""
    chance = np.random.default_rng(seed)
    size, epochs = 97, 3
    sampler = ShardedSampler(size, 12, seed=seed)
    kept: list[tuple[int, int]] = []
    saved = (sampler.state(), 0)
    while sampler.epoch < epochs:
        world = int(chance.integers(1, 6))
        for _ in range(int(chance.integers(1, 9))):
            if sampler.epoch == epochs:
                break
            for rank in range(world):
                sampler.reshard(rank, world)
                batch = sampler.batch()
                kept += [(batch.epoch, int(index)) for index in batch.indices]
            sampler.advance()
            if chance.random() < 0.3:
                saved = (sampler.state(), len(kept))
        if sampler.epoch < epochs and chance.random() < 0.5:  # a kill: the next ranks have what was saved
            sampler = ShardedSampler(size, 12, seed=99)
            sampler.restore(saved[0])
            del kept[saved[1] :]
    assert sorted(kept) == [(epoch, index) for epoch in range(epochs) for index in range(size)]
