"""Creates modules of any size without using memory: their large tensors are never written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

LARGE = 2**20
"""Number of elements from which tensors get no contents; smaller ones do, as a forward pass may read them."""


class LargeTensorsUnset(TorchDispatchMode):  # type: ignore[misc]
    """Mode in which large tensors are allocated and never written: unwritten pages use no memory.

    Tensors are on the CPU, as in a job's script, so that they match constants that a forward pass makes.
    Tensors on torch's meta device would not.
    """

    def __torch_dispatch__(
        self, function: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator, or allocates its results without contents."""
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
        except Exception:  # not available on meta, or a wrong call: run it for its own result or error
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
