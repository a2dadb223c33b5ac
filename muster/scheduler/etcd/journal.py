"""The journal in etcd: each batch of records is one value, written by one fenced transaction.

The key of a batch ends with the batch's number. The head of a job contains the numbers of its first and last
batch. A transaction requires that this process still leads, so that only one of two schedulers can write. It
also requires that the head is as this process knows it, so that a transaction is never carried out twice,
however late it arrives. If no answer comes, the same transaction is sent again. The stored head then shows
whether the first attempt was carried out.

A value larger than :data:`PART_BYTES` is written in parts, each by a fenced transaction. The batch itself is
written last. It contains the number of parts and makes them valid. After :data:`COMPACT_RECORDS` records of a
job, one transaction replaces all its records with a snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from muster.scheduler.core.ledger import Ledger
from muster.scheduler.core.records import Record, RecordError, decode_record, encode_record
from muster.scheduler.errors import SchedulerError
from muster.scheduler.etcd.api import (
    EtcdError,
    EtcdFullError,
    EtcdRefusedError,
    delete,
    end_of,
    get,
    modified_in,
    put,
)
from muster.scheduler.etcd.leadership import RETRY_S, Leadership, parse_leader
from muster.wire.log_lines import MAX_LINE, one_line
from muster.wire.v1 import etcd_pb2 as pb

PART_BYTES = 1_000_000
"""Size of a part in bytes: by default, a request to etcd may have at most 1.5 MiB."""

MAX_BATCH_BYTES = 256 * 1024 * 1024
"""The most bytes of records in a batch, uncompressed. A snapshot of the largest job has a few MB."""

COMPACT_RECORDS = 256
"""After this many records of a job, one snapshot replaces them."""

PAGE = 16
"""The number of values that one request reads."""

_WHOLE, _PARTS = b"z", b"p"


class EtcdJournalDamagedError(SchedulerError):
    """The keys in etcd are not a journal of this version, or a part of the journal is missing."""


@dataclass(frozen=True)
class _Head:
    """A job's first and last batch, and the revision in which this head was written; 0 if never."""

    first: int = 1
    last: int = 0
    revision: int = 0


class EtcdJournal:
    """Records of jobs in etcd, written while this process leads.

    Args:
        leadership: the leadership of this process, which must have won the election.
    """

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._etcd = leadership.etcd
        self._heads: dict[str, _Head] = {}
        self._kept: dict[str, int] = {}
        self._ledgers: dict[str, Ledger | None] = {}

    async def load(self) -> Mapping[str, Sequence[Record]]:
        """Reads all records of each job, oldest first.

        No other process can write to the journal any more, because this one leads.

        Raises:
            EtcdJournalDamagedError: batches are missing or unreadable.
            DeposedError: this process no longer leads, and another one may have written since.
        """
        try:
            return await self._load()
        except EtcdJournalDamagedError:
            await self._commit([])  # If another scheduler leads now, it may have changed the journal.
            raise

    async def _load(self) -> Mapping[str, Sequence[Record]]:
        found: dict[str, list[Record]] = {}
        base = self._base("heads")
        heads = [pair async for pair in self._pairs(base)]
        for pair in heads:
            job_id = self._job_id(pair.key[len(base) :])
            self._heads[job_id] = head = self._parsed(job_id, pair)
            number = head.first
            async for batch in self._pairs(self._base("jobs", job_id)):
                if batch.key != self._batch(job_id, number):
                    break
                records = await self._read(job_id, number, batch.value)
                found.setdefault(job_id, []).extend(records)
                self._note(job_id, records)
                number += 1
            if number != head.last + 1:
                raise self._damaged(job_id, f"batch {number} is missing")
        return found

    async def append(self, job_id: str, records: Sequence[Record]) -> None:
        """Makes records durable, all or none. Without records, only checks that this process still leads.

        Returns when etcd has answered, however long that takes.

        Raises:
            EtcdFullError: etcd has no space. Call again with the same records.
            DeposedError: this process no longer leads, and its decisions may not be sent.
        """
        if not records:
            await self._commit([])
            return
        # A compaction that lacked space is repeated first, because etcd may still carry out its transaction.
        await self._compact(job_id)
        await self._write(job_id, records)
        self._note(job_id, records)
        with contextlib.suppress(EtcdFullError):  # The records themselves are already durable.
            await self._compact(job_id)

    async def forget(self, job_id: str) -> None:
        """Deletes a job's records.

        Raises:
            DeposedError: as :meth:`append`.
        """
        head = self._heads.get(job_id, _Head())
        operations = [self._delete_all(kind, job_id) for kind in ("jobs", "parts")]
        await self._move(job_id, _Head(head.last + 1, head.last), operations)
        self._kept.pop(job_id, None)
        self._ledgers.pop(job_id, None)

    async def notes(self) -> Mapping[str, str]:
        """The notes stored next to the records, by name."""
        base = self._base("notes")
        return {pair.key[len(base) :].decode(): pair.value.decode() async for pair in self._pairs(base)}

    async def note(self, name: str, text: str) -> None:
        """Stores a text under a name, replacing the previous one.

        Raises:
            EtcdFullError, DeposedError: as :meth:`append`.
        """
        await self._commit([put(self._base("notes") + name.encode(), text.encode())])

    async def close(self) -> None:
        """Resigns, so that the next scheduler can lead."""
        await self._leadership.resign()

    # ------------------------------------------------------------ keys

    def _base(self, kind: str, job_id: str = "") -> bytes:
        return self._leadership.prefix + f"/{kind}/{job_id}{'/' if job_id else ''}".encode()

    def _batch(self, job_id: str, number: int) -> bytes:
        return self._base("jobs", job_id) + b"%016d" % number

    def _head_key(self, job_id: str) -> bytes:
        return self._base("heads") + job_id.encode()

    def _part(self, job_id: str, number: int, part: int = 0) -> bytes:
        return self._base("parts", job_id) + b"%016d/%04d" % (number, part)

    def _delete_all(self, kind: str, job_id: str) -> pb.RequestOp:
        base = self._base(kind, job_id)
        return delete(base, end_of(base))

    # ------------------------------------------------------------ writing

    async def _write(self, job_id: str, records: Sequence[Record], *, alone: bool = False) -> None:
        """Writes the next batch. With ``alone``, it replaces all earlier batches."""
        head = self._heads.get(job_id, _Head())
        number = head.last + 1
        value = _WHOLE + _packed(records)
        if len(value) > PART_BYTES:
            pieces = [value[at : at + PART_BYTES] for at in range(0, len(value), PART_BYTES)]
            for part, piece in enumerate(pieces):
                await self._commit([put(self._part(job_id, number, part), piece)])
            value = _PARTS + b"%d" % len(pieces)
        key = self._batch(job_id, number)
        before = [
            delete(self._base("jobs", job_id), key),
            delete(self._base("parts", job_id), self._part(job_id, number)),
        ]
        await self._move(
            job_id,
            _Head(number if alone else head.first, number),
            [put(key, value), *(before if alone else ())],
        )

    async def _move(self, job_id: str, head: _Head, operations: Sequence[pb.RequestOp]) -> None:
        """Carries out these operations and replaces the job's head, if nobody else has changed that head."""
        key, value = self._head_key(job_id), b"%d %d" % (head.first, head.last)
        before = self._heads.get(job_id, _Head()).revision
        reply = await self._commit([put(key, value), *operations], modified_in(key, before), get(key))
        if reply.succeeded:
            revision = reply.header.revision
        else:
            found = reply.responses[1].response_range.kvs
            if not found or found[0].value != value:
                raise self._leadership.depose("etcd says that another has written since")
            revision = found[0].mod_revision  # An earlier attempt was carried out, but its answer was lost.
        self._heads[job_id] = _Head(head.first, head.last, revision)

    async def _commit(
        self,
        operations: Sequence[pb.RequestOp],
        also: pb.Compare | None = None,
        reads: pb.RequestOp | None = None,
    ) -> pb.TxnResponse:
        """Carries out these operations if this process leads and the condition ``also`` holds.

        Otherwise, carries out ``reads``. Raises DeposedError if this process does not lead.
        """
        leader = self._leadership
        request = pb.TxnRequest(
            compare=[leader.fence(), *([] if also is None else [also])],
            success=operations,
            # An etcd member answers a transaction that neither reads nor writes from its own memory, which
            # may be out of date. Therefore the transaction always contains a read.
            failure=[get(leader.key), *([] if reads is None else [reads])],
        )
        reply = await self._answer(request)
        if not reply.succeeded:
            found = reply.responses[0].response_range.kvs
            if not found or found[0].create_revision != leader.token:
                name = parse_leader(found[0].value)[0] if found else "nobody yet"
                raise leader.depose(f"etcd says that {name} does")
        return reply

    async def _answer(self, request: pb.TxnRequest) -> pb.TxnResponse:
        while True:
            try:
                return await self._etcd.transact(request)
            except EtcdError as error:
                await self._pause(error)

    async def _pause(self, error: EtcdError) -> None:
        """Waits before the next attempt; raises DeposedError if etcd refuses this process."""
        leader = self._leadership
        if leader.deposed.done():
            raise leader.depose(leader.deposed.result()) from error
        if isinstance(error, EtcdFullError):
            raise error
        if isinstance(error, EtcdRefusedError):
            raise leader.depose(error.message.rstrip("."), remedy=error.remedy) from error
        await asyncio.sleep(RETRY_S)

    def _note(self, job_id: str, records: Sequence[Record]) -> None:
        self._kept[job_id] = self._kept.get(job_id, 0) + len(records)
        ledger = self._ledgers.setdefault(job_id, Ledger())
        try:
            for record in records if ledger is not None else ():
                ledger.apply(record)  # type: ignore[union-attr]
        except (KeyError, AttributeError, TypeError):
            self._ledgers[job_id] = None  # The records are kept, so that recovery can report what is wrong.

    async def _compact(self, job_id: str) -> None:
        """Replaces a job's records with one snapshot, if they are many and its generation is established."""
        if self._kept.get(job_id, 0) < COMPACT_RECORDS:
            return
        ledger = self._ledgers[job_id]
        if ledger is not None and ledger.established and ledger.outcome is None:
            await self._write(job_id, [ledger.snapshot()], alone=True)
        self._kept[job_id] = 0

    # ------------------------------------------------------------ reading

    async def _pairs(self, base: bytes) -> AsyncIterator[pb.KeyValue]:
        """Yields all keys that begin with ``base`` and their values, in order of the keys."""
        key, end = base, end_of(base)
        while True:
            request = pb.RangeRequest(key=key, range_end=end, limit=PAGE)
            reply = await self._page(request)
            for pair in reply.kvs:
                yield pair
            if not reply.more:
                return
            key = reply.kvs[-1].key + b"\0"

    async def _page(self, request: pb.RangeRequest) -> pb.RangeResponse:
        while True:
            try:
                return await self._etcd.read(request)
            except EtcdError as error:
                await self._pause(error)

    def _job_id(self, name: bytes) -> str:
        try:
            return name.decode()
        except UnicodeDecodeError as error:
            raise self._damaged(repr(name[:40]), "its name is not UTF-8") from error

    def _parsed(self, job_id: str, pair: pb.KeyValue) -> _Head:
        try:
            first, last = map(int, pair.value.split(b" "))
        except ValueError as error:
            raise self._damaged(job_id, f"its head is {pair.value[:40]!r}") from error
        return _Head(first, last, pair.mod_revision)

    async def _read(self, job_id: str, number: int, value: bytes) -> list[Record]:
        pieces = []
        if value.startswith(_PARTS):
            base = self._base("parts", job_id) + b"%016d/" % number
            pieces = [pair.value async for pair in self._pairs(base)]
        try:
            if value.startswith(_PARTS):
                value = b"".join(pieces[: int(value[1:])])
            if not value.startswith(_WHOLE):
                raise ValueError("it is of another version")
            return [decode_record(each) for each in json.loads(_unpacked(value[1:]))]
        except (zlib.error, RecordError, ValueError, TypeError, RecursionError) as error:
            raise self._damaged(job_id, f"batch {number}: {error}") from error

    def _damaged(self, job_id: str, what: str) -> EtcdJournalDamagedError:
        where = self._base("jobs", job_id).decode(errors="replace")
        told = f"{where[:MAX_LINE]} is damaged or foreign: {what[:MAX_LINE]}"
        return EtcdJournalDamagedError(
            f"The journal in etcd under {one_line(told)}.",
            remedy="Run the version of Muster that wrote it, restore etcd from a backup, or choose another"
            " path in MS_RECOVERY_PATH to start afresh.",
        )


def _unpacked(data: bytes) -> bytes:
    """Decompresses a value. A value larger than any batch is refused before all of it is in memory."""
    stream = zlib.decompressobj()
    text = stream.decompress(data, MAX_BATCH_BYTES)
    if stream.unconsumed_tail or not stream.eof:
        raise ValueError(f"it is cut short, or has more than {MAX_BATCH_BYTES} bytes")
    return text


def _packed(records: Sequence[Record]) -> bytes:
    text = json.dumps([encode_record(each) for each in records], separators=(",", ":"), ensure_ascii=False)
    return zlib.compress(text.encode(), 1)
