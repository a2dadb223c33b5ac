"""What the suite must know of each backend: how to make it, its arrays, and what it cannot do.

A backend joins the suite with one :class:`Kit` in :func:`kit` and its name in ``KIT_NAMES``.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from muster.communicators import create_backend
from muster.communicators.base import Backend
from muster.communicators.reduce_ops import ReduceOp

KIT_NAMES = ("tcp", "tcp-plain", "following", "nccl", "nccl-cpu")
JOB = "contract"
PASSWORD = b"contract suite"
ALL_DTYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")

NumpyArray = npt.NDArray[Any]


@dataclass(frozen=True)
class Kit:
    """One backend as the suite sees it; arrays are NumPy's unless a subclass says otherwise.

    Args:
        name: parameter of the tests.
        backend: what ``create_backend`` calls it.
        dtypes: what it takes.
        tells_mismatch: whether calls that disagree are detected on every rank.
        max_world_size: processes it can run here.
        divides_last: whether a mean is the sum, divided; otherwise it is rounded in another way.
        on_device: whether its arrays are on a GPU.
    """

    name: str
    backend: str
    dtypes: tuple[str, ...] = ALL_DTYPES
    tells_mismatch: bool = True
    max_world_size: int = 4
    divides_last: bool = True
    on_device: bool = False

    def create(self, certificates: Path, rank: int) -> Backend:
        """Makes the backend in the process of a rank."""
        return create_backend(self.backend, tls=None, job_id=JOB)

    def array(self, values: NumpyArray) -> Any:
        """An array of the backend's kind; never the same memory."""
        return values.copy()

    def numpy(self, array: Any) -> NumpyArray:
        """The values of an array of the backend's kind, once they are there."""
        return cast("NumpyArray", array)

    def synchronize(self) -> None:
        """Makes what was waited for be done on the host too, where ``wait()`` does not promise that."""


class TlsKit(Kit):
    """TCP with mutual TLS."""

    def create(self, certificates: Path, rank: int) -> Backend:
        from muster.certs.runtime.store import load_credentials

        credentials = load_credentials(certificates / "client.p12", PASSWORD, certificates / "ca.crt")
        return create_backend("tcp", tls=credentials, job_id=JOB)


def kit(name: str) -> Kit:
    """The kit of that name."""
    if name == "tcp":
        return TlsKit("tcp", "tcp")
    if name == "tcp-plain":
        return Kit("tcp-plain", "tcp")
    if name == "following":
        from tests.contracts.following_kit import FollowingKit

        return FollowingKit()
    from tests.gpu.contract_kit import NcclCpuKit, NcclKit  # type: ignore[import-not-found,unused-ignore]

    return cast("Kit", NcclCpuKit() if name == "nccl-cpu" else NcclKit())


def missing(name: str) -> str | None:
    """Why a kit cannot run here; None if it can."""
    if name.startswith("nccl"):
        if importlib.util.find_spec("tests.gpu") is None or importlib.util.find_spec("cupy") is None:
            return "no GPUs here"
        if importlib.util.find_spec("tests.gpu.contract_kit") is None:
            return "the nccl kit is missing"
    return None


def values(rank: int, size: int, dtype: str, seed: int = 0) -> NumpyArray:
    """Small whole numbers of a rank, which every dtype holds and adds without rounding."""
    generator = np.random.default_rng([seed, rank])
    return generator.integers(1, 5, size).astype(dtype)


def reference(op: ReduceOp, parts: list[NumpyArray]) -> NumpyArray:
    """What combining the parts gives."""
    stack = np.stack(parts)
    reduced: NumpyArray
    if op is ReduceOp.MIN:
        reduced = stack.min(axis=0)
    elif op is ReduceOp.MAX:
        reduced = stack.max(axis=0)
    elif op is ReduceOp.PROD:
        reduced = stack.prod(axis=0, dtype=stack.dtype)
    else:
        reduced = stack.sum(axis=0, dtype=stack.dtype)
        if op is ReduceOp.MEAN:
            reduced = (reduced / stack.dtype.type(len(parts))).astype(stack.dtype)
    return reduced
