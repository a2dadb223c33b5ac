"""The table of all environment variables that Muster reads: kind, range, default, side and meaning of each.

:class:`muster.wire.settings.Environment` takes ranges and defaults from this table, and reads no other
variables. docs/settings.md and the variables in ``--help`` are generated from it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

LONGEST_S = 604_800.0
"""The largest value of a time setting, in seconds: one week."""

LONGEST_TEXT = 4096
"""The largest number of characters of any variable."""

ALL, SCHEDULER, WORKER, LAUNCHER = "all", "scheduler", "worker", "launcher"
CERTS = "`muster certs`"

_KINDS = {
    "flag": "0 or 1",
    "path": "path",
    "host": "address or name",
    "hosts": "addresses or names",
    "password": "password",
    "file": "path",
    "devices": "indices or ids, with commas",
}
"""The kinds whose legal values are the same for every variable, in words."""


class Variable(NamedTuple):
    """One environment variable.

    Attributes:
        kind: integer, seconds, flag, choice, text, path, host, hosts, password or file; see ``Environment``.
        side: the processes that read it.
        meaning: a sentence for docs/settings.md and ``--help``, in Markdown.
        default: the value if it is not set; for ``hosts``, a text with commas.
        low, high: the least and the greatest legal value of an integer, or of seconds.
        choices: the legal words of a choice.
        removed: words that were legal in an earlier version, each with a note on what became of it.
        length: the largest number of characters of a text.
        shown: the default in words, if ``default`` does not say it, such as the value of another variable.
        options: the command-line options that take precedence, each with its command. An option of ``status``
            is also one of ``jobs``, ``health``, ``drain``, ``admit``, ``stacks`` and ``web``.
    """

    kind: str
    side: str
    meaning: str
    default: Any = None
    low: float = 0
    high: float = 0
    choices: tuple[str, ...] = ()
    removed: Mapping[str, str] = MappingProxyType({})
    length: int = LONGEST_TEXT
    shown: str = ""
    options: tuple[str, ...] = ()

    def values_in_words(self) -> str:
        """Returns the legal values, in Markdown."""
        if self.kind == "integer":
            return "0" if self.high == 0 else f"{self.low:,.0f} to {self.high:,.0f}"
        if self.kind == "seconds":
            return f"seconds, {self.low:g} to {self.high:,.0f}"
        if self.kind == "choice":
            return ", ".join(f"`{choice}`" for choice in self.choices)
        if self.kind == "text":
            return f"text, at most {self.length} characters"
        return _KINDS[self.kind]

    def default_in_words(self) -> str:
        """Returns the default, in Markdown; empty if there is none."""
        if self.shown or self.default is None:
            return self.shown
        if self.kind in ("integer", "seconds", "flag"):
            return f"{self.default:g}"
        return f"`{self.default}`" if self.default else ""


MAX_WORKERS = 65_536
MAX_DEVICES = 4096
MAX_SCHEDULERS = 5

TABLE = {
    "MS_ROLE": Variable(
        "choice",
        ALL,
        "The process's role; `MS_PSERVER` is refused.",
        "",
        choices=("MS_SCHED", "MS_WORKER"),
        shown="`MS_SCHED` for `muster scheduler`",
    ),
    "MS_WORKER_NUM": Variable(
        "integer",
        ALL,
        "Workers of the job; the same everywhere.",
        0,
        1,
        MAX_WORKERS,
        shown="that of a rank table, else none, it is required; with `--serve` the job's workers say it",
        options=("run -n",),
    ),
    "MS_WORKER_MIN": Variable(
        "integer",
        ALL,
        "Fewest workers to go on with; at most `MS_WORKER_NUM`.",
        0,
        1,
        MAX_WORKERS,
        shown="`MS_WORKER_NUM`",
        options=("run --min-workers",),
    ),
    "MS_SERVER_NUM": Variable(
        "integer", ALL, "MindSpore's number of parameter servers, which do not exist here.", 0, 0, 0
    ),
    "MS_SCHED_HOST": Variable(
        "hosts",
        ALL,
        "The scheduler's IPv4 or IPv6 address or name, without a port; of"
        f" [several](high_availability.md), at most {MAX_SCHEDULERS}, with commas between.",
        "127.0.0.1",
        options=("run --join", "scheduler --bind", "status --host"),
    ),
    "MS_SCHED_PORT": Variable(
        "integer", ALL, "The scheduler's port.", 6667, 1, 65_535, options=("run --join", "scheduler --port")
    ),
    "MS_JOB_ID": Variable(
        "text",
        ALL,
        "The job's name; one scheduler can hold several.",
        "default",
        length=128,
        options=("run --job-id", "status --job"),
    ),
    "MS_CONFIG_FILE": Variable(
        "path",
        ALL,
        "config.json with the certificates; turns TLS on.",
        options=("run --config", "scheduler --config", "status --config"),
    ),
    "MS_SERVER_PASSWORD": Variable(
        "password", SCHEDULER, "Password of the scheduler's `.p12` file.", shown="asked for"
    ),
    "MS_SERVER_PASSWORD_FILE": Variable(
        "file",
        SCHEDULER,
        "The file that holds that password.",
        options=("run --password-file", "scheduler --password-file"),
    ),
    "MS_CLIENT_PASSWORD": Variable(
        "password",
        "worker, operator",
        "Password of the worker's or operator's `.p12` file.",
        shown="asked for",
    ),
    "MS_CLIENT_PASSWORD_FILE": Variable(
        "file",
        "worker, operator",
        "The file that holds that password.",
        options=("run --password-file", "status --password-file"),
    ),
    "MS_CERTS_PASSWORD": Variable(
        "password",
        CERTS,
        "Password of the authority; `--password-file` goes before it, also before the roles' passwords.",
        shown="asked for",
    ),
    "MS_CERTS_PASSWORD_FILE": Variable(
        "file", CERTS, "The file that holds that password.", options=("certs init --password-file",)
    ),
    "MS_ALLOW_INSECURE": Variable("flag", ALL, "1: leave loopback without TLS.", False),
    "MS_TOPO_TIMEOUT": Variable(
        "seconds",
        ALL,
        "Time for the group to form, without members that are busy training."
        " A worker's own counts until it has reached the scheduler, then the scheduler's. A group that has to"
        " be formed again while it is built has at least half of it, and all such attempts"
        " together twice that.",
        1800.0,
        1.0,
        LONGEST_S,
    ),
    "MS_NODE_TIMEOUT": Variable(
        "seconds",
        ALL,
        "How long a worker may pause (frozen, or cut off) before it counts as lost.",
        5.0,
        0.5,
        3600.0,
    ),
    "MS_HANG_TIMEOUT": Variable(
        "seconds",
        SCHEDULER,
        "Time after which a rank is expelled that can be reached and"
        " does not come to a step for which others wait; not while it says `session.busy()`.",
        None,
        1.0,
        LONGEST_S,
        shown="`MS_COLLECTIVE_TIMEOUT` in the scheduler's environment",
    ),
    "MS_STALL_TIMEOUT": Variable(
        "seconds",
        SCHEDULER,
        "Time without progress after which the scheduler logs which rank lags, and in which collective.",
        60.0,
        1.0,
        LONGEST_S,
    ),
    "MS_DRAIN_STRAGGLERS": Variable(
        "text",
        SCHEDULER,
        "Drains a rank, while a spare waits, whose steps take a multiple of the usual time for a number of"
        " seconds: `1.5x:60s`.",
        "",
        length=32,
        options=("run --drain-stragglers", "scheduler --drain-stragglers"),
    ),
    "MS_LOG_LEVEL": Variable(
        "choice",
        ALL,
        "The least severe lines that are logged.",
        "INFO",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
    ),
    "MS_LOG_FORMAT": Variable(
        "choice",
        ALL,
        "How logs are written: lines of text, or a JSON object in each line.",
        "text",
        choices=("text", "json"),
    ),
    "RANK_TABLE_FILE": Variable(
        "path",
        ALL,
        "Fixed ranks by host and device; the launcher takes"
        " number and devices of this host's workers from it. Where `MS_WORKER_NUM` is not set, it is the"
        " number of the table's devices; a process with `RANK_ID` is a worker then, without `MS_ROLE`.",
    ),
    "MINDSPORE_HCCL_CONFIG_PATH": Variable("path", ALL, "The old name of `RANK_TABLE_FILE`."),
    "RANK_SIZE": Variable(
        "integer",
        ALL,
        "Beside a rank table: the number of workers, which must be the table's.",
        0,
        1,
        MAX_WORKERS,
        shown="the table's",
    ),
    "DEVICE_NUM": Variable(
        "integer",
        ALL,
        "Beside a rank table: devices of a host, at least as many as the table names of any.",
        0,
        1,
        MAX_WORKERS,
        shown="the table's",
    ),
    "RANK_ID": Variable(
        "integer",
        WORKER,
        "The rank that this worker expects; with another one it ends.",
        -1,
        0,
        MAX_WORKERS - 1,
        shown="any",
    ),
    "MS_SPARES": Variable(
        "integer",
        SCHEDULER,
        "Workers beyond `MS_WORKER_NUM` that may wait.",
        0,
        0,
        1024,
        options=("run --spares",),
    ),
    "MS_MAX_STREAMS_PER_HOST": Variable(
        "integer",
        SCHEDULER,
        "Streams that one address may hold; raise it behind address translation.",
        4096,
        1,
        MAX_WORKERS,
    ),
    "MS_ENABLE_RECOVERY": Variable(
        "flag",
        SCHEDULER,
        "1: keep a journal in `MS_RECOVERY_PATH`, and go on with it after a restart.",
        False,
    ),
    "MS_RECOVERY_PATH": Variable(
        "path",
        SCHEDULER,
        "The journal's directory, or `etcd://a:2379,b:2379/PATH` for one"
        " of [several schedulers](high_availability.md).",
    ),
    "MS_METRICS_PORT": Variable(
        "integer", SCHEDULER, "Port for Prometheus metrics.", 0, 1, 65_535, shown="off"
    ),
    "MS_METRICS_HOST": Variable("host", SCHEDULER, "Address for Prometheus metrics.", "127.0.0.1"),
    "MS_AUDIT_LOG": Variable("path", SCHEDULER, "File for admissions, refusals and expulsions."),
    "MS_INCIDENT_DIR": Variable(
        "path",
        SCHEDULER,
        "Directory for evidence of hangs; `muster run` sets one in the run's directory.",
        shown="`incidents` beside the journal",
    ),
    "MS_NODE_ID": Variable(
        "text",
        WORKER,
        "This worker's stable name; if all are numbers in range, they are the ranks.",
        "",
        length=128,
        shown="host and index",
    ),
    "MS_LOCAL_INDEX": Variable(
        "integer",
        WORKER,
        "Index of this worker on its host; the launcher sets it.",
        -1,
        0,
        MAX_DEVICES - 1,
        shown="none",
    ),
    "MS_HOST_ID": Variable(
        "text",
        WORKER,
        "Identity of the machine, where the built-in one does not fit.",
        "",
        length=128,
        shown="boot id and network",
    ),
    "MS_TOPOLOGY": Variable(
        "text",
        WORKER,
        "Rack or NVLink-domain label, one for all workers of a host; hosts with"
        " one label get adjacent ranks.",
        "",
        length=256,
    ),
    "MS_INTERFACE": Variable(
        "text",
        WORKER,
        "Network interface by which peers reach this host: its name, or the network that its address is in,"
        " such as `192.168.0.0/24`.",
        "",
        length=64,
        shown="the one towards the scheduler",
    ),
    "MS_WORKER_ADDRESS": Variable(
        "host", WORKER, "Address by which peers reach this host.", "", shown="that of the interface"
    ),
    "MS_BACKEND": Variable(
        "choice",
        WORKER,
        "What computes collectives.",
        "",
        choices=("nccl", "tcp"),
        removed={
            "gloo": "the backend 'gloo' was removed, because it did not encrypt; use 'tcp', which takes the"
            " same arrays (torch programs keep torch's Gloo)"
        },
        shown="by device",
    ),
    "MS_NCCL_ENCRYPTION": Variable(
        "choice",
        WORKER,
        "Whether what NCCL sends between hosts is [encrypted](nccl_encryption.md); the same everywhere."
        " `require`: or no worker starts. `prefer`: where it can be, and not where there is InfiniBand.",
        "off",
        choices=("off", "prefer", "require"),
        options=("run --encrypt-nccl",),
    ),
    "MS_NCCL_CONNECTIONS": Variable(
        "integer",
        WORKER,
        "With encryption: TCP connections of each communicator of NCCL's network; each keeps a core busy.",
        4,
        1,
        16,
    ),
    "MS_NCCL_ACCEPT_TIMEOUT": Variable(
        "integer",
        WORKER,
        "With encryption: seconds for which NCCL's connections wait for the other side.",
        120,
        1,
        86_400,
    ),
    "MS_GPU_CHECK": Variable(
        "choice",
        WORKER,
        "`on`: its GPU is [checked](on_call.md#a-check-before-a-join-and-after-a-loss) before a worker joins,"
        " and after others are lost; with one that fails it is refused.",
        "off",
        choices=("off", "on"),
    ),
    "MS_GPU_MAX_CELSIUS": Variable(
        "integer", WORKER, "Above this temperature a GPU is [suspect](on_call.md#gpu-health).", 90, 1, 200
    ),
    "MS_GPU_MAX_ECC_ERRORS": Variable(
        "integer",
        WORKER,
        "With more uncorrected ECC errors than these since its driver was loaded, a GPU is"
        " [ill](on_call.md#gpu-health).",
        0,
        0,
        1_000_000,
    ),
    "MS_GPU_MAX_NVLINK_ERRORS": Variable(
        "integer",
        WORKER,
        "With more replays and recoveries of its NVLinks than these since its driver was loaded, a GPU is"
        " [suspect](on_call.md#gpu-health).",
        100,
        0,
        1_000_000_000,
    ),
    "MS_WORKER_SPARE": Variable("flag", WORKER, "1: wait as a spare.", False),
    "MS_COLLECTIVE_TIMEOUT": Variable(
        "seconds",
        "worker, scheduler",
        "Time after which a collective fails and names the ranks for which it waited; the job then waits for"
        " these in a next generation. With NCCL it applies only where the host waits (`barrier`,"
        " `create_group`, `synchronize`, each step of a torch model in an `ElasticLoop`); other collectives"
        " are reported after `MS_STALL_TIMEOUT`.",
        600.0,
        0.1,
        LONGEST_S,
    ),
    "MS_RECONNECT_TIMEOUT": Variable(
        "seconds",
        WORKER,
        "How long to look for a lost scheduler before the worker gives up. Where `MS_SCHED_HOST`"
        " names several and this is not set, without limit.",
        120.0,
        1.0,
        LONGEST_S,
        shown="120; with several schedulers no limit",
    ),
    "MS_LAST_CALL_TIMEOUT": Variable(
        "seconds",
        WORKER,
        "How long the first group waits for up to `MS_WORKER_NUM` members once it has `MS_WORKER_MIN`.",
        0.0,
        0.1,
        LONGEST_S,
        shown="`MS_TOPO_TIMEOUT`",
    ),
    "MS_LEAVE_TIMEOUT": Variable(
        "seconds",
        WORKER,
        "How long a worker that was asked to leave (SIGTERM,"
        " `request_leave`) waits for others to finish the step; then it saves a checkpoint and"
        " goes without waiting for its end. Keep it"
        " some seconds below the time after which the platform kills; the launcher sets 0.8 times"
        " its `--grace`.",
        20.0,
        1.0,
        LONGEST_S,
    ),
    "MS_TORCH_GLOO": Variable(
        "choice",
        WORKER,
        "`muster`: process groups of the backend `gloo` in [torch programs](torch.md) are Muster's.",
        "",
        choices=("muster",),
        shown="torch's own Gloo",
    ),
    "MS_IN_PLACE": Variable(
        "flag",
        WORKER,
        "1: torch programs [live on](in_place.md) when other ranks are lost; the same everywhere.",
        False,
        options=("run --in-place",),
    ),
    "MS_STEP_TIMES": Variable(
        "flag",
        WORKER,
        "0: the steps of [torch programs](torch.md) are not measured, and torch's functions are left as they"
        " are; then no [slow rank](on_call.md) of theirs is named.",
        True,
    ),
    "CUDA_VISIBLE_DEVICES": Variable(
        "devices",
        "worker, launcher",
        "GPUs that this host offers, up to the first entry that names none.",
        shown="all",
        options=("run --devices",),
    ),
    "DEVICE_ID": Variable(
        "integer",
        WORKER,
        "This worker's GPU, counted among those; on CPUs only its name in a rank table.",
        -1,
        0,
        MAX_DEVICES - 1,
        shown="`MS_LOCAL_INDEX`",
    ),
    "DATA_PATH": Variable(
        "path", "`train.py`", "Where CIFAR-10's binary files are; another data set needs none."
    ),
}
"""All variables by name."""

INTERNAL = frozenset(("MS_NCCL_SECRET_FD", "MS_UPLINK", "MS_UPLINK_DOOR", "MS_PROCESSES_ENDED"))
"""Variables that a launch sets for its own processes; users do not."""


def default_of(name: str) -> Any:
    """Returns the default of a variable."""
    return TABLE[name].default


def option_help(name: str, *, default: str = "") -> str:
    """Returns the help of an option that replaces a variable: the variable's meaning, name and default."""
    row = TABLE[name]
    meaning = _plain(row.meaning).removesuffix(".")
    default = default or _plain(row.default_in_words())
    return f"{meaning[0].lower()}{meaning[1:]} ({name}{f'; default: {default}' if default else ''})"


def variables_help(*sides: str, width: int = 78) -> str:
    """Returns the variables that these processes read, for the end of a command's ``--help``.

    Args:
        sides: SCHEDULER, WORKER or LAUNCHER; variables that all processes read are shown, too.
        width: the largest number of characters of a line.
    """
    indent = " " * 4
    lines = ["environment variables:"]
    for name, row in TABLE.items():
        if row.side != ALL and not set(sides) & set(row.side.split(", ")):
            continue
        default = f"; default: {row.default_in_words()}" if row.default_in_words() else ""
        text = f"{row.meaning} ({row.values_in_words()}{default})"
        lines.append(f"  {name}")
        lines += textwrap.wrap(_plain(text), width, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)


def _plain(markdown: str) -> str:
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown).replace("`", "")


NEAR = 0.88
"""The similarity (0 to 1) from which on an unknown name counts as misspelt; MindSpore has MS_ names, too."""


def misspelt(env: Mapping[str, str]) -> list[str]:
    """Returns a sentence for each unknown variable whose name is nearly that of one in the table."""
    unknown = sorted(name for name in env if name.startswith("MS_") and name not in TABLE)
    if not unknown:
        return []
    import difflib

    said = []
    for name in unknown:
        near = difflib.get_close_matches(name, TABLE, n=1, cutoff=NEAR)
        if near:
            said.append(f"nothing reads {name[:80]}; did you mean {near[0]}?")
    return said
