"""Sends copies of this rank's parts to its partners, and receives those of the ranks whose partner it is.

It has connections and threads of its own, so that collectives do not wait for it. The connections are made
like those of the ``tcp`` communicator, encrypted and authenticated by the generation's secret, and carry
:class:`~muster.communicators.tcp.messages.Messages`. A large copy goes over several connections at once, if
the host has processors for them. Each chunk's checksum is computed while other chunks are sent.
"""

from __future__ import annotations

import collections
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
"""Message tags: the announcement of a copy, the answer whether it was kept; from here on one tag per copy."""

_HEADER = struct.Struct("!IBQQII?QQQQ")
"""The sender's number of the copy; the number of lanes for its chunks; generation, step, world size, rank;
whether there is a snapshot that counts, and its generation and step; bytes of the head, and of the data. The
checksums follow the data."""

MOST_LANES = 4
"""Maximum number of connections to one partner, each with a thread for checksums: one per four processors."""

_ANSWERED = struct.Struct("!QQ?")
_MOST_HEAD_BYTES = 256 << 20
_GLANCE_S = 0.2
_PATIENCE_S = 7 * 86_400.0
"""The timeout of a message, in seconds: it waits until the generation ends, which closes connections."""


@dataclass(slots=True)
class OutgoingCopy:
    """A copy to be sealed, kept and sent.

    Attributes:
        key: the part's key.
        agreed: the newest snapshot that counts, as far as this rank knows.
        finish: waits until the data is in memory, and returns the copy. The copy's memory does not change
            until the copy is dropped.
        is_wanted: whether to send it; None: not known yet. Set by the exchange.
    """

    key: PartKey
    agreed: SnapshotId | None
    finish: Callable[[], PartCopy]
    is_wanted: bool | None = None


class CopyExchange:
    """Sends and receives copies within one generation.

    Args:
        membership: the membership of the generation.
        endpoint: opens and accepts connections.
        partners: the ranks that get this rank's copies.
        wards: the ranks whose copies are kept here, each with the size of its copies' data, in bytes.
        held: the collection to which complete copies are added.
        accept: called for each announced part, with the newest snapshot that counts for its owner; returns
            whether the part is wanted.
        completed: called when a part of this rank is complete here and at all partners.
        failed: called with the reason if a part of this rank cannot be completed.
        mbytes_per_s: maximum rate at which copies are sent, in 10**6 bytes per second; 0: no limit.
        number: number of earlier exchanges of this generation; the same on all ranks.
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
        self._under_way: OutgoingCopy | None = None
        self._sent = 0
        self._lanes = min(MOST_LANES, max(1, len(os.sched_getaffinity(0)) // 4))
        self._messages = [
            Messages(
                membership,
                endpoint,
                path=f"{membership.group}/snapshots/{number}/{each}",
                timeout_s=_PATIENCE_S,
                others=dict,
            )
            for each in range(MOST_LANES)
        ]
        self._threads = [start_thread(self._send_all, name="muster-snapshots-out")]
        for ward, size in wards.items():
            keeper = Keeper(self._messages, membership, ward, size, held, accept)
            self._threads.append(start_thread(keeper.run, name=f"muster-snapshots-in-{ward}"))

    @property
    def under_way(self) -> PartKey | None:
        """The part whose memory is still being read; None: there is none."""
        with self._work:
            latest = self._waiting or self._under_way
            return None if latest is None else latest.key

    def prepare(self, outgoing: OutgoingCopy) -> None:
        """Brings a copy into memory, in the background; :meth:`send` or :meth:`withdraw` must follow."""
        with self._work:
            self._waiting = outgoing
            self._work.notify_all()

    def send(self, outgoing: OutgoingCopy) -> None:
        """Seals a copy, keeps it and sends it to the partners, all in the background."""
        with self._work:
            outgoing.is_wanted = True
            if self._under_way is not outgoing:
                self._waiting = outgoing
            self._work.notify_all()

    def withdraw(self, outgoing: OutgoingCopy) -> None:
        """Drops a prepared copy: it is neither kept nor sent, and no callback is called for it."""
        with self._work:
            outgoing.is_wanted = False
            if self._waiting is outgoing:
                self._waiting = None
            self._work.notify_all()

    def close(self) -> None:
        """Ends connections and threads, and drops copies in progress. Idempotent."""
        self._closed.set()
        with self._work:
            self._work.notify_all()
        for each in self._messages:
            each.close()
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
                self._under_way = outgoing
            try:
                copy = outgoing.finish()
                if not self._wait_until_known(outgoing):
                    continue
                self._keep_and_send(copy, outgoing.agreed)
            except Exception as error:  # such as CUDA's; if the thread ended, snapshots would end unnoticed
                if self._wait_until_known(outgoing):
                    self._failed(outgoing.key, str(error))
                continue
            self._completed(outgoing.key)

    def _wait_until_known(self, outgoing: OutgoingCopy) -> bool:
        """Waits until it is known whether to send a copy; returns False also if the exchange was closed."""
        with self._work:
            self._work.wait_for(lambda: outgoing.is_wanted is not None or self._closed.is_set())
            return bool(outgoing.is_wanted) and not self._closed.is_set()

    def _keep_and_send(self, copy: PartCopy, agreed: SnapshotId | None) -> None:
        sums: dict[int, int] = {}
        try:
            for partner in self._partners:
                self._send(copy, sums, agreed, partner)
        finally:  # also if a partner is gone: the others may still find all parts of that step
            self._held.keep(copy.sealed(sums))

    def _send(self, copy: PartCopy, sums: dict[int, int], agreed: SnapshotId | None, partner: int) -> None:
        """Sends a copy; adds missing checksums to ``sums``, by chunk, while chunks are being sent."""
        answer = memoryview(bytearray(_ANSWERED.size))
        answered = self._messages[0].receive(answer, partner, _ANSWER, "uint8")
        (generation, step), world_size, rank = copy.key
        counts = (agreed is not None, *(agreed or (0, 0)))
        sizes = (len(copy.head), len(copy.data))
        self._sent += 1
        tag = _CONTENT + self._sent
        places = generation, step, world_size, rank
        header = _HEADER.pack(self._sent, self._lanes, *places, *counts, *sizes)
        _wait(self._put(header, partner, _ANNOUNCED))
        _wait(self._put(copy.head, partner, tag), answered)
        parts = chunks(copy.data)

        def send_lane(lane: int) -> None:
            begun, sent = time.monotonic(), 0
            under_way: collections.deque[Message] = collections.deque()
            for number in range(lane, len(parts), self._lanes):
                if len(under_way) > 1:  # one chunk is being sent while the next waits
                    _wait(under_way.popleft(), answered)
                if answered.done():
                    return
                under_way.append(self._put(parts[number], partner, tag, lane))
                sent += len(parts[number])
                if number not in sums:
                    sums[number] = copy.checksum(number)
                if self._bytes_per_s:
                    due = begun + sent * self._lanes / self._bytes_per_s
                    self._closed.wait(max(0.0, due - time.monotonic()))
            for message in under_way:
                _wait(message, answered)

        _in_lanes(self._lanes, send_lane, self._messages)
        if not answered.done():
            checksums = copy.sealed(sums).checksums
            _wait(self._put(struct.pack(f"!{len(checksums)}I", *checksums), partner, tag), answered)
        _wait(answered)
        if _ANSWERED.unpack(answer) != (generation, step, True):
            partner_name = peer_name(self._membership.peers[partner])
            raise CommunicatorError(
                f"{partner_name} did not keep the copy of {in_words(copy.key)}: see its log."
            )

    def _put(self, data: bytes | memoryview, partner: int, tag: int, lane: int = 0) -> Message:
        return self._messages[lane].send(memoryview(data), partner, tag, "uint8")


class Keeper:
    """Receives one rank's copies in one generation, and keeps at most two of them. See CopyExchange."""

    def __init__(
        self,
        messages: Sequence[Messages],
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
        """Receives copies until the messages are closed, or the other rank is gone."""
        header = memoryview(bytearray(_HEADER.size))
        try:
            while True:
                _wait(self._messages[0].receive(header, self._ward, _ANNOUNCED, "uint8"))
                number, lanes, generation, step, *rest = _HEADER.unpack(header)
                world_size, rank, counts, *rest = rest
                key = PartKey(SnapshotId(generation, step), world_size, rank)
                agreed = SnapshotId(*rest[:2]) if counts else None
                is_kept = self._take(key, agreed, _CONTENT + number, lanes, *rest[2:])
                answer = _ANSWERED.pack(generation, step, is_kept)
                _wait(self._messages[0].send(memoryview(answer), self._ward, _ANSWER, "uint8"))
        except WorkerError as error:
            _LOG.debug("no more copies of rank %d: %s", self._ward, error)

    def _take(
        self,
        key: PartKey,
        agreed: SnapshotId | None,
        tag: int,
        lanes: int,
        head_size: int,
        size: int,
    ) -> bool:
        """Receives one announced copy, unless it is refused; returns whether it is complete and kept."""
        here = self._membership
        expected = PartKey(SnapshotId(here.generation, key.snapshot.step), here.world_size, self._ward)
        agreed_on = key == expected and size <= self._most_bytes and head_size <= _MOST_HEAD_BYTES
        if not agreed_on or not 1 <= lanes <= len(self._messages):
            _LOG.warning(
                "%s offers an unexpected copy, which is refused: %s, %d bytes; at most %d were agreed on",
                peer_name(here.peers[self._ward]),
                in_words(key),
                size,
                self._most_bytes,
            )
            return False
        is_wanted = self._accept(key, agreed)
        room = self._free(key, size)
        if room is None:
            _LOG.warning("%s sends a third copy: two are kept", peer_name(here.peers[self._ward]))
            return False
        head = memoryview(bytearray(head_size))
        _wait(self._receive(head, tag))
        copy = PartCopy(key, bytes(head), memoryview(room)[:size])
        found = self._receive_chunks(copy, tag, lanes)
        sums = memoryview(bytearray(4 * chunk_count(size)))
        _wait(self._receive(sums, tag))
        copy = replace(copy, checksums=struct.unpack(f"!{chunk_count(size)}I", sums))
        try:
            copy.check(found)
        except DamagedCopyError as error:
            _LOG.error("A copy that has arrived is not kept: %s", error.message)
            is_wanted = False
        if is_wanted:
            self._held.keep(copy)
        return is_wanted

    def _receive_chunks(self, copy: PartCopy, tag: int, lanes: int) -> dict[int, int]:
        """Receives a copy's data; returns its checksums, by chunk, computed while other chunks arrive."""
        parts = chunks(copy.data)
        found: dict[int, int] = {}

        def receive_lane(lane: int) -> None:
            under_way: collections.deque[tuple[int, Message]] = collections.deque()

            def finish_oldest() -> None:
                number, message = under_way.popleft()
                _wait(message)
                found[number] = copy.checksum(number)

            for number in range(lane, len(parts), lanes):
                under_way.append((number, self._receive(parts[number], tag, lane)))
                if len(under_way) > 1:
                    finish_oldest()
            while under_way:
                finish_oldest()

        _in_lanes(lanes, receive_lane, self._messages)
        return found

    def _receive(self, room: memoryview, tag: int, lane: int = 0) -> Message:
        return self._messages[lane].receive(room, self._ward, tag, "uint8")

    def _free(self, key: PartKey, size: int) -> Any:
        """Returns memory for a copy, if possible that of a dropped one; None: two copies are held already."""
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


def _in_lanes(count: int, work: Callable[[int], None], messages: Sequence[Messages]) -> None:
    """Runs ``work`` for all lanes at the same time; if one fails, aborts the messages of all.

    Raises:
        Exception: a lane has failed; the error of the first one.
    """
    errors: list[Exception] = []

    def run(lane: int) -> None:
        try:
            work(lane)
        except Exception as error:  # otherwise the other lanes would wait until the generation ends
            errors.append(error)
            for each in messages:
                each.abort(error)

    others = [
        start_thread(partial(run, lane), name=f"muster-snapshots-lane-{lane}") for lane in range(1, count)
    ]
    run(0)
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]


def _wait(message: Message, answered: Message | None = None) -> None:
    """Waits until a message is done, or until ``answered`` is: then the other side takes no more.

    Raises:
        WorkerError: the message did not arrive, or the generation is over.
    """
    while not message.wait(None if answered is None else _GLANCE_S):
        if answered is not None and answered.done():
            return
    if message.error is not None:
        error = message.error
        raise error if isinstance(error, WorkerError) else CommunicatorError(str(error))
