"""Measures the data planes for ``muster check``: ``tcp`` always, NCCL if every rank has a GPU."""

from __future__ import annotations

import abc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from muster.communicators.base import Backend, Communicator
from muster.communicators.membership import Membership, Peer
from muster.communicators.nccl.generation_secret import derive_secret
from muster.communicators.reduce_ops import ReduceOp
from muster.errors import WorkerError
from muster.worker.collectives import all_gather
from muster.worker.nccl_protection import NcclHost, look_at_host, protect_nccl
from muster.worker.session.session import Session

ID_BYTES = 128
ENDPOINT_BYTES = 300
CONNECT_TIMEOUT_S = 60.0
MIB = 1024 * 1024


@dataclass(frozen=True)
class Arrays:
    """The operations on arrays of a plane: convert from NumPy, convert back, and wait."""

    make: Callable[[Any], Any] = lambda values: values
    read: Callable[[Any], Any] = lambda array: array
    wait: Callable[[], None] = lambda: None


class Plane(abc.ABC):
    """A communicator backend under test.

    Args:
        session: the job; the ranks exchange other data over its own communicator.
        name: the plane's name in the output.
        arrays: the operations on the plane's arrays.
    """

    def __init__(self, session: Session, name: str, arrays: Arrays) -> None:
        self.session = session
        self.name = name
        self.arrays = arrays

    def wrong_ranks(self, size_mib: int) -> list[int]:
        """Returns the ranks on which an AllReduce of all ranks gives a wrong number."""
        world = list(range(self.session.world_size))
        communicator = self.enter([world], "all")
        pattern = np.arange(size_mib * MIB // 4, dtype=np.float32) % 97
        source = self.arrays.make(pattern + self.session.rank)
        result = self.arrays.make(np.zeros_like(pattern))
        assert communicator is not None
        communicator.all_reduce(source, result, ReduceOp.SUM).wait()
        expected = pattern * len(world) + sum(world)
        wrong = bool((self.arrays.read(result) != expected).any())
        self.leave(communicator)
        return [rank for rank, each in enumerate(all_gather(np.array([wrong])).ravel()) if each]

    def speeds(self, pairs: Sequence[tuple[int, int]], size_mib: int, repeats: int) -> list[float]:
        """Measures the GB/s of each rank in an AllReduce with its partner; 0 if it has none.

        All ranks call this; all pairs run at the same time.
        """
        communicator = self.enter([list(pair) for pair in pairs], "pair")
        best_s = 0.0
        if communicator is not None:
            source = self.arrays.make(np.ones(size_mib * MIB // 4, np.float32))
            result = self.arrays.make(np.zeros(size_mib * MIB // 4, np.float32))
            best_s = min(self._time(communicator, source, result) for _ in range(repeats + 1))
            self.leave(communicator)
        own = size_mib * MIB / best_s / 1e9 if best_s else 0.0
        return [float(speed) for speed in all_gather(np.array([own])).ravel()]

    def _time(self, communicator: Communicator, source: Any, result: Any) -> float:
        begun = time.perf_counter()
        communicator.all_reduce(source, result, ReduceOp.SUM).wait()
        self.arrays.wait()
        return time.perf_counter() - begun

    # ------------------------------------------------------------ what differs from plane to plane

    @abc.abstractmethod
    def enter(self, groups: Sequence[Sequence[int]], label: str) -> Communicator | None:
        """Makes a communicator for each group of ranks; returns that of this rank, if it is in one."""

    @abc.abstractmethod
    def leave(self, communicator: Communicator) -> None:
        """Ends the communicator that :meth:`enter` returned."""

    def close(self) -> None:
        """Frees everything."""
        return


class Embedded(Plane):
    """The ``tcp`` communicator of the session itself."""

    def __init__(self, session: Session) -> None:
        super().__init__(session, session.backend.name, Arrays())
        self._made: list[str] = []

    def enter(self, groups: Sequence[Sequence[int]], label: str) -> Communicator | None:
        """See :meth:`Plane.enter`."""
        found = None
        for ranks in groups:
            name = f"check-{label}-{len(self._made)}"
            self._made.append(name)
            self.session.groups.create(name, ranks)
            if self.session.rank in ranks:
                found = self.session.group(name)
        return found

    def leave(self, communicator: Communicator) -> None:
        """Does nothing: the session ends its groups itself."""


class Beside(Plane):
    """Another backend, such as NCCL; its unique ids are sent over the session's communicator.

    Args:
        session: the job.
        backend: the backend, which is not the session's own.
        arrays: the operations on the backend's arrays.
        prepare: called before each communicator is made.
    """

    def __init__(
        self,
        session: Session,
        backend: Backend,
        arrays: Arrays,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(session, backend.name, arrays)
        self._backend = backend
        self._prepare = prepare
        self._count = 0
        endpoint = backend.open_endpoint(session.me.host.address).encode().ljust(ENDPOINT_BYTES)
        everyone = all_gather(np.frombuffer(endpoint, np.uint8)).reshape(-1, ENDPOINT_BYTES)
        self._endpoints = [row.tobytes().decode().strip() for row in everyone]

    def enter(self, groups: Sequence[Sequence[int]], label: str) -> Communicator | None:
        """See :meth:`Plane.enter`."""
        self._count += 1
        rank = self.session.rank
        own = next((ranks for ranks in groups if rank in ranks), None)
        minted = bytes(ID_BYTES)
        if own is not None and own[0] == rank:
            [minted] = self._backend.mint_unique_ids(1)
        ids = all_gather(np.frombuffer(minted, np.uint8)).reshape(-1, ID_BYTES)
        if own is None:
            return None
        membership = Membership(
            job_id=self.session.job_id,
            generation=self.session.generation,
            group=f"check-{label}-{self._count}",
            rank=own.index(rank),
            peers=tuple(self._peer(number, member) for number, member in enumerate(own)),
            unique_ids=(ids[own[0]].tobytes(),),
        )
        self._prepare()
        return self._backend.connect(membership, timeout_s=CONNECT_TIMEOUT_S, cancelled=lambda: None)

    def _peer(self, number: int, rank: int) -> Peer:
        member = self.session.members[rank]
        own = rank == self.session.rank
        return Peer(
            rank=number,
            node_id=member.node_id,
            incarnation=member.incarnation,
            host_id=member.host.id,
            host_name=member.host.name,
            data_address=self._endpoints[rank],
            device_index=self.session.device_ordinal if own else member.device.index,
        )

    def leave(self, communicator: Communicator) -> None:
        """See :meth:`Plane.leave`."""
        communicator.close()

    def close(self) -> None:
        """Frees everything."""
        self._backend.close()


def planes(session: Session) -> list[Plane]:
    """Returns the planes to measure, the same on every rank."""
    found: list[Plane] = [Embedded(session)]
    backend: Backend | None = None
    if session.device_ordinal >= 0:
        from muster.communicators.nccl.communicator import NcclBackend

        try:
            backend = NcclBackend()
        except WorkerError:
            backend = None
    everywhere = bool(all_gather(np.array([backend is not None])).all())
    if backend is not None and everywhere:
        prepare = seal_as_job(session, backend)
        found.append(Beside(session, backend, _gpu_arrays(session.device_ordinal), prepare))
    return found


def seal_as_job(
    session: Session, backend: Backend, look_at_host: Callable[[], NcclHost] = look_at_host
) -> Callable[[], None]:
    """Encrypts the check's NCCL traffic as the job would; returns a function that sets the plug-in's secret.

    The secret is derived from the session's unique ids, which only its members know.
    """
    settings = session.settings
    tls = settings.config_path is not None
    decided = protect_nccl(settings, backend, os.environ, os.environ, tls=tls, look_at_host=look_at_host)
    if not decided.sealed:
        return lambda: None
    plugin = look_at_host().load(decided.environment["NCCL_NET_PLUGIN"])

    def prepare() -> None:
        own = session.communicator.membership
        secret = derive_secret(own.unique_ids, job_id=own.job_id, generation=own.generation)
        plugin.use_secret(own.generation, secret)

    return prepare


def _gpu_arrays(ordinal: int) -> Arrays:
    """Arrays on this worker's GPU, by CuPy or torch."""
    try:
        import cupy

        cupy.cuda.Device(ordinal).use()
        return Arrays(cupy.asarray, cupy.asnumpy, lambda: cupy.cuda.get_current_stream().synchronize())
    except ImportError:
        import torch

        torch.cuda.set_device(ordinal)
        return Arrays(
            lambda values: torch.from_numpy(values).cuda(),
            lambda array: array.cpu().numpy(),
            torch.cuda.synchronize,
        )
