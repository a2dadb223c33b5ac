"""The election and the journal on a real etcd of three members, with mutual TLS and roles."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from muster.bench.failover.etcd import EtcdCluster, make_keys
from muster.bench.failover.space import QUOTA_BYTES
from muster.bench.launches import MUSTER, ROOT, environment
from muster.certs.runtime.preflight import preflight
from muster.certs.runtime.store import Credentials, load_credentials
from muster.scheduler.core import records
from muster.scheduler.errors import DeposedError
from muster.scheduler.etcd import journal as module
from muster.scheduler.etcd.api import EtcdRefusedError, EtcdUnreachableError, delete, end_of, put
from muster.scheduler.etcd.calls import EtcdCalls
from muster.scheduler.etcd.journal import COMPACT_RECORDS, EtcdJournal
from muster.scheduler.etcd.leadership import LEASE_S, RENEW_S, Leadership
from muster.scheduler.jobs.storage import WaitingStorage
from muster.wire.v1 import etcd_pb2 as pb
from tests.scheduler.etcd.test_journal import BATCHES, JOB, history, noise
from tests.waiting import go, until

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed"),
]
WORKER_JOB = "default"


class Rig:
    """The cluster, and processes with certificates that make schedulers of them, or do not."""

    def __init__(self, cluster: EtcdCluster, keys: Path) -> None:
        self.cluster, self.keys = cluster, keys
        self.secret = (keys / "password").read_bytes().strip()
        self.endpoints = [
            (host, int(port)) for host, _, port in (e.partition(":") for e in cluster.endpoints)
        ]

    def calls(self, p12: str = "etcd.p12", ca: str = "etcd/ca.crt") -> EtcdCalls:
        mine = load_credentials(self.keys / p12, self.secret, self.keys / ca, require_identity=False)
        mine = dataclasses.replace(mine, ca_pem=(self.keys / "etcd/ca.crt").read_bytes())
        return EtcdCalls(self.endpoints, lambda: mine)

    def process(self, name: str) -> Leadership:
        loop = asyncio.get_running_loop()
        return Leadership(self.calls(), f"/muster/{WORKER_JOB}".encode(), name, loop)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """etcd with roles, as ``muster certs etcd`` says: its printed commands are run."""
    directory = tmp_path_factory.mktemp("etcd")
    keys = directory / "keys"
    make_keys(keys, "127.0.0.1", job=WORKER_JOB)
    with EtcdCluster(directory / "data", keys / "etcd") as cluster:
        for command in ROLES:
            cluster.ctl(*command.split(), stdin="for-root\n" * 2 if command.endswith("root") else "")
        yield Rig(cluster, keys)


ROLES = (
    f"role add muster-{WORKER_JOB}",
    f"role grant-permission --prefix=true muster-{WORKER_JOB} readwrite /muster/{WORKER_JOB}/",
    f"user add {WORKER_JOB}.scheduler --no-password",
    f"user grant-role {WORKER_JOB}.scheduler muster-{WORKER_JOB}",
    "user add root",
    "auth enable",
)


async def leads(claim: Leadership) -> EtcdJournal:
    await claim.campaign()
    journal = EtcdJournal(claim)
    await journal.load()
    return journal


def test_the_printed_commands_are_those_that_are_run_here(rig: Rig, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    init = ["init", "--dir", str(keys), "--password-file", str(keys / "password")]
    etcd = ["etcd", "--dir", str(keys), "--job", WORKER_JOB, "--password-file", str(keys / "password")]
    said = ""
    for command in (init, etcd):
        done = subprocess.run(
            [*MUSTER, "certs", *command],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        said = done.stdout
    printed = [line.split(".key ", 1)[1] for line in said.splitlines() if "etcdctl" in line]
    assert tuple(printed) == ROLES


def test_one_leads_and_the_next_reads_what_it_wrote(rig: Rig) -> None:
    async def test() -> None:
        old, new = rig.process("old"), rig.process("new")
        journal = await leads(old)
        await journal.append(JOB, BATCHES[0])
        await journal.append(JOB, ())
        began = asyncio.get_running_loop().time()
        waiting = asyncio.ensure_future(leads(new))
        after = await waiting
        assert asyncio.get_running_loop().time() - began < LEASE_S + 60
        for late in (BATCHES[1], ()):
            with pytest.raises(DeposedError, match="new does"):
                await journal.append(JOB, late)
        await after.append(JOB, BATCHES[1])
        await after.close()
        last = rig.process("last")
        await last.campaign()
        found = await EtcdJournal(last).load()
        assert list(found[JOB]) == [*BATCHES[0], *BATCHES[1]]
        await last.resign()

    go(test())


def test_a_batch_above_etcds_limit_and_a_snapshot(rig: Rig) -> None:
    async def test() -> None:
        claim = rig.process("one")
        journal = await leads(claim)
        keeping = asyncio.ensure_future(claim.keep())
        large = records.GenerationEnded(1, noise(6_000_000))  # about 3 MB when compressed
        await journal.append("large", [large])
        for record in history(COMPACT_RECORDS):
            await journal.append("long", [record])
        keeping.cancel()
        await journal.close()
        next_one = rig.process("next")
        await next_one.campaign()
        found = await EtcdJournal(next_one).load()
        assert list(found["large"]) == [large]
        assert len(found["long"]) == 1
        await next_one.resign()
        assert module.PART_BYTES < 1.5 * 1024 * 1024

    go(test())


def test_a_member_that_dies_is_passed_over(rig: Rig) -> None:
    async def test() -> None:
        claim = rig.process("one")
        journal = await leads(claim)
        keeping = asyncio.ensure_future(claim.keep())
        rig.cluster.kill(0)
        for number in range(20):  # renewals go on beside it, for as long as a lease lasts
            await journal.append("going-on", [records.GenerationEnded(1, str(number))])
            await asyncio.sleep(LEASE_S / 20)
        assert claim.leads
        keeping.cancel()
        await journal.close()
        rig.cluster.start_member(0)

    go(test())


WRITES = {
    "take the lead": lambda calls: calls.transact(
        pb.TxnRequest(success=[put(f"/muster/{WORKER_JOB}/leader".encode(), b"mine")])
    ),
    "write a record": lambda calls: calls.transact(
        pb.TxnRequest(success=[put(f"/muster/{WORKER_JOB}/jobs/{JOB}/0000000000000001".encode(), b"mine")])
    ),
    "read": lambda calls: calls.read(pb.RangeRequest(key=f"/muster/{WORKER_JOB}/leader".encode())),
}


@pytest.mark.parametrize("what", WRITES)
@pytest.mark.parametrize("who", ["client.p12", "operator.p12", "server.p12"])
def test_a_certificate_of_the_jobs_own_authority_opens_no_connection(rig: Rig, who: str, what: str) -> None:
    async def test() -> None:
        with pytest.raises(EtcdUnreachableError):
            await WRITES[what](rig.calls(who, "ca.crt"))

    go(test())


@pytest.mark.parametrize("what", WRITES)
def test_another_jobs_scheduler_of_etcds_own_authority_can_do_nothing(
    rig: Rig, what: str, tmp_path: Path
) -> None:
    foreign = _issue(rig, tmp_path, "other", "worker")

    async def test() -> None:
        with pytest.raises(EtcdRefusedError, match=r"permission denied|not found|user name is empty"):
            await WRITES[what](EtcdCalls(rig.endpoints, foreign))

    go(test())


def test_a_stranger_cannot_end_the_leaders_lease(rig: Rig, tmp_path: Path) -> None:
    foreign = _issue(rig, tmp_path, "other", "worker")

    async def test() -> None:
        claim = rig.process("one")
        await claim.campaign()
        (pair,) = (await rig.calls().read(pb.RangeRequest(key=claim.key))).kvs
        with pytest.raises(EtcdRefusedError):
            await EtcdCalls(rig.endpoints, foreign).revoke(pair.lease)
        keeping = asyncio.ensure_future(claim.keep())
        await asyncio.sleep(2 * RENEW_S)  # renewals, which would find out that the lease has ended
        assert claim.leads
        keeping.cancel()
        await claim.resign()

    go(test())


def _issue(rig: Rig, tmp_path: Path, job: str, role: str) -> Callable[[], Credentials]:
    out = tmp_path / "foreign.p12"
    command = ["issue", "--dir", str(rig.keys / "etcd"), "--role", role, "--job", job, "--out", str(out)]
    subprocess.run(
        [*MUSTER, "certs", *command, "--password-file", str(rig.keys / "password")],
        cwd=ROOT,
        env=environment(),
        check=True,
        capture_output=True,
    )
    mine = load_credentials(out, rig.secret, rig.keys / "etcd/ca.crt", require_identity=False)
    return lambda: mine


def test_a_scheduler_that_etcd_refuses_says_what_to_do(rig: Rig) -> None:
    done = _scheduler(rig, "unknown-to-etcd")
    assert done.returncode == 1
    assert "permission denied" in done.stderr
    assert "muster certs etcd" in done.stderr


def test_a_scheduler_says_that_a_later_version_has_led_and_ends(rig: Rig) -> None:
    key = f"/muster/{WORKER_JOB}/leader/version".encode()

    async def set_version(operation: pb.RequestOp) -> None:
        await rig.calls().transact(pb.TxnRequest(success=[operation]))

    go(set_version(put(key, b"99.0.0")))
    try:
        done = _scheduler(rig, WORKER_JOB)
    finally:
        go(set_version(delete(key, end_of(key))))
    assert done.returncode == 2
    assert f"Muster 99.0.0 has led under /muster/{WORKER_JOB} in etcd" in done.stderr


def test_a_leader_that_may_not_write_its_records_gives_the_lead_up(rig: Rig) -> None:
    """Its lease it could renew for ever, and nobody else would lead."""

    def permit(verb: str, *what: str) -> None:
        role = f"muster-{WORKER_JOB}"
        rig.cluster.ctl("--user", "root:for-root", "role", f"{verb}-permission", "--prefix=true", role, *what)

    async def test() -> None:
        claim = rig.process("one")
        journal = await leads(claim)
        keeping = asyncio.ensure_future(claim.keep())
        permit("grant", "readwrite", f"{claim.prefix.decode()}/leader")
        permit("revoke", f"{claim.prefix.decode()}/")
        try:
            with pytest.raises(DeposedError, match=r"permission denied.*muster certs etcd"):
                await journal.append(JOB, BATCHES[0])
        finally:
            permit("grant", "readwrite", f"{claim.prefix.decode()}/")
        await keeping
        assert not claim.leads
        await journal.close()

    go(test())


def test_a_journal_waits_for_space_under_its_lease_and_a_standby_for_both(tmp_path: Path) -> None:
    """A quota that is reached, and what an administrator does about it."""
    keys = tmp_path / "keys"
    make_keys(keys, "127.0.0.1", job=WORKER_JOB)
    with EtcdCluster(tmp_path / "data", keys / "etcd", size=1, quota_bytes=QUOTA_BYTES) as cluster:

        async def test() -> None:
            small = Rig(cluster, keys)
            one, other = small.process("one"), small.process("other")
            storage = WaitingStorage(await leads(one), asyncio.get_running_loop().time)
            keeping = asyncio.ensure_future(one.keep())
            following = asyncio.ensure_future(leads(other))
            await until(lambda: other.stood_by)
            await asyncio.to_thread(cluster.fill)
            writing = asyncio.ensure_future(storage.append(JOB, BATCHES[0]))
            await until(lambda: "space exceeded" in storage.unwritable)
            await asyncio.sleep(LEASE_S + 2 * RENEW_S)  # as long as the lease would last
            assert one.leads and not writing.done()
            await asyncio.to_thread(cluster.make_space)
            await writing
            assert storage.unwritable == ""
            await asyncio.to_thread(cluster.fill)
            keeping.cancel()
            await one.resign()
            await asyncio.sleep(2 * RENEW_S)
            assert not following.done()  # nobody can lead, and none gives up
            await asyncio.to_thread(cluster.make_space)
            await following
            await other.resign()
            last = small.process("last")
            found = await (await leads(last)).load()
            assert list(found[JOB]) == list(BATCHES[0])
            await last.resign()

        go(test())


def test_who_leads_after_it_has_stood_by_shows_what_was_renewed_meanwhile(rig: Rig, tmp_path: Path) -> None:
    """It showed the certificate that it had begun with, which may have ended since, and all turned away."""
    renewed = tmp_path / "renewed.p12"
    issue = ["issue", "--dir", str(rig.keys), "--role", "scheduler", "--job", WORKER_JOB]
    more = ["--hosts", "127.0.0.1", "--out", str(renewed), "--password-file", str(rig.keys / "password")]
    subprocess.run(
        [*MUSTER, "certs", *issue, *more],
        cwd=ROOT,
        env=environment(),
        check=True,
        capture_output=True,
    )
    own = load_credentials(rig.keys / "client.p12", rig.secret, rig.keys / "ca.crt")
    with (tmp_path / "log").open("wb") as log:
        standby = subprocess.Popen(
            [sys.executable, "-m", "scheduler", "--port", "0"],
            cwd=os.sep,
            env=_environment(rig, WORKER_JOB),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    said = standby.stdout
    assert said is not None

    async def test() -> None:
        claim = rig.process("one")
        await claim.campaign()
        keeping = asyncio.ensure_future(claim.keep())
        assert (await asyncio.to_thread(said.readline)).startswith("scheduler stands by")
        renewed.replace(rig.keys / "server.p12")
        await until(lambda: "new certificate muster://" in (tmp_path / "log").read_text())
        keeping.cancel()
        await claim.resign()
        ready = re.search(r"ready on 127\.0\.0\.1:(\d+)", await asyncio.to_thread(said.readline))
        assert ready is not None
        shown = await asyncio.to_thread(
            preflight, "127.0.0.1", int(ready[1]), own, job=WORKER_JOB, timeout_s=30.0
        )
        now = load_credentials(rig.keys / "server.p12", rig.secret, rig.keys / "ca.crt")
        assert shown.peer.fingerprint == now.fingerprint

    try:
        go(test())
    finally:
        standby.terminate()
        standby.communicate(timeout=100)


def _scheduler(rig: Rig, job: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scheduler", "--port", "0"],
        cwd=os.sep,
        env=_environment(rig, job),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def _environment(rig: Rig, job: str) -> dict[str, str]:
    return environment() | {
        "MS_WORKER_NUM": "1",
        "MS_JOB_ID": job,
        "MS_RECOVERY_PATH": f"etcd://{','.join(rig.cluster.endpoints)}/muster",
        "MS_CONFIG_FILE": str(rig.keys / "config.json"),
        "MS_SERVER_PASSWORD_FILE": str(rig.keys / "password"),
        "MS_ROLE": "MS_SCHED",
    }
