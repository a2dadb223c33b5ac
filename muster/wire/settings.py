"""Common settings of scheduler and workers: typed, checked reads of environment variables; gRPC's options.

Names and meanings are those of MindSpore. A wrong value is refused with one sentence that names the variable,
the value and the legal range.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.wire.files import path_of, read_regular
from muster.wire.patience import PING_AFTER_S, ping_answer_s
from muster.wire.variables import LONGEST_TEXT, MAX_SCHEDULERS, MAX_WORKERS, TABLE, default_of

if TYPE_CHECKING:
    from muster.wire.rank_table import RankTable

RANK_TABLE_MAX_BYTES = 16 << 20
_PLACES = {"MS_SCHED": "for python -m scheduler", "MS_WORKER": "in a training process"}
_STARTS = {
    "MS_SCHED": "Start the scheduler with MS_ROLE=MS_SCHED python -m scheduler.",
    "MS_WORKER": "Start a worker with MS_ROLE=MS_WORKER python train.py, "
    "or a job with muster run -n N --scheduler -- python train.py.",
}


class Environment:
    """Typed, checked reads of environment variables; an empty value counts as unset.

    :data:`muster.wire.variables.TABLE` gives the range and default of each.

    Args:
        env: the environment.
        error: the exception class for wrong values; it takes a message, and a keyword ``remedy``.
    """

    def __init__(self, env: Mapping[str, str], error: Any) -> None:
        self._env = env
        self.error = error

    def text(self, name: str) -> str:
        """Reads one line of printable text, without surrounding blanks; empty if unset."""
        value = self._env.get(name, "").strip()
        if name not in TABLE:
            raise LookupError(f"{name} is not in the table of variables")
        if not value.isprintable() or len(value) > LONGEST_TEXT:
            raise self.error(
                f"{name} must be printable text of at most {LONGEST_TEXT} characters; it is {value[:80]!r}."
            )
        return value

    def integer(self, name: str, *, default: int | None = None, high: int | None = None) -> int:
        """Reads a whole number; ``default`` and ``high`` take precedence over the table's."""
        row, raw = TABLE[name], self.text(name)
        if not raw:
            return int(row.default if default is None else default)
        return self.checked_integer(name, raw, int(row.low), int(row.high) if high is None else high)

    def checked_integer(self, name: str, raw: str, low: int, high: int) -> int:
        """Reads a whole number in plain ASCII digits, within bounds that are not negative."""
        ok = raw.isascii() and raw.isdigit() and len(raw) <= 18
        if not ok or not low <= int(raw) <= high:
            raise self.error(f"{name} must be a whole number from {low} to {high}; it is {raw[:80]!r}.")
        return int(raw)

    def seconds(self, name: str, *, default: float | None = None) -> float:
        """Reads a time in seconds, fractions allowed; ``default`` takes precedence over the table's."""
        row, raw = TABLE[name], self.text(name)
        if not raw:
            return float(row.default if default is None else default)
        try:
            value = float(raw)
        except ValueError:
            value = float("nan")
        if not row.low <= value <= row.high:
            raise self.error(
                f"{name} must be a time from {row.low:g} to {row.high:g} seconds; it is {raw[:80]!r}."
            )
        return value

    def flag(self, name: str) -> bool:
        """Reads 1 or 0, as MindSpore does; unset is 0."""
        raw = self.text(name) or "0"
        if raw not in ("0", "1"):
            raise self.error(f"{name} must be 0 or 1; it is {raw[:80]!r}.")
        return raw == "1"

    def choice(self, name: str) -> str:
        """Reads one of the variable's legal words, in upper or lower case."""
        row, raw = TABLE[name], self.text(name)
        found = next((value for value in row.choices if raw.lower() == value.lower()), None)
        if raw.lower() in row.removed:
            raise self.error(f"{name} is {raw!r}: {row.removed[raw.lower()]}.")
        if found is None and raw:
            raise self.error(f"{name} must be one of {', '.join(row.choices)}; it is {raw[:80]!r}.")
        return found or str(row.default)

    def path(self, name: str) -> Path | None:
        """Reads a file or directory name, and makes it absolute."""
        raw = self.text(name)
        return path_of(raw) if raw else None

    def name(self, variable: str, *, blanks: bool = False) -> str:
        """Reads a short text; blanks within it are refused unless allowed."""
        row = TABLE[variable]
        value = self.text(variable) or str(row.default)
        if len(value) > row.length or (not blanks and " " in value):
            without = "" if blanks else " without blanks"
            raise self.error(
                f"{variable} must be at most {row.length} characters{without}; it is {value[:140]!r}."
            )
        return value

    def host(self, name: str) -> str:
        """Reads an address or host name, without a port."""
        return self._checked_host(name, self.text(name) or str(TABLE[name].default))

    def _checked_host(self, name: str, host: str) -> str:
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        if len(host) > 253 or any(c.isspace() or c in "/@[]" for c in host):
            raise self.error(
                f"{name} must be an IPv4 address, an IPv6 address or a host name; it is {host[:80]!r}."
            )
        if host.count(":") == 1:
            whose = f", which is {name.removesuffix('HOST')}PORT's" if name.endswith("HOST") else ""
            raise self.error(f"{name} must be without a port{whose}; it is {host[:80]!r}.")
        return canonical_address(host)

    def hosts(self, name: str) -> tuple[str, ...]:
        """Reads addresses or host names, separated by commas, without ports; duplicates are refused."""
        return self.checked_hosts(name, self.text(name) or str(TABLE[name].default))

    def checked_hosts(self, name: str, raw: str) -> tuple[str, ...]:
        """Reads addresses or host names, separated by commas; ``name`` is used in errors."""
        parts = [part.strip() for part in raw.split(",")]
        if not all(parts) or len(parts) > MAX_SCHEDULERS:
            raise self.error(
                f"{name} must be 1 to {MAX_SCHEDULERS} addresses or host names with commas between;"
                f" it is {','.join(parts)[:80]!r}."
            )
        return tuple(dict.fromkeys(self._checked_host(name, part) for part in parts))

    def job_id(self, value: str = "") -> str:
        """Returns the job's name: the argument, or else the environment's."""
        row = TABLE["MS_JOB_ID"]
        value = value or self.text("MS_JOB_ID") or str(row.default)
        allowed = all(c.isascii() and (c.isalnum() or c in "._-") for c in value)
        if not allowed or not value[0].isalnum() or len(value) > row.length:
            raise self.error(
                f"MS_JOB_ID must be 1 to {row.length} letters, digits, '.', '_' or '-', beginning with a"
                f" letter or digit; it is {value[:140]!r}."
            )
        return value

    def worker_counts(self, table: RankTable | None = None) -> tuple[int, int]:
        """Reads MS_WORKER_NUM and MS_WORKER_MIN; if the former is unset, a rank table gives it.

        Args:
            table: the rank table, if it was read already; otherwise it is read here if needed.
        """
        worker_num = self.integer("MS_WORKER_NUM")
        name, file = self.rank_table_file()
        if not worker_num and file:
            table = table or self.rank_table()
            worker_num = len(table.entries) if table else 0
        if not worker_num:
            raise self.error(
                f"MS_WORKER_NUM is not set: it must be the number of workers, from 1 to {MAX_WORKERS}."
            )
        if file and self.integer("RANK_SIZE", default=worker_num) != worker_num:
            raise self.error(
                f"RANK_SIZE must be {worker_num}, the number of workers, beside {name};"
                f" it is {self.text('RANK_SIZE')!r}."
            )
        return worker_num, self.integer("MS_WORKER_MIN", default=worker_num, high=worker_num)

    def rank_table(self) -> RankTable | None:
        """Reads and checks the rank table that the environment names; returns None if it names none."""
        import json

        from muster.wire.rank_table import RankTableError, parse_rank_table

        name, file = self.rank_table_file()
        if not file:
            return None
        path = path_of(file)
        try:
            table: RankTable = parse_rank_table(json.loads(read_regular(path, RANK_TABLE_MAX_BYTES)))
        except OSError as error:
            raise self.error(f"{name} cannot be read: '{path}': {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, RankTableError) else f"it is not JSON ({error})."
            raise self.error(f"{name} '{path}' is no rank table: {reason.rstrip('.')}.") from error
        most = max(Counter(entry.server_id for entry in table.entries).values())
        if self.integer("DEVICE_NUM", default=most) < most:
            raise self.error(
                f"DEVICE_NUM must be at least {most}, the devices that {name} '{path}' names of one host;"
                f" it is {self.text('DEVICE_NUM')!r}."
            )
        return table

    def rank_table_file(self) -> tuple[str, str]:
        """Returns the variable (new or old name) that names a rank table, and the file; empty if none."""
        name, old_name = "RANK_TABLE_FILE", "MINDSPORE_HCCL_CONFIG_PATH"
        file, old = self.text(name), self.text(old_name)
        if file and old and file != old:
            raise self.error(
                f"{name} is {file[:80]!r}, and {old_name}, its old name, is {old[:80]!r};"
                " set only one of them."
            )
        return (name, file) if file else (old_name, old)


def shared_settings(read: Environment, role: str) -> dict[str, Any]:
    """Checks the process's role, and reads the common settings of scheduler and workers.

    Args:
        read: the environment.
        role: MS_SCHED, which may be left out, or MS_WORKER.

    Returns:
        job_id, topo_timeout_s, node_timeout_s, allow_insecure, log_level and log_format.

    Raises:
        read.error: a value is out of range, or the environment has another role.
    """
    _check_role(read, role)
    return {
        "job_id": read.job_id(),
        "topo_timeout_s": read.seconds("MS_TOPO_TIMEOUT"),
        "node_timeout_s": read.seconds("MS_NODE_TIMEOUT"),
        "allow_insecure": read.flag("MS_ALLOW_INSECURE"),
        "log_level": read.choice("MS_LOG_LEVEL"),
        "log_format": read.choice("MS_LOG_FORMAT"),
    }


def _check_role(read: Environment, own: str) -> None:
    role = read.text("MS_ROLE") or (own if own == "MS_SCHED" else "")
    if role == "MS_PSERVER":
        raise read.error(
            "MS_ROLE is 'MS_PSERVER', but data-parallel training by AllReduce has no parameter servers;"
            f" it must be {own} here."
        )
    if role != own:
        found = f"it is {role[:80]!r}" if role else "it is not set"
        remedy = _STARTS[role if role in _STARTS else own]
        raise read.error(f"MS_ROLE must be {own} {_PLACES[own]}; {found}.", remedy=remedy)
    servers = read.text("MS_SERVER_NUM")
    if servers not in ("", "0"):
        raise read.error(
            "MS_SERVER_NUM must be 0 or unset, because there are no parameter servers;"
            f" it is {servers[:80]!r}."
        )


def canonical_address(host: str) -> str:
    """Returns an IPv6 address in its canonical form, as gRPC compares it with the certificate's as text."""
    if ":" not in host:
        return host
    import ipaddress

    try:
        return str(ipaddress.IPv6Address(host))
    except ValueError:
        return host


def show_address(host: str, port: int) -> str:
    """Returns an address as people and gRPC write it: IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether an address or name can only refer to this machine."""
    import ipaddress

    if host.lower() in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(host.split("%", 1)[0]).is_loopback
    except ValueError:
        return False


# ---------------------------------------------------------------- gRPC's options on both sides

_SERVER_OPTIONS = (
    # Clients ping while there is no data; the default here would end them with "Too many pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    # Otherwise two schedulers on one port would share its connections without any error.
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 5_000),
    # Otherwise refused and silent connections would stay open.
    ("grpc.max_connection_idle_ms", 30_000),
    # Thousands of workers may join at the same moment.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 30_000),
)
_CLIENT_OPTIONS = (
    ("grpc.http2.max_pings_without_data", 0),
    # Otherwise proxy variables would apply even to loopback.
    ("grpc.enable_http_proxy", 0),
)

DEFAULT_NODE_TIMEOUT_S: float = default_of("MS_NODE_TIMEOUT")
_LEAST_PING_AFTER_S = 5.0
_LEAST_TIMEOUT_S = 5.0
_SERVER_LEAST_ANSWER_S = 60.0


def server_options(node_timeout_s: float = DEFAULT_NODE_TIMEOUT_S) -> tuple[tuple[str, int], ...]:
    """Returns the gRPC options of every server.

    A paused process does not answer pings, and a flooded server does not receive the answers. So the server
    does not close a connection because answers are missing: heartbeats show silent peers, and the kernel
    shows lost hosts.

    Args:
        node_timeout_s: MS_NODE_TIMEOUT; see :func:`client_options`.
    """
    return (*_keepalive(node_timeout_s, least_answer_s=_SERVER_LEAST_ANSWER_S), *_SERVER_OPTIONS)


def client_options(
    node_timeout_s: float = DEFAULT_NODE_TIMEOUT_S, *, schedulers: int = 1
) -> tuple[tuple[str, int], ...]:
    """Returns the gRPC options of every channel.

    Args:
        node_timeout_s: MS_NODE_TIMEOUT; a pause of this length at the other end does not close a connection.
        schedulers: the number of schedulers; if there are several, a paused one is abandoned for the next.
    """
    if schedulers > 1:
        answer_ms = round(1000 * ping_answer_s(node_timeout_s))
        return (
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", round(1000 * PING_AFTER_S)),
            ("grpc.keepalive_timeout_ms", answer_ms),
            ("grpc.http2.ping_timeout_ms", answer_ms),
            *_CLIENT_OPTIONS,
        )
    return (*_keepalive(node_timeout_s, least_answer_s=_LEAST_TIMEOUT_S), *_CLIENT_OPTIONS)


def _keepalive(node_timeout_s: float, *, least_answer_s: float) -> tuple[tuple[str, int], ...]:
    timeout_s = max(_LEAST_TIMEOUT_S, 2 * node_timeout_s)
    after_s = max(_LEAST_PING_AFTER_S, 0.6 * node_timeout_s)
    return (
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", round(1000 * after_s)),
        # The socket's TCP_USER_TIMEOUT: for how long the other kernel may acknowledge nothing.
        ("grpc.keepalive_timeout_ms", round(1000 * timeout_s)),
        # For how long the other process may not answer pings; gRPC also sends its own when data arrives.
        ("grpc.http2.ping_timeout_ms", round(1000 * max(least_answer_s, timeout_s))),
    )
