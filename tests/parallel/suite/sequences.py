"""Recurrences, connectionist losses, recommenders with bags of embeddings, graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.parallel.suite.entries import BATCH, floats, ids, model


@model("lstm", ids(32, 8), ids(32, 8))
class LstmWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = (
            nn.Embedding(32, 8),
            nn.LSTM(8, 16, batch_first=True),
            nn.Linear(16, 32),
        )

    def forward(self, words: Any, target: Any) -> Any:
        h, _ = self.body(self.embed(words))
        return F.nll_loss(F.log_softmax(self.head(h), -1).transpose(1, 2), target)


@model("lstm", ids(32, 8), ids(4))
class GruBothWays(nn.Module):
    """Bidirectional, pooled over time, classes of different weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8, padding_idx=0)
        self.body = nn.GRU(8, 8, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, 4)
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5, 1.5]))

    def forward(self, words: Any, y: Any) -> Any:
        h, _ = self.body(self.embed(words))
        pooled = torch.cat([h.max(dim=1).values, h.mean(dim=1)], -1)
        return F.cross_entropy(self.head(pooled), y, weight=self.weights)


@model("lstm", floats(6, 8), floats(6))
class CellByHand(nn.Module):
    """A cell, step by step, and gates written out."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.mix, self.head = nn.LSTMCell(8, 16), nn.Linear(24, 64), nn.Linear(16, 1)

    def forward(self, x: Any, y: Any) -> Any:
        h = c = torch.zeros(x.shape[0], 16, dtype=x.dtype)
        own_h, own_c, outs = h, c, []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            i, f, g, o = self.mix(torch.cat([x[:, t], own_h], 1)).chunk(4, 1)
            own_c = f.sigmoid() * own_c + i.sigmoid() * g.tanh()
            own_h = o.sigmoid() * own_c.tanh()
            outs.append(self.head(h + own_h))
        return F.mse_loss(torch.cat(outs, 1), y)


@model("lstm", ids(32, 8), ids(32, 6))
class AttendingTranslator(nn.Module):
    """A decoder that attends to an encoder's states, with padding masked."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(32, 16), nn.GRU(16, 16, batch_first=True)
        self.decoder, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(32, 32)

    def forward(self, words: Any, target: Any) -> Any:
        states, last = self.encoder(self.embed(words))
        out, _ = self.decoder(self.embed(F.pad(target[:, :-1], (1, 0), value=1)), last)
        scores = torch.bmm(out, states.transpose(1, 2)).masked_fill((words == 0).unsqueeze(1), -1e9)
        seen = torch.bmm(scores.softmax(-1), states)
        return F.cross_entropy(self.head(torch.cat([out, seen], -1)).transpose(1, 2), target, ignore_index=0)


@model("ctc", floats(16, 8), lambda draw: torch.randint(1, 8, (BATCH, 4), generator=draw))
class CtcConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv1d(8, 16, 3, padding=1), nn.Conv1d(16, 8, 1)

    def forward(self, x: Any, y: Any) -> Any:
        h = self.c2(F.relu(self.c1(x.transpose(1, 2))))
        steps, words = (torch.full((x.shape[0],), n, dtype=torch.long) for n in (16, 4))
        return F.ctc_loss(h.permute(2, 0, 1).log_softmax(2), y, steps, words)


@model("ctc", floats(12, 8), lambda draw: torch.randint(1, 8, (BATCH, 3), generator=draw))
class CtcRecurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 8)
        self.loss = nn.CTCLoss(blank=0, zero_infinity=True)

    def forward(self, x: Any, y: Any) -> Any:
        h = self.head(self.body(x)[0]).log_softmax(-1).transpose(0, 1)
        return self.loss(h, y, (12,) * x.shape[0], (3,) * x.shape[0])


@model("ctc", floats(2, 32), ids(16, 32))
class CausalWaves(nn.Module):
    """Dilated causal convolutions with gates, the next sample of 16 levels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 8, 1)
        self.filters = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**n) for n in range(3))
        self.skips, self.head = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3)), nn.Conv1d(8, 16, 1)

    def forward(self, x: Any, y: Any) -> Any:
        x, total = self.first(x), 0
        for n, (each, skip) in enumerate(zip(self.filters, self.skips, strict=True)):
            a, b = each(F.pad(x, (2**n, 0))).chunk(2, 1)
            h = skip(torch.tanh(a) * torch.sigmoid(b))
            x, total = x + h, total + h
        return F.cross_entropy(self.head(F.relu(total)), y)


@model("dlrm", floats(4), ids(64, 3, 5), floats(1))
class DlrmBags(nn.Module):
    """Bags of embeddings, pairs of features by their products."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(64, 8, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Any, sparse: Any, y: Any) -> Any:
        x = self.bottom(dense)
        features = torch.stack([x, *(bag(sparse[:, i]) for i, bag in enumerate(self.bags))], 1)
        pairs = torch.bmm(features, features.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, -1)
        scores = self.top(torch.cat([x, pairs[:, rows, columns]], 1))
        return F.binary_cross_entropy_with_logits(scores, (y > 0.5).to(x.dtype))


@model("dlrm", ids(64, 6), floats(6), floats(1))
class BagsOfOffsets(nn.Module):
    """A flat list of words with where each bag begins, each word with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(64, 8, mode="sum")
        self.mean, self.head = nn.EmbeddingBag(64, 8, mode="mean"), nn.Linear(16, 1)

    def forward(self, words: Any, weights: Any, y: Any) -> Any:
        begins = torch.arange(0, words.numel(), words.shape[1])
        sums = self.bag(words.flatten(), begins, per_sample_weights=weights.flatten())
        return F.mse_loss(self.head(torch.cat([sums, self.mean(words)], 1)).sigmoid(), y)


@model("dlrm", ids(32, 4), floats(1))
class CrossNetwork(nn.Module):
    """Embeddings side by side, crossed, beside a wide part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.wide = nn.Embedding(128, 4), nn.Embedding(128, 1)
        self.cross = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.deep, self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.0)), nn.Linear(48, 1)
        self.register_buffer("first", torch.arange(4) * 32)

    def forward(self, sparse: Any, y: Any) -> Any:
        words = sparse + self.first
        x0 = x = self.embed(words).flatten(1)
        for each in self.cross:
            x = x0 * each(x) + x
        scores = self.head(torch.cat([x, self.deep(x0)], 1)) + self.wide(words).sum(1)
        return F.binary_cross_entropy_with_logits(scores, y)


@model("dlrm", ids(32), ids(64), floats(1))
class TwoTowers(nn.Module):
    """Users and things with biases; negatives are the others of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.things = nn.Embedding(32, 8), nn.Embedding(64, 8)
        self.bias, self.tower = nn.Embedding(64, 1), nn.Linear(8, 8)

    def forward(self, users: Any, things: Any, y: Any) -> Any:
        u, t = self.tower(self.users(users)), self.things(things)
        scores = u @ t.t() + self.bias(things).squeeze(1)
        rated = (u * t).sum(1, keepdim=True)
        return F.cross_entropy(scores, torch.arange(scores.shape[0])) + F.mse_loss(rated, y)


EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]])


@model("gnn", floats(6, 8), floats(6, 6), ids(4))
class DenseGraph(nn.Module):
    """Graph convolutions by normalised adjacency."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Any, near: Any, y: Any) -> Any:
        near = ((near + near.transpose(1, 2)) > 1).to(x.dtype) + torch.eye(6)
        scale = near.sum(-1).pow(-0.5)
        near = scale.unsqueeze(-1) * near * scale.unsqueeze(-2)
        h = F.relu(near @ self.c1(x))
        h = near @ self.c2(h)
        return F.cross_entropy(self.head(h.amax(1)), y)


@model("gnn", floats(6, 8), floats(6))
class MessagePassing(nn.Module):
    """Messages along edges, added where they end."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.head = nn.Linear(16, 8), nn.GRUCell(8, 8), nn.Linear(8, 1)
        self.register_buffer("edges", EDGES)

    def forward(self, x: Any, y: Any) -> Any:
        source, target = self.edges
        sent = F.relu(self.message(torch.cat([x[:, source], x[:, target]], -1)))
        got = torch.zeros_like(x).index_add(1, target, sent)
        h = self.update(got.reshape(-1, 8), x.reshape(-1, 8)).view_as(x)
        return F.mse_loss(self.head(h).squeeze(-1), y)


@model("gnn", floats(6, 8), floats(6, 8))
class GraphAttention(nn.Module):
    """A softmax over the edges that end in a node, by scattered maxima and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.score = nn.Linear(8, 8), nn.Linear(16, 1)
        self.register_buffer("edges", EDGES)

    def forward(self, x: Any, y: Any) -> Any:
        source, target = self.edges
        h = self.value(x)
        scores = F.leaky_relu(self.score(torch.cat([h[:, source], h[:, target]], -1)).squeeze(-1), 0.2)
        where = target.expand(x.shape[0], -1)
        top = torch.full((x.shape[0], 6), -1e9, dtype=x.dtype).scatter_reduce(
            1, where, scores.detach(), "amax"
        )
        weights = (scores - top.gather(1, where)).exp()
        total = torch.zeros(x.shape[0], 6, dtype=x.dtype).scatter_add(1, where, weights).gather(1, where)
        sent = (weights / (total + 1e-9)).unsqueeze(-1) * h[:, source]
        out = torch.zeros_like(h).scatter_add(1, where.unsqueeze(-1).expand(-1, -1, 8), sent)
        return F.mse_loss(F.elu(out), y)
