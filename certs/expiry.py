"""Warnings before certificates, authorities and revocation lists end."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from certs.certificates import utc_now
from certs.store import Credentials

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Expiry:
    """When something ends.

    Attributes:
        what: ``certificate``, ``authority`` or ``revocation_list``; fit for a metric's label.
        not_after: its last moment.
        warn_from: when warnings begin.
    """

    what: str
    not_after: datetime.datetime
    warn_from: datetime.datetime

    def seconds_left(self, now: datetime.datetime | None = None) -> float:
        """Seconds until the end; negative after it."""
        return (self.not_after - (now or utc_now())).total_seconds()


def expiries(credentials: Credentials, warning_days: int) -> list[Expiry]:
    """What ends when, of a process's own credentials.

    A revocation list is warned about in the last quarter of its life at the earliest: many live for days.
    """
    ahead = datetime.timedelta(days=warning_days)
    found = [
        Expiry("certificate", credentials.not_after, credentials.not_after - ahead),
        Expiry("authority", credentials.ca_not_after, credentials.ca_not_after - ahead),
    ]
    for each in credentials.revocations.lists if credentials.revocations else ():
        quarter = (each.next_update - each.this_update) / 4
        found.append(Expiry("revocation_list", each.next_update, each.next_update - min(ahead, quarter)))
    return found


def expiry_warnings(
    credentials: Credentials, warning_days: int, now: datetime.datetime | None = None
) -> list[str]:
    """One sentence for each thing that ends within the warning time, or has ended."""
    now = now or utc_now()
    return [
        _sentence(credentials, each, now)
        for each in expiries(credentials, warning_days)
        if now >= each.warn_from
    ]


class ExpiryReminder:
    """Repeats the warnings once a day.

    Args:
        warning_days: ``cert_expire_warning_time_in_day`` of the configuration.
    """

    def __init__(self, warning_days: int) -> None:
        self._warning_days = warning_days
        self._last: datetime.datetime | None = None

    def due(self, credentials: Credentials, now: datetime.datetime | None = None) -> list[str]:
        """The warnings, the first time and whenever a day has passed; nothing in between."""
        now = now or utc_now()
        if self._last is not None and now - self._last < DAY:
            return []
        self._last = now
        return expiry_warnings(credentials, self._warning_days, now)


def _sentence(credentials: Credentials, each: Expiry, now: datetime.datetime) -> str:
    names = {
        "certificate": f"The certificate {credentials.identity} (SHA-256 {credentials.fingerprint[:23]}...)",
        "authority": f"The authority of the certificate {credentials.identity}",
        "revocation_list": "The revocation list",
    }
    remedies = {
        "certificate": "`python -m certs renew FILE.p12` makes a new one.",
        "authority": "`python -m certs renew --ca` gives it a new certificate.",
        "revocation_list": "`python -m certs revoke` without a certificate signs it anew.",
    }
    days = (each.not_after - now) // DAY
    when = f"ends in {days} days, on" if days > 0 else ("ends on" if now <= each.not_after else "ended on")
    return f"{names[each.what]} {when} {each.not_after:%Y-%m-%d %H:%M} UTC. {remedies[each.what]}"
