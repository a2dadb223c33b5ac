"""ResNet-50 (He et al., 2015; stride in the 3x3 convolution), in stages that are compiled one by one."""

from __future__ import annotations

from typing import Any

from torch import nn

from examples import stem_kernels

EXPANSION = 4


class Bottleneck(nn.Module):  # type: ignore[misc]
    """1x1, 3x3, 1x1 convolutions around a shortcut."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = width * EXPANSION
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x: Any) -> Any:
        """(N, channels_in, H, W) -> (N, 4 * width, H / stride, W / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class Stem(nn.Module):  # type: ignore[misc]
    """The first convolution and pooling: (N, 3, H, W) -> (N, width, H / 4, W / 4).

    Args:
        width: channels.
        fast: compute the same in the way of :mod:`examples.stem_kernels` where that is possible.
    """

    def __init__(self, width: int, fast: bool) -> None:
        super().__init__()
        self.fast = fast
        self.conv = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, x: Any) -> Any:
        """First features of the images."""
        if self.fast and x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0:
            return stem_kernels.relu_pool(self.bn(stem_kernels.stem_convolution(x, self.conv.weight)))
        return self.pool(self.relu(self.bn(self.conv(x))))


class Stage(nn.Module):  # type: ignore[misc]
    """Bottlenecks of one width. (A class of its own: torch.compile passes over nn.Sequential's code.)"""

    def __init__(self, blocks: list[Bottleneck]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any) -> Any:
        """One block after the other."""
        for block in self.blocks:
            x = block(x)
        return x


class Head(nn.Module):  # type: ignore[misc]
    """Pooling over the image and the classifier: (N, channels, H, W) -> (N, classes)."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(channels, classes)

    def forward(self, x: Any) -> Any:
        """Logits."""
        return self.classify(self.pool(x).flatten(1))


class ResNet(nn.Module):  # type: ignore[misc]
    """Bottleneck ResNet for (N, 3, H, W) images; gives (N, classes) logits.

    Args:
        blocks: how many bottlenecks each stage has.
        classes: how many classes there are.
        width: channels of the first stage's inner convolutions.
        fast: see :class:`Stem`; parameters and results are the same.
    """

    def __init__(
        self, blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 10, width: int = 64, fast: bool = False
    ) -> None:
        super().__init__()
        self.stem = Stem(width, fast)
        stages, channels = [], width
        for number, count in enumerate(blocks):
            inner = width * 2**number
            layers = []
            for position in range(count):
                layers.append(Bottleneck(channels, inner, 2 if number and not position else 1))
                channels = inner * EXPANSION
            stages.append(Stage(layers))
        self.stages = nn.ModuleList(stages)
        self.head = Head(channels, classes)
        self._initialise()

    def forward(self, x: Any) -> Any:
        """Logits of the images."""
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x)

    def compile_stages(self, options: dict[str, Any] | None = None) -> ResNet:
        """Compiles each stage by itself: one graph would give all gradients at once, at the very end.

        So the AllReduce of late layers still runs beside the backward pass of early ones.

        Args:
            options: of torch.compile's default backend.
        """
        for part in (self.stem, *self.stages, self.head):
            part.compile(dynamic=False, options=options)
        return self

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def resnet50(classes: int = 10, *, fast: bool = False) -> ResNet:
    """ResNet-50: 25.6 million parameters with 1000 classes, 23.5 million with 10."""
    return ResNet((3, 4, 6, 3), classes, fast=fast)
