"""The communicator for arrays in host memory: all collectives, over connections between authenticated peers.

Its calls run one at a time, in order, under a deadline, until one fails. Small arrays are sent with the
description of the call, on which all ranks agree first. Large ones follow in rings (:mod:`rings`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from muster.communicators.arithmetic import ARITHMETIC, NumpyArray
from muster.communicators.arrays import Array, as_bytes
from muster.communicators.host_communicator import HostCommunicator
from muster.communicators.membership import Membership, Peer
from muster.communicators.reduce_ops import ReduceOp
from muster.communicators.tcp import rings as rings
from muster.communicators.tcp.connection import PeerConnection
from muster.communicators.tcp.endpoint import Endpoint, dials
from muster.communicators.tcp.frames import (
    HAS_FINISHED,
    Call,
    FrameKind,
    Reason,
    blocks_frame,
    end_in_words,
)
from muster.communicators.tcp.handshake import group_label, peer_name
from muster.communicators.tcp.pending_group import PendingGroup
from muster.communicators.tcp.transfer import (
    DeadlinePassedError,
    FrameIn,
    Incoming,
    Multiplexer,
    Outgoing,
    PeerEndedError,
)
from muster.communicators.work import FINISHED, Work, WorkQueue
from muster.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorError,
    FormationTimeoutError,
    PeerFinishedError,
    PeerLostError,
)

SMALL_BYTES = 32768
"""A payload up to this size, in bytes, is sent with the call (twice as much for all ranks together)."""

_NOTHING = memoryview(b"")
_NO_NUMBERS = np.empty(0, np.uint8)
_POLL_S = 0.05
_FAREWELLS: tuple[tuple[type[Exception], Reason], ...] = (
    (CollectiveMismatchError, Reason.MISMATCH),
    (CollectiveTimeoutError, Reason.TIMEOUT),
    (PeerLostError, Reason.LOST),
    (CommunicatorAbortedError, Reason.ABORTED),
    (Exception, Reason.FAILED),
)

Block = tuple[bytes, memoryview]


class TcpCommunicator(HostCommunicator):
    """Collectives over authenticated TLS connections.

    Calls of one rank run one at a time. The mean of integers is refused; integer sums wrap around.
    Once a call has failed with anything but :class:`~muster.errors.ArrayError`, the communicator is
    unusable, every later call raises the same error, and the peers hear why.

    ``send`` returns when the peer has called ``recv``, as with NCCL. Both are ordered calls, like all
    others, and are compared as collectives are, so that a rank that calls something else is named at once.
    Messages that wait independently of collectives, by tag or from any rank, use :mod:`messages`.
    """

    name = "tcp"

    elsewhere = 0
    """Number of collectives of these ranks that went over NCCL; it must be the same on all ranks."""

    def __init__(self, membership: Membership, endpoint: Endpoint, *, path: str, timeout_s: float) -> None:
        self.membership = membership
        self.timeout_s = timeout_s
        self._endpoint = endpoint
        self._path = path
        self._multiplexer = Multiplexer(second_core=has_second_core(membership))
        self._pending_group = PendingGroup(membership, group_label(membership, path))
        self._links: dict[int, PeerConnection] = {}
        self._queue = WorkQueue(f"muster-tcp-{membership.group}")
        self._lock = threading.Lock()
        self._sequence = 0
        self._splits = 0
        self._points: dict[int, int] = {}
        self._deadline = 0.0
        self._closed = False
        self._unmet = False

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint that opens and accepts this process's connections."""
        return self._endpoint

    # ------------------------------------------------------------ collectives

    def all_reduce(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_reduce`."""
        source, target = self._take_pair(send, recv)
        op = self._operation(op, source)
        call = Call("all_reduce", source.dtype, op.value, -1, source.size, self.elsewhere)
        numbers, sent, received = ARITHMETIC[source.dtype], source.flat, target.flat

        def small(parts: list[NumpyArray]) -> None:
            numbers.reduce_all(op, parts, received)

        def large() -> None:
            ring = self._ring()
            ring.run(*rings.all_reduce_plan(ring, sent, received, numbers, op))

        def pair() -> None:
            """Exchanges data of two ranks without agreement: each sees the other's call before the data."""
            ring = self._ring()
            mine = self._next(call)
            outgoing, incoming = rings.all_reduce_plan(ring, sent, received, numbers, op)
            outgoing.precede(blocks_frame(FrameKind.CALLS, [(mine, _NOTHING)]))
            theirs = FrameIn(ring.left)
            ended: PeerEndedError | None = None
            try:
                self._multiplexer.run([outgoing], [theirs], self._deadline, until=theirs)
            except PeerEndedError as error:
                ended = error
                theirs.take_rest()  # the peer may have left because of this rank's call: compare its own
            if theirs.finished:
                self._expect_calls(theirs, mine, 1)
                if theirs.blocks[0][0] != mine:
                    raise self._mismatch({self.rank: mine, 1 - self.rank: theirs.blocks[0][0]})
            if ended is not None:
                raise ended
            ring.run(outgoing, incoming)

        if self.world_size == 2 and not self._goes_with_call(source.nbytes):
            return self._issue(call, pair, async_op)
        return self._collective(call, sent, small, large, async_op)

    def reduce(
        self,
        send: Array,
        recv: Array | None,
        op: ReduceOp,
        root: int,
        *,
        async_op: bool = False,
    ) -> Work:
        """See :meth:`Communicator.reduce`."""
        source, target = self._take_rooted(send, recv, root)
        op = self._operation(op, source)
        call = Call("reduce", source.dtype, op.value, root, source.size)
        numbers, received = ARITHMETIC[source.dtype], None if target is None else target.flat

        def small(parts: list[NumpyArray]) -> None:
            if received is not None:
                numbers.reduce_all(op, parts, received)

        def large() -> None:
            rings.reduce(self._ring(), source.flat, received, numbers, op, root)

        return self._collective(call, source.flat, small, large, async_op)

    def broadcast(self, buffer: Array, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.broadcast`."""
        self.membership.check_rank(root, "root")
        target = self._take(buffer, "buffer", writable=self.rank != root)
        call = Call("broadcast", target.dtype, "", root, target.size)

        def small(parts: list[NumpyArray]) -> None:
            if self.rank != root:
                target.flat[...] = parts[root]

        def large() -> None:
            rings.broadcast(self._ring(), target.flat, root)

        payload = target.flat if self.rank == root else None
        return self._collective(call, payload, small, large, async_op, target.nbytes)

    def all_gather(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_gather`."""
        source, target = self._take_pair(send, recv, gathers=True)
        call = Call("all_gather", source.dtype, "", -1, source.size)
        places = self._parts(target.flat)

        def small(parts: list[NumpyArray]) -> None:
            for part, place in zip(parts, places, strict=True):
                place[...] = part

        def large() -> None:
            places[self.rank][...] = source.flat
            rings.all_gather(self._ring(), target.flat)

        return self._collective(call, source.flat, small, large, async_op)

    def reduce_scatter(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.reduce_scatter`."""
        source, target = self._take_pair(send, recv, scatters=True)
        op = self._operation(op, source)
        call = Call("reduce_scatter", source.dtype, op.value, -1, target.size)
        numbers = ARITHMETIC[source.dtype]

        def small(parts: list[NumpyArray]) -> None:
            numbers.reduce_all(op, [self._parts(part)[self.rank] for part in parts], target.flat)

        def large() -> None:
            rings.reduce_scatter(self._ring(), source.flat, target.flat, numbers, op)

        return self._collective(call, source.flat, small, large, async_op)

    def gather(self, send: Array, recv: Array | None, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.gather`."""
        source, target = self._take_rooted(send, recv, root, gathers=True)
        call = Call("gather", source.dtype, "", root, source.size)
        places = [] if target is None else self._parts(target.flat)

        def small(parts: list[NumpyArray]) -> None:
            for part, place in zip(parts, places, strict=False):
                place[...] = part

        def large() -> None:
            if not places:
                self._move({root: as_bytes(source.flat)}, {})
                return
            places[root][...] = source.flat
            self._move({}, {r: as_bytes(place) for r, place in enumerate(places) if r != root})

        return self._collective(call, source.flat, small, large, async_op)

    def scatter(self, send: Array | None, recv: Array, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.scatter`."""
        source, target = self._take_scattered(send, recv, root)
        call = Call("scatter", target.dtype, "", root, target.size)
        payload = None if source is None else source.flat

        def small(parts: list[NumpyArray]) -> None:
            target.flat[...] = self._parts(parts[root])[self.rank]

        def large() -> None:
            if payload is None:
                self._move({}, {root: as_bytes(target.flat)})
                return
            places = self._parts(payload)
            self._move({r: as_bytes(place) for r, place in enumerate(places) if r != root}, {})
            target.flat[...] = places[root]

        return self._collective(call, payload, small, large, async_op, target.nbytes * self.world_size)

    def all_to_all(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_to_all`."""
        source, target = self._take_pair(send, recv)
        call = Call("all_to_all", self._shared(source).dtype, "", -1, source.size)
        places = self._parts(target.flat)

        def small(parts: list[NumpyArray]) -> None:
            for part, place in zip(parts, places, strict=True):
                place[...] = self._parts(part)[self.rank]

        def large() -> None:
            shared = np.may_share_memory(source.flat, target.flat)
            out = self._parts(source.flat.copy() if shared else source.flat)
            places[self.rank][...] = out[self.rank]
            for step in range(1, self.world_size):
                to, source_rank = (self.rank + step) % self.world_size, (self.rank - step) % self.world_size
                self._move({to: as_bytes(out[to])}, {source_rank: as_bytes(places[source_rank])})

        return self._collective(call, source.flat, small, large, async_op)

    def all_to_all_pieces(self, send: Sequence[NumpyArray], recv: Sequence[NumpyArray], dtype: str) -> None:
        """Sends piece j of rank i's ``send`` to piece i of rank j's ``recv``; pieces may differ in size.

        Only torch's process groups use it.

        Args:
            send: flat arrays, one for each rank.
            recv: flat arrays, one for each rank; share no memory with ``send``.
            dtype: the name of the dtype of all of them.

        Raises:
            CollectiveMismatchError: two ranks disagree on a piece's size or dtype; raised on all ranks.
        """
        call = Call("all_to_all", dtype)
        sizes = np.array([[piece.size for piece in send], [piece.size for piece in recv]], np.int64)

        def action() -> None:
            if self.world_size > 1:
                parts = self._agree(call, as_bytes(sizes.reshape(-1)))
                self._check_sizes([np.frombuffer(part, np.int64).reshape(2, -1) for part in parts])
            recv[self.rank][...] = send[self.rank]
            for step in range(1, self.world_size):
                to, source = (self.rank + step) % self.world_size, (self.rank - step) % self.world_size
                self._move({to: as_bytes(send[to])}, {source: as_bytes(recv[source])})

        self._issue(call, action, async_op=False)

    def _check_sizes(self, sizes: Sequence[NumpyArray]) -> None:
        for rank, (sent, _) in enumerate(sizes):
            for other, (_, expected) in enumerate(sizes):
                if sent[other] != expected[rank]:
                    raise CollectiveMismatchError(
                        f"all_to_all in group {self.membership.group!r}: {self._names([rank])} sends"
                        f" {sent[other]} elements to {self._names([other])}, which expects {expected[rank]}.",
                        remedy="The split sizes of the ranks must fit each other.",
                    )

    def send(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.send`; returns when the peer has called recv."""
        source = self._take(buffer, "buffer")
        self.membership.check_peer(peer)
        call = Call("send", source.dtype, "", peer, source.size)
        return self._issue(call, lambda: self._point(call, peer, as_bytes(source.flat)), async_op)

    def recv(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.recv`."""
        target = self._take(buffer, "buffer", writable=True)
        self.membership.check_peer(peer)
        call = Call("recv", target.dtype, "", peer, target.size)
        return self._issue(call, lambda: self._point(call, peer, as_bytes(target.flat)), async_op)

    def barrier(self) -> None:
        """See :meth:`Communicator.barrier`."""
        self._collective(Call("barrier"), None, lambda _parts: None, lambda: None, False, 0)

    def split(self, group: str, ranks: Sequence[int]) -> TcpCommunicator | None:
        """See :meth:`Communicator.split`."""
        membership = self.membership.part(group, ranks)
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

        payload = np.frombuffer(f"{group!r} of ranks {list(ranks)}".encode(), np.uint8)
        self._collective(Call("split"), payload, agree, lambda: None, False, 0)
        if membership is None:
            return None
        part = self._part(membership, number)
        part.bring_up(self.timeout_s, self._check)
        return part

    def part(self, group: str, ranks: Sequence[int]) -> TcpCommunicator | None:
        """Like :meth:`split`, but without communication: the new communicator connects at its first calls."""
        membership = self.membership.part(group, ranks)
        number = self._splits
        self._splits += 1
        if membership is None:
            return None
        part = self._part(membership, number)
        part.listen()
        return part

    def _part(self, membership: Membership, number: int) -> TcpCommunicator:
        path = f"{self._path}/{number}:{membership.group}"
        return TcpCommunicator(membership, self._endpoint, path=path, timeout_s=self.timeout_s)

    # ------------------------------------------------------------ beginning and end

    def listen(self) -> None:
        """Accepts connections from now on, instead of :meth:`bring_up`; calls connect the peers they need."""
        if self.world_size > 1:
            self._endpoint.gather(self._pending_group)
            self._unmet = True

    def absent(self, wait_s: float) -> list[Peer]:
        """Returns the other ranks that do not answer as members of this group within ``wait_s`` seconds.

        Only for a group that cannot form, because the connections that this makes must not be used.
        """
        deadline = time.monotonic() + wait_s
        group = self._pending_group
        others = [peer for peer in self.membership.peers if peer.rank != self.rank]
        for peer in others:
            self._endpoint.dial(group, peer.rank, deadline)
        with group.changed:
            group.changed.wait_for(
                lambda: all(peer.rank in group.arrived or peer.rank in group.failures for peer in others),
                timeout=wait_s,
            )
            return [peer for peer in others if peer.rank not in group.arrived]

    def bring_up(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Connects to the usual peers and waits until every rank has done so.

        Raises:
            FormationTimeoutError: a rank did not connect in time; the message names it.
        """
        if self.world_size == 1:
            return
        self._deadline = time.monotonic() + timeout_s
        self._endpoint.gather(self._pending_group)
        self._multiplexer.check_while_waiting(check)
        try:
            self._connect(self._usual(), check)
            self._exchange(Call("connect").encode(), _NOTHING)
        except Exception as error:
            known = self._explain(error, Call("connect"), timeout_s)
            if isinstance(known, CollectiveTimeoutError):
                known = FormationTimeoutError(known.message, remedy=known.remedy)
            self._error = known
            self._hang_up(known)
            self._multiplexer.close()
            raise known from None
        self._multiplexer.check_while_waiting(None)

    def abort(self, error: Exception) -> None:
        """See :meth:`Communicator.abort`."""
        if self._error is None:
            self._error = error
        self._multiplexer.stop()
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
                self._say_goodbye(Reason.DONE, HAS_FINISHED if self.finished else "")
            self._multiplexer.close()

    def _close_if_failed(self) -> None:
        if self._error is not None and self._lock.acquire(blocking=False):
            try:
                self._hang_up(self._error)
            finally:
                self._lock.release()

    def _hang_up(self, error: Exception) -> None:
        """Sends every peer a goodbye with the reason why this rank leaves."""
        reason = next(reason for kind, reason in _FAREWELLS if isinstance(error, kind))
        self._say_goodbye(reason, str(error))

    def _say_goodbye(self, reason: Reason, message: str) -> None:
        """Says goodbye to all peers and closes all connections; idempotent."""
        self._endpoint.forget(self._pending_group)
        links, self._links = {**self._pending_group.arrived, **self._links}, {}
        self._pending_group.arrived.clear()
        for link in links.values():
            link.close(reason, message)

    # ------------------------------------------------------------ running one call

    def _issue(self, call: Call, action: Callable[[], None], async_op: bool) -> Work:
        self._check()
        if not async_op and self._queue.idle:
            self._run(call, action)
            return FINISHED
        return self._queued(lambda: self._run(call, action), async_op)

    def _run(self, call: Call, action: Callable[[], None]) -> None:
        try:
            with self._lock:
                self._check()
                self._deadline = time.monotonic() + self.timeout_s
                try:
                    action()
                except Exception as error:
                    if self._error is None:
                        self._error = self._explain(error, call, self.timeout_s)
                    raise self._error from None
                except BaseException:
                    self._error = CommunicatorAbortedError(f"{call} was interrupted.")
                    raise
        finally:
            self._close_if_failed()

    def _collective(
        self,
        call: Call,
        payload: NumpyArray | None,
        small: Callable[[list[NumpyArray]], None],
        large: Callable[[], None],
        async_op: bool,
        nbytes: int = -1,
    ) -> Work:
        """Issues a collective: ranks agree on the call, with small data or followed by large data."""
        if self.elsewhere:
            call = replace(call, sequence=self.elsewhere)  # the number of now: the call may run later
        with_data = self._goes_with_call(nbytes if nbytes >= 0 or payload is None else payload.nbytes)
        dtype = ARITHMETIC[call.dtype].storage if call.dtype else _NO_NUMBERS.dtype

        def action() -> None:
            if self.world_size == 1:
                small([_NO_NUMBERS if payload is None else payload.copy()])
                return
            parts = self._agree(call, _NOTHING if payload is None or not with_data else as_bytes(payload))
            if with_data:
                small([np.frombuffer(part, dtype) for part in parts])
            else:
                large()

        return self._issue(call, action, async_op)

    def _goes_with_call(self, nbytes: int) -> bool:
        return nbytes <= SMALL_BYTES and nbytes * self.world_size <= 2 * SMALL_BYTES

    def _agree(self, call: Call, payload: memoryview) -> list[memoryview]:
        mine = self._next(call)
        blocks = self._exchange(mine, memoryview(bytes(payload)))
        if any(theirs != mine for theirs, _ in blocks):
            raise self._mismatch({rank: theirs for rank, (theirs, _) in enumerate(blocks)})
        return [part for _, part in blocks]

    def _next(self, call: Call) -> bytes:
        number = self._sequence
        self._sequence += 1
        return replace(call, sequence=call.sequence + number).encode()

    def _exchange(self, call: bytes, payload: memoryview) -> list[Block]:
        """Sends this rank's call with a small payload to every rank; returns those of all ranks, by rank.

        It takes log2(world size) rounds. In each, a rank passes on all that it knows to the peer at
        twice the distance of the previous round.
        """
        rank, size = self.rank, self.world_size
        if self._unmet:  # all at once: of ranks that connect one by one each may wait for the next to dial
            self._connect(self._usual(), self._check_peers)
            self._unmet = False
        known: list[Block] = [(call, payload)]
        distance = 1
        while distance < size:
            count = min(distance, size - distance)
            try:
                incoming = self._swap(FrameKind.CALLS, known[:count], rank + distance, rank - distance)
            except DeadlinePassedError:
                unheard = {(rank - distance - i) % size for i in range(count)}
                raise DeadlinePassedError(tuple(sorted(unheard))) from None
            self._expect_calls(incoming, call, count)
            known += incoming.blocks
            distance *= 2
        return [known[(rank - r) % size] for r in range(size)]

    def _swap(self, kind: FrameKind, blocks: Sequence[Block], target: int, source: int) -> FrameIn:
        """Sends a frame to one rank while receiving one from another, or from the same."""
        frame = memoryview(blocks_frame(kind, blocks))
        incoming = FrameIn(self._link(source))
        self._multiplexer.run([Outgoing(self._link(target), [frame])], [incoming], self._deadline)
        return incoming

    def _expect_calls(self, incoming: FrameIn, call: bytes, count: int) -> None:
        """Checks that a received frame belongs to a collective.

        Raises:
            CollectiveMismatchError: the peer is in a point-to-point call.
            CommunicatorError: the frame has another number of blocks.
        """
        if incoming.kind is FrameKind.POINT:
            raise self._mismatch({self.rank: call, incoming.connection.peer: incoming.blocks[0][0]})
        if len(incoming.blocks) != count:
            raise CommunicatorError(f"Rank {incoming.connection.peer} is out of step with this one.")

    def _point(self, call: Call, peer: int, memory: memoryview) -> None:
        """Runs a send or recv: the two ranks agree on the call, as for a collective; then data is sent."""
        number = self._points.get(peer, 0)
        self._points[peer] = number + 1
        sends, small = call.kind == "send", len(memory) <= SMALL_BYTES
        mine = replace(call, sequence=number).encode()
        other = "recv" if sends else "send"
        expected = replace(call, kind=other, root=self.rank, sequence=number).encode()
        block = mine, memory if sends and small else _NOTHING
        theirs, data = self._swap(FrameKind.POINT, [block], peer, peer).blocks[0]
        if theirs != expected:
            raise self._mismatch({self.rank: mine, peer: theirs})
        if not small:
            self._move({peer: memory} if sends else {}, {} if sends else {peer: memory})
        elif not sends:
            memory[:] = data

    # ------------------------------------------------------------ connections

    def links(self) -> Mapping[int, PeerConnection]:
        """The present connections, by rank."""
        return dict(self._links)

    def sending_s(self) -> Mapping[int, float]:
        """Returns the total seconds for which data for each rank was unacknowledged or could not be sent.

        That is the kernel's count; if the kernel has none, the result is empty.
        """
        return {
            rank: seconds for rank, link in self.links().items() if (seconds := link.sending_s()) is not None
        }

    def _usual(self) -> list[int]:
        """The peers that almost every collective needs: ring neighbours and power-of-two distances."""
        rank, size = self.rank, self.world_size
        distances = []
        distance = 1
        while distance < size:
            distances += [distance, -distance]
            distance *= 2
        return sorted({(rank + d) % size for d in distances} - {rank})

    def _link(self, rank: int) -> PeerConnection:
        """Returns the connection to a peer; connects if there is none."""
        peer = rank % self.world_size
        if peer not in self._links:
            self._connect([peer], self._check_peers)
        return self._links[peer]

    def _ring(self) -> rings.Ring:
        left, right = self._link(self.rank - 1), self._link(self.rank + 1)
        return rings.Ring(self._multiplexer, left, right, self.rank, self.world_size, self._deadline)

    def _move(self, out: dict[int, memoryview], into: dict[int, memoryview]) -> None:
        """Sends to some peers and receives from others, all at once."""
        self._connect([*out, *into], self._check_peers)
        outgoing = [Outgoing(self._links[rank], [view]) for rank, view in out.items()]
        incoming = [Incoming(self._links[rank], [view]) for rank, view in into.items()]
        self._multiplexer.run(outgoing, incoming, self._deadline)

    def _check_peers(self) -> None:
        """Fails the wait for a peer's connection as soon as another peer hangs up."""
        self._check()
        self._multiplexer.look()

    def _connect(self, peers: Iterable[int], check: Callable[[], None]) -> None:
        """Connects to several peers at once; ``check`` is called now and then, and may raise.

        Raises:
            FormationTimeoutError: a peer did not connect in time; the message names it.
            SecurityError: a process other than the peer answered.
        """
        missing = {peer for peer in peers if peer not in self._links}
        for peer in sorted(missing):
            if dials(self.rank, peer):
                self._endpoint.dial(self._pending_group, peer, self._deadline)
        group = self._pending_group
        while missing:
            with group.changed:
                if not (missing & group.arrived.keys()) and not group.failures:
                    group.changed.wait(max(0.0, min(_POLL_S, self._deadline - time.monotonic())))
                arrived = {peer: group.arrived[peer] for peer in missing & group.arrived.keys()}
                failures = list(group.failures.values())
            for peer, link in arrived.items():
                self._links[peer] = link
                self._multiplexer.watch(link)
            missing -= arrived.keys()
            if failures:
                raise failures[0]
            check()
            if missing and time.monotonic() >= self._deadline:
                raise FormationTimeoutError(self._missing(sorted(missing)), remedy="See those workers' logs.")

    # ------------------------------------------------------------ errors in words

    def _missing(self, ranks: Sequence[int]) -> str:
        notes = self._pending_group.notes
        names = [
            peer_name(self.membership.peers[rank]) + (f" [{notes[rank]}]" if rank in notes else "")
            for rank in ranks
        ]
        where = f"group {self.membership.group!r}, generation {self.membership.generation}"
        return f"No connection in time ({where}) with {', '.join(names)}."

    def _mismatch(self, calls: dict[int, bytes]) -> CollectiveMismatchError:
        """Returns the error that says which rank called what."""
        groups: dict[bytes, list[int]] = {}
        for rank in sorted(calls):
            groups.setdefault(calls[rank], []).append(rank)
        parts = [f"{self._names(ranks)} called {Call.decode(call)}" for call, ranks in groups.items()]
        return CollectiveMismatchError(
            f"The ranks of group {self.membership.group!r} disagree: {'; '.join(parts)}.",
            remedy="All ranks must make the same calls in the same order.",
        )

    def _names(self, ranks: Sequence[int]) -> str:
        if len(ranks) > 4:
            return f"ranks {', '.join(str(r) for r in ranks)}"
        return " and ".join(peer_name(self.membership.peers[r]) for r in ranks)

    def _explain(self, error: Exception, call: Call, timeout_s: float) -> Exception:
        """Converts a transfer's failure into the error that the user sees."""
        where = f"{call} in group {self.membership.group!r} of generation {self.membership.generation}"
        if isinstance(error, DeadlinePassedError):
            return CollectiveTimeoutError(
                f"{where} did not complete in {timeout_s:g} s: waited for {self._names(error.ranks)}.",
                remedy="See those workers' logs, or raise the deadline (MS_COLLECTIVE_TIMEOUT).",
            )
        if isinstance(error, FormationTimeoutError):  # a rank that this call was the first to need
            return CollectiveTimeoutError(f"{where} did not complete in {timeout_s:g} s: {error.message}")
        if not isinstance(error, PeerEndedError):
            return error
        reason, text = error.farewell or (Reason.LOST, "")
        if reason is Reason.MISMATCH:
            return CollectiveMismatchError(text)
        if reason is Reason.TIMEOUT:
            return CollectiveTimeoutError(f"{where} failed at rank {error.rank}: {text}")
        name = peer_name(self.membership.peers[error.rank])
        if reason is Reason.DONE and text == HAS_FINISHED:
            return PeerFinishedError(
                f"{name} has finished, while this rank still calls {where}: it had fewer batches, or its"
                " script has ended early",
                rank=error.rank,
            )
        how = end_in_words(reason, text)
        return PeerLostError(f"{where} failed: the connection to {name} {how}.", rank=error.rank)


def has_second_core(membership: Membership) -> bool:
    """Whether this process may use at least twice as many cores as the group has ranks on this host.

    With fewer cores, a second thread of each rank would only take turns with the others.
    """
    host = membership.peers[membership.rank].host_id
    ranks = sum(peer.host_id == host for peer in membership.peers)
    return len(os.sched_getaffinity(0)) >= 2 * ranks
