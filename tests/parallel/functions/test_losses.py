"""The cross entropy in one pass, beside torch's: losses, gradients, and whose memory the gradient takes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F

import muster
from muster.parallel.functions.losses import CrossEntropy
from tests.parallel.oracle import SLOW, whole_gradients
from tests.parallel.ranks import RankCommunicator, run_ranks

torch.set_num_threads(1)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def scores_and_targets(dtype: Any, device: str, rows: int = 6, classes: int = 10_000) -> tuple[Any, Any]:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    draw = torch.Generator().manual_seed(2)
    scores = (4 * torch.randn(rows, classes, generator=draw)).to(dtype).to(device)
    return scores, torch.randint(classes, (rows,), generator=draw).to(device)


def fused(scores: Any, target: Any, *, ignored: int = -100, overwrite: bool = False, parts: int = 1) -> Any:
    """Losses of rows; with ``parts`` as if each rank had some of the classes, one rank after the other."""
    classes = scores.shape[1] // parts
    pieces = [slice(part * classes, (part + 1) * classes) for part in range(parts)]
    found: list[Any] = []

    def noted(own: Any) -> Any:
        found.append(own)
        return own[None]

    with torch.no_grad():
        for piece in pieces:
            CrossEntropy.apply(scores[:, piece], target, piece.start, noted, ignored, False)
    whole = torch.stack(found)
    return [
        CrossEntropy.apply(
            scores[:, piece], target, piece.start, lambda own: whole, ignored, overwrite and parts == 1
        )
        for piece in pieces
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("ignored", [-100, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_losses_and_gradients_are_torchs(device: str, dtype: Any, ignored: int, parts: int) -> None:
    scores, target = scores_and_targets(dtype, device)
    target[1] = ignored
    exact = scores.double().clone().requires_grad_()
    want = F.cross_entropy(exact, target, reduction="none", ignore_index=ignored)
    weight = torch.linspace(-1, 1, len(target), device=device)
    (want * weight).sum().backward()
    ours = scores.clone().requires_grad_()
    losses = fused(ours, target, ignored=ignored, parts=parts)
    close = 1e-9 if dtype == torch.float64 else 1e-4
    for each in losses:  # every rank has the same losses, and a part of the gradient
        assert each.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(each.double(), want, atol=close, rtol=close)
    sum((each * weight).sum() for each in losses).backward()
    step = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-9
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=1e-6, rtol=2 * step)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", [1, 4])
def test_classes_that_are_masked_out_count_for_nothing(device: str, parts: int) -> None:
    """Even where all of a rank's classes are, as the padding of a vocabulary may be."""
    scores, target = scores_and_targets(torch.float32, device)
    target %= 2_000
    scores[:, 2_500:] = -torch.inf
    want = F.cross_entropy(scores.double(), target, reduction="none")
    ours = scores.clone().requires_grad_()
    losses = fused(ours, target, parts=parts)
    losses[0].sum().backward()
    torch.testing.assert_close(losses[0].double(), want, atol=1e-5, rtol=1e-5)
    assert ours.grad.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_takes_the_scores_memory_unless_another_pass_may_come(device: str) -> None:
    scores, target = scores_and_targets(torch.float32, device)
    for again in (True, False):
        held = scores.clone()
        scored = held.detach().requires_grad_()
        (loss,) = fused(scored, target, overwrite=True)
        loss.sum().backward(retain_graph=again)
        assert torch.equal(held, scores) == again
        assert (scored.grad.data_ptr() == held.data_ptr()) != again
    want = scores.clone().requires_grad_()
    F.cross_entropy(want, target, reduction="sum").backward()
    torch.testing.assert_close(scored.grad, want.grad, atol=1e-6, rtol=1e-5)


class Head(nn.Module):
    """A linear layer and its loss, as programs write them that count in bfloat16."""

    def __init__(self, *, shown: bool = False) -> None:
        super().__init__()
        self.fc, self.shown = nn.Linear(8, 32), shown

    def forward(self, x: Any, y: Any) -> Any:
        scores = self.fc(x)
        loss = F.cross_entropy(scores.float(), y)
        return (loss, scores) if self.shown else loss


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("strategy", [{"n": 2}, {"k": 2}, {"b0": 2}])
def test_scores_in_bfloat16_give_the_loss_that_torch_gives_in_float32(
    strategy: dict[str, int], shown: bool
) -> None:
    """The program's cast to float32 is left out; what it returns beside the loss stays as it was."""
    torch.manual_seed(4)
    net, x, y = Head(shown=shown), torch.randn(8, 8), torch.randint(32, (8,))
    with torch.autocast("cpu", torch.bfloat16):
        out = net(x, y)
        want, scores = out if shown else (out, x)
    want.backward()

    def one(communicator: RankCommunicator) -> Any:
        model = muster.parallelize(
            Head(shown=shown),
            (x, y),
            communicator=communicator,
            mode="semi_auto",
            strategies={"fc": strategy},
            dataset_strategy="full_batch",
            autocast=torch.bfloat16,
            machine=SLOW,
        )
        model.load_full_state_dict(net.state_dict())
        found = model(x, y)
        loss, seen = found if shown else (found, x)
        loss.backward()
        if shown:
            torch.testing.assert_close(seen.float(), scores.float(), atol=2e-2, rtol=2e-2)
        assert loss.dtype == torch.float32
        return loss.item(), whole_gradients(model)["fc.weight"]

    for loss, grad in run_ranks(2, one):
        assert loss == pytest.approx(want.item(), rel=2e-2 if "k" in strategy else 1e-3)
        torch.testing.assert_close(grad, net.fc.weight.grad, atol=2e-3, rtol=3e-2)
