"""Makes torch forget the device meshes of an ended generation."""

from __future__ import annotations

import sys
from typing import Any


def forget_meshes() -> None:
    """Clears this thread's cache of DTensor layouts, if the process uses DTensors.

    Torch treats two meshes of the same shape as equal, and this cache returns tensors that refer to the first
    one. The ranks of that mesh belong to a generation that has ended, in which this process may have had
    another rank. This was seen with torch 2.5 to 2.14. Torch's names for the cache are private; if they are
    missing, nothing is done.
    """
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return
    from torch.distributed.tensor import debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is None:  # as in torch 2.9
        dispatcher = getattr(tensors.DTensor, "_op_dispatcher", None)
        cached = getattr(getattr(dispatcher, "sharding_propagator", None), "propagate_op_sharding", None)
        cached = getattr(cached, "cache", cached)  # of this thread
        clear = getattr(cached, "cache_clear", None)
    if clear is not None:
        clear()
