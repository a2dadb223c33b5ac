"""How many CTAs (thread blocks, one per channel) NCCL should take at least, where more were measured to help.

Without NVLink multicast (NVLS) rings move the data, and among H200s NCCL gives them 24 channels by default.
"""

from __future__ import annotations

from collections.abc import Mapping

MOST_CTAS = 64
"""NCCL's own limit (MAXCHANNELS); it must be named where the fewest are."""

_FEWEST_CTAS = {"NVIDIA H200": 32}
"""By GPU model: what ``muster bench allreduce --backend nccl`` found fastest among GPUs of one host."""


def fewest_ctas(model: str, *, hosts: int, env: Mapping[str, str]) -> int | None:
    """The fewest CTAs to ask NCCL for; None: leave it to NCCL.

    Only where it was measured: on one host, with NVLS off. NCCL itself lets NCCL_MIN_CTAS and NCCL_MAX_CTAS
    overrule it.

    Args:
        model: the GPU's name, as the driver gives it.
        hosts: how many hosts the ranks are on.
        env: NCCL_NVLS_ENABLE.
    """
    if hosts != 1 or env.get("NCCL_NVLS_ENABLE") != "0":
        return None
    return _FEWEST_CTAS.get(model)
