"""What a worker does about MS_NCCL_ENCRYPTION before it joins, with a stand-in for the host."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from muster.communicators.nccl.encryption import SealingPlugin
from muster.communicators.outside import OutsideBackend
from muster.errors import SettingsError
from muster.worker.config import Settings, load_settings
from muster.worker.host import join_facts
from muster.worker.nccl_protection import NcclHost, encryption_facts, protect_nccl
from tests.worker.session.scripted import StubBackend

FOUND = SealingPlugin("/opt/libmuster-nccl.so")
WORKER = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1"}


class OwnNccl(StubBackend):
    """Runs NCCL in this process."""

    on_device = may_run_nccl = True

    def __init__(self) -> None:
        super().__init__()
        self.sealed_by: Any = None

    def seal(self, plugin: Any) -> None:
        self.sealed_by = plugin


class Worker:
    """A worker's process: its environment, and which libraries it has looked for and loaded."""

    def __init__(self, plane: Any, found: SealingPlugin = FOUND, **env: str) -> None:
        self.plane, self._found, self.env, self.looked = plane, found, dict(env), 0

    def _look(self, env: Mapping[str, str]) -> SealingPlugin:
        self.looked += 1
        return self._found

    def _host(self) -> NcclHost:
        load: Any = lambda path: f"loaded {path}"  # noqa: E731
        return NcclHost("2.28.9", False, False, self._look, load)

    def protect(self, mode: str, *, tls: bool = True) -> Any:
        settings = Settings(worker_num=2, worker_min=2, nccl_encryption=mode)
        return protect_nccl(settings, self.plane, dict(self.env), self.env, tls=tls, look_at_host=self._host)


def test_off_looks_for_nothing_and_changes_nothing() -> None:
    worker = Worker(OwnNccl())
    decided = worker.protect("off")
    assert (decided.sealed, worker.looked, worker.env, worker.plane.sealed_by) == (False, 0, {}, None)
    assert encryption_facts(decided, worker.plane) == {}


def test_where_nccl_runs_in_this_process_its_environment_and_the_plug_in_are_ready() -> None:
    worker = Worker(OwnNccl())
    decided = worker.protect("require")
    assert worker.env == dict(decided.environment) and worker.env["NCCL_NET"] == "MusterSealed"
    assert worker.plane.sealed_by == "loaded /opt/libmuster-nccl.so"
    assert encryption_facts(decided, worker.plane) == {
        "MS_NCCL_ENCRYPTION": "require",
        "nccl_traffic": "sealed",
    }


def test_an_agents_own_process_stays_as_it_is() -> None:
    worker = Worker(OutsideBackend())
    decided = worker.protect("require")
    assert decided.environment["NCCL_NET_PLUGIN"] == FOUND.path and worker.env == {}
    assert encryption_facts(decided, worker.plane)["nccl_traffic"] == "sealed"


def test_a_job_on_cpus_needs_no_plug_in_and_still_compares_the_setting() -> None:
    worker = Worker(StubBackend(), SealingPlugin(obstacle="no compiler"))
    decided = worker.protect("require")
    assert worker.looked == 0 and encryption_facts(decided, worker.plane) == {"MS_NCCL_ENCRYPTION": "require"}


def test_require_ends_the_worker_before_anything_is_loaded() -> None:
    worker = Worker(OwnNccl(), SealingPlugin(obstacle="There is no C compiler.", remedy="Install one."))
    with pytest.raises(
        SettingsError, match=r"MS_NCCL_ENCRYPTION is 'require'\. There is no C compiler\."
    ) as caught:
        worker.protect("require")
    assert caught.value.remedy == "Install one." and caught.value.exit_code == 2
    assert worker.env == {} and worker.plane.sealed_by is None


@pytest.mark.parametrize("env", [{"NCCL_NET": "IB"}, {"NCCL_NET_PLUGIN": "own"}, {"NCCL_MNNVL_ENABLE": "1"}])
def test_nothing_is_built_where_something_else_is_in_the_way(env: dict[str, str]) -> None:
    worker = Worker(OwnNccl(), FOUND, **env)
    with pytest.raises(SettingsError, match=next(iter(env))):
        worker.protect("require")
    assert worker.looked == 0 and worker.env == env


def test_prefer_goes_on_in_plain_text_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(OwnNccl())
    with caplog.at_level(logging.INFO, "muster.worker"):
        decided = worker.protect("prefer", tls=False)
    [line] = [record for record in caplog.records if "NCCL between hosts" in record.message]
    assert line.levelno == logging.WARNING and "plain" in line.message and "certificates" in line.message
    assert worker.env == {} and encryption_facts(decided, worker.plane) == {
        "MS_NCCL_ENCRYPTION": "prefer",
        "nccl_traffic": "plain",
    }


def test_hosts_may_keep_the_plug_in_at_different_places() -> None:
    """What the others must have alike leaves its path out, and has what was set besides."""
    sent = []
    for path in ("/opt/a.so", "/home/b/c.so"):
        worker = Worker(OwnNccl(), SealingPlugin(path))
        worker.protect("require")
        sent.append(join_facts(worker.plane, worker.env))
    assert sent[0] == sent[1] and sent[0]["NCCL_NET"] == "MusterSealed" and "NCCL_NET_PLUGIN" not in sent[0]
    own = join_facts(OwnNccl(), {"NCCL_NET": "IB", "NCCL_NET_PLUGIN": "own"})
    assert own["NCCL_NET_PLUGIN"] == "own"


def test_what_the_plug_in_reads_is_checked_before_nccl_starts() -> None:
    assert load_settings(WORKER).nccl_encryption == "off"
    for name, value in (
        ("MS_NCCL_ENCRYPTION", "yes"),
        ("MS_NCCL_CONNECTIONS", "17"),
        ("MS_NCCL_ACCEPT_TIMEOUT", "1.5"),
    ):
        with pytest.raises(SettingsError, match=name):
            load_settings({**WORKER, name: value})
