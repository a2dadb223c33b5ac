"""Elects the leading scheduler by a lease of etcd's, and gives the token that fences every write.

The leader's key exists for as long as its lease, and etcd gives each key that is created a revision that no
other has. That revision is the token: a transaction that demands it is refused from the moment in which the
key is gone, whatever the clocks say and however long the leader stood still. The leader also looks after its
lease itself, and steps down when it cannot renew it, so that its workers find the next one; no proof needs
that.

Beside the leader's key stands the version of the one that led last; the transaction that elects it writes it.
What a later version has written may mean what an earlier one does not know, so that one neither leads nor
stands by.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Protocol

from muster.scheduler.core.shortage import pause_s
from muster.scheduler.errors import DeposedError, SchedulerError, SchedulerSettingsError
from muster.scheduler.etcd.api import (
    Etcd,
    EtcdError,
    EtcdFullError,
    EtcdRefusedError,
    EtcdUnreachableError,
    created_in,
    end_of,
    get,
    modified_in,
    put,
)
from muster.version import __version__
from muster.wire.messages import is_later_series
from muster.wire.v1 import etcd_pb2 as pb

LEASE_S = 2
"""The shortest that etcd grants by default: one and a half times its election time-out, rounded up."""

RENEW_S = 0.4
"""The pause between two renewals."""

RETRY_S = 0.1
"""The pause after a request that was not answered."""

STEP_DOWN_S = 3.5
"""The leader steps down this long after its last renewal. Longer than a lease: while etcd elects a leader of
its own it renews none, and ends none."""

WATCH_S = 2.0
"""How long a standby relies on a watch at most: one on a member that is cut off stays silent."""

SILENCE_REPORTED_S = 30.0
"""The pause between two log lines of a standby that etcd does not answer."""

REFUSED_S = 25.0
"""So long a standby that etcd refuses tries again before it ends: what it has to start too often systemd
gives up, and then a role that is given back comes to nobody."""

LOG = logging.getLogger("scheduler")


class LaterVersionError(SchedulerError):
    """A later version of Muster has led here; this one may not read what that has written."""

    exit_code = 2


def leader_value(name: str, schedulers: Sequence[str]) -> bytes:
    """What the leader's key says: who leads, and the addresses of all schedulers of the job."""
    return " of ".join(filter(None, (name, ",".join(schedulers)))).encode()


def parse_leader(value: bytes) -> tuple[str, str]:
    """The leader's name and the addresses, with commas between, from :func:`leader_value`."""
    name, _, addresses = value.decode(errors="replace").partition(" of ")
    return name, addresses


class MonotonicClock(Protocol):
    """Time; an asyncio event loop is one."""

    def time(self) -> float:
        """Seconds on a monotonic clock."""


class Leadership:
    """One process's claim to lead.

    Args:
        etcd: where it is elected.
        prefix: of all keys of these schedulers.
        name: of this process, for people.
        clock: the event loop.
        schedulers: the addresses of all that may lead; the leader's key says them after its name.

    Attributes:
        key: the leader's.
        version_key: it says the version of the one that led last.
        token: the revision in which this process has created it; 0: it never led.
        deposed: done as soon as this process knows that it does not lead any more; says why.
    """

    def __init__(
        self, etcd: Etcd, prefix: bytes, name: str, clock: MonotonicClock, schedulers: Sequence[str] = ()
    ) -> None:
        self.etcd = etcd
        self.prefix = prefix
        self.name = name
        self.key = prefix + b"/leader"
        self.version_key = self.key + b"/version"
        self.token = 0
        self.deposed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._schedulers = schedulers
        self._clock = clock
        self._lease = 0
        self._renewed_at = 0.0
        self._seen = ""
        self._before = ""
        self._silent_since: float | None = None
        self._refused_since: float | None = None
        self._tries = 0
        self._remedy = ""

    async def campaign(self) -> None:
        """Returns once this process leads.

        Raises:
            EtcdRefusedError: etcd has refused this process for :data:`REFUSED_S`.
            SchedulerSettingsError: the one that leads is of other schedulers, which serve other workers.
            LaterVersionError: a later version of Muster has led here.
        """
        while not await self._tried():
            pass
        LOG.info("%s leads", self.name)
        if self._before not in ("", __version__):
            where = self.prefix.decode()
            LOG.info(
                "Muster %s led before under %s in etcd; it goes on with %s", self._before, where, __version__
            )

    @property
    def stood_by(self) -> bool:
        """Whether another has led while this process waited."""
        return bool(self._seen)

    @property
    def leads(self) -> bool:
        """Whether this process leads, as far as it knows."""
        return self.token > 0 and not self.deposed.done()

    async def keep(self) -> None:
        """Renews the lease until it cannot be; returns when this process is deposed."""
        pause_s = 0.0
        try:
            while not self.deposed.done():
                await asyncio.wait({self.deposed}, timeout=pause_s)
                pause_s = await self._renew()
        finally:
            self.depose("its lease is renewed no more")  # a fault here must not go unnoticed

    def fence(self) -> pb.Compare:
        """What a transaction must demand that only the leader may carry out.

        By the revision and not by what the key says: another process may have this one's name.
        """
        return created_in(self.key, self.token)

    def depose(self, why: str, *, remedy: str = "") -> DeposedError:
        """Notes that this process does not lead any more; returns what to raise."""
        if not self.deposed.done():
            self.deposed.set_result(why)
            self._remedy = remedy
        return DeposedError(f"This scheduler leads no more: {why}.", remedy=self._remedy)

    async def resign(self) -> None:
        """Lets the next one lead at once; without an answer from etcd when the lease is over."""
        if self._lease:
            with contextlib.suppress(EtcdError):
                await self.etcd.revoke(self._lease)

    # ------------------------------------------------------------ inside

    async def _tried(self) -> bool:
        try:
            reply = await self.etcd.read(pb.RangeRequest(key=self.key, range_end=end_of(self.key)))
            if not self._tries:  # reads are answered without space as well
                self._answered()
            found = {pair.key: pair for pair in reply.kvs}
            version = found.get(self.version_key, pb.KeyValue())
            self._check_version(version.value.decode(errors="replace"))
            if self.key in found:
                return await self._follow(found[self.key], reply.header.revision)
            return await self._try(version)
        except EtcdUnreachableError as error:
            self._complain(error)
            await asyncio.sleep(RETRY_S)
            return False
        except EtcdFullError as error:  # nobody can lead before there is space, however often it is started
            self._complain(error)
            await self._back_off()
            return False
        except EtcdRefusedError as error:
            self._bear(error)
            await self._back_off()
            return False

    async def _back_off(self) -> None:
        self._tries += 1
        await asyncio.sleep(pause_s(self._tries))

    def _bear(self, error: EtcdRefusedError) -> None:
        """Says that etcd refuses, once; raises that when it has done so for long."""
        now = self._clock.time()
        if self._refused_since is None:
            self._refused_since = now
            LOG.warning("%s Trying again for %g s.", error, REFUSED_S)
        elif now >= self._refused_since + REFUSED_S:
            raise error

    async def _follow(self, leader: pb.KeyValue, revision: int) -> bool:
        if self._lease and leader.lease == self._lease:  # the answer to a try that won was lost
            self.token = leader.create_revision
            return True
        self._refused_since, self._tries = None, 0  # there is nothing to be refused while another leads
        name, addresses = parse_leader(leader.value)
        self._check_belongs(name, addresses)
        if name != self._seen:
            LOG.info("standing by: %s leads", name)
        self._seen = name
        await self.etcd.await_deletion(self.key, revision + 1, WATCH_S)
        return False

    def _check_belongs(self, name: str, addresses: str) -> None:
        """Refuses to stand by for schedulers none of which this one's workers know: theirs are lost to it."""
        if addresses and self._schedulers and not set(addresses.split(",")) & set(self._schedulers):
            raise SchedulerSettingsError(
                f"{name}, which leads under {self.prefix.decode()} in etcd, is of other schedulers"
                f" ({addresses}) than this one ({','.join(self._schedulers)}).",
                remedy="Give each job a path in MS_RECOVERY_PATH, or an MS_JOB_ID, of its own.",
            )

    def _check_version(self, version: str) -> None:
        if is_later_series(version, __version__):
            raise LaterVersionError(
                f"Muster {version} has led under {self.prefix.decode()} in etcd, and this scheduler is of"
                f" version {__version__}.",
                remedy="Run that version or a later one, or choose another path in MS_RECOVERY_PATH.",
            )

    async def _try(self, version: pb.KeyValue) -> bool:
        """Takes the lead, if nobody has it or has had it since ``version`` was read."""
        now = self._clock.time()
        if not self._lease or now > self._renewed_at + LEASE_S / 2:
            self._lease = 0
            self._lease = await self.etcd.grant(LEASE_S)
            self._renewed_at = now
        request = pb.TxnRequest(
            compare=[created_in(self.key, 0), modified_in(self.version_key, version.mod_revision)],
            success=[
                put(self.key, leader_value(self.name, self._schedulers), self._lease),
                put(self.version_key, __version__.encode()),
            ],
            failure=[get(self.key)],
        )
        self._before = version.value.decode(errors="replace")
        try:
            reply = await self.etcd.transact(request)
        except EtcdRefusedError as error:
            if error.code != "NOT_FOUND":
                raise
            self._lease = 0  # it was over before etcd came to this
            return False
        self._refused_since, self._tries = None, 0
        if reply.succeeded:
            self.token = reply.header.revision
        return reply.succeeded

    async def _renew(self) -> float:
        """Renews the lease once; returns after how many seconds to do so again."""
        sent = self._clock.time()
        try:
            ttl_s = await self.etcd.keep_alive(self._lease)
            key_stands = ttl_s > 0 and await self._key_stands()
        except (EtcdUnreachableError, EtcdFullError) as error:
            silent_s = self._clock.time() - self._renewed_at
            if silent_s > STEP_DOWN_S:
                self.depose(f"its lease could not be renewed for {silent_s:.1f} s ({error.message})")
            return RETRY_S
        except EtcdRefusedError as error:
            self.depose(error.message.rstrip("."), remedy=error.remedy)
            return 0.0
        if ttl_s <= 0:
            self.depose("its lease has ended")
        elif not key_stands:
            self.depose("its key in etcd is gone")
        self._renewed_at = sent
        return RENEW_S

    async def _key_stands(self) -> bool:
        """Whether the leader's key is this process's; without it the next one leads, lease or no lease."""
        reply = await self.etcd.read(pb.RangeRequest(key=self.key))
        return any(pair.create_revision == self.token for pair in reply.kvs)

    def _complain(self, error: EtcdError) -> None:
        now = self._clock.time()
        if self._silent_since is None or now > self._silent_since + SILENCE_REPORTED_S:
            self._silent_since = now
            until = "there is space" if isinstance(error, EtcdFullError) else "it answers"
            LOG.warning("%s Standing by until %s.", error.message, until)

    def _answered(self) -> None:
        self._silent_since = None
