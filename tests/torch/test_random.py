"""torch's generators as part of the state: a step that is redone draws what it drew; newcomers are seeded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.communicators.base import Communicator
from muster.communicators.membership import Membership, Peer
from muster.communicators.work import FINISHED
from muster.torch.capture import capture_step
from muster.torch.data_parallel import DataParallel
from muster.torch.random import RandomState, seed_of
from muster.torch.state import TorchTrainingState
from muster.training.sampler import ShardedSampler
from tests.gpu.threads import ThreadCommunicator, run_ranks
from tests.torch.test_state import IMAGES, LABELS, Member, equal, generation

SEED = 20


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    before = torch.get_rng_state()
    torch.manual_seed(SEED)
    yield
    torch.set_rng_state(before)


class Dropping(Member):
    """Draws a mask in each step."""

    def compute(self) -> None:
        self.state.begin()
        rows = self.state.sampler.batch().indices
        self.optimizer.zero_grad()
        images = torch.nn.functional.dropout(IMAGES[rows], 0.5)
        torch.nn.functional.cross_entropy(self.model(images), LABELS[rows]).backward()
        self.optimizer.step()


def breaks(member: Member) -> None:
    def run(communicator: ThreadCommunicator) -> None:
        member.model.rebind(communicator)
        member.compute()  # and no commit: the AllReduce was aborted, say

    run_ranks(1, run)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_redone_step_draws_what_it_drew_before(steps_before: int) -> None:
    whole, broken = Dropping(1), Dropping(1)
    generation([whole], steps_before + 2)
    torch.manual_seed(SEED)
    generation([broken], steps_before)
    breaks(broken)
    breaks(broken)
    generation([broken], 2, source=0)
    assert equal(whole, broken)


def test_seeding_after_the_state_was_made_counts() -> None:
    members = [Dropping(1), Dropping(1)]
    for member in members:
        torch.manual_seed(3)  # ranks that build one model alike
        run_ranks(1, member.enter)
        torch.manual_seed(4)  # and draw apart, seed themselves about here: before the loop begins
        generation([member], 1)
    assert equal(*members)


def test_all_keep_their_own_seed_when_a_run_begins() -> None:
    generation([Member(1), Member(2)], 0)
    assert torch.initial_seed() == SEED


def test_a_newcomer_is_seeded_by_rank_and_step() -> None:
    first, second, late = (Member(seed) for seed in (1, 2, 3))
    generation([first, second], 3)
    assert torch.initial_seed() == SEED
    generation([first, late, second], 0, source=0, newcomers=(1,))
    assert torch.initial_seed() == seed_of(SEED, 1, 3)
    late.state.begin()
    drawn = torch.rand(4)
    late.state.roll_back()  # its first step is redone like any other
    assert torch.equal(torch.rand(4), drawn)
    torch.manual_seed(7)
    generation([first, late, second], 1, source=0)  # it is no newcomer any more
    assert torch.initial_seed() == 7


def test_going_on_from_a_checkpoint_does_not_draw_the_first_steps_again() -> None:
    saved, resumed = Member(1), Member(1)
    generation([saved], 3)
    run_ranks(1, resumed.enter)
    resumed.state.restore(saved.state.describe())
    generation([resumed], 0)
    assert torch.initial_seed() == seed_of(SEED, 0, 3)


def test_seeds_differ_by_rank_step_and_run() -> None:
    cases = [(seed, rank, step) for seed in (0, 1) for rank in range(12) for step in range(1, 13)]
    assert len({seed_of(*case) for case in cases}) == len(cases)
    assert all(0 <= seed_of(*case) < 2**63 for case in cases)


# ---------------------------------------------------------------- on a GPU


class OneRank(Communicator):
    """A job of one on a GPU, without NCCL: nothing has to be moved."""

    name = "nccl"
    on_device = capturable = True

    def __init__(self) -> None:
        self.membership = Membership("job", 1, "world", 0, (Peer(0, "w0", 1, "h", "h", ""),))

    def all_reduce(self, send: Any, recv: Any, op: Any, *, async_op: bool = False) -> Any:
        recv.copy_(send)
        return FINISHED

    def broadcast(self, buffer: Any, root: int, *, async_op: bool = False) -> Any:
        return FINISHED

    def mark(self) -> Any:
        return torch.cuda.synchronize

    def before_end(self, release: Any) -> Any:
        return lambda: None

    def all_gather(self, send: Any, recv: Any, *, async_op: bool = False) -> Any:
        recv.copy_(send)
        return FINISHED

    def _absent(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    reduce = reduce_scatter = gather = scatter = all_to_all = send = recv = barrier = split = _absent
    abort = close = _absent


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("capture", [False, True])
def test_a_redone_step_on_a_gpu_draws_what_it_drew_before(capture: bool) -> None:
    images, labels = IMAGES.cuda().flatten(1), LABELS.cuda()

    def train(breaking: int | None) -> tuple[list[Any], bool]:
        torch.manual_seed(SEED)
        net = torch.nn.Sequential(torch.nn.Linear(48, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)).cuda()
        model = DataParallel(net, communicator=OneRank(), elastic=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
        state = TorchTrainingState(model, optimizer, ShardedSampler(24, 24))
        step = capture_step(
            lambda x, y: torch.nn.functional.cross_entropy(model(x), y), model, optimizer, capture=capture
        )
        state.enter(model.communicator, 0)
        for number in range(8):
            if number == breaking:
                state.begin()
                step(images, labels)
                state.roll_back()
            state.begin()
            step(images, labels)
            state.commit()
        return [parameter.detach().clone() for parameter in net.parameters()], step.captured

    whole, captured = train(None)
    redone, _ = train(6)
    assert captured is capture
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(redone, whole, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_that_draws_goes_on_eagerly_where_capturing_it_fails() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(48, 8), torch.nn.Dropout(0.5)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)

    def loss(images: Any) -> Any:
        value = net(images).square().mean()
        value.item()  # the host reads the GPU: not possible while capturing
        return value

    step = capture_step(loss, net, optimizer)
    losses = {float(step(IMAGES.cuda().flatten(1))) for _ in range(6)}
    assert step.reason is not None and "capture" in step.reason and not step.captured
    assert len(losses) == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_keeping_does_not_wait_for_the_gpu() -> None:
    state, busy = RandomState(torch.device("cuda", 0)), torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    busy.record()
    state.put_back(state.keep())
    assert not busy.query()
    torch.cuda.synchronize()
