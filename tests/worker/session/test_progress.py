"""How far the training is, from what loop and script report."""

from __future__ import annotations

import pytest

from muster.wire import messages
from muster.wire.codec import decode_worker_message, encode
from muster.wire.messages import MAX_NUMBERS
from muster.worker.session.progress import Progress


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_script_of_its_own_counts_a_step_with_each_report() -> None:
    clock = Clock()
    progress = Progress(clock)
    for _ in range(3):
        clock.now_s += 0.5
        assert progress.take(None, None, loss=2, samples=32)
    assert (progress.step, progress.samples_per_s, progress.loss) == (3, 64.0, 2.0)


def test_beside_a_loop_that_numbers_its_steps_a_script_adds_a_loss() -> None:
    progress = Progress(Clock())
    assert progress.take(7, 100.0, steps=20)
    assert not progress.take(None, None, loss=0.5)
    assert (progress.step, progress.samples_per_s, progress.loss, progress.steps) == (7, 100.0, 0.5, 20)
    assert progress.take(8, 90.0)
    assert (progress.step, progress.loss) == (8, 0.5)


@pytest.mark.parametrize("speed", [float("nan"), float("inf"), -1.0])
def test_a_speed_that_is_none_is_sent_as_nought(speed: float) -> None:
    """The scheduler refuses others."""
    progress = Progress(Clock())
    progress.take(1, speed)
    assert progress.samples_per_s == 0.0


@pytest.mark.parametrize("count", [-1, 2**63, 10**400])
@pytest.mark.parametrize("name", ["step", "steps", "epoch", "epochs"])
def test_what_is_no_count_is_refused_to_the_caller(name: str, count: int) -> None:
    """A thread sends it: that would end, and the worker be lost as silent."""
    progress = Progress(Clock())
    arguments: dict[str, int] = {"step": 1, "steps": 2, name: count}
    with pytest.raises(ValueError, match=f"{name} must be from 0 to"):
        progress.take(arguments.pop("step"), None, **arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        progress.take(1.5, None)  # type: ignore[arg-type]
    assert progress.step == progress.steps == 0


def test_numbers_of_the_script_s_own_are_kept_and_alone_are_no_step(caplog: pytest.LogCaptureFixture) -> None:
    progress = Progress(Clock())
    assert progress.take(None, None, loss=1, numbers={"grad_norm": 2})
    assert not progress.take(None, None, numbers={"accuracy": 0.5})
    assert (progress.step, progress.numbers) == (1, {"grad_norm": 2.0, "accuracy": 0.5})
    progress.take(None, None, numbers={"accuracy": float("nan")})
    assert progress.numbers == {"grad_norm": 2.0}
    with pytest.raises((TypeError, ValueError)):
        progress.take(None, None, numbers={"accuracy": "high"})  # type: ignore[dict-item]


def test_the_epoch_is_kept_and_alone_is_no_step() -> None:
    progress = Progress(Clock())
    assert not progress.take(None, None, epoch=1, epochs=10)
    assert progress.take(None, None, loss=1)
    assert not progress.take(None, None, numbers={"accuracy": 0.5}, epoch=2)
    assert (progress.step, progress.epoch, progress.epochs) == (1, 2, 10)


def test_numbers_that_heartbeats_cannot_carry_are_left_out_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    progress = Progress(Clock())
    many = {f"n{number}": number for number in range(MAX_NUMBERS)}
    for _ in range(3):
        progress.take(None, None, numbers={**many, "more": 1, "with blank": 1})
    assert progress.numbers == many
    assert [record.args[0] for record in caplog.records if record.args] == ["more", "with blank"]  # type: ignore[index]
    beat = messages.Heartbeat(1, 2, 3, 4.0, numbers=tuple(sorted(progress.numbers.items())))
    assert decode_worker_message(encode(beat)) == beat
