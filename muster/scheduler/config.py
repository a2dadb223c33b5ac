"""The scheduler's settings: read from the environment once, checked, and frozen.

Names and meanings are those of MindSpore. A wrong value is refused in one sentence that names the variable,
the value and the legal range.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.scheduler.core.events import CoreSettings, DrainPolicy
from muster.scheduler.errors import SchedulerSettingsError
from muster.wire.files import path_of
from muster.wire.launches import INCIDENTS
from muster.wire.patience import breaking_pause_s, takeover_patience_s
from muster.wire.rank_table import RankTable
from muster.wire.settings import (
    Environment,
    canonical_address,
    shared_settings,
)
from muster.wire.variables import LONGEST_S, default_of

ETCD_PORT = 2379
_ETCD = "etcd://"
_DRAIN = re.compile(r"(\d{1,3}(?:\.\d{1,3})?)x:(\d{1,6})s", re.ASCII)
LEAST_DRAINED = 1.2
"""The smallest slowdown for which a rank may be drained; smaller ones are never reported."""


@dataclass(frozen=True)
class EtcdAddress:
    """The etcd endpoints and path where several schedulers elect a leader and keep their journal.

    Attributes:
        endpoints: host and port of each member of etcd.
        prefix: prefix of all keys of these schedulers.
    """

    endpoints: tuple[tuple[str, int], ...]
    prefix: str


@dataclass(frozen=True)
class SchedulerSettings:
    """The scheduler's settings, as read at its start. All times are in seconds.

    If ``worker_num`` is 0, which is allowed only when serving several jobs, the first worker determines it.
    If ``port`` is 0, which is allowed only as an option, any free port is used. ``hosts`` lists all
    schedulers of the job. If ``bind_host`` is empty, the scheduler listens on those ``hosts`` that are
    addresses of this machine.
    """

    job_id: str
    hosts: tuple[str, ...]
    bind_host: str
    port: int
    worker_num: int
    worker_min: int
    spares: int
    topo_timeout_s: float
    node_timeout_s: float
    stall_timeout_s: float = default_of("MS_STALL_TIMEOUT")
    hang_timeout_s: float = default_of("MS_COLLECTIVE_TIMEOUT")
    serve: bool = False
    adopt: bool = False
    config_path: Path | None = None
    allow_insecure: bool = False
    recovery_path: Path | None = None
    etcd: EtcdAddress | None = None
    rank_table: RankTable | None = None
    max_streams_per_host: int = default_of("MS_MAX_STREAMS_PER_HOST")
    metrics_port: int | None = None
    metrics_host: str = default_of("MS_METRICS_HOST")
    audit_log_path: Path | None = None
    incident_path: Path | None = None
    log_level: str = default_of("MS_LOG_LEVEL")
    log_format: str = default_of("MS_LOG_FORMAT")
    drain_stragglers: DrainPolicy | None = None

    @property
    def incident_directory(self) -> Path | None:
        """The directory for evidence of hangs: as configured, else next to the journal, else None."""
        beside = self.recovery_path / INCIDENTS if self.recovery_path is not None else None
        return self.incident_path or beside

    def core(self, *, own_job: bool = True) -> CoreSettings:
        """The settings of a job's state machine.

        For jobs other than the scheduler's own, the workers determine the world size.
        """
        heartbeat_interval_s = min(1.0, self.node_timeout_s / 4)
        several = self.etcd is not None  # With several schedulers, workers wait longer for one that leads.
        return CoreSettings(
            worker_num=self.worker_num if own_job else 0,
            worker_min=self.worker_min if own_job else 0,
            spares=self.spares,
            topo_timeout_s=self.topo_timeout_s,
            # A pause may begin just before a heartbeat, and the next heartbeat may be late on a busy machine.
            node_timeout_s=self.node_timeout_s + 1.5 * heartbeat_interval_s,
            heartbeat_interval_s=heartbeat_interval_s,
            stall_timeout_s=self.stall_timeout_s,
            hang_timeout_s=self.hang_timeout_s,
            recovered_timeout_s=takeover_patience_s(self.node_timeout_s) if several else None,
            breaking_pause_s=breaking_pause_s(self.node_timeout_s) if several else None,
            rank_table=self.rank_table if own_job else None,
            drain_stragglers=self.drain_stragglers,
        )


@dataclass(frozen=True)
class Address:
    """The address of the scheduler, or of each of several schedulers, for commands that query it."""

    hosts: tuple[str, ...]
    port: int
    job_id: str
    config_path: Path | None


def load_address(env: Mapping[str, str], *, config_path: Path | None = None, job_id: str = "") -> Address:
    """Reads the scheduler's address and the job id.

    Raises:
        SchedulerSettingsError: a variable has a wrong value.
    """
    read = Environment(env, SchedulerSettingsError)
    return Address(
        hosts=read.hosts("MS_SCHED_HOST"),
        port=read.integer("MS_SCHED_PORT"),
        job_id=read.job_id(job_id),
        config_path=config_path or read.path("MS_CONFIG_FILE"),
    )


def load_settings(
    env: Mapping[str, str],
    *,
    config_path: Path | None = None,
    serve: bool = False,
    port: int | None = None,
    bind_host: str = "",
    adopt: bool = False,
    drain_stragglers: str | None = None,
) -> SchedulerSettings:
    """Reads and checks the scheduler's settings from the environment.

    Args:
        env: the environment.
        config_path: the security configuration from the command line; overrides MS_CONFIG_FILE.
        serve: whether to keep serving after the scheduler's own job has ended.
        port: the port from the command line; 0 lets the system choose.
        bind_host: the address to listen on, if it differs from the one that workers connect to.
        adopt: whether to accept workers whose generation is newer than the journal's.
        drain_stragglers: which stragglers are drained, from the command line; overrides
            MS_DRAIN_STRAGGLERS.

    Raises:
        SchedulerSettingsError: a value is missing or out of range, or contradicts another one.
    """
    read = Environment(env, SchedulerSettingsError)
    shared = shared_settings(read, "MS_SCHED")
    address = load_address(env, config_path=config_path)
    worker_num, worker_min = (0, 0) if serve and not read.text("MS_WORKER_NUM") else read.worker_counts()
    collective_timeout_s = read.seconds("MS_COLLECTIVE_TIMEOUT")  # A setting of the workers.
    return SchedulerSettings(
        **shared,
        hosts=address.hosts,
        bind_host=bind_host,
        port=address.port if port is None else read.checked_integer("--port", str(port), 0, 65_535),
        worker_num=worker_num,
        worker_min=worker_min,
        spares=read.integer("MS_SPARES"),
        stall_timeout_s=read.seconds("MS_STALL_TIMEOUT"),
        hang_timeout_s=read.seconds("MS_HANG_TIMEOUT", default=max(1.0, collective_timeout_s)),
        serve=serve,
        adopt=adopt,
        config_path=address.config_path,
        **_recovery(read, address, "/" + shared["job_id"]),
        rank_table=_rank_table(read, worker_num),
        max_streams_per_host=read.integer("MS_MAX_STREAMS_PER_HOST"),
        metrics_port=read.integer("MS_METRICS_PORT") or None,
        metrics_host=read.host("MS_METRICS_HOST"),
        audit_log_path=read.path("MS_AUDIT_LOG"),
        incident_path=read.path("MS_INCIDENT_DIR"),
        drain_stragglers=drain_policy(
            read.text("MS_DRAIN_STRAGGLERS") if drain_stragglers is None else drain_stragglers
        ),
    )


def drain_policy(text: str) -> DrainPolicy | None:
    """Parses which stragglers are drained, as in ``1.5x:60s``; returns None if none are.

    Raises:
        SchedulerSettingsError: the text is not in this form.
    """
    if not text:
        return None
    found = _DRAIN.fullmatch(text.strip())
    if found is None or float(found[1]) < LEAST_DRAINED or float(found[2]) > LONGEST_S:
        raise SchedulerSettingsError(
            "MS_DRAIN_STRAGGLERS (--drain-stragglers) must be a factor of a step's time, at least"
            f" {LEAST_DRAINED}, and a duration in seconds, as in 1.5x:60s; it is {text[:40]!r}."
        )
    return DrainPolicy(float(found[1]), float(found[2]))


def _recovery(read: Environment, address: Address, job: str) -> dict[str, Any]:
    """Returns ``recovery_path`` or ``etcd``; neither if recovery is off."""
    raw = read.text("MS_RECOVERY_PATH")
    if not raw.lower().startswith(_ETCD):
        return {"recovery_path": _recovery_path(read, address)}
    if read.text("MS_ENABLE_RECOVERY") == "0":
        return {}
    read.flag("MS_ENABLE_RECOVERY")  # With etcd, MS_ENABLE_RECOVERY need not be set.
    endpoints, slash, path = raw[len(_ETCD) :].partition("/")
    found = tuple(_endpoint(raw, part.strip()) for part in endpoints.split(","))
    path = path.strip("/")
    if not slash or not path or len(path) > 128 or any(c.isspace() for c in path):
        raise _no_etcd(raw)
    return {"etcd": EtcdAddress(found, f"/{path}{job}")}


def _endpoint(raw: str, part: str) -> tuple[str, int]:
    host, _, port = part.rpartition(":") if part.rpartition("]")[2] else (part, "", "")
    host, port = (host, port) if host else (part, "")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    legal = bare and len(bare) <= 253 and not any(c.isspace() or c in "/@[]" for c in bare)
    if not legal or (":" in bare and bare == host) or (port and not port.isdigit()):
        raise _no_etcd(raw)
    number = int(port or ETCD_PORT) if len(port) < 6 else 0
    if not 1 <= number <= 65_535:
        raise _no_etcd(raw)
    return canonical_address(bare), number


def _no_etcd(raw: str) -> SchedulerSettingsError:
    return SchedulerSettingsError(
        "MS_RECOVERY_PATH, if it is etcd, must be members of one cluster and a path, as in"
        f" etcd://a:2379,b:2379,c:2379/muster; it is {raw[:120]!r}."
    )


def _recovery_path(read: Environment, address: Address) -> Path | None:
    path = read.path("MS_RECOVERY_PATH")
    if len(address.hosts) > 1:
        raise SchedulerSettingsError(
            f"MS_SCHED_HOST names {len(address.hosts)} schedulers, and they have no journal in common.",
            remedy="Set MS_RECOVERY_PATH to etcd, as in etcd://a:2379,b:2379/muster, or name one host.",
        )
    if not read.flag("MS_ENABLE_RECOVERY"):
        # Somebody who sets a path expects that a journal is kept there.
        if path is not None and not read.text("MS_ENABLE_RECOVERY"):
            raise SchedulerSettingsError(
                "MS_RECOVERY_PATH is set and MS_ENABLE_RECOVERY is not: set it to 1 to keep a journal there,"
                " or to 0 to keep none."
            )
        return None
    if path is None:
        raise SchedulerSettingsError(
            "MS_RECOVERY_PATH is not set: with MS_ENABLE_RECOVERY=1 it must name the journal's directory."
        )
    if path.exists() and not path.is_dir():
        raise SchedulerSettingsError(f"MS_RECOVERY_PATH must name a directory; '{path}' is a file.")
    return path


def _rank_table(read: Environment, worker_num: int) -> RankTable | None:
    table = read.rank_table()
    if table and worker_num and len(table.entries) != worker_num:
        name, file = read.rank_table_file()
        raise SchedulerSettingsError(
            f"MS_WORKER_NUM must be {len(table.entries)}, the number of devices in {name} '{path_of(file)}';"
            f" it is '{worker_num}'."
        )
    return table
