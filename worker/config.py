"""A worker's settings: read from the environment once, checked, and frozen.

MindSpore's names and meanings are kept. A wrong value is refused in one sentence that names the
variable, the value and the legal range.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from muster.rendezvous.value import Value
from muster.worker.errors import SettingsError
from muster.worker.launch.rank_table_file import table_file


class ForeignLauncher(Value):
    """The variables of one launcher; an empty name means that it says nothing of the kind.

    The presence of ``marker`` shows that this launcher started the process.
    """

    name: str
    rank: str
    size: str
    local_index: str
    marker: str


# The innermost first: a pod of an indexed job may run torchrun, a Slurm step may run mpirun.
LAUNCHERS = (
    ForeignLauncher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"),
    ForeignLauncher(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_RANK",
    ),
    ForeignLauncher("mpirun (MPICH)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALRANKID"),
    ForeignLauncher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID"),
    ForeignLauncher("Kubernetes indexed job", "JOB_COMPLETION_INDEX", "", "", "JOB_COMPLETION_INDEX"),
)

# The step of the shell that salloc opens on a node. Its variables say "task 0 of all", but it is no task.
INTERACTIVE_STEP = "4294967290"


def detect(env: Mapping[str, str]) -> ForeignLauncher | None:
    """Finds the launcher that started this process, or None. Muster's own launcher comes before all."""
    if "MS_LOCAL_INDEX" in env:
        return None
    return next((one for one in LAUNCHERS if _marked(env, one.marker) and env.get(one.rank)), None)


def _marked(env: Mapping[str, str], marker: str) -> bool:
    value = env.get(marker)
    return bool(value) and (marker, value) != ("SLURM_STEP_ID", INTERACTIVE_STEP)


def translate(env: Mapping[str, str]) -> dict[str, str]:
    """Says in Muster's variables what another launcher's environment says.

    Args:
        env: the process's environment.

    Returns:
        Only variables that ``env`` lacks: MS_ROLE, MS_NODE_ID (the launcher's rank), MS_WORKER_NUM and
        MS_LOCAL_INDEX. Empty when no known launcher is there, or when the process is not a worker.
        Values are handed on as they stand; whoever parses the variables judges them.
    """
    launcher = detect(env)
    if launcher is None or env.get("MS_ROLE", "MS_WORKER") != "MS_WORKER":
        return {}
    found = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": env[launcher.rank]}
    for name, source in (("MS_WORKER_NUM", launcher.size), ("MS_LOCAL_INDEX", launcher.local_index)):
        if source and env.get(source):
            found[name] = env[source]
    if table_file(env):
        del found["MS_NODE_ID"]  # the table gives the ranks, by host and device
    return {name: value for name, value in found.items() if not env.get(name)}


def node_rank(env: Mapping[str, str]) -> int | None:
    """The number of this host, where one launcher process per host was started by srun or an indexed job."""
    for variable, marker in (
        ("SLURM_NODEID", "SLURM_STEP_ID"),
        ("JOB_COMPLETION_INDEX", "JOB_COMPLETION_INDEX"),
    ):
        value = env.get(variable, "")
        if _marked(env, marker) and value.isascii() and value.isdigit() and len(value) <= 9:
            return int(value)
    return None


DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 6667
MAX_WORKERS = 65_536
MAX_DEVICES = 4096
BACKENDS = ("nccl", "tcp", "gloo")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class SecurityContext(Value):
    """What ``set_ps_context`` was told; it wins over the environment.

    Args:
        config_file_path: config.json.
        enable_ssl: None: TLS is on when there is a config.json.
        client_password: opens the worker's PKCS#12 file.
        server_password: opens the scheduler's; not used in a worker, kept for scripts that give both.
    """

    secret_fields = (
        "client_password",
        "server_password",
    )
    config_file_path: str | None = None
    enable_ssl: bool | None = None
    client_password: str | None = None
    server_password: str | None = None


class Settings(Value):
    """Everything a worker was told at its start. Times in seconds.

    ``visible_devices`` None: all there are. ``device_id``, ``local_index`` and ``rank_id`` -1: not said.
    ``node_id``, ``host_id``, ``worker_address``, ``interface``, ``backend``, ``topology`` may be empty.
    """

    secret_fields = ("client_password",)

    worker_num: int
    worker_min: int
    scheduler_host: str = DEFAULT_HOST
    scheduler_port: int = DEFAULT_PORT
    job_id: str = "default"
    node_id: str = ""
    spare: bool = False
    topo_timeout_s: float = 1800.0
    node_timeout_s: float = 5.0
    collective_timeout_s: float = 600.0
    reconnect_timeout_s: float = 120.0
    leave_timeout_s: float = 20.0
    host_id: str = ""
    topology: str = ""
    interface: str = ""
    worker_address: str = ""
    local_index: int = -1
    backend: str = ""
    visible_devices: tuple[str, ...] | None = None
    device_id: int = -1
    rank_id: int = -1
    config_path: Path | None = None
    client_password: bytes | None = None
    allow_insecure: bool = False
    log_level: str = "INFO"

    @property
    def scheduler_address(self) -> str:
        """``host:port`` of the scheduler, IPv6 addresses in brackets."""
        host = f"[{self.scheduler_host}]" if ":" in self.scheduler_host else self.scheduler_host
        return f"{host}:{self.scheduler_port}"


def load_settings(env: Mapping[str, str], context: SecurityContext | None = None) -> Settings:
    """Reads and checks everything a worker is told at its start.

    Args:
        env: the environment; what mpirun, srun, torchrun or an indexed job says counts where MS_* is silent.
        context: what ``set_ps_context`` was told.

    Raises:
        SettingsError: a value is missing, out of its range or contradicts another.
    """
    read = _Reader({**env, **translate(env)})
    _check_role(read)
    worker_num = read.integer("MS_WORKER_NUM", 0, 1, MAX_WORKERS)
    if not worker_num:
        raise SettingsError(
            f"MS_WORKER_NUM is not set: it must be the number of workers, from 1 to {MAX_WORKERS}."
        )
    config_path, password = _security(read, context or SecurityContext())
    settings = Settings(
        worker_num=worker_num,
        worker_min=read.integer("MS_WORKER_MIN", worker_num, 1, worker_num),
        scheduler_host=_host(read, "MS_SCHED_HOST", DEFAULT_HOST),
        scheduler_port=read.integer("MS_SCHED_PORT", DEFAULT_PORT, 1, 65_535),
        job_id=_job_id(read.text("MS_JOB_ID", "default")),
        node_id=_node_id(read.text("MS_NODE_ID")),
        spare=read.flag("MS_WORKER_SPARE"),
        topo_timeout_s=read.seconds("MS_TOPO_TIMEOUT", 1800.0, 1.0, 604_800.0),
        node_timeout_s=read.seconds("MS_NODE_TIMEOUT", 5.0, 0.5, 3600.0),
        collective_timeout_s=read.seconds("MS_COLLECTIVE_TIMEOUT", 600.0, 0.1, 604_800.0),
        reconnect_timeout_s=read.seconds("MS_RECONNECT_TIMEOUT", 120.0, 1.0, 604_800.0),
        leave_timeout_s=read.seconds("MS_LEAVE_TIMEOUT", 20.0, 1.0, 604_800.0),
        host_id=_short("MS_HOST_ID", read.text("MS_HOST_ID"), 128),
        topology=_short("MS_TOPOLOGY", read.text("MS_TOPOLOGY"), 256, blanks=True),
        interface=_short("MS_INTERFACE", read.text("MS_INTERFACE"), 15),
        worker_address=_host(read, "MS_WORKER_ADDRESS", ""),
        local_index=read.integer("MS_LOCAL_INDEX", -1, 0, MAX_DEVICES - 1),
        backend=read.choice("MS_BACKEND", "", BACKENDS),
        visible_devices=visible_devices(env),
        device_id=read.integer("DEVICE_ID", -1, 0, MAX_DEVICES - 1),
        rank_id=read.integer("RANK_ID", -1, 0, worker_num - 1),
        config_path=config_path,
        client_password=password,
        allow_insecure=read.flag("MS_ALLOW_INSECURE"),
        log_level=read.choice("MS_LOG_LEVEL", "INFO", LOG_LEVELS),
    )
    _check_plaintext(settings)
    return settings


class _Reader:
    """Typed, checked reads of environment variables; an empty value counts as unset."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def text(self, name: str, default: str = "") -> str:
        value = self._env.get(name, "").strip()
        if not value:
            return default
        if not value.isprintable() or len(value) > 4096:
            raise SettingsError(
                f"{name} must be printable text of at most 4096 characters; it is {value[:80]!r}."
            )
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        raw = self.text(name)
        if not raw:
            return default
        ok = raw.isascii() and raw.isdigit() and len(raw) <= 18
        if not ok or not low <= int(raw) <= high:
            raise SettingsError(f"{name} must be a whole number from {low} to {high}; it is {raw[:80]!r}.")
        return int(raw)

    def seconds(self, name: str, default: float, low: float, high: float) -> float:
        raw = self.text(name)
        if not raw:
            return default
        try:
            value = float(raw)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise SettingsError(
                f"{name} must be a time from {low:g} to {high:g} seconds; it is {raw[:80]!r}."
            )
        return value

    def flag(self, name: str) -> bool:
        return self.choice(name, "0", ("0", "1")) == "1"

    def choice(self, name: str, default: str, legal: tuple[str, ...]) -> str:
        raw = self.text(name, default)
        for value in legal:
            if raw.lower() == value.lower():
                return value
        if raw == default:
            return default
        raise SettingsError(f"{name} must be one of {', '.join(legal)}; it is {raw[:80]!r}.")


def _check_role(read: _Reader) -> None:
    role = read.text("MS_ROLE")
    if role == "MS_PSERVER":
        raise SettingsError(
            "MS_ROLE is 'MS_PSERVER', but data-parallel training by AllReduce has no parameter servers;"
            " it must be MS_WORKER here."
        )
    if role != "MS_WORKER":
        said = f"it is {role!r}" if role else "it is not set"
        remedy = (
            "Start the scheduler with MS_ROLE=MS_SCHED python -m scheduler."
            if role == "MS_SCHED"
            else "Start a worker with MS_ROLE=MS_WORKER, "
            "or a job with muster run -n N --scheduler -- python train.py."
        )
        raise SettingsError(f"MS_ROLE must be MS_WORKER in a training process; {said}.", remedy=remedy)
    servers = read.text("MS_SERVER_NUM", "0")
    if servers != "0":
        raise SettingsError(
            "MS_SERVER_NUM must be 0 or unset, because there are no parameter servers;"
            f" it is {servers[:80]!r}."
        )


def _host(read: _Reader, variable: str, default: str) -> str:
    host = read.text(variable, default)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if len(host) > 253 or any(c.isspace() or c in "/@[]" for c in host):
        raise SettingsError(
            f"{variable} must be an IPv4 address, an IPv6 address or a host name; it is {host[:80]!r}."
        )
    if host.count(":") == 1:
        raise SettingsError(f"{variable} must be an address without a port; it is {host[:80]!r}.")
    return canonical_address(host)


def canonical_address(host: str) -> str:
    """An IPv6 address in its one short form, because gRPC compares it with the certificate's as text."""
    if ":" not in host:
        return host
    import ipaddress

    try:
        return str(ipaddress.IPv6Address(host))
    except ValueError:
        return host


def _job_id(value: str) -> str:
    allowed = all(c.isascii() and (c.isalnum() or c in "._-") for c in value)
    if not allowed or not value[0].isalnum() or len(value) > 128:
        raise SettingsError(
            "MS_JOB_ID must be 1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit;"
            f" it is {value[:140]!r}."
        )
    return value


def _node_id(value: str) -> str:
    if value == "*" or value in (".", ".."):
        raise SettingsError(f"MS_NODE_ID must be a name; it is {value!r}.")
    return _short("MS_NODE_ID", value, 128)


def _short(variable: str, value: str, limit: int, *, blanks: bool = False) -> str:
    if len(value) > limit or (not blanks and " " in value):
        without = "" if blanks else " without blanks"
        raise SettingsError(f"{variable} must be at most {limit} characters{without}; it is {value[:140]!r}.")
    return value


def visible_devices(env: Mapping[str, str]) -> tuple[str, ...] | None:
    """Reads CUDA_VISIBLE_DEVICES by CUDA's rule: the list ends at the first entry that is no device.

    Returns:
        Indices without leading zeros, and identities (``GPU-...``, ``MIG-...``), in order; None: not set.

    Raises:
        SettingsError: a device stands there twice, whereupon CUDA would show none; or a wild index.
    """
    raw = env.get("CUDA_VISIBLE_DEVICES")
    if raw is None:
        return None
    devices: list[str] = []
    for entry in (part.strip() for part in raw.split(",")):
        is_index = entry.isascii() and entry.isdigit()
        if not is_index and not entry.startswith(("GPU-", "MIG-")):
            break
        name = (entry.lstrip("0") or "0") if is_index else entry
        if is_index and (len(name) > 9 or int(name) >= MAX_DEVICES):
            raise SettingsError(
                f"CUDA_VISIBLE_DEVICES must name devices from 0 to {MAX_DEVICES - 1}; it is {raw[:80]!r}."
            )
        if name in devices:
            raise SettingsError(f"CUDA_VISIBLE_DEVICES is {raw[:80]!r}; it names device {name[:80]!r} twice.")
        devices.append(name)
    return tuple(devices)


def _security(read: _Reader, context: SecurityContext) -> tuple[Path | None, bytes | None]:
    raw = context.config_file_path or read.text("MS_CONFIG_FILE")
    password = context.client_password.encode() if context.client_password is not None else None
    if context.enable_ssl is False:
        return None, None
    if context.enable_ssl and not raw:
        raise SettingsError(
            "enable_ssl is True, but there is no config.json.",
            remedy="Give config_file_path or set MS_CONFIG_FILE; muster certs init makes one.",
        )
    return (Path(raw).expanduser().absolute() if raw else None), password


def _check_plaintext(settings: Settings) -> None:
    """Without TLS nothing leaves this machine, unless it is asked for in so many words."""
    if settings.config_path is not None or settings.allow_insecure:
        return
    if not is_loopback(settings.scheduler_host):
        raise SettingsError(
            f"MS_SCHED_HOST is {settings.scheduler_host!r}, but without TLS it must be a loopback address.",
            remedy="Set MS_CONFIG_FILE to a config.json (muster certs init makes one),"
            " or MS_ALLOW_INSECURE=1 to let everybody on the network join, read and forge.",
        )


def is_loopback(host: str) -> bool:
    """Whether an address or name can mean nothing but this machine."""
    import ipaddress

    if host.lower() in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
