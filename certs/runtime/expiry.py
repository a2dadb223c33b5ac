"""Warnings before certificates, authorities and revocation lists end."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from muster.certs.pki.certificates import utc_now
from muster.certs.runtime.store import Credentials

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Expiry:
    """The end of a certificate, authority or revocation list.

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
    """The ends of a process's own credentials.

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


class ExpiryReminder:
    """Repeats each warning once a day; one about a renewed certificate does not wait for that."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, Expiry], datetime.datetime] = {}

    def due(
        self, credentials: Credentials, warning_days: int, now: datetime.datetime | None = None
    ) -> list[str]:
        """The warnings that were not given within the last day.

        Args:
            credentials: those in force.
            warning_days: ``cert_expire_warning_time_in_day`` of the configuration in force.
            now: the time; by default the current one.
        """
        now = now or utc_now()
        ending = {
            (credentials.fingerprint, each): each
            for each in expiries(credentials, warning_days)
            if now >= each.warn_from
        }
        said = {key: at for key, at in self._said.items() if key in ending and now - at < DAY}
        due = [each for key, each in ending.items() if key not in said]
        self._said = dict.fromkeys(ending, now) | said
        return [_sentence(credentials, each, now) for each in due]


def _sentence(credentials: Credentials, each: Expiry, now: datetime.datetime) -> str:
    names = {
        "certificate": f"The certificate {credentials.identity} (SHA-256 {credentials.fingerprint[:23]}...)",
        "authority": f"The authority of the certificate {credentials.identity}",
        "revocation_list": "The revocation list",
    }
    remedies = {
        "certificate": "`muster certs renew FILE.p12` makes a new one.",
        "authority": "`muster certs renew --ca` gives it a new certificate.",
        "revocation_list": "`muster certs revoke` without a certificate signs it anew.",
    }
    days = (each.not_after - now) // DAY
    when = f"ends in {days} days, on" if days > 0 else ("ends on" if now <= each.not_after else "ended on")
    return f"{names[each.what]} {when} {each.not_after:%Y-%m-%d %H:%M} UTC. {remedies[each.what]}"
