"""The embedded CPU communicator: every collective on NumPy arrays, among processes that trust nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from worker.communicators import tcp_arrays as arrays
from worker.communicators import tcp_rings as rings
from worker.communicators.base import Array, Communicator, Membership, ReduceOp, Work
from worker.communicators.tcp_arrays import NumpyArray, as_bytes, checked, dtype_code
from worker.communicators.tcp_endpoint import Endpoint
from worker.communicators.tcp_handshake import Lobby
from worker.communicators.tcp_links import Links, farewell_of
from worker.communicators.tcp_transfer import (
    FrameIn,
    Incoming,
    Mover,
    Outgoing,
)
from worker.communicators.tcp_wire import Call, FrameKind, Reason, blocks_frame, group_label
from worker.communicators.tcp_work import FINISHED, WorkQueue
from worker.errors import ArrayError, CollectiveMismatchError, CommunicatorAbortedError

SMALL_BYTES = 32768
"""A payload up to this size travels with the call itself (all ranks' together: twice as much)."""

_NOTHING = memoryview(b"")


class TcpCommunicator(Communicator):
    """Collectives over authenticated TLS connections.

    Calls of one rank run one at a time. The mean of integers is refused; integer sums wrap around.
    Once a call has failed with anything but :class:`~worker.errors.ArrayError`, the communicator is
    unusable, every later call raises the same error, and the peers are told why.

    ``send`` returns when the peer has called ``recv``, as with NCCL.
    """

    name = "tcp"

    def __init__(self, membership: Membership, endpoint: Endpoint, *, path: str, timeout_s: float) -> None:
        self.membership = membership
        self.timeout_s = timeout_s
        self._endpoint = endpoint
        self._path = path
        self._mover = Mover()
        self._lobby = Lobby(membership, group_label(membership, path))
        self._links = Links(membership, endpoint, self._lobby, self._mover)
        self._queue = WorkQueue(f"muster-tcp-{membership.group}")
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._sequence = 0
        self._splits = 0
        self._points: dict[int, int] = {}
        self._deadline = 0.0
        self._closed = False

    def bring_up(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Connects to the usual peers and waits until every rank has done so.

        Raises:
            FormationTimeoutError: names the ranks that did not come.
        """
        if self.world_size == 1:
            return
        deadline = time.monotonic() + timeout_s
        self._endpoint.gather(self._lobby)
        self._mover.check_while_waiting(check)
        try:
            self._links.connect(self._links.usual(), deadline, check)
            call = Call("connect").encode()
            self._links.exchange(call, _NOTHING, deadline, check)
        except Exception as error:
            known = self._links.explain(error, Call("connect"), timeout_s)
            self._tear_down(known)
            raise known from None
        self._mover.check_while_waiting(None)

    # ------------------------------------------------------------ collectives

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
        outgoing.precede(blocks_frame(FrameKind.CALLS, [(mine, _NOTHING)]))
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
        for rank in ranks:
            self._check_rank(rank, "a rank of the group")
        if not ranks or len(set(ranks)) != len(ranks):
            raise ArrayError(f"The group {group!r} needs each of its ranks once, and one at least.")
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
        if self.rank not in ranks:
            return None
        peers = tuple(replace(self.membership.peers[r], rank=i) for i, r in enumerate(ranks))
        membership = replace(self.membership, group=group, rank=list(ranks).index(self.rank), peers=peers)
        path = f"{self._path}/{number}:{group}"
        part = TcpCommunicator(membership, self._endpoint, path=path, timeout_s=self.timeout_s)
        part.bring_up(self.timeout_s, self._check)
        return part

    # ------------------------------------------------------------ life

    def abort(self, error: Exception) -> None:
        """See :meth:`Communicator.abort`."""
        if self._error is None:
            self._error = error
        self._mover.stop()
        self._close_if_failed()

    def close(self) -> None:
        """See :meth:`Communicator.close`."""
        if self._closed:
            return
        self._closed = True
        self._queue.close()
        with self._lock:
            if self._error is None:
                self._error = CommunicatorAbortedError("The communicator was closed.")
                self._links.close(Reason.DONE)
            self._mover.close()

    # ------------------------------------------------------------ running

    def _issue(self, call: Call, action: Callable[[], None], async_op: bool) -> Work:
        if self._error is not None:
            raise self._error
        if not async_op and self._queue.idle:
            self._run(call, action)
            return FINISHED
        work = self._queue.put(lambda: self._run(call, action))
        if not async_op:
            work.wait()
        return work

    def _run(self, call: Call, action: Callable[[], None]) -> None:
        try:
            with self._lock:
                self._check()
                self._deadline = time.monotonic() + self.timeout_s
                try:
                    action()
                except Exception as error:
                    if self._error is None:
                        self._error = self._links.explain(error, call, self.timeout_s)
                    raise self._error from None
        finally:
            self._close_if_failed()

    def _close_if_failed(self) -> None:
        if self._error is not None and self._lock.acquire(blocking=False):
            try:
                self._links.close(*farewell_of(self._error))
            finally:
                self._lock.release()

    def _tear_down(self, error: Exception) -> None:
        self._error = error
        self._links.close(*farewell_of(error))
        self._mover.close()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _collective(
        self,
        call: Call,
        payload: NumpyArray | None,
        small: Callable[[list[NumpyArray]], None],
        large: Callable[[], None],
        async_op: bool,
        nbytes: int = -1,
    ) -> Work:
        """Issues a collective: agreement of all ranks first, data with it if small, else after it."""
        size = nbytes if nbytes >= 0 else (0 if payload is None else payload.nbytes)
        dtype = np.dtype(np.uint8) if payload is None else payload.dtype
        with_data = self._goes_with_call(size)

        def action() -> None:
            if self.world_size == 1:
                small([payload.copy() if payload is not None else np.empty(0, np.uint8)])
                return
            data = _NOTHING if payload is None or not with_data else as_bytes(payload)
            parts = self._agree(call, data)
            if with_data:
                dtypes = dtype if payload is not None or not call.dtype else np.dtype(call.dtype)
                small([arrays.from_bytes(part, dtypes) for part in parts])
            else:
                large()

        return self._issue(call, action, async_op)

    def _agree(self, call: Call, payload: memoryview) -> list[memoryview]:
        mine = self._next(call)
        own = memoryview(bytes(payload))
        blocks = self._links.exchange(mine, own, self._deadline, self._check)
        if any(theirs != mine for theirs, _ in blocks):
            raise self._links.mismatch({rank: theirs for rank, (theirs, _) in enumerate(blocks)})
        return [part for _, part in blocks]

    def _next(self, call: Call) -> bytes:
        number = self._sequence
        self._sequence += 1
        return replace(call, sequence=number).encode()

    def _goes_with_call(self, nbytes: int) -> bool:
        return nbytes <= SMALL_BYTES and nbytes * self.world_size <= 2 * SMALL_BYTES

    def _ring(self) -> rings.Ring:
        size = self.world_size
        left = self._links.get((self.rank - 1) % size, self._deadline, self._check)
        right = self._links.get((self.rank + 1) % size, self._deadline, self._check)
        return rings.Ring(self._mover, left, right, self.rank, size, self._deadline)

    def _move(self, out: dict[int, memoryview], into: dict[int, memoryview]) -> None:
        """Sends to some peers and receives from others, all at once."""
        self._links.connect([*out, *into], self._deadline, self._check)
        outgoing = [Outgoing(self._links.get(r, self._deadline, self._check), [v]) for r, v in out.items()]
        incoming = [Incoming(self._links.get(r, self._deadline, self._check), [v]) for r, v in into.items()]
        self._mover.run(outgoing, incoming, self._deadline)

    def _point(self, call: Call, peer: int, source: NumpyArray | None, target: NumpyArray | None) -> None:
        """One half of a point-to-point call: both say what they call, then the data goes."""
        number = self._points.get(peer, 0)
        self._points[peer] = number + 1
        link = self._links.get(peer, self._deadline, self._check)
        mine = replace(call, sequence=number).encode()
        small = source is not None and source.nbytes <= SMALL_BYTES
        payload = as_bytes(source) if small and source is not None else _NOTHING
        incoming = FrameIn(link)
        frame = blocks_frame(FrameKind.POINT, [(mine, payload)])
        self._mover.run([Outgoing(link, [memoryview(frame)])], [incoming], self._deadline)
        theirs, data = incoming.blocks[0]
        other = "recv" if call.kind == "send" else "send"
        expected = replace(call, kind=other, root=self.rank, sequence=number)
        if incoming.kind is not FrameKind.POINT or theirs != expected.encode():
            raise self._links.mismatch({self.rank: mine, peer: theirs})
        if target is not None and target.nbytes <= SMALL_BYTES:
            as_bytes(target)[:] = data
        elif target is not None:
            self._move({}, {peer: as_bytes(target)})
        elif source is not None and not small:
            self._move({peer: as_bytes(source)}, {})

    # ------------------------------------------------------------ arguments

    def _call(
        self, kind: str, array: NumpyArray, count: int, *, op: ReduceOp | None = None, root: int = -1
    ) -> Call:
        return Call(kind, dtype_code(array), "" if op is None else op.value, root, count)

    def _parts(self, array: NumpyArray) -> list[NumpyArray]:
        return list(array.reshape(self.world_size, -1)) if array.size else [array] * self.world_size

    def _at_root(
        self, array: Array | None, name: str, root: int, *, writable: bool = True
    ) -> NumpyArray | None:
        self._check_rank(root, "root")
        if self.rank != root:
            return None
        if array is None:
            raise ArrayError(f"{name} is None at the root, rank {root}.")
        return checked(array, name, writable=writable)

    def _check_rank(self, rank: int, name: str) -> None:
        if not 0 <= rank < self.world_size:
            raise ArrayError(
                f"{name} is {rank}; the group {self.membership.group!r} has ranks 0 to {self.world_size - 1}."
            )

    def _check_peer(self, peer: int) -> None:
        self._check_rank(peer, "peer")
        if peer == self.rank:
            raise ArrayError(f"Rank {peer} cannot send to or receive from itself.")
