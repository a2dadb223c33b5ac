"""Names that the join path and the check share; it imports nothing, because each worker loads it."""

from __future__ import annotations

SOFT = "~"
"""Begins the name of a fact whose difference is worth a warning and no more."""

MUST_AGREE_LIBRARIES = ("torch", "cupy", "cuda")
"""Libraries with which ranks that have different versions may compute, or talk, differently."""

MUST_AGREE_NCCL = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_COMM_ID",
    "NCCL_IB_DISABLE",
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_NTHREADS",
    "NCCL_BUFFSIZE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_CTAS",
    "NCCL_MIN_CTAS",
    "NCCL_NVLS_ENABLE",
    "NCCL_CROSS_NIC",
)
"""Settings of NCCL with which ranks that differ hang or fail; the others may differ from host to host."""
