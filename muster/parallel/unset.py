"""Makes modules of any size without their memory: large tensors are there, but nobody writes to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

LARGE = 2**20
"""Elements of a tensor that gets no contents. Smaller ones are right: a forward pass may look at them."""


class LargeTensorsUnset(TorchDispatchMode):  # type: ignore[misc]
    """Within it what would write a large tensor leaves it as it is: pages that nobody writes take no memory.

    Tensors are on the CPU, as in a job's script: constants that a forward pass makes fit them, which those on
    torch's meta device would not.
    """

    def __torch_dispatch__(
        self, function: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator, or makes its results without contents."""
        kwargs = kwargs or {}
        schema = function._schema
        written = [
            kwargs[each.name] if each.kwarg_only else args[number]
            for number, each in enumerate(schema.arguments)
            if each.alias_info is not None and each.alias_info.is_write
            if (each.name in kwargs if each.kwarg_only else number < len(args))
        ]
        if written:
            return written[0] if _is_large(written[0]) else function(*args, **kwargs)
        if function.is_view or function._opname.startswith("empty") or not _on_cpu(args, kwargs):
            return function(*args, **kwargs)
        try:
            shapes = function(*_meta(args), **{**_meta(kwargs), **_on_meta(schema)})
        except Exception:  # it has none without contents, or is in the wrong: let it say so itself
            return function(*args, **kwargs)
        leaves, structure = pytree.tree_flatten(shapes)
        if not any(map(_is_large, leaves)):
            return function(*args, **kwargs)
        made = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype)
            if isinstance(each, torch.Tensor)
            else each
            for each in leaves
        ]
        return pytree.tree_unflatten(made, structure)


def _is_large(each: Any) -> bool:
    return isinstance(each, torch.Tensor) and each.numel() >= LARGE


def _on_cpu(args: Any, kwargs: Any) -> bool:
    device = kwargs.get("device")
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    return torch.device(device or "cpu").type == "cpu" and all(each.is_cpu for each in tensors)


def _meta(arguments: Any) -> Any:
    return pytree.tree_map(
        lambda each: (
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
            if isinstance(each, torch.Tensor)
            else each
        ),
        arguments,
    )


def _on_meta(schema: Any) -> dict[str, Any]:
    return {"device": "meta"} if any(each.name == "device" for each in schema.arguments) else {}
