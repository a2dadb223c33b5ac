"""What calls become when a member of etcd does not answer, or answers another one badly."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from muster.scheduler.etcd.api import EtcdError, EtcdFullError, EtcdRefusedError, EtcdUnreachableError
from muster.scheduler.etcd.calls import EtcdCalls
from muster.wire.v1 import etcd_pb2 as pb
from tests.waiting import go


class Member:
    """A member of etcd: what it answers to transactions and renewals, tests say."""

    def __init__(self) -> None:
        self.transactions: asyncio.Queue[pb.TxnResponse] = asyncio.Queue()
        self.asked = asyncio.Event()
        self.takes_s = 0.0
        self.refuses: tuple[grpc.StatusCode, str] | None = None

    async def transact(self, _: pb.TxnRequest, context: Any) -> pb.TxnResponse:
        self.asked.set()
        if self.refuses is not None:
            await context.abort(*self.refuses)
        await asyncio.sleep(self.takes_s)
        return await self.transactions.get()

    async def keep_alive(self, _: Any, context: Any) -> AsyncIterator[pb.LeaseKeepAliveResponse]:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "etcdserver: leader changed")
        yield pb.LeaseKeepAliveResponse()

    async def watch(self, _: Any, __: Any) -> AsyncIterator[pb.WatchResponse]:
        self.asked.set()
        await asyncio.Event().wait()
        yield pb.WatchResponse()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        """Its port, while it serves."""
        server = grpc.aio.server()
        for service, method, handler in (
            ("KV", "Txn", _unary(self.transact, pb.TxnRequest)),
            ("Lease", "LeaseKeepAlive", _stream(self.keep_alive, pb.LeaseKeepAliveRequest)),
            ("Watch", "Watch", _stream(self.watch, pb.WatchRequest)),
        ):
            name = f"etcdserverpb.{service}"
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {method: handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield port
        finally:
            await server.stop(0)


def _unary(behaviour: Any, kind: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(behaviour, kind.FromString, lambda r: r.SerializeToString())


def _stream(behaviour: Any, kind: Any) -> Any:
    return grpc.stream_stream_rpc_method_handler(behaviour, kind.FromString, lambda r: r.SerializeToString())


def test_one_call_that_fails_ends_no_other() -> None:
    """gRPC ends calls on a channel that is closed as a task is cancelled: nobody would renew the lease."""

    async def test() -> None:
        member = Member()
        async with member.serving() as port:
            calls = EtcdCalls([("127.0.0.1", port)], None)
            writing = asyncio.ensure_future(calls.transact(pb.TxnRequest()))
            await member.asked.wait()
            with pytest.raises(EtcdUnreachableError):
                await calls.keep_alive(1)
            member.transactions.put_nowait(pb.TxnResponse(succeeded=True))
            assert (await writing).succeeded
            member.transactions.put_nowait(pb.TxnResponse(succeeded=True))
            assert (await calls.transact(pb.TxnRequest())).succeeded  # on a channel made again
            await calls.close()

    go(test())


def test_a_watch_on_which_nothing_comes_ends_in_time() -> None:
    async def test() -> None:
        member = Member()
        async with member.serving() as port:
            calls = EtcdCalls([("127.0.0.1", port)], None)
            await calls.await_deletion(b"key", 1, 0.2)
            assert member.asked.is_set()
            await calls.close()

    go(test())


def test_the_next_member_is_asked_after_one_that_is_gone() -> None:
    async def test() -> None:
        member = Member()
        member.transactions.put_nowait(pb.TxnResponse(succeeded=True))
        async with Member().serving() as gone:
            pass
        async with member.serving() as port:
            calls = EtcdCalls([("127.0.0.1", gone), ("127.0.0.1", port)], None)
            with pytest.raises(EtcdUnreachableError, match=str(gone)):
                await calls.transact(pb.TxnRequest())
            assert (await calls.transact(pb.TxnRequest())).succeeded
            await calls.close()

    go(test())


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied", EtcdRefusedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "grpc: received message larger than max", EtcdRefusedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", EtcdFullError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: too many requests", EtcdUnreachableError),
        (grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: revision of auth store is old", EtcdUnreachableError),
    ],
)
def test_what_etcd_refuses_for_now_is_told_from_what_it_refuses(
    code: grpc.StatusCode, text: str, kind: type[EtcdError]
) -> None:
    """Its administrator may give another job a role at any moment; no leader falls for that."""

    async def test() -> None:
        member = Member()
        member.refuses = (code, text)
        async with member.serving() as port:
            calls = EtcdCalls([("127.0.0.1", port)], None)
            with pytest.raises(EtcdError) as raised:
                await calls.transact(pb.TxnRequest())
            assert type(raised.value) is kind
            await calls.close()

    go(test())


def test_an_etcd_that_is_always_slow_is_given_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each try would be given up, and repeated for ever, though each is carried out."""
    monkeypatch.setattr("muster.scheduler.etcd.calls.CALL_TIMEOUT_S", 0.3)

    async def test() -> None:
        slow = Member()
        slow.takes_s = 0.5
        for _ in range(10):
            slow.transactions.put_nowait(pb.TxnResponse(succeeded=True))
        async with slow.serving() as port:
            calls = EtcdCalls([("127.0.0.1", port), ("127.0.0.1", port)], None)
            failed = 0
            while True:
                try:
                    assert (await calls.transact(pb.TxnRequest())).succeeded
                    break
                except EtcdUnreachableError as error:
                    assert "does not answer: Deadline Exceeded" in str(error)
                    failed += 1
            assert failed >= 2
            await calls.close()

    go(test())
