"""The interface to etcd that schedulers use, its errors, and functions that build its requests."""

from __future__ import annotations

from typing import Protocol

from muster.scheduler.errors import NoSpaceError, SchedulerError
from muster.wire.v1 import etcd_pb2 as pb


class EtcdError(SchedulerError):
    """Base of what etcd's client raises."""


class EtcdUnreachableError(EtcdError):
    """No answer came in time: what was asked is carried out, or will be, or never was."""


class EtcdRefusedError(EtcdError):
    """etcd has refused a request; ``code`` is gRPC's name of the reason."""

    def __init__(self, message: str, *, code: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.code = code


class EtcdFullError(EtcdRefusedError, NoSpaceError):
    """etcd's database has reached its quota: it reads, deletes and renews leases, and writes nothing."""


class Etcd(Protocol):
    """etcd's public API, as far as it is used. Each call is one try.

    Raises:
        EtcdUnreachableError: there was no answer.
        EtcdFullError: etcd has no space.
        EtcdRefusedError: etcd says no.
    """

    async def read(self, request: pb.RangeRequest) -> pb.RangeResponse:
        """Reads keys; linearizable."""

    async def transact(self, request: pb.TxnRequest) -> pb.TxnResponse:
        """Compares, and then does one of two lists of operations, as one."""

    async def grant(self, ttl_s: int) -> int:
        """Makes a lease, and returns its number."""

    async def keep_alive(self, lease: int) -> int:
        """Renews a lease; returns for how many seconds, 0 if it has ended."""

    async def revoke(self, lease: int) -> None:
        """Ends a lease, and deletes its keys."""

    async def await_deletion(self, key: bytes, revision: int, limit_s: float) -> None:
        """Returns when ``key`` is deleted in or after ``revision``, or when ``limit_s`` is over."""


def put(key: bytes, value: bytes, lease: int = 0) -> pb.RequestOp:
    """The operation that writes a key."""
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))


def get(key: bytes) -> pb.RequestOp:
    """The operation that reads a key."""
    return pb.RequestOp(request_range=pb.RangeRequest(key=key))


def delete(key: bytes, end: bytes) -> pb.RequestOp:
    """The operation that deletes all keys from ``key`` on, up to ``end``, which stays."""
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key, range_end=end))


def created_in(key: bytes, revision: int) -> pb.Compare:
    """Holds while ``key`` is the one created in ``revision``; 0: while it is not there."""
    equal, create = pb.Compare.CompareResult.EQUAL, pb.Compare.CompareTarget.CREATE
    return pb.Compare(result=equal, target=create, key=key, create_revision=revision)


def modified_in(key: bytes, revision: int) -> pb.Compare:
    """Holds while ``key`` is as ``revision`` has left it; 0: while it is not there."""
    equal, mod = pb.Compare.CompareResult.EQUAL, pb.Compare.CompareTarget.MOD
    return pb.Compare(result=equal, target=mod, key=key, mod_revision=revision)


def end_of(prefix: bytes) -> bytes:
    """The key after all that begin with ``prefix``, which must not end with 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
