"""Contrastive, weighted, soft and regularised losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.parallel.suite.entries import floats, ids, model


class Encoder(nn.Sequential):
    def __init__(self, inputs: int = 16, outputs: int = 8) -> None:
        super().__init__(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


@model("contrastive", floats(16), floats(16))
class TwoViews(nn.Module):
    """SimCLR: each view's other is its class among all."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, a: Any, b: Any) -> Any:
        z = F.normalize(torch.cat([self.encoder(a), self.encoder(b)]), dim=1)
        scores = z @ z.t() / 0.5
        scores = scores.masked_fill(torch.eye(scores.shape[0], dtype=torch.bool), float("-inf"))
        half = a.shape[0]
        wanted = torch.cat([torch.arange(half) + half, torch.arange(half)])
        return F.cross_entropy(scores, wanted)


@model("contrastive", floats(16), ids(32, 6))
class ImageAndText(nn.Module):
    """CLIP: both directions, with a temperature that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.words, self.text = Encoder(), nn.Embedding(32, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Any, words: Any) -> Any:
        a = self.image(image)
        b = self.text(self.words(words))[torch.arange(words.shape[0]), words.argmax(-1) % 6]
        a, b = a / a.norm(dim=-1, keepdim=True), b / b.norm(dim=-1, keepdim=True)
        scores = self.scale.exp() * a @ b.t()
        wanted = torch.arange(scores.shape[0])
        return (F.cross_entropy(scores, wanted) + F.cross_entropy(scores.t(), wanted)) / 2


@model("contrastive", floats(16), floats(16), floats(16))
class Triplets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, anchor: Any, near: Any, far: Any) -> Any:
        a, n, f = (self.encoder(each) for each in (anchor, near, far))
        apart = F.pairwise_distance(a, n) - F.pairwise_distance(a, f)
        sign = torch.ones(a.shape[0], dtype=a.dtype)
        return (
            F.triplet_margin_loss(a, n, f) + F.relu(apart + 0.5).mean() + F.cosine_embedding_loss(a, n, sign)
        )


@model("contrastive", floats(16), floats(16))
class RedundancyReduced(nn.Module):
    """Barlow Twins: the cross-correlation of two views."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.norm = Encoder(), nn.BatchNorm1d(8, affine=False)

    def forward(self, a: Any, b: Any) -> Any:
        c = self.norm(self.encoder(a)).t() @ self.norm(self.encoder(b)) / a.shape[0]
        on = torch.diagonal(c).add(-1).pow(2).sum()
        return on + 0.005 * (c.pow(2).sum() - torch.diagonal(c).pow(2).sum())


@model("weighted", floats(16), ids(6))
class WeightedClasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(16, 6)
        self.loss = nn.CrossEntropyLoss(weight=torch.arange(1.0, 7.0), label_smoothing=0.05)

    def forward(self, x: Any, y: Any) -> Any:
        return self.loss(self.encoder(x), y)


@model("weighted", floats(16), ids(6))
class Focal(nn.Module):
    """Hard samples count more; the score of the class by gather."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.alpha = Encoder(16, 6), nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: Any, y: Any) -> Any:
        logs = F.log_softmax(self.encoder(x), dim=-1)
        own = logs.gather(1, y.unsqueeze(1)).squeeze(1)
        return (-self.alpha[y] * (1 - own.exp()) ** 2 * own).mean()


@model("weighted", floats(16), ids(6))
class Distilled(nn.Module):
    """A frozen teacher, the divergence of softened scores."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Encoder(16, 6), Encoder(16, 6).requires_grad_(False)

    def forward(self, x: Any, y: Any) -> Any:
        scores = self.student(x)
        with torch.no_grad():
            soft = F.softmax(self.teacher(x) / 2, dim=-1)
        divergence = F.kl_div(F.log_softmax(scores / 2, dim=-1), soft, reduction="batchmean")
        return 4 * divergence + 0.5 * F.cross_entropy(scores, y)


@model("weighted", floats(16), floats(6))
class SoftTargets(nn.Module):
    """Mixed labels as probabilities, and margins of several labels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(16, 6)

    def forward(self, x: Any, y: Any) -> Any:
        scores = self.encoder(x)
        soft = y / y.sum(1, keepdim=True)
        several = F.multilabel_soft_margin_loss(scores, (y > 0.5).to(x.dtype))
        return (
            F.cross_entropy(scores, soft) + several + F.binary_cross_entropy(scores.sigmoid(), y, weight=soft)
        )


@model("weighted", floats(16), floats(8), floats(1))
class Quantiles(nn.Module):
    """Quantile and Gaussian losses of a forecast, samples of different weight, a penalty of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.var = Encoder(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any, y: Any, weight: Any) -> Any:
        h = self.encoder((x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-3))
        apart = y - self.mean(h)
        pinball = torch.maximum(0.9 * apart, -0.1 * apart)
        gaussian = F.gaussian_nll_loss(self.mean(h), y, F.softplus(self.var(h)) + 0.1)
        penalty = sum(p.square().sum() for p in self.encoder.parameters())
        return (weight * pinball).sum() / weight.sum() + gaussian + 1e-3 * penalty
