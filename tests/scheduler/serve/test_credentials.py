"""The scheduler's own certificates: whose they must be, and what a change of files does."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from collections.abc import Callable

import pytest

from muster.certs.errors import IdentityError
from muster.certs.pki.identity import Identity
from muster.certs.runtime.follower import Follower, follow_files
from muster.scheduler.access import Access
from muster.scheduler.audit.logs import LOG
from muster.scheduler.config import load_settings
from muster.scheduler.errors import UnauthenticatedError
from muster.scheduler.serve.credentials import check_is_scheduler, load_security
from tests.certs.making import certificate, pem
from tests.scheduler.processes import PASSWORD, Pki, environment
from tests.scheduler.test_access import Context


def security(pki: Pki) -> Follower:
    return follow_files(pki.config, "scheduler", pki.env(), LOG, job="default")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[Follower], list[str]]:
    """Gives what is logged about what ends soon."""

    def told(followed: Follower) -> list[str]:
        caplog.clear()
        followed.log_change(None)
        return caplog.messages

    return told


Warnings = Callable[[Follower], list[str]]


def test_without_a_configuration_there_is_no_tls() -> None:
    assert load_security(load_settings({"MS_WORKER_NUM": "1"}), {}) is None


@pytest.mark.parametrize(("job", "good"), [("default", True), ("other", False)])
def test_the_certificate_must_be_a_schedulers_of_the_job(pki: Pki, job: str, good: bool) -> None:
    credentials = pki.credentials("server")
    if good:
        check_is_scheduler(credentials, job)
    else:
        with pytest.raises(IdentityError, match="'default', not 'other'"):
            check_is_scheduler(credentials, job)
    with pytest.raises(IdentityError, match="role worker"):
        check_is_scheduler(pki.credentials("client"), "default")


def test_nothing_changed(pki: Pki) -> None:
    assert security(pki).poll() is None


def test_a_new_certificate_is_taken_and_one_for_another_role_is_not(own_pki: Pki, warnings: Warnings) -> None:
    watched = security(own_pki)
    first = watched.credentials
    own_pki.issue("server", Identity("default", "scheduler"), ("127.0.0.1",))
    change = watched.poll()
    assert change is not None
    assert change.problems == ()
    assert [note.startswith("new certificate muster://default/scheduler ") for note in change.notes] == [True]
    assert watched.credentials.fingerprint == own_pki.credentials("server").fingerprint
    second = watched.credentials
    assert second.fingerprint != first.fingerprint
    ends = watched.expiries()
    rejected = own_pki.authority.issue(Identity("elsewhere", "scheduler"), ("127.0.0.1",), days=5)
    (own_pki.directory / "server.p12").write_bytes(rejected.p12(PASSWORD))
    change = watched.poll()
    assert change is not None
    assert [type(problem) for problem in change.problems] == [IdentityError]
    assert "the old ones stay in force" in str(change.problems[0])
    assert (change.new_certificate, change.notes) == (False, ())
    assert watched.credentials == second
    assert watched.expiries() == ends
    assert warnings(watched) == []


def test_settings_count_from_the_next_call_on(own_pki: Pki, warnings: Warnings) -> None:
    own_pki.write_config(require_identity=False)
    watched = security(own_pki)
    access = Access(tls=True, require_identity=watched.require_identity)
    nobody = Context(pem(certificate(own_pki.authority, uris=())))
    caller = access.authenticate(nobody)
    assert caller.certificate is not None
    assert caller.certificate.identity.legacy
    assert warnings(watched) == []
    own_pki.write_config(cert_expire_warning_time_in_day=180)
    short = own_pki.authority.issue(Identity("default", "scheduler"), ("127.0.0.1",), days=100)
    (own_pki.directory / "server.p12").write_bytes(short.p12(PASSWORD))
    change = watched.poll()
    assert change is not None
    assert change.problems == ()
    with pytest.raises(UnauthenticatedError, match="names no job and role"):
        access.authenticate(nobody)
    assert len(warnings(watched)) == 1


def test_new_lists_are_in_force_at_once(own_pki: Pki) -> None:
    own_pki.authority.write_revocations()
    own_pki.write_config(crl_path="crl.pem")
    watched = security(own_pki)
    before = watched.revocations()
    assert before is not None
    own_pki.authority.write_revocations([12345])
    change = watched.poll()
    assert change is not None
    assert change.new_revocations
    assert change.problems == ()
    after = watched.revocations()
    assert after is not None
    assert [12345 in each.serials for each in (*before.lists, *after.lists)] == [False, True]


def test_ends_are_told_for_metrics_and_warnings(own_pki: Pki, warnings: Warnings) -> None:
    own_pki.authority.write_revocations()
    own_pki.write_config(crl_path="crl.pem")
    watched = security(own_pki)
    assert {expiry.what for expiry in watched.expiries()} == {"certificate", "authority", "revocation_list"}
    assert warnings(watched) == []
    soon = own_pki.authority.issue(Identity("default", "scheduler"), ("127.0.0.1",), days=5).p12(PASSWORD)
    (own_pki.directory / "server.p12").write_bytes(soon)
    watched = security(own_pki)
    (warning,) = warnings(watched)
    end = own_pki.credentials("server").not_after
    assert f"{end:%Y-%m-%d}" in warning
    assert end < dt.datetime.now(dt.UTC) + dt.timedelta(days=6)
    assert warnings(watched) == []  # once a day


def test_the_ciphers_reach_grpc_before_it_is_imported(own_pki: Pki) -> None:
    own_pki.write_config(cipher_list="ECDHE-ECDSA-AES256-GCM-SHA384")
    program = (
        "import os, sys\n"
        "from muster.scheduler.config import load_settings\n"
        "from muster.scheduler.serve.credentials import load_security\n"
        "load_security(load_settings(os.environ), os.environ)\n"
        "print('grpc' in sys.modules, os.environ['GRPC_SSL_CIPHER_SUITES'])\n"
    )
    env = environment(**own_pki.env(), MS_WORKER_NUM="1")
    env.pop("GRPC_SSL_CIPHER_SUITES", None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "ECDHE-ECDSA-AES256-GCM-SHA384"]
