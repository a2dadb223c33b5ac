"""The interface to etcd that schedulers use, its errors, and functions that build its requests."""

from __future__ import annotations

from typing import Protocol

from muster.scheduler.errors import NoSpaceError, SchedulerError
from muster.wire.v1 import etcd_pb2 as pb


class EtcdError(SchedulerError):
    """Base of the errors that etcd's client raises."""


class EtcdUnreachableError(EtcdError):
    """No answer came in time. etcd may have carried out the request, may do so later, or may never do so."""


class EtcdRefusedError(EtcdError):
    """etcd has refused a request; ``code`` is the name of gRPC's status code."""

    def __init__(self, message: str, *, code: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.code = code


class EtcdFullError(EtcdRefusedError, NoSpaceError):
    """etcd's database has reached its quota: it reads, deletes and renews leases, but writes nothing."""


class Etcd(Protocol):
    """The part of etcd's public API that is used here. Each call makes a single attempt.

    Raises:
        EtcdUnreachableError: there was no answer.
        EtcdFullError: etcd has no space.
        EtcdRefusedError: etcd refused the request.
    """

    async def read(self, request: pb.RangeRequest) -> pb.RangeResponse:
        """Reads keys; linearizable."""

    async def transact(self, request: pb.TxnRequest) -> pb.TxnResponse:
        """Atomically evaluates comparisons and carries out one of two lists of operations."""

    async def grant(self, ttl_s: int) -> int:
        """Creates a lease; returns its id."""

    async def keep_alive(self, lease: int) -> int:
        """Renews a lease; returns its new lifetime in seconds, 0 if it has ended."""

    async def revoke(self, lease: int) -> None:
        """Ends a lease, which deletes its keys."""

    async def await_deletion(self, key: bytes, revision: int, limit_s: float) -> None:
        """Returns when ``key`` is deleted in or after ``revision``, or after ``limit_s`` seconds."""


def put(key: bytes, value: bytes, lease: int = 0) -> pb.RequestOp:
    """The operation that writes a key."""
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))


def get(key: bytes) -> pb.RequestOp:
    """The operation that reads a key."""
    return pb.RequestOp(request_range=pb.RangeRequest(key=key))


def delete(key: bytes, end: bytes) -> pb.RequestOp:
    """The operation that deletes all keys from ``key`` up to, but not including, ``end``."""
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key, range_end=end))


def created_in(key: bytes, revision: int) -> pb.Compare:
    """The condition that ``key`` was created in ``revision``; with 0, that the key does not exist."""
    equal, create = pb.Compare.CompareResult.EQUAL, pb.Compare.CompareTarget.CREATE
    return pb.Compare(result=equal, target=create, key=key, create_revision=revision)


def modified_in(key: bytes, revision: int) -> pb.Compare:
    """The condition that ``key`` was last modified in ``revision``; with 0, that it does not exist."""
    equal, mod = pb.Compare.CompareResult.EQUAL, pb.Compare.CompareTarget.MOD
    return pb.Compare(result=equal, target=mod, key=key, mod_revision=revision)


def end_of(prefix: bytes) -> bytes:
    """The end of the range of keys that begin with ``prefix``, which must not end with 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
