"""Float32 master weights of a module that computes with bfloat16 weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from muster.errors import SettingsError
from muster.torch.buckets import GradientBucket
from muster.torch.flat import views_of

_NORMALISATIONS = (
    torch.nn.modules.batchnorm._NormBase,
    torch.nn.LayerNorm,
    torch.nn.GroupNorm,
    torch.nn.RMSNorm,
)


class MasterWeights:
    """Moves a module's parameters into flat float32 masters, one per bucket, with bfloat16 copies.

    Normalisation layers stay in float32: their parameters are views of the masters.

    Raises:
        SettingsError: a parameter is not float32, or is not trained and so has no master.
    """

    def __init__(self, module: torch.nn.Module, buckets: Sequence[GradientBucket], dtype: Any) -> None:
        for name, parameter in module.named_parameters():
            if parameter.dtype != torch.float32 or not parameter.requires_grad:
                what = (
                    "frozen" if not parameter.requires_grad else str(parameter.dtype).removeprefix("torch.")
                )
                raise SettingsError(
                    f'weights="bf16" keeps float32 masters of what is trained; {name} is {what}.'
                    " Leave weights out and use torch.autocast."
                )
        exact = {
            id(parameter)
            for owner in module.modules()
            if isinstance(owner, _NORMALISATIONS)
            for parameter in owner.parameters(recurse=False)
        }
        self.dtype = dtype
        self.parameters: list[Any] = []
        self.views: dict[int, Any] = {}
        self._pairs: list[tuple[Any, Any]] = []
        for bucket in buckets:
            master = torch.zeros_like(bucket.flat[: bucket.size])
            low = torch.empty_like(master, dtype=dtype)
            views, low_views = views_of(master, bucket.parameters), views_of(low, bucket.parameters)
            for parameter, view, low_view in zip(bucket.parameters, views, low_views, strict=True):
                view.copy_(parameter.detach())
                self.views[id(parameter)] = view
                parameter.data = view if id(parameter) in exact else low_view
            self._pairs.append((low, master))
            bucket.master = torch.nn.Parameter(master)
            self.parameters.append(bucket.master)
        self._places = [(p, p.data_ptr()) for bucket in buckets for p in bucket.parameters]
        self.refresh()

    def check_in_place(self) -> None:
        """Checks that the module still computes with copies of the masters that the optimizer trains.

        Raises:
            SettingsError: the module's parameters were moved or converted.
        """
        if any(parameter.data_ptr() != place for parameter, place in self._places):
            raise SettingsError(
                'the module was moved or converted after it was wrapped with weights="bf16": it would compute'
                " with weights that are not trained. Call to(...) before you wrap it."
            )

    def refresh(self) -> None:
        """Copies the masters into the bfloat16 weights."""
        with torch.no_grad():
            for low, master in self._pairs:
                low.copy_(master)


# The same as torch.compiler.disable sets; calling that would load all of torch's compiler. The compiler sees
# weights as inputs that share memory, and refuses code that writes to them.
MasterWeights.refresh._torchdynamo_disable = True  # type: ignore[attr-defined]
