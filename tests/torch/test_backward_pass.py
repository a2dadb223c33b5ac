"""One backward pass: on which stream its buckets are reduced, and what follows one that breaks off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.errors import WorkerError
from muster.torch.buckets import GradientBucket
from muster.torch.data_parallel import DataParallel
from muster.torch.transfer import CommStream
from tests.gpu.threads import ThreadCommunicator, run_ranks
from tests.torch.test_data_parallel import (
    Branches,
    Crossed,
    batch_of,
    gradients_of,
    linear_net,
    loss_function,
)


def test_an_abandoned_backward_pass_is_forgotten_by_rebind() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(linear_net(), communicator=communicator)
        images, labels = batch_of(4, 0)
        output = model(images)
        output.register_hook(_raise)
        with contextlib.suppress(RuntimeError):
            loss_function(output, labels).backward()
        model.rebind(communicator, source=1)
        model.zero_grad()
        loss_function(model(images), labels).backward()
        return gradients_of(model)

    first, second = run_ranks(2, one)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


def _raise(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("a rank's own trouble")


def test_after_a_pass_that_broke_off_at_its_end_no_gradient_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would reduce those of the next pass, also not of parameters that this one did not reach."""

    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(Branches(), communicator=communicator)
        with monkeypatch.context() as patch:
            patch.setattr(communicator, "all_reduce", _raise)
            with pytest.raises(RuntimeError, match="a rank's own trouble"):
                model(torch.ones(1, 4), "left").sum().backward()
        with pytest.raises(WorkerError, match="the previous pass failed"):
            model.module.right(torch.ones(1, 4)).sum().backward()

    run_ranks(1, one)


class Streams:
    """torch's streams, as far as a CommStream uses them: who waited for which, and the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: list[tuple[str, str]] = []
        self.current = "main"
        monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: FakeStream(self, "side"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(self, self.current))
        monkeypatch.setattr(torch.cuda, "stream", self.within)
        monkeypatch.setattr(torch.cuda, "Event", lambda **options: FakeEvent(self))

    @contextlib.contextmanager
    def within(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


class FakeEvent:
    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def record(self, stream: FakeStream) -> None:
        self.streams.waits.append((stream.name, "event"))


class FakeStream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_stream(self, other: FakeStream) -> None:
        self.streams.waits.append((self.name, other.name))


@pytest.mark.parametrize("capturing", [False, True])
def test_gradients_on_a_gpu_are_packed_and_reduced_on_a_stream_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    """Else nothing of it would run beside the backward pass."""

    def one(communicator: ThreadCommunicator) -> Any:
        model: Any = DataParallel(Crossed(), communicator=communicator)
        streams, seen = Streams(monkeypatch), list[Any]()
        model._comm_stream = OnStreams(
            streams, seen, communicator, lambda: capturing and len(model.backward_pass.read_aside)
        )
        model._comm_stream.is_capturing = capturing
        fill = GradientBucket.fill

        def noted(bucket: Any, scale: Any) -> Any:
            seen.append(("fill", streams.current))
            return fill(bucket, scale)

        monkeypatch.setattr(GradientBucket, "fill", noted)
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: seen.append(("record", stream.name))
        )
        model(torch.ones(1, 4)).sum().backward()
        return seen, streams.waits

    seen, waits = run_ranks(1, one)[0]
    # Two buckets of one gradient each, whose memory is not reused before the side stream has read it.
    recorded = [] if capturing else [("record", "side")]
    expected = [[("fill", "side"), *recorded, ("reduce", "side", capturing and held)] for held in (1, 2)]
    assert seen == [*expected[0], *expected[1]]
    # What is packed must be there before, and the result afterwards; how long that takes is measured.
    measured = [("main", "event"), ("main", "side"), ("main", "event")]
    assert waits == [("side", "main"), ("side", "main"), *measured]


class OnStreams(CommStream):
    """A GPU's communication stream whose tensors are on the CPU."""

    def __init__(
        self, streams: Streams, seen: list[Any], communicator: ThreadCommunicator, held: Callable[[], int]
    ) -> None:
        super().__init__(communicator, torch.device("cuda", 0))
        self.streams, self.seen, self.held = streams, seen, held
        self.is_capturing = False

    def reduce(self, flat: Any, op: Any, *, buffers: Any = ()) -> None:
        self.seen.append(("reduce", self.streams.current, self.held()))

    def capturing(self) -> bool:
        return self.is_capturing
