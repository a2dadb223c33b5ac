"""The scheduler's settings: read from the environment once, checked, and frozen.

MindSpore's names and meanings are kept. A wrong value is refused in one sentence that names the
variable, the value and the legal range.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.scheduler.core.messages import RankTable, Settings
from muster.scheduler.errors import SettingsError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 6667
MAX_WORKERS = 65_536
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
RANK_TABLE_MAX_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class SchedulerSettings:
    """Everything the scheduler was told at its start. Times in seconds.

    ``worker_num`` 0 stands for "the first worker says it" (only when serving several jobs);
    ``port`` 0 for "any free port" (only by option).
    """

    job_id: str
    host: str
    bind_host: str
    port: int
    worker_num: int
    worker_min: int
    spares: int
    topo_timeout_s: float
    node_timeout_s: float
    stall_timeout_s: float = 60.0
    hang_timeout_s: float = 600.0
    serve: bool = False
    config_path: Path | None = None
    allow_insecure: bool = False
    recovery_path: Path | None = None
    rank_table: RankTable | None = None
    max_streams_per_host: int = 4096
    metrics_port: int | None = None
    metrics_host: str = DEFAULT_HOST
    audit_log_path: Path | None = None
    log_level: str = "INFO"

    def core(self, *, own_job: bool = True) -> Settings:
        """What a job's state machine needs to know; a foreign job's workers say its size themselves."""
        heartbeat_interval_s = min(1.0, self.node_timeout_s / 4)
        return Settings(
            worker_num=self.worker_num if own_job else 0,
            worker_min=self.worker_min if own_job else 0,
            spares=self.spares,
            topo_timeout_s=self.topo_timeout_s,
            # A pause may begin just before a heartbeat, and the next one takes its time on a busy machine.
            node_timeout_s=self.node_timeout_s + 1.5 * heartbeat_interval_s,
            heartbeat_interval_s=heartbeat_interval_s,
            stall_timeout_s=self.stall_timeout_s,
            hang_timeout_s=self.hang_timeout_s,
            rank_table=self.rank_table if own_job else None,
        )


@dataclass(frozen=True)
class Address:
    """Where a scheduler is, for the commands that ask it something."""

    host: str
    port: int
    job_id: str
    config_path: Path | None


class Environment:
    """Typed, checked reads of environment variables; an empty value counts as unset."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def text(self, name: str, default: str = "") -> str:
        """One line of printable text, without surrounding blanks."""
        value = self._env.get(name, "").strip()
        if not value:
            return default
        if not value.isprintable() or len(value) > 4096:
            raise SettingsError(
                f"{name} must be printable text of at most 4096 characters; it is {value[:80]!r}."
            )
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number within ``low`` and ``high``."""
        raw = self.text(name)
        if not raw:
            return default
        return checked_integer(name, raw, low, high)

    def seconds(self, name: str, default: float, low: float, high: float) -> float:
        """A time in seconds within ``low`` and ``high``; fractions are allowed."""
        raw = self.text(name)
        if not raw:
            return default
        try:
            value = float(raw)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise SettingsError(f"{name} must be a time from {low:g} to {high:g} seconds; it is {raw!r}.")
        return value

    def flag(self, name: str) -> bool:
        """1 or 0, MindSpore's way; unset is 0."""
        raw = self.text(name, "0")
        if raw not in ("0", "1"):
            raise SettingsError(f"{name} must be 0 or 1; it is {raw!r}.")
        return raw == "1"

    def path(self, name: str) -> Path | None:
        """A file or directory name, made absolute."""
        raw = self.text(name)
        return Path(raw).expanduser().absolute() if raw else None


def checked_integer(name: str, raw: str, low: int, high: int) -> int:
    """Reads a whole number in plain ASCII digits, within bounds."""
    digits = raw[1:] if raw.startswith("-") else raw
    ok = digits.isascii() and digits.isdigit() and len(digits) <= 18
    value = int(raw) if ok else low - 1
    if not low <= value <= high:
        raise SettingsError(f"{name} must be a whole number from {low} to {high}; it is {raw!r}.")
    return value


def load_address(env: Mapping[str, str], *, config_path: Path | None = None, job_id: str = "") -> Address:
    """Reads where the scheduler is and whose job is meant.

    Raises:
        SettingsError: a variable has a wrong value.
    """
    read = Environment(env)
    return Address(
        host=_host(read, "MS_SCHED_HOST"),
        port=read.integer("MS_SCHED_PORT", DEFAULT_PORT, 1, 65_535),
        job_id=_name("MS_JOB_ID", job_id or read.text("MS_JOB_ID", "default")),
        config_path=config_path or read.path("MS_CONFIG_FILE"),
    )


def load_settings(
    env: Mapping[str, str],
    *,
    config_path: Path | None = None,
    serve: bool = False,
    port: int | None = None,
    bind_host: str = "",
) -> SchedulerSettings:
    """Reads and checks everything the scheduler is told at its start.

    Args:
        env: the environment.
        config_path: the security configuration given on the command line; wins over MS_CONFIG_FILE.
        serve: stay for more jobs after the own one.
        port: the command line's port; 0 lets the system choose.
        bind_host: the address to listen on, where it is not the one that the workers call.

    Raises:
        SettingsError: a value is missing, out of its range or contradicts another.
    """
    read = Environment(env)
    _check_role(read)
    address = load_address(env, config_path=config_path)
    worker_num, worker_min = _worker_counts(read, serve=serve)
    return SchedulerSettings(
        job_id=address.job_id,
        host=address.host,
        bind_host=bind_host or address.host,
        port=address.port if port is None else checked_integer("--port", str(port), 0, 65_535),
        worker_num=worker_num,
        worker_min=worker_min,
        spares=read.integer("MS_SPARES", 0, 0, 1024),
        topo_timeout_s=read.seconds("MS_TOPO_TIMEOUT", 1800.0, 1.0, 604_800.0),
        node_timeout_s=read.seconds("MS_NODE_TIMEOUT", 5.0, 0.5, 3600.0),
        stall_timeout_s=read.seconds("MS_STALL_TIMEOUT", 60.0, 1.0, 604_800.0),
        hang_timeout_s=read.seconds("MS_HANG_TIMEOUT", 600.0, 1.0, 604_800.0),
        serve=serve,
        config_path=address.config_path,
        allow_insecure=read.flag("MS_ALLOW_INSECURE"),
        recovery_path=_recovery_path(read),
        rank_table=_rank_table(read, worker_num),
        max_streams_per_host=read.integer("MS_MAX_STREAMS_PER_HOST", 4096, 1, MAX_WORKERS),
        metrics_port=read.integer("MS_METRICS_PORT", 0, 1, 65_535) or None,
        metrics_host=_host(read, "MS_METRICS_HOST"),
        audit_log_path=read.path("MS_AUDIT_LOG"),
        log_level=_log_level(read),
    )


def _check_role(read: Environment) -> None:
    role = read.text("MS_ROLE", "MS_SCHED")
    if role == "MS_PSERVER":
        raise SettingsError(
            "MS_ROLE is 'MS_PSERVER', but data-parallel training by AllReduce has no parameter servers;"
            " it must be MS_SCHED here."
        )
    if role != "MS_SCHED":
        remedy = "Start a worker with MS_ROLE=MS_WORKER python train.py." if role == "MS_WORKER" else ""
        raise SettingsError(
            f"MS_ROLE must be MS_SCHED for python -m scheduler; it is {role!r}.", remedy=remedy
        )
    servers = read.text("MS_SERVER_NUM", "0")
    if servers != "0":
        raise SettingsError(
            f"MS_SERVER_NUM must be 0 or unset, because there are no parameter servers; it is {servers!r}."
        )


def _host(read: Environment, variable: str) -> str:
    host = read.text(variable, DEFAULT_HOST)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if len(host) > 253 or any(c.isspace() or c in "/@[]" for c in host):
        raise SettingsError(
            f"{variable} must be an IPv4 address, an IPv6 address or a host name; it is {host[:80]!r}."
        )
    if host.count(":") == 1:
        raise SettingsError(
            f"{variable} must be without a port, which is {variable.removesuffix('HOST')}PORT's;"
            f" it is {host[:80]!r}."
        )
    return canonical_address(host)


def canonical_address(host: str) -> str:
    """An IPv6 address in its one short form, because gRPC compares it with the certificate's as text."""
    try:
        return str(ipaddress.IPv6Address(host))
    except ValueError:
        return host


def _name(variable: str, value: str) -> str:
    allowed = all(c.isascii() and (c.isalnum() or c in "._-") for c in value)
    if not allowed or not value[0].isalnum() or len(value) > 128:
        raise SettingsError(
            f"{variable} must be 1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit;"
            f" it is {value[:140]!r}."
        )
    return value


def _worker_counts(read: Environment, *, serve: bool) -> tuple[int, int]:
    worker_num = read.integer("MS_WORKER_NUM", 0, 1, MAX_WORKERS)
    if not worker_num:
        if serve:
            return 0, 0
        raise SettingsError(
            f"MS_WORKER_NUM is not set: it must be the number of workers, from 1 to {MAX_WORKERS}."
        )
    return worker_num, read.integer("MS_WORKER_MIN", worker_num, 1, worker_num)


def _recovery_path(read: Environment) -> Path | None:
    path = read.path("MS_RECOVERY_PATH")
    if not read.flag("MS_ENABLE_RECOVERY"):
        if path is not None and not read.text("MS_ENABLE_RECOVERY"):  # who names one counts on it
            raise SettingsError(
                "MS_RECOVERY_PATH is set and MS_ENABLE_RECOVERY is not: set it to 1 to keep a journal there,"
                " or to 0 to keep none."
            )
        return None
    if path is None:
        raise SettingsError(
            "MS_RECOVERY_PATH is not set: with MS_ENABLE_RECOVERY=1 it must name the journal's directory."
        )
    if path.exists() and not path.is_dir():
        raise SettingsError(f"MS_RECOVERY_PATH must name a directory; '{path}' is a file.")
    return path


def _rank_table(read: Environment, worker_num: int) -> RankTable | None:
    name, path = "RANK_TABLE_FILE", read.path("RANK_TABLE_FILE")
    old = read.path("MINDSPORE_HCCL_CONFIG_PATH")  # its old name
    if path is not None and old is not None and path != old:
        raise SettingsError(
            f"RANK_TABLE_FILE is '{path}', and MINDSPORE_HCCL_CONFIG_PATH, its old name, is '{old}';"
            " set only one of them."
        )
    if path is None:
        name, path = "MINDSPORE_HCCL_CONFIG_PATH", old
    if path is None:
        return None
    from muster.scheduler.core.rank_table import RankTableError, parse_rank_table

    try:
        with path.open("rb") as file:
            raw = file.read(RANK_TABLE_MAX_BYTES + 1)
        if len(raw) > RANK_TABLE_MAX_BYTES:
            raise SettingsError(f"{name} must be at most 16 MiB; '{path}' is larger.")
        table: RankTable = parse_rank_table(json.loads(raw))
    except OSError as error:
        raise SettingsError(f"{name} cannot be read: '{path}': {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, RankTableError) else f"it is not JSON ({error})."
        raise SettingsError(f"{name} '{path}' is no rank table: {reason.rstrip('.')}.") from error
    if worker_num and len(table.entries) != worker_num:
        raise SettingsError(
            f"MS_WORKER_NUM must be {len(table.entries)}, the number of devices in {name} '{path}';"
            f" it is '{worker_num}'."
        )
    return table


def _log_level(read: Environment) -> str:
    raw = read.text("MS_LOG_LEVEL", "INFO")
    if raw.upper() not in LOG_LEVELS:
        raise SettingsError(f"MS_LOG_LEVEL must be one of {', '.join(LOG_LEVELS)}; it is {raw!r}.")
    return raw.upper()
