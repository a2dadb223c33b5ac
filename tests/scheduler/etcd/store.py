"""etcd in memory: keys, revisions, transactions and leases as its API documents them, on any clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from muster.scheduler.etcd.api import EtcdFullError, EtcdRefusedError, EtcdUnreachableError
from muster.wire.v1 import etcd_pb2 as pb

COMPARED = {0: "version", 1: "create_revision", 2: "mod_revision", 3: "value", 4: "lease"}


class Store:
    """The cluster's state; each method is carried out at once.

    Args:
        now: seconds.

    Attributes:
        on_put: called with each key and value that is written.
        is_full: whether its quota is reached: then it writes nothing, and grants no lease.
        members_behind: state that a read without a quorum would be answered from.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.revision = 1
        self.pairs: dict[bytes, pb.KeyValue] = {}
        self.leases: dict[int, float] = {}
        self.is_full: Callable[[], bool] = lambda: False
        self.on_put: Callable[[bytes, bytes], None] = lambda key, value: None
        self.deletions: list[tuple[bytes, int]] = []
        self._lasts: dict[int, int] = {}

    def expire(self) -> None:
        """Ends the leases whose time is over, and deletes their keys."""
        for lease, until in list(self.leases.items()):
            if self.now() >= until:
                self.end_lease(lease)

    def end_lease(self, lease: int) -> None:
        if self.leases.pop(lease, None) is None:
            return
        keys = [key for key, pair in self.pairs.items() if pair.lease == lease]
        self.revision += bool(keys)
        for key in keys:
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        del self.pairs[key]
        self.deletions.append((key, self.revision))

    def header(self) -> pb.ResponseHeader:
        return pb.ResponseHeader(revision=self.revision)

    def read(self, request: pb.RangeRequest) -> pb.RangeResponse:
        self.expire()
        found = [self.pairs[key] for key in self._keys(request.key, request.range_end)]
        limit = request.limit or len(found)
        return pb.RangeResponse(
            header=self.header(), kvs=found[:limit], more=len(found) > limit, count=len(found)
        )

    def _keys(self, key: bytes, end: bytes) -> list[bytes]:
        if not end:
            return [key] if key in self.pairs else []
        return sorted(each for each in self.pairs if key <= each < end)

    def transact(self, request: pb.TxnRequest) -> pb.TxnResponse:
        self.expire()
        if any(op.HasField("request_put") for op in (*request.success, *request.failure)):
            self._check_space()
        held = all(map(self._holds, request.compare))
        operations = request.success if held else request.failure
        changes = any(op.WhichOneof("request") != "request_range" for op in operations)
        if any(op.request_put.lease and op.request_put.lease not in self.leases for op in operations):
            text = "etcd at e:2379 refuses: etcdserver: requested lease not found."
            raise EtcdRefusedError(text, code="NOT_FOUND")
        self.revision += changes
        responses = [self._carry_out(op) for op in operations]
        return pb.TxnResponse(header=self.header(), succeeded=held, responses=responses)

    def _holds(self, compare: pb.Compare) -> bool:
        assert compare.result == pb.Compare.CompareResult.EQUAL
        pair = self.pairs.get(compare.key, pb.KeyValue())
        field = COMPARED[compare.target]
        return bool(getattr(pair, field) == getattr(compare, field))

    def _carry_out(self, operation: pb.RequestOp) -> pb.ResponseOp:
        kind = operation.WhichOneof("request")
        if kind == "request_range":
            return pb.ResponseOp(response_range=self.read(operation.request_range))
        if kind == "request_put":
            put = operation.request_put
            before = self.pairs.get(put.key)
            self.on_put(put.key, put.value)
            self.pairs[put.key] = pb.KeyValue(
                key=put.key,
                value=put.value,
                lease=put.lease,
                create_revision=before.create_revision if before else self.revision,
                mod_revision=self.revision,
                version=(before.version if before else 0) + 1,
            )
            return pb.ResponseOp(response_put=pb.PutResponse(header=self.header()))
        keys = self._keys(operation.request_delete_range.key, operation.request_delete_range.range_end)
        for key in keys:
            self._drop(key)
        return pb.ResponseOp(response_delete_range=pb.DeleteRangeResponse(deleted=len(keys)))

    def _check_space(self) -> None:
        if self.is_full():
            text = "etcd at e:2379 refuses: etcdserver: mvcc: database space exceeded."
            raise EtcdFullError(text, code="RESOURCE_EXHAUSTED")

    def grant(self, ttl_s: int) -> int:
        self._check_space()
        lease = 7_000 + self.revision * 1_000 + len(self._lasts)
        self._lasts[lease] = ttl_s
        self.leases[lease] = self.now() + ttl_s
        return lease

    def keep_alive(self, lease: int) -> int:
        self.expire()
        if lease not in self.leases:
            return 0
        self.keep(lease)
        return self._lasts[lease]

    def keep(self, lease: int) -> None:
        """Gives a lease its whole time again."""
        self.leases[lease] = self.now() + self._lasts[lease]


class Direct:
    """The API of one process, on a store that answers at once; tests may take answers away.

    Attributes:
        lost: of so many requests to come the answer is lost, after they were carried out.
        refused: so many requests to come are never carried out.
        asked: every transaction.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.lost = 0
        self.refused = 0
        self.asked: list[pb.TxnRequest] = []

    def _before(self) -> None:
        if self.refused:
            self.refused -= 1
            raise EtcdUnreachableError("etcd at a:2379 does not answer: refused.")

    def _after(self) -> None:
        if self.lost:
            self.lost -= 1
            raise EtcdUnreachableError("etcd at a:2379 does not answer: lost.")

    async def read(self, request: pb.RangeRequest) -> pb.RangeResponse:
        self._before()
        reply = self.store.read(request)
        self._after()
        return reply

    async def transact(self, request: pb.TxnRequest) -> pb.TxnResponse:
        self.asked.append(request)
        self._before()
        reply = self.store.transact(request)
        self._after()
        return reply

    async def grant(self, ttl_s: int) -> int:
        self._before()
        lease = self.store.grant(ttl_s)
        self._after()
        return lease

    async def keep_alive(self, lease: int) -> int:
        self._before()
        ttl_s = self.store.keep_alive(lease)
        self._after()
        return ttl_s

    async def revoke(self, lease: int) -> None:
        self._before()
        self.store.end_lease(lease)
        self._after()

    async def await_deletion(self, key: bytes, revision: int, limit_s: float) -> None:
        self._before()
        until = self.store.now() + limit_s
        while self.store.now() < until:
            self.store.expire()
            if any(gone == key and at >= revision for gone, at in self.store.deletions):
                return
            await asyncio.sleep(0.001)
