from __future__ import annotations

import dataclasses
import datetime

from muster.certs.runtime.follower import ExpiryReminder, expiries
from muster.certs.runtime.store import Credentials, load_credentials
from tests.certs.making import DAY, PASSWORD, Pki


def at(credentials: Credentials, **fields: datetime.datetime) -> Credentials:
    return dataclasses.replace(credentials, **fields)  # type: ignore[arg-type]


def test_warnings_begin_and_name_what_ends(server: Credentials) -> None:
    end = server.not_after
    assert ExpiryReminder().due(server, 90, end - 91 * DAY) == []
    [warning] = ExpiryReminder().due(server, 90, end - 89.5 * DAY)
    assert "muster://job/scheduler" in warning and server.fingerprint[:23] in warning
    assert f"ends in 89 days, on {end:%Y-%m-%d}" in warning and "certs renew" in warning
    assert "ends on" in ExpiryReminder().due(server, 90, end - DAY / 2)[0]
    assert "ended on" in ExpiryReminder().due(server, 90, end + DAY)[0]
    assert ExpiryReminder().due(server, 7, end - 8 * DAY) == []


def test_the_authority_is_warned_about(server: Credentials) -> None:
    soon = at(server, ca_not_after=server.not_before + 50 * DAY)
    [warning] = ExpiryReminder().due(soon, 90, server.not_before)
    assert warning.startswith("The authority of the certificate muster://job/scheduler ends in 50 days")


def test_a_revocation_list_is_warned_about_in_its_last_quarter(own_pki: Pki) -> None:
    own_pki.authority.write_revocations(days=8)
    credentials = load_credentials(
        own_pki.path("server.p12"), PASSWORD, own_pki.ca, crl_path=own_pki.path("crl.pem")
    )
    [end] = [each.not_after for each in expiries(credentials, 90) if each.what == "revocation_list"]
    assert ExpiryReminder().due(credentials, 90, end - 3 * DAY) == []
    [warning] = ExpiryReminder().due(credentials, 90, end - 1.5 * DAY)
    assert "The revocation list ends in 1 days" in warning and "certs revoke" in warning


def test_seconds_for_the_metric(server: Credentials) -> None:
    left = {each.what: each.seconds_left(server.not_after - DAY) for each in expiries(server, 90)}
    assert left["certificate"] == 86_400
    assert left["authority"] > left["certificate"]
    assert expiries(server, 90)[0].seconds_left(server.not_after + DAY) == -86_400


def test_the_reminder_speaks_at_start_and_daily(server: Credentials) -> None:
    reminder = ExpiryReminder()
    start = server.not_after - 10 * DAY
    assert len(reminder.due(server, 90, start)) == 1
    assert reminder.due(server, 90, start + DAY * 0.99) == []
    assert len(reminder.due(server, 90, start + DAY)) == 1
    assert reminder.due(server, 90, start + DAY * 1.5) == []


def test_a_renewed_certificate_is_warned_about_at_once(server: Credentials) -> None:
    reminder = ExpiryReminder()
    start = server.not_after - 10 * DAY
    assert len(reminder.due(server, 90, start)) == 1
    short = dataclasses.replace(server, fingerprint="AB:CD", not_after=start + DAY / 12)
    [warning] = reminder.due(short, 90, start + DAY / 1000)
    assert "AB:CD" in warning and "ends on" in warning
    assert reminder.due(short, 90, start + DAY / 500) == []


def test_a_longer_warning_time_counts_at_once(server: Credentials) -> None:
    reminder = ExpiryReminder()
    start = server.not_after - 100 * DAY
    assert reminder.due(server, 90, start) == []
    assert len(reminder.due(server, 180, start)) == 1
