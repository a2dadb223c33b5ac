"""Limits concurrent incoming handshakes, and decides which one is evicted when the limit is reached."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Standing(enum.IntEnum):
    """Ranks handshakes by what they have shown so far; the lowest is evicted first."""

    STRANGER = 0
    """No member is known at its address, and it has sent nothing of use."""
    STRANGER_WITH_HELLO = 1
    """The same, but its TLS hello has arrived."""
    NEIGHBOUR = 2
    """A member is known at its address."""
    NEIGHBOUR_WITH_HELLO = 3
    """The same, and its TLS hello has arrived."""
    PROVEN = 4
    """It has shown a certificate that is valid for this job."""
    PARKED = 5
    """Proven, and it waits for this process to enter its generation; in a table of its own."""


@dataclass(slots=True)
class _Admitted:
    standing: Standing
    neighbour: bool
    certificate: Hashable = None


class Admission(Generic[T]):
    """Limits handshakes in progress, parked handshakes, and those of one certificate.

    A handshake in progress is never evicted for a parked handshake, or for one of lower standing. Among
    equals, the oldest is evicted. All workers of a job may share one certificate, so the limit per
    certificate must not be small.

    Args:
        max_under_way: maximum number of handshakes that are not parked.
        max_under_way_each: maximum number of these with one certificate; those from a stranger's address are
            evicted first.
        max_parked: maximum number of parked handshakes.
        max_parked_each: maximum number of these with one certificate.
    """

    def __init__(
        self, *, max_under_way: int, max_under_way_each: int, max_parked: int, max_parked_each: int
    ) -> None:
        self.max_under_way = max_under_way
        self.max_under_way_each = max_under_way_each
        self.max_parked = max_parked
        self.max_parked_each = max_parked_each
        self._entries: dict[T, _Admitted] = {}
        self._ranked: dict[Standing, dict[T, None]] = {standing: {} for standing in Standing}
        # The key includes the standing: handshakes of a certificate under way and parked ones count apart.
        self._of_certificate: dict[tuple[Hashable, Standing], dict[T, None]] = {}

    def admit(self, handshake: T, *, neighbour: bool) -> T | None:
        """Adds a new handshake; returns the handshake to drop for it (perhaps the new one), or None.

        Args:
            handshake: the new one.
            neighbour: whether a member is known at its address.
        """
        standing = Standing.NEIGHBOUR if neighbour else Standing.STRANGER
        self._entries[handshake] = _Admitted(standing, neighbour)
        self._ranked[standing][handshake] = None
        under_way = len(self._entries) - len(self._ranked[Standing.PARKED])
        return self.weakest() if under_way > self.max_under_way else None

    def hello(self, handshake: T) -> None:
        """Notes that a handshake's TLS hello has arrived; handshakes without one are evicted before it."""
        standing = self._entries[handshake].standing
        if standing in (Standing.STRANGER, Standing.NEIGHBOUR):
            self._move(handshake, Standing(standing + 1))

    def prove(self, handshake: T, certificate: Hashable) -> T | None:
        """Notes a handshake's certificate; returns another one with that certificate to drop, or None."""
        self._entries[handshake].certificate = certificate
        others = self._of_certificate.get((certificate, Standing.PROVEN), {})
        goes = None
        if len(others) >= self.max_under_way_each:
            goes = min(others, key=lambda other: self._entries[other].neighbour)  # the oldest of equals
        self._move(handshake, Standing.PROVEN)
        return goes

    def park(self, handshake: T) -> bool:
        """Moves a handshake to the parked ones; returns False if their number is at its limit."""
        certificate = self._entries[handshake].certificate
        parked = self._of_certificate.get((certificate, Standing.PARKED), {})
        if len(parked) >= self.max_parked_each or len(self._ranked[Standing.PARKED]) >= self.max_parked:
            return False
        self._move(handshake, Standing.PARKED)
        return True

    def resume(self, handshake: T) -> None:
        """Moves a parked handshake back to those under way."""
        self._move(handshake, Standing.PROVEN)

    def remove(self, handshake: T) -> None:
        """Removes a handshake, if it is known."""
        if handshake in self._entries:
            self._unlist(handshake)
            del self._entries[handshake]

    def weakest(self) -> T | None:
        """The handshake under way that is evicted first; None if there is none."""
        under_way = (self._ranked[standing] for standing in Standing if standing is not Standing.PARKED)
        return next(itertools.chain.from_iterable(under_way), None)

    def _move(self, handshake: T, standing: Standing) -> None:
        self._unlist(handshake)
        entry = self._entries[handshake]
        entry.standing = standing
        self._ranked[standing][handshake] = None
        if standing >= Standing.PROVEN:
            self._of_certificate.setdefault((entry.certificate, standing), {})[handshake] = None

    def _unlist(self, handshake: T) -> None:
        entry = self._entries[handshake]
        del self._ranked[entry.standing][handshake]
        if entry.standing >= Standing.PROVEN:
            key = (entry.certificate, entry.standing)
            del self._of_certificate[key][handshake]
            if not self._of_certificate[key]:
                del self._of_certificate[key]
