"""capture_step where nothing can be captured: what a step computes, and what it says."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from muster.errors import SettingsError
from muster.torch.capture import CaptureError
from muster.torch.data_parallel import DataParallel
from tests.gpu.threads import ThreadCommunicator, run_ranks
from tests.torch.test_data_parallel import batch_of, linear_net
from tests.torch.test_step import step_of


def test_strict_raises_what_otherwise_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CaptureError, match="the module is on the cpu"):
        step_of(linear_net(), strict=True)
    assert not caplog.records
    step = step_of(linear_net())
    assert step.reason == "the module is on the cpu" and not step.captured
    assert "training steps run eagerly: the module is on the cpu" in caplog.text


def test_a_step_may_be_kept_eager_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    step = step_of(linear_net(), capture=False)
    assert step.reason == "capture is switched off" and not caplog.records


def test_a_batch_that_was_fed_before_is_trained_on() -> None:
    net, fed = linear_net(), linear_net()
    step_of(net)(*batch_of(4, 0))
    step = step_of(fed)
    step.feed(*batch_of(4, 0))
    step()
    for ours, theirs in zip(net.parameters(), fed.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(SettingsError, match=r"feed\(\) before"):
        step()


def test_the_loss_that_is_shown_is_the_mean_over_ranks() -> None:
    def one(communicator: ThreadCommunicator) -> tuple[float, float]:
        step = step_of(DataParallel(linear_net(), communicator=communicator))
        loss = step(*batch_of(4, communicator.rank))
        return float(loss), step.mean_over_ranks(loss)

    found = run_ranks(3, one)
    mean = sum(own for own, _ in found) / 3
    assert len({own for own, _ in found}) == 3 and len({shown for _, shown in found}) == 1
    assert found[0][1] == pytest.approx(mean)
    alone = step_of(linear_net())
    loss = alone(*batch_of(4, 0))
    assert alone.mean_over_ranks(loss) == float(loss)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup_steps": 1}, r"at least 2, for optimizers to create their state; it is 1"),
        ({"accumulate": 0}, "at least 1, not 0"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        step_of(linear_net(), **options)
