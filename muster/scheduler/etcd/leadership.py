"""Elects the leading scheduler with an etcd lease, and provides the token that fences every write.

The leader's key exists as long as its lease, and etcd gives each created key a unique revision. This revision
is the token. A transaction that requires it is refused as soon as the key is gone, whatever the clocks show
and however long the leader was paused. The leader also watches its own lease and steps down when it cannot
renew it, so that its workers find the next leader. Safety does not depend on stepping down.

Another key holds the version of the last leader; the transaction that elects a leader writes it. A later
version of Muster may have written records that an earlier version does not understand. Therefore a scheduler
of an earlier version neither leads nor stands by.
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
"""The shortest lease that etcd grants by default, in seconds: one and a half times its election timeout,
rounded up.
"""

RENEW_S = 0.4
"""The pause between two renewals, in seconds."""

RETRY_S = 0.1
"""The pause after a request that was not answered, in seconds."""

STEP_DOWN_S = 3.5
"""The leader steps down this many seconds after its last successful renewal. This is longer than a lease,
because etcd neither renews nor ends leases while it elects a leader among its own members.
"""

WATCH_S = 2.0
"""How long a standby relies on a watch, in seconds. A watch on a cut-off etcd member never reports."""

SILENCE_REPORTED_S = 30.0
"""The time between two log lines of a standby that gets no answer from etcd, in seconds."""

REFUSED_S = 25.0
"""How long a standby that etcd refuses keeps trying before it exits, in seconds. If it exited earlier, it
would restart so often that systemd gives up on it. Restoring its role in etcd later would then not help.
"""

LOG = logging.getLogger("scheduler")


class LaterVersionError(SchedulerError):
    """A later version of Muster has led here, whose records this version may not understand."""

    exit_code = 2


def leader_value(name: str, schedulers: Sequence[str]) -> bytes:
    """The value of the leader's key: the leader's name, and the addresses of all schedulers of the job."""
    return " of ".join(filter(None, (name, ",".join(schedulers)))).encode()


def parse_leader(value: bytes) -> tuple[str, str]:
    """Parses the value made by :func:`leader_value`: the leader's name, and comma-separated addresses."""
    name, _, addresses = value.decode(errors="replace").partition(" of ")
    return name, addresses


class MonotonicClock(Protocol):
    """A source of time, such as an asyncio event loop."""

    def time(self) -> float:
        """Seconds on a monotonic clock."""


class Leadership:
    """One process's claim to lead.

    Args:
        etcd: the etcd in which the leader is elected.
        prefix: prefix of all keys of these schedulers.
        name: a readable name of this process.
        clock: the event loop.
        schedulers: the addresses of all schedulers that may lead. The leader's key contains them after the
            leader's name.

    Attributes:
        key: the leader's key.
        version_key: the key that holds the version of the last leader.
        token: the revision in which this process created the leader's key; 0 if it never led.
        deposed: a future that gets the reason as soon as this process knows that it no longer leads.
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
            SchedulerSettingsError: the leader belongs to a different group of schedulers.
            LaterVersionError: a later version of Muster has led here.
        """
        while not await self._tried():
            pass
        LOG.info("%s leads", self.name)
        if self._before not in ("", __version__):
            where = self.prefix.decode()
            LOG.info(
                "Muster %s led under %s in etcd before; Muster %s continues", self._before, where, __version__
            )

    @property
    def stood_by(self) -> bool:
        """Whether another process led while this one waited."""
        return bool(self._seen)

    @property
    def leads(self) -> bool:
        """Whether this process leads, as far as it knows."""
        return self.token > 0 and not self.deposed.done()

    async def keep(self) -> None:
        """Renews the lease until that fails; returns when this process is deposed."""
        pause_s = 0.0
        try:
            while not self.deposed.done():
                await asyncio.wait({self.deposed}, timeout=pause_s)
                pause_s = await self._renew()
        finally:
            self.depose("its lease is renewed no more")  # A fault in this loop must end the leadership, too.

    def fence(self) -> pb.Compare:
        """Returns the condition of a transaction that only the leader can carry out.

        The condition compares the key's revision, not its value, because another process may have the same
        name.
        """
        return created_in(self.key, self.token)

    def depose(self, why: str, *, remedy: str = "") -> DeposedError:
        """Records that this process no longer leads; returns the error to raise."""
        if not self.deposed.done():
            self.deposed.set_result(why)
            self._remedy = remedy
        return DeposedError(f"This scheduler leads no more: {why}.", remedy=self._remedy)

    async def resign(self) -> None:
        """Lets the next scheduler lead immediately, or after the lease has ended if etcd does not answer."""
        if self._lease:
            with contextlib.suppress(EtcdError):
                await self.etcd.revoke(self._lease)

    # ------------------------------------------------------------ inside

    async def _tried(self) -> bool:
        try:
            reply = await self.etcd.read(pb.RangeRequest(key=self.key, range_end=end_of(self.key)))
            if not self._tries:  # An etcd without space still answers reads.
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
        except EtcdFullError as error:
            # Exiting would not help, because nobody can lead before there is space.
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
        """Logs a refusal by etcd once; raises it after etcd has refused for :data:`REFUSED_S`."""
        now = self._clock.time()
        if self._refused_since is None:
            self._refused_since = now
            LOG.warning("%s Trying again for %g s.", error, REFUSED_S)
        elif now >= self._refused_since + REFUSED_S:
            raise error

    async def _follow(self, leader: pb.KeyValue, revision: int) -> bool:
        if self._lease and leader.lease == self._lease:  # This process had won, but the answer was lost.
            self.token = leader.create_revision
            return True
        # This process only reads while another scheduler leads, so earlier refusals no longer count.
        self._refused_since, self._tries = None, 0
        name, addresses = parse_leader(leader.value)
        self._check_belongs(name, addresses)
        if name != self._seen:
            LOG.info("standing by: %s leads", name)
        self._seen = name
        await self.etcd.await_deletion(self.key, revision + 1, WATCH_S)
        return False

    def _check_belongs(self, name: str, addresses: str) -> None:
        """Refuses to stand by for schedulers that share no address with this one."""
        if addresses and self._schedulers and not set(addresses.split(",")) & set(self._schedulers):
            raise SchedulerSettingsError(
                f"{name} leads under {self.prefix.decode()} in etcd, but belongs to other schedulers"
                f" ({addresses}) than this one ({','.join(self._schedulers)}).",
                remedy="Give each job its own path in MS_RECOVERY_PATH, or its own MS_JOB_ID.",
            )

    def _check_version(self, version: str) -> None:
        if is_later_series(version, __version__):
            raise LaterVersionError(
                f"Muster {version} has led under {self.prefix.decode()} in etcd, and this scheduler is of"
                f" version {__version__}.",
                remedy="Run that version or a later one, or choose another path in MS_RECOVERY_PATH.",
            )

    async def _try(self, version: pb.KeyValue) -> bool:
        """Becomes the leader if nobody leads, and nobody has led since ``version`` was read."""
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
            self._lease = 0  # The lease had ended before etcd handled this.
            return False
        self._refused_since, self._tries = None, 0
        if reply.succeeded:
            self.token = reply.header.revision
        return reply.succeeded

    async def _renew(self) -> float:
        """Renews the lease once; returns the time until the next renewal, in seconds."""
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
        """Whether the leader's key is still the one that this process created.

        If it is not, another scheduler may lead, even while this one's lease lasts.
        """
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
