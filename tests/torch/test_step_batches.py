"""StepBatches by number: those of earlier steps come once more, and another process gets the same."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.torch.random import RandomState
from muster.torch.step_batches import NoMoreBatchesError, StepBatches

STEPS = 6


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


def loader() -> Any:
    return torch.utils.data.DataLoader(torch.arange(5), batch_size=2, shuffle=True)


def batches(epochs: int = 2) -> StepBatches:
    return StepBatches(loader(), epochs, RandomState(torch.device("cpu")))


def step(made: StepBatches, number: int) -> tuple[list[int], float]:
    """A batch, and what the step draws then."""
    return made.at(number).tolist(), torch.rand(1).item()


def test_all_epochs_come_and_then_no_more() -> None:
    made = batches()
    found = [made.at(number).tolist() for number in range(STEPS)]
    for epoch in (found[:3], found[3:]):
        assert sorted(each for batch in epoch for each in batch) == [0, 1, 2, 3, 4]
    with pytest.raises(NoMoreBatchesError):
        made.at(STEPS)


def test_a_process_that_goes_back_gets_the_same_also_over_an_epoch_s_end() -> None:
    made = batches()
    first = [step(made, number) for number in range(2)]
    kept = torch.get_rng_state()
    made.forget_before(2)
    rest = [step(made, number) for number in range(2, STEPS)]
    torch.set_rng_state(kept)
    assert [step(made, number) for number in range(2, STEPS)] == rest
    assert len(first + rest) == STEPS


@pytest.mark.parametrize("number", range(STEPS))
def test_another_process_goes_on_where_the_lost_one_was(number: int) -> None:
    lost = batches()
    for each in range(number):
        step(lost, each)
    place, kept = lost.place(number), torch.get_rng_state()
    rest = [step(lost, each) for each in range(number, STEPS)]
    torch.manual_seed(99)
    other = batches()
    other.go_to(number, place)
    torch.set_rng_state(kept)
    assert [step(other, each) for each in range(number, STEPS)] == rest
