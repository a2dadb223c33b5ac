"""Sends copies of this rank's parts to its partners, and takes those of the ranks whose partner it is.

On connections and threads of their own, beside the training: collectives do not wait for them. The
connections are those of the ``tcp`` communicator, encrypted and proven by the generation's secret, on which
:class:`~muster.communicators.tcp.messages.Messages` go.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from muster.communicators.membership import Membership
from muster.communicators.tcp.endpoint import Endpoint
from muster.communicators.tcp.handshake import peer_name
from muster.communicators.tcp.messages import Message, Messages
from muster.errors import CommunicatorError, WorkerError
from muster.training.part_copy import (
    DamagedCopyError,
    HeldCopies,
    PartCopy,
    chunk_count,
    chunks,
    in_words,
)
from muster.training.snapshots.parts import PartKey, SnapshotId
from muster.wire.threads import start_thread

_LOG = logging.getLogger("muster.worker")
_ANNOUNCED, _ANSWER, _CONTENT = 1, 2, 3
"""Tags of the messages: what comes next, whether it was kept, and from here on the bytes of one copy each."""

_HEADER = struct.Struct("!IQQII?QQQQ")
"""The copy's number among its sender's; generation, step, world size, rank; whether there is a snapshot
that counts, and its generation and step; bytes of the head, and of the data."""

_ANSWERED = struct.Struct("!QQ?")
_MOST_HEAD_BYTES = 256 << 20
_GLANCE_S = 0.2
_PATIENCE_S = 7 * 86_400.0
"""A message waits as long as the generation lasts, whose end closes the connections."""


@dataclass(frozen=True, slots=True)
class OutgoingCopy:
    """A copy that is to be sealed, kept and sent.

    Attributes:
        copy: whose memory stays as it is until the copy is dropped.
        agreed: the newest snapshot that counts, as this rank knows it.
        ready: waits until the data is in memory.
    """

    copy: PartCopy
    agreed: SnapshotId | None
    ready: Callable[[], None]


class CopyExchange:
    """The copies that come and go within one generation.

    Args:
        membership: of the generation.
        endpoint: makes and takes connections.
        partners: the ranks that get this one's copies.
        wards: the ranks whose copies come here, and the bytes of data that each said its copies have.
        held: where whole copies go.
        accept: asked for each part that is announced, with what counts for its owner: whether it is wanted.
        completed: told when a part of this rank is here and at all partners.
        failed: told when it will not be, with the reason.
        mbytes_per_s: most megabytes a second that go out; 0: as fast as they go.
        number: of exchanges of this generation before; the same on all ranks.
    """

    def __init__(
        self,
        membership: Membership,
        endpoint: Endpoint,
        *,
        partners: Sequence[int],
        wards: Mapping[int, int],
        held: HeldCopies,
        accept: Callable[[PartKey, SnapshotId | None], bool],
        completed: Callable[[PartKey], None],
        failed: Callable[[PartKey, str], None],
        mbytes_per_s: float = 0.0,
        number: int = 0,
    ) -> None:
        self._membership = membership
        self._partners = tuple(partners)
        self._held = held
        self._completed, self._failed = completed, failed
        self._bytes_per_s = mbytes_per_s * 1e6
        self._closed = threading.Event()
        self._work = threading.Condition()
        self._waiting: OutgoingCopy | None = None
        self._under_way: PartKey | None = None
        self._sent = 0
        self._messages = Messages(
            membership,
            endpoint,
            path=f"{membership.group}/snapshots/{number}",
            timeout_s=_PATIENCE_S,
            others=dict,
        )
        self._threads = [start_thread(self._send_all, name="muster-snapshots-out")]
        for ward, size in wards.items():
            keeper = Keeper(self._messages, membership, ward, size, held, accept)
            self._threads.append(start_thread(keeper.run, name=f"muster-snapshots-in-{ward}"))

    @property
    def under_way(self) -> PartKey | None:
        """The part whose memory is still being read; None: there is none."""
        with self._work:
            return self._waiting.copy.key if self._waiting is not None else self._under_way

    def send(self, outgoing: OutgoingCopy) -> None:
        """Seals a copy, keeps it and sends it to the partners, all in the background."""
        with self._work:
            self._waiting = outgoing
            self._work.notify_all()

    def close(self) -> None:
        """Ends connections and threads; what is on its way is dropped. Idempotent."""
        self._closed.set()
        with self._work:
            self._work.notify_all()
        self._messages.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    # ------------------------------------------------------------ the thread that sends

    def _send_all(self) -> None:
        while True:
            with self._work:
                self._under_way = None
                self._work.wait_for(lambda: self._waiting is not None or self._closed.is_set())
                if self._closed.is_set():
                    return
                assert self._waiting is not None
                outgoing, self._waiting = self._waiting, None
                self._under_way = outgoing.copy.key
            try:
                outgoing.ready()
                copy = outgoing.copy.sealed()
                self._held.keep(copy)
                for partner in self._partners:
                    self._send(copy, outgoing.agreed, partner)
            except Exception as error:  # of CUDA, say; a thread that ends would end snapshots unnoticed
                if not self._closed.is_set():
                    self._failed(outgoing.copy.key, str(error))
                continue
            self._completed(copy.key)

    def _send(self, copy: PartCopy, agreed: SnapshotId | None, partner: int) -> None:
        begun, sent = time.monotonic(), 0
        answer = memoryview(bytearray(_ANSWERED.size))
        answered = self._messages.receive(answer, partner, _ANSWER, "uint8")
        head = copy.head + struct.pack(f"!{len(copy.checksums)}I", *copy.checksums)
        (generation, step), world_size, rank = copy.key
        counts = (agreed is not None, *(agreed or (0, 0)))
        sizes = (len(copy.head), len(copy.data))
        self._sent += 1
        tag = _CONTENT + self._sent
        header = _HEADER.pack(self._sent, generation, step, world_size, rank, *counts, *sizes)
        _wait(self._put(header, partner, _ANNOUNCED))
        under_way = [self._put(head, partner, tag)]
        for chunk in chunks(copy.data):
            if len(under_way) > 1:  # one travels while the next is offered
                _wait(under_way.pop(0), answered)
            if answered.done():
                break
            under_way.append(self._put(chunk, partner, tag))
            sent += len(chunk)
            if self._bytes_per_s:
                self._closed.wait(max(0.0, begun + sent / self._bytes_per_s - time.monotonic()))
        for message in under_way:
            _wait(message, answered)
        _wait(answered)
        if _ANSWERED.unpack(answer) != (generation, step, True):
            partner_name = peer_name(self._membership.peers[partner])
            raise CommunicatorError(
                f"{partner_name} did not keep the copy of {in_words(copy.key)}: see its log."
            )

    def _put(self, data: bytes | memoryview, partner: int, tag: int) -> Message:
        return self._messages.send(memoryview(data), partner, tag, "uint8")


class Keeper:
    """Takes one rank's copies, as long as the generation lasts; two of them have room. See CopyExchange."""

    def __init__(
        self,
        messages: Messages,
        membership: Membership,
        ward: int,
        most_bytes: int,
        held: HeldCopies,
        accept: Callable[[PartKey, SnapshotId | None], bool],
    ) -> None:
        self._messages = messages
        self._membership = membership
        self._ward = ward
        self._most_bytes = most_bytes
        self._held = held
        self._accept = accept
        self._room: list[tuple[PartKey | None, Any]] = []

    def run(self) -> None:
        """Takes copies until the messages are closed, or the other rank is gone."""
        header = memoryview(bytearray(_HEADER.size))
        try:
            while True:
                _wait(self._messages.receive(header, self._ward, _ANNOUNCED, "uint8"))
                number, generation, step, world_size, rank, counts, *rest = _HEADER.unpack(header)
                key = PartKey(SnapshotId(generation, step), world_size, rank)
                agreed = SnapshotId(*rest[:2]) if counts else None
                is_kept = self._take(key, agreed, _CONTENT + number, *rest[2:])
                answer = _ANSWERED.pack(generation, step, is_kept)
                _wait(self._messages.send(memoryview(answer), self._ward, _ANSWER, "uint8"))
        except WorkerError as error:
            _LOG.debug("no more copies of rank %d: %s", self._ward, error)

    def _take(self, key: PartKey, agreed: SnapshotId | None, tag: int, head_size: int, size: int) -> bool:
        """Whether a copy has come whole and is kept; what is not taken stays with the other rank."""
        here = self._membership
        expected = PartKey(SnapshotId(here.generation, key.snapshot.step), here.world_size, self._ward)
        if key != expected or size > self._most_bytes or head_size > _MOST_HEAD_BYTES:
            _LOG.warning(
                "%s offers a copy that was not agreed on: %s, %d bytes, where %d were",
                peer_name(here.peers[self._ward]),
                in_words(key),
                size,
                self._most_bytes,
            )
            return False
        is_wanted = self._accept(key, agreed)
        count = chunk_count(size)
        head = memoryview(bytearray(head_size + 4 * count))
        room = self._free(key, size)
        if room is None:
            _LOG.warning("%s sends a third copy: two are kept", peer_name(here.peers[self._ward]))
            return False
        data = memoryview(room)[:size]
        _wait(self._messages.receive(head, self._ward, tag, "uint8"))
        for chunk in chunks(data):
            _wait(self._messages.receive(chunk, self._ward, tag, "uint8"))
        sums = struct.unpack(f"!{count}I", head[head_size:])
        copy = PartCopy(key, bytes(head[:head_size]), data, sums)
        try:
            copy.check()
        except DamagedCopyError as error:
            _LOG.error("A copy that has arrived is not kept: %s", error.message)
            is_wanted = False
        if is_wanted:
            self._held.keep(copy)
        return is_wanted

    def _free(self, key: PartKey, size: int) -> Any:
        """Memory for a copy: that of one which nobody holds any more, if there is; None: there is none."""
        self._room = [
            (old, room) for old, room in self._room if len(room) >= size or self._held.get(old) is not None
        ]
        for number, (old, room) in enumerate(self._room):
            if self._held.get(old) is None:
                self._room[number] = (key, room)
                return room
        if len(self._room) >= 2:
            return None
        self._room.append((key, np.empty(size, np.uint8)))
        return self._room[-1][1]


def _wait(message: Message, answered: Message | None = None) -> None:
    """Waits until a message is over, or ``answered`` is: the other side takes no more then.

    Raises:
        WorkerError: it did not arrive, or the generation is over.
    """
    while not message.wait(None if answered is None else _GLANCE_S):
        if answered is not None and answered.done():
            return
    if message.error is not None:
        error = message.error
        raise error if isinstance(error, WorkerError) else CommunicatorError(str(error))
