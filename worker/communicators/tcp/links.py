"""The connections of one communicator, and what their failures mean."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from muster.worker.communicators.base import Membership
from muster.worker.communicators.tcp.connection import Connection
from muster.worker.communicators.tcp.endpoint import Endpoint
from muster.worker.communicators.tcp.frames import HAS_FINISHED, Call, FrameKind, Reason, blocks_frame
from muster.worker.communicators.tcp.handshake import Lobby, dials, peer_name
from muster.worker.communicators.tcp.transfer import (
    DeadlinePassedError,
    FrameIn,
    Mover,
    Outgoing,
    PeerEndedError,
)
from muster.worker.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorError,
    FormationTimeoutError,
    PeerFinishedError,
    PeerLostError,
)

Block = tuple[bytes, memoryview]
_POLL_S = 0.05


class Links:
    """Connections to the peers of a group, made when first needed."""

    def __init__(self, membership: Membership, endpoint: Endpoint, lobby: Lobby, mover: Mover) -> None:
        self.membership = membership
        self.mover = mover
        self._endpoint = endpoint
        self._lobby = lobby
        self._links: dict[int, Connection] = {}

    def usual(self) -> list[int]:
        """The peers that almost every collective needs: ring neighbours and power-of-two distances."""
        rank, size = self.membership.rank, self.membership.world_size
        distances = []
        distance = 1
        while distance < size:
            distances += [distance, -distance]
            distance *= 2
        return sorted({(rank + d) % size for d in distances} - {rank})

    def get(self, peer: int, deadline: float, check: Callable[[], None]) -> Connection:
        """The connection to a peer; made now if there is none."""
        link = self._links.get(peer)
        if link is None:
            self.connect([peer], deadline, check)
            link = self._links[peer]
        return link

    def connect(self, peers: Iterable[int], deadline: float, check: Callable[[], None]) -> None:
        """Connects to several peers at once.

        Args:
            peers: ranks.
            deadline: on the monotonic clock.
            check: called now and then; may raise.

        Raises:
            FormationTimeoutError: names those that did not come.
            SecurityError: somebody answered who is not the peer.
        """
        missing = {peer for peer in peers if peer not in self._links}
        for peer in sorted(missing):
            if dials(self.membership.rank, peer):
                self._endpoint.dial(self._lobby, peer, deadline)
        lobby = self._lobby
        while missing:
            with lobby.changed:
                if not (missing & lobby.arrived.keys()) and not lobby.failures:
                    lobby.changed.wait(max(0.0, min(_POLL_S, deadline - time.monotonic())))
                arrived = {peer: lobby.arrived[peer] for peer in missing & lobby.arrived.keys()}
                failures = list(lobby.failures.values())
            for peer, link in arrived.items():
                self._links[peer] = link
                self.mover.watch(link)
            missing -= arrived.keys()
            if failures:
                raise failures[0]
            check()
            if missing and time.monotonic() >= deadline:
                raise FormationTimeoutError(self._missing(sorted(missing)), remedy="See those workers' logs.")

    def _missing(self, ranks: Sequence[int]) -> str:
        names = [
            peer_name(self.membership.peers[rank])
            + (f" [{self._lobby.notes[rank]}]" if rank in self._lobby.notes else "")
            for rank in ranks
        ]
        where = f"group {self.membership.group!r}, generation {self.membership.generation}"
        return f"No connection in time ({where}) with {', '.join(names)}."

    def exchange(
        self, call: bytes, payload: memoryview, deadline: float, check: Callable[[], None]
    ) -> list[Block]:
        """Tells every rank what this one calls, with a small payload; returns all ranks' by rank.

        Takes log2 of the world size rounds: in each, a rank passes on all that it knows to the peer at
        twice the distance of the round before.
        """
        rank, size = self.membership.rank, self.membership.world_size
        known: list[Block] = [(call, payload)]
        distance = 1
        while distance < size:
            count = min(distance, size - distance)
            data = memoryview(blocks_frame(FrameKind.CALLS, known[:count]))
            target = self.get((rank + distance) % size, deadline, check)
            source = self.get((rank - distance) % size, deadline, check)
            incoming = FrameIn(source)
            try:
                self.mover.run([Outgoing(target, [data])], [incoming], deadline)
            except DeadlinePassedError:
                unheard = {(rank - distance - i) % size for i in range(count)}
                raise DeadlinePassedError(tuple(sorted(unheard))) from None
            self.expect_calls(incoming, call, count)
            known += incoming.blocks
            distance *= 2
        return [known[(rank - r) % size] for r in range(size)]

    def expect_calls(self, incoming: FrameIn, call: bytes, count: int) -> None:
        """Checks that a frame is one of a collective.

        Raises:
            CollectiveMismatchError: the peer is in a point-to-point call.
            CommunicatorError: the frame is of another shape.
        """
        if incoming.kind is FrameKind.POINT:
            raise self.mismatch({self.membership.rank: call, incoming.connection.peer: incoming.blocks[0][0]})
        if len(incoming.blocks) != count:
            raise CommunicatorError(f"Rank {incoming.connection.peer} is out of step with this one.")

    def mismatch(self, calls: dict[int, bytes]) -> CollectiveMismatchError:
        """The error that tells who called what."""
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

    def explain(self, error: Exception, call: Call, timeout_s: float) -> Exception:
        """Makes of a transfer's failure the error that the user sees."""
        where = f"{call} in group {self.membership.group!r} of generation {self.membership.generation}"
        if isinstance(error, DeadlinePassedError):
            return CollectiveTimeoutError(
                f"{where} was not done in {timeout_s:g} s: waited for {self._names(error.ranks)}.",
                remedy="See those workers' logs, or raise the deadline (MS_COLLECTIVE_TIMEOUT).",
            )
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
                remedy="Let all ranks make as many steps: pad or drop what is left over of the data, or"
                " divide it with uneven_batch().",
                rank=error.rank,
            )
        if reason is Reason.LOST:
            how = f"broke: {text or 'the process ended or the network failed'}"
        elif reason is Reason.DONE:
            how = "was closed by it in good order, while this rank still needed it"
        else:
            how = f"was closed by it: {text}"
        return PeerLostError(f"{where} failed: the connection to {name} {how}.", rank=error.rank)

    def close(self, reason: Reason, message: str = "") -> None:
        """Says goodbye to all peers and closes all connections; idempotent."""
        self._endpoint.forget(self._lobby)
        links, self._links = {**self._lobby.arrived, **self._links}, {}
        self._lobby.arrived.clear()
        for link in links.values():
            link.close(reason, message)


def farewell_of(error: Exception) -> tuple[Reason, str]:
    """What to tell the peers when a communicator fails with ``error``."""
    reasons: list[tuple[type[Exception], Reason]] = [
        (CollectiveMismatchError, Reason.MISMATCH),
        (CollectiveTimeoutError, Reason.TIMEOUT),
        (PeerLostError, Reason.LOST),
        (CommunicatorAbortedError, Reason.ABORTED),
    ]
    for kind, reason in reasons:
        if isinstance(error, kind):
            return reason, str(error)
    return Reason.FAILED, str(error)
