"""A worker's settings: read from the environment once, checked, and frozen.

Includes variables of other launchers.

Names and meanings are those of MindSpore. Variables of mpirun, srun, torchrun and indexed jobs are translated
into them. A wrong value is refused in one sentence that names the variable, the value and the legal range.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from muster.errors import SettingsError
from muster.wire.files import path_of
from muster.wire.messages import Value
from muster.wire.settings import (
    Environment,
    is_loopback,
    shared_settings,
    show_address,
)
from muster.wire.variables import MAX_DEVICES, default_of
from muster.worker.gpu_health.judgement import GpuLimits


class ForeignLauncher(Value):
    """The variables of one launcher; an empty name means that it has no such variable.

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

# The shell that salloc opens on a node runs in a step of its own. Its variables describe it as task 0, but it
# is not a task.
INTERACTIVE_STEP = "4294967290"


def detect(env: Mapping[str, str]) -> ForeignLauncher | None:
    """Finds the launcher that started this process; None if there is none.

    Muster's own launcher has precedence.
    """
    if "MS_LOCAL_INDEX" in env:
        return None
    return next((one for one in LAUNCHERS if _marked(env, one.marker) and env.get(one.rank)), None)


def _marked(env: Mapping[str, str], marker: str) -> bool:
    value = env.get(marker)
    return bool(value) and (marker, value) != ("SLURM_STEP_ID", INTERACTIVE_STEP)


def translate(env: Mapping[str, str]) -> dict[str, str]:
    """Translates another launcher's variables into Muster's.

    Args:
        env: the process's environment.

    Returns:
        Only variables that ``env`` lacks: MS_ROLE, MS_NODE_ID (the launcher's rank), MS_WORKER_NUM and
            MS_LOCAL_INDEX. Empty if there is no known launcher, or if the process is not a worker. Values are
            passed on unchanged; the parser of the variables checks them.
    """
    launcher = detect(env)
    if env.get("MS_ROLE", "MS_WORKER") != "MS_WORKER":
        return {}
    if launcher is None:  # A script that starts the processes of a rank table sets only the rank.
        return {"MS_ROLE": "MS_WORKER"} if not env.get("MS_ROLE") and _ranked_by_table(env) else {}
    found = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": env[launcher.rank]}
    for name, source in (("MS_WORKER_NUM", launcher.size), ("MS_LOCAL_INDEX", launcher.local_index)):
        if source and env.get(source):
            found[name] = env[source]
    if table_file(env):
        del found["MS_NODE_ID"]  # The table determines the ranks, by host and device.
    return {name: value for name, value in found.items() if not env.get(name)}


def _ranked_by_table(env: Mapping[str, str]) -> bool:
    return bool(env.get("RANK_ID") and table_file(env))


def node_rank(env: Mapping[str, str]) -> int | None:
    """Returns the number of this host, if srun or an indexed job has started a launcher on each host."""
    for variable, marker in (
        ("SLURM_NODEID", "SLURM_STEP_ID"),
        ("JOB_COMPLETION_INDEX", "JOB_COMPLETION_INDEX"),
    ):
        value = env.get(variable, "")
        if _marked(env, marker) and value.isascii() and value.isdigit() and len(value) <= 9:
            return int(value)
    return None


def table_file(env: Mapping[str, str]) -> str:
    """Returns the rank table that the environment names, under its present or its old variable.

    Empty if there is none.

    Raises:
        SettingsError: the two variables name different files.
    """
    return Environment(env, SettingsError).rank_table_file()[1]


class SecurityContext(Value):
    """The arguments of ``set_ps_context``, which win over the environment.

    Args:
        config_file_path: config.json.
        enable_ssl: None: TLS is on when there is a config.json.
        client_password: password of the worker's PKCS#12 file.
        server_password: password of the scheduler's PKCS#12 file; not used in a worker.
    """

    secret_fields = (
        "client_password",
        "server_password",
    )
    config_file_path: str | None = None
    enable_ssl: bool | None = None
    client_password: str | None = None
    server_password: str | None = None

    def config_file(self, variable: str) -> str:
        """Returns the config.json to use; empty if there is none, which means no TLS.

        Args:
            variable: the value of MS_CONFIG_FILE.

        Raises:
            SettingsError: TLS is required, and there is no config.json.
        """
        if self.enable_ssl is False:
            return ""
        found = self.config_file_path or variable
        if self.enable_ssl and not found:
            raise SettingsError(
                "enable_ssl is True, but there is no config.json.",
                remedy="Give config_file_path or set MS_CONFIG_FILE; muster certs init makes one.",
            )
        return found

    def for_scheduler(self, env: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment with these arguments added, for a scheduler.

        Raises:
            SettingsError: TLS is required, and there is no config.json.
        """
        given = {**env, "MS_CONFIG_FILE": str(self.config_file(env.get("MS_CONFIG_FILE", "")))}
        if self.server_password is not None:
            given["MS_SERVER_PASSWORD"] = self.server_password
            given.pop("MS_SERVER_PASSWORD_FILE", None)
        return given


class Settings(Value):
    """A worker's settings, as read at its start. Times in seconds.

    ``scheduler_hosts`` lists all schedulers of the job, one of which leads. ``waits_without_limit``: whether
    to wait without limit while none of them leads, because there are several and MS_RECONNECT_TIMEOUT is not
    set. ``gpu_limits`` are the values of the GPU above which a warning is given. ``visible_devices`` None:
    all devices. ``device_id``, ``local_index`` and ``rank_id`` -1: not set. ``nccl_connections`` and
    ``nccl_accept_timeout_s`` are read by NCCL's plug-in, and only checked here. ``node_id``, ``host_id``,
    ``worker_address``, ``interface``, ``backend`` and ``topology`` may be empty.
    """

    secret_fields = ("client_password",)

    worker_num: int
    worker_min: int
    scheduler_hosts: tuple[str, ...] = (default_of("MS_SCHED_HOST"),)
    scheduler_port: int = default_of("MS_SCHED_PORT")
    job_id: str = default_of("MS_JOB_ID")
    node_id: str = ""
    spare: bool = False
    topo_timeout_s: float = default_of("MS_TOPO_TIMEOUT")
    last_call_s: float = default_of("MS_LAST_CALL_TIMEOUT")
    node_timeout_s: float = default_of("MS_NODE_TIMEOUT")
    collective_timeout_s: float = default_of("MS_COLLECTIVE_TIMEOUT")
    reconnect_timeout_s: float = default_of("MS_RECONNECT_TIMEOUT")
    waits_without_limit: bool = False
    leave_timeout_s: float = default_of("MS_LEAVE_TIMEOUT")
    host_id: str = ""
    topology: str = ""
    interface: str = ""
    worker_address: str = ""
    local_index: int = default_of("MS_LOCAL_INDEX")
    backend: str = ""
    nccl_encryption: str = default_of("MS_NCCL_ENCRYPTION")
    nccl_connections: int = default_of("MS_NCCL_CONNECTIONS")
    nccl_accept_timeout_s: int = default_of("MS_NCCL_ACCEPT_TIMEOUT")
    gpu_limits: GpuLimits = GpuLimits()
    gpu_check: str = default_of("MS_GPU_CHECK")
    visible_devices: tuple[str, ...] | None = None
    device_id: int = default_of("DEVICE_ID")
    rank_id: int = default_of("RANK_ID")
    config_path: Path | None = None
    client_password: bytes | None = None
    allow_insecure: bool = False
    log_level: str = default_of("MS_LOG_LEVEL")
    log_format: str = default_of("MS_LOG_FORMAT")

    @property
    def scheduler_address(self) -> str:
        """``host:port`` of the scheduler, with IPv6 addresses in brackets.

        Several schedulers are separated by commas.
        """
        return ",".join(show_address(host, self.scheduler_port) for host in self.scheduler_hosts)


def load_settings(env: Mapping[str, str], context: SecurityContext | None = None) -> Settings:
    """Reads and checks a worker's settings from the environment.

    Args:
        env: the environment. Variables of mpirun, srun, torchrun or an indexed job are used where MS_*
            variables are not set.
        context: the arguments of ``set_ps_context``.

    Raises:
        SettingsError: a value is missing or out of range, or contradicts another one.
    """
    read = Environment({**env, **translate(env)}, SettingsError)
    shared = shared_settings(read, "MS_WORKER")
    worker_num, worker_min = read.worker_counts()
    hosts = read.hosts("MS_SCHED_HOST")
    config_path, password = _security(read, context or SecurityContext())
    settings = Settings(
        worker_num=worker_num,
        worker_min=worker_min,
        scheduler_hosts=hosts,
        scheduler_port=read.integer("MS_SCHED_PORT"),
        **shared,
        node_id=_node_id(read),
        spare=read.flag("MS_WORKER_SPARE"),
        last_call_s=read.seconds("MS_LAST_CALL_TIMEOUT"),
        collective_timeout_s=read.seconds("MS_COLLECTIVE_TIMEOUT"),
        reconnect_timeout_s=read.seconds("MS_RECONNECT_TIMEOUT"),
        waits_without_limit=len(hosts) > 1 and not read.text("MS_RECONNECT_TIMEOUT"),
        leave_timeout_s=read.seconds("MS_LEAVE_TIMEOUT"),
        host_id=read.name("MS_HOST_ID"),
        topology=read.name("MS_TOPOLOGY", blanks=True),
        interface=read.name("MS_INTERFACE"),
        worker_address=read.host("MS_WORKER_ADDRESS"),
        local_index=read.integer("MS_LOCAL_INDEX"),
        backend=read.choice("MS_BACKEND"),
        nccl_encryption=read.choice("MS_NCCL_ENCRYPTION"),
        nccl_connections=read.integer("MS_NCCL_CONNECTIONS"),
        nccl_accept_timeout_s=read.integer("MS_NCCL_ACCEPT_TIMEOUT"),
        gpu_limits=GpuLimits(
            celsius=read.integer("MS_GPU_MAX_CELSIUS"),
            uncorrected_errors=read.integer("MS_GPU_MAX_ECC_ERRORS"),
            nvlink_errors=read.integer("MS_GPU_MAX_NVLINK_ERRORS"),
        ),
        gpu_check=read.choice("MS_GPU_CHECK"),
        visible_devices=visible_devices(env),
        device_id=read.integer("DEVICE_ID"),
        rank_id=read.integer("RANK_ID", high=worker_num - 1),
        config_path=config_path,
        client_password=password,
    )
    _check_plaintext(settings)
    return settings


def _node_id(read: Environment) -> str:
    value = read.name("MS_NODE_ID")
    if value == "*" or value in (".", ".."):
        raise SettingsError(f"MS_NODE_ID must be a name; it is {value!r}.")
    return value


def visible_devices(env: Mapping[str, str]) -> tuple[str, ...] | None:
    """Parses CUDA_VISIBLE_DEVICES by CUDA's rule: the list ends at the first entry that is not a device.

    Returns:
        Indices without leading zeros, and identities (``GPU-...``, ``MIG-...``), in order; None if it is not
        set.

    Raises:
        SettingsError: a device is listed twice, in which case CUDA would show none; or an index is out of
            range.
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


def _security(read: Environment, context: SecurityContext) -> tuple[Path | None, bytes | None]:
    raw = context.config_file(read.text("MS_CONFIG_FILE"))
    if context.enable_ssl is False:
        return None, None
    password = context.client_password.encode() if context.client_password is not None else None
    return (path_of(raw) if raw else None), password


def _check_plaintext(settings: Settings) -> None:
    """Refuses to use plaintext beyond loopback, unless MS_ALLOW_INSECURE allows it."""
    if settings.config_path is not None or settings.allow_insecure:
        return
    if not all(map(is_loopback, settings.scheduler_hosts)):
        hosts = ",".join(settings.scheduler_hosts)
        raise SettingsError(
            f"MS_SCHED_HOST is {hosts!r}, but without TLS it must be a loopback address.",
            remedy="Set MS_CONFIG_FILE to a config.json (muster certs init makes one),"
            " or MS_ALLOW_INSECURE=1 to let everybody on the network join, read and forge.",
        )
