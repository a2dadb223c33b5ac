"""Convolutions: ConvNeXt and its kin, U-Nets in one to three dimensions, autoencoders."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.parallel.suite.entries import floats, ids, model


class ChannelNorm(nn.Module):
    """LayerNorm over channels that come first, written out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Any) -> Any:
        mean = x.mean(1, keepdim=True)
        var = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(var + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


@model("convnext", floats(3, 16, 16), ids(10))
class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 16, 2, 2)
        self.depth, self.norm = nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.LayerNorm(8)
        self.up, self.low, self.gamma = (
            nn.Linear(8, 32),
            nn.Linear(32, 8),
            nn.Parameter(torch.full((8,), 0.1)),
        )
        self.channels, self.last, self.head = ChannelNorm(8), nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, x: Any, y: Any) -> Any:
        x = self.channels(self.stem(x))
        h = self.norm(self.depth(x).permute(0, 2, 3, 1))
        h = self.gamma * self.low(F.gelu(self.up(h)))
        x = self.down(x + h.permute(0, 3, 1, 2))
        return F.cross_entropy(self.head(self.last(x.mean([-2, -1]))), y)


@model("convnext", floats(3, 8, 8), ids(10))
class MobileBlock(nn.Module):
    """Depthwise convolution with squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(
            nn.Conv2d(3, 16, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish(inplace=True)
        )
        self.depth = nn.Sequential(
            nn.Conv2d(16, 16, 3, 2, 1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU6(inplace=True)
        )
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.project, self.head = nn.Conv2d(16, 8, 1, bias=False), nn.Linear(8, 10)

    def forward(self, x: Any, y: Any) -> Any:
        x = self.depth(self.expand(x))
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        x = self.project(x * gate)
        return F.cross_entropy(self.head(F.avg_pool2d(x, x.shape[-1]).flatten(1)), y)


@model("convnext", floats(3, 12, 12), ids(10))
class DilatedGroups(nn.Module):
    """Grouped and dilated convolutions with a pyramid of pools."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.groups = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4),
        )
        self.norm, self.mix, self.head = nn.GroupNorm(4, 8), nn.Conv2d(24, 8, 1), nn.Linear(8, 10)

    def forward(self, x: Any, y: Any) -> Any:
        x = F.leaky_relu(self.norm(self.groups(self.stem(x))), 0.1)
        pools = [F.interpolate(F.adaptive_avg_pool2d(x, n), size=12, mode="bilinear") for n in (2, 3)]
        x = self.mix(torch.cat([x, *pools], 1))
        return F.cross_entropy(self.head(F.adaptive_max_pool2d(x, 1).flatten(1)), y)


class Double(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        super().__init__(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True))


@model("unet", floats(3, 8, 8), ids(4, 8, 8))
class UnetTransposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d1, self.d2, self.d3 = Double(3, 8), Double(8, 16), Double(16, 32)
        self.u2, self.u1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.c2, self.c1, self.out = Double(32, 16), Double(16, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Any, y: Any) -> Any:
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        c = self.d3(F.max_pool2d(b, 2))
        b = self.c2(torch.cat([b, self.u2(c)], 1))
        return F.cross_entropy(self.out(self.c1(torch.cat([a, self.u1(b)], 1))), y)


@model("unet", floats(3, 8, 8), floats(1, 8, 8))
class UnetDice(nn.Module):
    """Bilinear upsampling, the Dice loss beside a weighted binary cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.low, self.up = (
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.Conv2d(8, 16, 3, 2, 1),
            nn.Conv2d(24, 8, 3, padding=1),
        )
        self.norm, self.out = nn.InstanceNorm2d(8, affine=True), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Any, y: Any) -> Any:
        a = F.relu(self.down(x))
        b = F.interpolate(F.relu(self.low(a)), scale_factor=2, mode="bilinear", align_corners=True)
        h = F.interpolate(F.relu(self.norm(self.up(torch.cat([a, b], 1)))), scale_factor=2)
        scores, wanted = self.out(h), (y > 0.5).to(x.dtype)
        p = scores.sigmoid()
        dice = 1 - (2 * (p * wanted).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + wanted.sum((1, 2, 3)) + 1)
        return dice.mean() + F.binary_cross_entropy_with_logits(scores, wanted, pos_weight=torch.tensor(2.0))


@model("unet", floats(2, 32), floats(2, 32))
class UnetSound(nn.Module):
    """In one dimension, strided and transposed, gated."""

    def __init__(self) -> None:
        super().__init__()
        self.d1, self.d2 = nn.Conv1d(2, 16, 8, 4, 2), nn.Conv1d(8, 32, 4, 2, 1)
        self.u2, self.u1 = nn.ConvTranspose1d(16, 8, 4, 2, 1), nn.ConvTranspose1d(8, 2, 8, 4, 2)

    def forward(self, x: Any, y: Any) -> Any:
        a = F.glu(self.d1(x), 1)
        b = F.glu(self.d2(a), 1)
        return F.l1_loss(self.u1(F.relu(self.u2(b)) + a), y)


@model("unet", floats(1, 4, 8, 8), floats(1, 4, 8, 8))
class UnetVolume(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2, self.norm = (
            nn.Conv3d(1, 8, 3, padding=1),
            nn.Conv3d(8, 16, 3, padding=1),
            nn.GroupNorm(2, 16),
        )
        self.up, self.out = nn.ConvTranspose3d(16, 8, 2, 2), nn.Conv3d(16, 1, 1)

    def forward(self, x: Any, y: Any) -> Any:
        a = F.relu(self.c1(x))
        b = F.elu(self.norm(self.c2(F.max_pool3d(a, 2))))
        h = self.out(torch.cat([a, self.up(b)], 1))
        rough = F.interpolate(F.avg_pool3d(h, 2), scale_factor=2, mode="trilinear")
        return F.smooth_l1_loss(h, y) + 0.1 * F.mse_loss(rough, y)


@model("unet", floats(3, 8, 8), floats(3, 16, 16))
class SuperResolution(nn.Module):
    """Reflected borders, pixels shuffled, a robust loss and total variation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 12, 3)
        self.prelu = nn.PReLU(16)

    def forward(self, x: Any, y: Any) -> Any:
        h = self.prelu(self.first(F.pad(x, (1, 1, 1, 1), mode="reflect")))
        out = F.pixel_shuffle(self.last(F.pad(h, (1, 1, 1, 1), mode="replicate")), 2)
        variation = (out[..., 1:] - out[..., :-1]).abs().mean() + (
            out[:, :, 1:] - out[:, :, :-1]
        ).abs().mean()
        return torch.sqrt((out - y).square() + 1e-6).mean() + 0.01 * variation


@model("vae", floats(16), floats(4))
class VariationalMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.mean, self.spread = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.back = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 16), nn.Sigmoid())

    def forward(self, x: Any, noise: Any) -> Any:
        h = F.softplus(self.up(x))
        mean, spread = self.mean(h), self.spread(h)
        again = self.back(mean + (0.5 * spread).exp() * noise)
        apart = F.binary_cross_entropy(again, x, reduction="sum")
        return (apart - 0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())) / 8


@model("vae", floats(3, 8, 8), floats(8, 2, 2))
class VariationalConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.SiLU(), nn.Conv2d(8, 16, 4, 2, 1))
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1, output_padding=0)
        )

    def forward(self, x: Any, noise: Any) -> Any:
        mean, spread = self.encode(x).chunk(2, dim=1)
        spread = spread.clamp(-4, 4)
        kl = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum((1, 2, 3)).mean()
        return F.huber_loss(self.decode(mean + noise * (spread / 2).exp()), x, delta=0.3) + 1e-2 * kl


@model("vae", floats(16, 8), floats(16, 8))
class VectorQuantized(nn.Module):
    """The nearest word of a book by distances, gradients straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.book, self.decode = nn.Linear(8, 4), nn.Embedding(16, 4), nn.Linear(4, 8)

    def forward(self, x: Any, y: Any) -> Any:
        z = self.encode(x)
        flat = z.reshape(-1, 4)
        apart = torch.cdist(flat, self.book.weight)
        words = apart.argmin(1).view(z.shape[:-1])
        q = self.book(words)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return F.mse_loss(self.decode(z + (q - z).detach()), y) + loss
