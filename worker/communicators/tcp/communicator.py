"""The embedded CPU communicator: every collective on NumPy arrays, among processes that trust nobody else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from muster.worker.communicators import numpy_arrays as arrays
from muster.worker.communicators.base import Array, ReduceOp, Work
from muster.worker.communicators.numpy_arrays import NumpyArray, as_bytes, checked, dtype_code
from muster.worker.communicators.tcp import rings as rings
from muster.worker.communicators.tcp.engine import NOTHING, TcpEngine
from muster.worker.communicators.tcp.frames import Call, FrameKind, blocks_frame
from muster.worker.communicators.tcp.transfer import FrameIn
from muster.worker.communicators.validation import part_of
from muster.worker.errors import ArrayError, CollectiveMismatchError


class TcpCommunicator(TcpEngine):
    """Collectives over authenticated TLS connections.

    Calls of one rank run one at a time. The mean of integers is refused; integer sums wrap around.
    Once a call has failed with anything but :class:`~muster.errors.ArrayError`, the communicator is
    unusable, every later call raises the same error, and the peers are told why.

    ``send`` returns when the peer has called ``recv``, as with NCCL.
    """

    def all_reduce(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_reduce`."""
        source, target = checked(send, "send"), checked(recv, "recv", writable=True)
        op = ReduceOp(op)
        arrays.check_pair(source, target)
        arrays.check_op(source, op)
        arrays.check_overlap(source, target)
        call = self._call("all_reduce", source, source.size, op=op)

        def small(parts: list[NumpyArray]) -> None:
            arrays.reduce_all(op, parts, target)

        def large() -> None:
            ring = self._ring()
            ring.run(*rings.all_reduce_plan(ring, source, target, op))

        if self.world_size == 2 and not self._goes_with_call(source.nbytes):
            return self._issue(call, lambda: self._all_reduce_pair(call, source, target, op), async_op)
        return self._collective(call, source, small, large, async_op)

    def _all_reduce_pair(self, call: Call, source: NumpyArray, target: NumpyArray, op: ReduceOp) -> None:
        """Two ranks need no agreement before the data: each sees the other's call in front of it."""
        ring = self._ring()
        mine = self._next(call)
        outgoing, incoming = rings.all_reduce_plan(ring, source, target, op)
        outgoing.precede(blocks_frame(FrameKind.CALLS, [(mine, NOTHING)]))
        theirs = FrameIn(ring.left)
        self._mover.run([outgoing], [theirs], self._deadline, until=theirs)
        self._links.expect_calls(theirs, mine, 1)
        if theirs.blocks[0][0] != mine:
            raise self._links.mismatch({self.rank: mine, 1 - self.rank: theirs.blocks[0][0]})
        ring.run(outgoing, incoming)

    def reduce(
        self, send: Array, recv: Array | None, op: ReduceOp, root: int, *, async_op: bool = False
    ) -> Work:
        """See :meth:`Communicator.reduce`."""
        source, target = checked(send, "send"), self._at_root(recv, "recv", root)
        op = ReduceOp(op)
        if target is not None:
            arrays.check_pair(source, target)
            arrays.check_overlap(source, target)
        arrays.check_op(source, op)
        call = self._call("reduce", source, source.size, op=op, root=root)

        def small(parts: list[NumpyArray]) -> None:
            if target is not None:
                arrays.reduce_all(op, parts, target)

        return self._collective(
            call, source, small, lambda: rings.reduce(self._ring(), source, target, op, root), async_op
        )

    def broadcast(self, buffer: Array, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.broadcast`."""
        self._check_rank(root, "root")
        target = checked(buffer, "buffer", writable=self.rank != root)
        call = self._call("broadcast", target, target.size, root=root)

        def small(parts: list[NumpyArray]) -> None:
            if self.rank != root:
                target[...] = parts[root]

        payload = target if self.rank == root else None
        return self._collective(
            call, payload, small, lambda: rings.broadcast(self._ring(), target, root), async_op, target.nbytes
        )

    def all_gather(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_gather`."""
        source, target = checked(send, "send"), checked(recv, "recv", writable=True)
        arrays.check_pair(source, target, recv_parts=self.world_size)
        arrays.check_overlap(target, source, self.rank * source.size)
        call = self._call("all_gather", source, source.size)

        def small(parts: list[NumpyArray]) -> None:
            for part, place in zip(parts, self._parts(target), strict=True):
                place[...] = part

        def large() -> None:
            self._parts(target)[self.rank][...] = source
            rings.all_gather(self._ring(), target)

        return self._collective(call, source, small, large, async_op)

    def reduce_scatter(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.reduce_scatter`."""
        source, target = checked(send, "send"), checked(recv, "recv", writable=True)
        op = ReduceOp(op)
        arrays.check_pair(source, target, send_parts=self.world_size)
        arrays.check_op(source, op)
        arrays.check_overlap(source, target, self.rank * target.size)
        call = self._call("reduce_scatter", source, target.size, op=op)

        def small(parts: list[NumpyArray]) -> None:
            arrays.reduce_all(op, [self._parts(part)[self.rank] for part in parts], target)

        return self._collective(
            call, source, small, lambda: rings.reduce_scatter(self._ring(), source, target, op), async_op
        )

    def gather(self, send: Array, recv: Array | None, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.gather`."""
        source, target = checked(send, "send"), self._at_root(recv, "recv", root)
        if target is not None:
            arrays.check_pair(source, target, recv_parts=self.world_size)
            arrays.check_overlap(target, source, self.rank * source.size)
        call = self._call("gather", source, source.size, root=root)

        def small(parts: list[NumpyArray]) -> None:
            if target is not None:
                for part, place in zip(parts, self._parts(target), strict=True):
                    place[...] = part

        def large() -> None:
            if target is None:
                self._move({root: as_bytes(source)}, {})
                return
            places = self._parts(target)
            places[root][...] = source
            self._move({}, {r: as_bytes(place) for r, place in enumerate(places) if r != root})

        return self._collective(call, source, small, large, async_op)

    def scatter(self, send: Array | None, recv: Array, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.scatter`."""
        target, source = (
            checked(recv, "recv", writable=True),
            self._at_root(send, "send", root, writable=False),
        )
        if source is not None:
            arrays.check_pair(source, target, send_parts=self.world_size)
            arrays.check_overlap(source, target, self.rank * target.size)
        call = self._call("scatter", target, target.size, root=root)

        def small(parts: list[NumpyArray]) -> None:
            target[...] = self._parts(parts[root])[self.rank]

        def large() -> None:
            if source is None:
                self._move({}, {root: as_bytes(target)})
                return
            places = self._parts(source)
            self._move({r: as_bytes(place) for r, place in enumerate(places) if r != root}, {})
            target[...] = places[root]

        return self._collective(call, source, small, large, async_op, target.nbytes * self.world_size)

    def all_to_all(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_to_all`."""
        source, target = checked(send, "send"), checked(recv, "recv", writable=True)
        arrays.check_pair(source, target)
        arrays.check_overlap(source, target)
        if source.size % self.world_size:
            raise ArrayError(
                f"send has {source.size} elements, which {self.world_size} ranks cannot share evenly."
            )
        call = self._call("all_to_all", source, source.size)

        def small(parts: list[NumpyArray]) -> None:
            for part, place in zip(parts, self._parts(target), strict=True):
                place[...] = self._parts(part)[self.rank]

        def large() -> None:
            apart = source.copy() if np.may_share_memory(source, target) else source
            out, places = self._parts(apart), self._parts(target)
            places[self.rank][...] = out[self.rank]
            for step in range(1, self.world_size):
                to, source_rank = (self.rank + step) % self.world_size, (self.rank - step) % self.world_size
                self._move({to: as_bytes(out[to])}, {source_rank: as_bytes(places[source_rank])})

        return self._collective(call, source, small, large, async_op)

    def send(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.send`; returns when the peer has called recv."""
        source = checked(buffer, "buffer")
        self._check_peer(peer)
        call = Call("send", dtype_code(source), "", peer, source.size)
        return self._issue(call, lambda: self._point(call, peer, source, None), async_op)

    def recv(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.recv`."""
        target = checked(buffer, "buffer", writable=True)
        self._check_peer(peer)
        call = Call("recv", dtype_code(target), "", peer, target.size)
        return self._issue(call, lambda: self._point(call, peer, None, target), async_op)

    def barrier(self) -> None:
        """See :meth:`Communicator.barrier`."""
        self._collective(Call("barrier"), None, lambda _parts: None, lambda: None, False, 0)

    def split(self, group: str, ranks: Sequence[int]) -> TcpCommunicator | None:
        """See :meth:`Communicator.split`."""
        membership = part_of(self.membership, group, ranks)
        number = self._splits
        self._splits += 1

        def agree(parts: list[NumpyArray]) -> None:
            names = [part.tobytes().decode(errors="replace") for part in parts]
            if len(set(names)) > 1:
                raise CollectiveMismatchError(
                    "The ranks split off different groups: "
                    + "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(names)),
                    remedy="All ranks must create the same groups in the same order.",
                )

        mine = f"{group!r} of ranks {list(ranks)}".encode()
        payload = np.frombuffer(mine, np.uint8)
        self._collective(Call("split"), payload, agree, lambda: None, False, 0)
        if membership is None:
            return None
        path = f"{self._path}/{number}:{group}"
        part = TcpCommunicator(membership, self._endpoint, path=path, timeout_s=self.timeout_s)
        part.bring_up(self.timeout_s, self._check)
        return part

    def _call(
        self, kind: str, array: NumpyArray, count: int, *, op: ReduceOp | None = None, root: int = -1
    ) -> Call:
        return Call(kind, dtype_code(array), "" if op is None else op.value, root, count)
