"""Reads the facts that a worker reports about its machine: identity, address, devices, and others.

The other facts are versions, drivers and NCCL's settings. :func:`join_facts` is part of every join and takes
very little time; :func:`all_facts` collects everything, for ``muster check``. Nothing here imports torch,
CuPy or NumPy.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import os
import re
import socket
import struct
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from muster.errors import SettingsError, WorkerError
from muster.version import __version__
from muster.wire.messages import NCCL_NET, VERSION_FACT, Device, Host, Value
from muster.worker.config import Settings
from muster.worker.gpu_health.identity import GpuIdentity

if TYPE_CHECKING:
    from muster.communicators.base import Backend


_SIOCGIFADDR = 0x8915


class UnresolvedHostError(SettingsError):
    """MS_SCHED_HOST has no address yet, because it is wrong or the name service does not know it yet."""


class DeviceChoice(Value):
    """The device of this worker.

    Attributes:
        device: the device as reported to the scheduler. Its index counts all GPUs of the host, not the
            entries of CUDA_VISIBLE_DEVICES.
        ordinal: CUDA's index among the devices that this process sees; -1 stands for its local rank.
        visible_count: number of devices that this process sees; 0 if it computes on the CPU.
    """

    device: Device
    ordinal: int = -1
    visible_count: int = 0


def host_identity() -> str:
    """Returns a hash of values that differ between machines: boot id and network namespace.

    The host name is used only if neither is available.
    """
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        with contextlib.suppress(OSError):
            parts.append(Path(path).read_text(encoding="ascii").strip())
            break
    with contextlib.suppress(OSError):
        parts.append(str(os.stat("/proc/self/ns/net").st_ino))  # noqa: PTH116 - not a file of the disk
    if not parts:
        parts.append(socket.gethostname())
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def describe_host(settings: Settings) -> Host:
    """Describes this machine for the scheduler and the peers.

    Raises:
        SettingsError: MS_INTERFACE has no address here.
        UnresolvedHostError: MS_SCHED_HOST cannot be resolved or routed to.
    """
    return Host(
        id=settings.host_id or host_identity(),
        name=re.sub(r"[^\x21-\x7e]", "_", socket.gethostname())[:253] or "unnamed",
        address=_local_address(settings),
        topology=settings.topology,
    )


def node_identity(settings: Settings, host: Host, random_hex: str) -> str:
    """Returns the node id: as set, otherwise made of the host and the local index or a random number.

    It includes a part of the host's identity, which distinguishes machines with the same name.
    """
    if settings.node_id:
        return settings.node_id
    name = f"{host.name[:80]}-{hashlib.sha256(host.id.encode()).hexdigest()[:4]}"
    return f"{name}-{settings.local_index}" if settings.local_index >= 0 else f"{name}-{random_hex}"


def _local_address(settings: Settings) -> str:
    if settings.worker_address:
        return settings.worker_address
    if settings.interface:
        return _find_interface(settings.interface, six_first=":" in settings.scheduler_hosts[0])[1]
    for host in settings.scheduler_hosts[:-1]:
        with contextlib.suppress(WorkerError):
            return _address_towards(host, settings.scheduler_port)
    return _address_towards(settings.scheduler_hosts[-1], settings.scheduler_port)


def _address_towards(scheduler: str, port: int) -> str:
    """Returns the address of this host from which the scheduler is reached."""
    try:
        found = socket.getaddrinfo(scheduler, port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        # Connecting a datagram socket sends nothing; it only asks for the route.
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]).partition("%")[0]
    except UnicodeError:  # The name is not valid, so retrying is of no use.
        raise SettingsError(
            "MS_SCHED_HOST must be an address or a host name, whose parts have 1 to 63 characters;"
            f" it is {scheduler!r}."
        ) from None
    except OSError as error:
        raise UnresolvedHostError(
            f"The scheduler's host is {scheduler!r} (--join, MS_SCHED_HOST), and there is no way to it:"
            f" {error.strerror}.",
            remedy="Check the name and the network, or set MS_WORKER_ADDRESS to an address of this host.",
        ) from None


def _find_interface(wanted: str, *, six_first: bool = False) -> tuple[str, str]:
    """Finds a network interface by name, or the first one with an address in a network (10.0.0.0/16).

    Returns:
        The interface's name and one of its addresses: the one in the network; for a name, one of the
            scheduler's address family if there is one (Linux).
    """
    kinds = (_interface_ipv6, _interface_ipv4) if six_first else (_interface_ipv4, _interface_ipv6)
    names = [name for _, name in socket.if_nameindex()]
    network = _network(wanted) if "/" in wanted else None
    for name in names if network else [wanted]:
        for find in kinds:
            address = find(name)
            if address and (network is None or ipaddress.ip_address(address) in network):
                return name, address
    what = "a network, as in 10.0.0.0/16, that one of them is in" if network else "one of them"
    raise SettingsError(
        f"MS_INTERFACE must be a network interface with an address, {what} ({', '.join(names)});"
        f" it is {wanted!r}."
    )


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise SettingsError(f"MS_INTERFACE is {text!r}, which is no network: {error}.") from None


def _interface_ipv4(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
        return socket.inet_ntoa(answer[20:24])
    return ""


def _interface_ipv6(name: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, scope, _, interface = line.split()
            if interface == name and scope != "20":  # Link-local addresses need a zone.
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return ""


def choose_device(settings: Settings, root: Path = Path("/")) -> DeviceChoice:
    """Determines the device of this worker, without loading a GPU library.

    Args:
        settings: CUDA_VISIBLE_DEVICES, DEVICE_ID and MS_LOCAL_INDEX.
        root: directory that contains ``dev`` and ``proc``.

    Raises:
        SettingsError: DEVICE_ID or MS_LOCAL_INDEX names a device that does not exist.
    """
    present = nvidia_devices(root)
    names = settings.visible_devices
    visible = [str(i) for i in range(len(present))] if names is None else list(names)
    if not present or not visible:
        # The device is only a name here, but rank tables list devices by it.
        index = settings.device_id if settings.device_id >= 0 else settings.local_index
        return DeviceChoice(Device(kind="cpu", index=index))
    ordinal = _ordinal(settings, len(visible))
    if ordinal < 0:
        return DeviceChoice(Device(kind="cuda", index=-1), -1, len(visible))
    name = visible[ordinal]
    index = int(name) if name.isdigit() else ordinal
    bus_id, model = present[index] if index < len(present) else ("", "")
    return DeviceChoice(Device("cuda", index, bus_id, model), ordinal, len(visible))


def _ordinal(settings: Settings, count: int) -> int:
    for variable, value in (("DEVICE_ID", settings.device_id), ("MS_LOCAL_INDEX", settings.local_index)):
        if value < 0:
            continue
        if value >= count and not (variable == "MS_LOCAL_INDEX" and count == 1):
            raise SettingsError(
                f"{variable} must be from 0 to {count - 1}, because {count} GPUs are visible; it is {value}."
            )
        return min(value, count - 1)
    return 0 if count == 1 else -1


def visible_gpu(settings: Settings, ordinal: int, root: Path = Path("/")) -> GpuIdentity:
    """Identifies the GPU that has CUDA's number ``ordinal`` in this process."""
    names = settings.visible_devices
    name = str(ordinal) if names is None or ordinal >= len(names) else names[ordinal]
    if not name.isdigit():
        return GpuIdentity(uuid=name)
    present, index = nvidia_devices(root), int(name)
    bus_id = present[index][0] if index < len(present) else ""
    return GpuIdentity(index, bus_id, _uuid_at(root, bus_id))


def _uuid_at(root: Path, bus_id: str) -> str:
    """Returns the driver's uuid of the GPU at this PCI bus id; empty if /proc does not have it."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = (root / f"proc/driver/nvidia/gpus/{bus_id}/information").read_text(encoding="utf-8")
        found = _UUID.search(text) if bus_id else None
        return found[1] if found else ""
    return ""


def nvidia_devices(root: Path) -> list[tuple[str, str]]:
    """Returns (PCI bus id, model) of each GPU, in the order of the device files.

    A container may have the files of only some GPUs.
    """
    names = (path.name[6:] for path in root.glob("dev/nvidia[0-9]*"))
    minors = sorted(int(name) for name in names if name.isdigit())
    if not minors:
        return []
    known: dict[int, tuple[str, str]] = {}
    for file in root.glob("proc/driver/nvidia/gpus/*/information"):
        with contextlib.suppress(OSError, ValueError):
            pairs = (line.partition(":") for line in file.read_text(encoding="utf-8").splitlines())
            facts = {key.strip(): value.strip() for key, _, value in pairs}
            known[int(facts["Device Minor"])] = (facts.get("Bus Location", ""), facts.get("Model", ""))
    return [known.get(minor, ("", "")) for minor in minors]


SOFT = "~"
"""Prefix of the name of a fact for which a difference causes only a warning."""

MUST_AGREE_LIBRARIES = ("torch", "cupy", "cuda")
"""Libraries that may compute or communicate differently in different versions."""

MUST_AGREE_NCCL = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_COMM_ID",
    "NCCL_IB_DISABLE",
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_NTHREADS",
    "NCCL_BUFFSIZE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_CTAS",
    "NCCL_MIN_CTAS",
    "NCCL_NVLS_ENABLE",
    "NCCL_CROSS_NIC",
)
"""Settings of NCCL that must be the same on all ranks, which otherwise hang or fail."""

PROJECTS = {
    **{name: (name,) for name in ("numpy", "grpcio", "protobuf", "cryptography", "torch", "nccl4py")},
    "cupy": ("cupy_cuda13x", "cupy_cuda12x", "cupy"),
    "nccl": ("nvidia_nccl_cu13", "nvidia_nccl_cu12"),
    "cuda": ("nvidia_cuda_runtime", "nvidia_cuda_runtime_cu13", "nvidia_cuda_runtime_cu12"),
}
"""For each package that is compared, the projects that may install it; the first one found is used."""
_INSTALLED = re.compile(r"([\w.]+)-([\w.+!]{1,64})(?:-.*)?\.(?:dist|egg)-info", re.ASCII)
_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-f-]{36})\s*$", re.M)
_DRIVER = re.compile(r"^NVRM version:.*?\s(\d+\.\d[\d.]*)\s", re.M)


def join_facts(
    plane: Backend,
    env: Mapping[str, str],
    root: Path = Path("/"),
    path: Iterable[str] | None = None,
) -> dict[str, str]:
    """Returns the facts that a worker sends when it joins.

    The scheduler refuses a worker if one of its facts differs from the others'. If the name begins with
    ``~``, it only warns.

    Args:
        plane: the data plane; may add ``facts`` of its own.
        env: the process's environment.
        root: directory that contains ``proc``.
        path: folders in which packages are installed; None for those of this process.
    """
    facts = {VERSION_FACT: __version__, **plane.facts}
    if plane.on_device:
        nccl = {name: env.get(name, "") for name in MUST_AGREE_NCCL}
        if nccl["NCCL_NET"] == NCCL_NET:  # Muster's plug-in may be in a different place on each host.
            del nccl["NCCL_NET_PLUGIN"]
        facts |= {name: value[:256] for name, value in nccl.items() if value and value.isprintable()}
        facts |= package_versions(MUST_AGREE_LIBRARIES, path)
        driver = driver_version(root)
        if driver:
            facts[f"{SOFT}driver"] = driver
    return facts


def all_facts(env: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """Returns all facts that ``muster check`` compares; missing ones are left out.

    Args:
        env: the process's environment.
        root: directory that contains ``proc`` and ``dev``.
    """
    import platform

    facts = {
        "muster": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "driver": driver_version(root),
        **package_versions(PROJECTS),
        **{name: env[name] for name in sorted(env) if name.startswith("NCCL_")},
    }
    gpus = gpu_models(root)
    facts["gpus"] = str(len(gpus))
    facts["gpu model"] = ", ".join(sorted(set(gpus)))
    return {name: value[:200] for name, value in facts.items() if value}


def driver_version(root: Path = Path("/")) -> str:
    """Returns the NVIDIA driver's version, from /proc; empty if there is none."""
    try:
        found = _DRIVER.search((root / "proc/driver/nvidia/version").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""
    return found[1] if found else ""


def gpu_models(root: Path = Path("/")) -> list[str]:
    """Returns the model of each GPU of this host, from /proc."""
    models = []
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        lines = (
            line.partition(":") for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        )
        models.append(next((value.strip() for key, _, value in lines if key.strip() == "Model"), "unknown"))
    return models or ["unknown" for path in root.glob("dev/nvidia[0-9]*") if path.name[6:].isdigit()]


def package_versions(names: Iterable[str], path: Iterable[str] | None = None) -> dict[str, str]:
    """Returns the versions of installed packages, from the names of their metadata folders.

    Importing ``importlib.metadata`` would take longer than this function.

    Args:
        names: keys of :data:`PROJECTS`.
        path: folders to look in; None: ``sys.path``.

    Returns:
        The versions of the installed packages, by name.
    """
    installed: dict[str, str] = {}
    for folder in sys.path if path is None else path:
        try:
            listed = os.listdir(folder or ".")  # noqa: PTH208 - iterdir() makes a Path of each
        except OSError:  # The folder does not exist, or is an archive.
            continue
        metadata = sorted(entry for entry in listed if entry.endswith("-info"))
        for found in filter(None, map(_INSTALLED.fullmatch, metadata)):
            installed.setdefault(found[1].replace(".", "_").lower(), found[2])
    first = {name: next(filter(None, map(installed.get, PROJECTS[name])), "") for name in names}
    return {name: version for name, version in first.items() if version}


def bind_libraries(interface: str) -> None:
    """Makes NCCL and Gloo use the interface of MS_INTERFACE, unless their own variables name another.

    Both read the variables when they first open a socket, in this process.
    """
    if interface:
        interface = _find_interface(interface)[0] if "/" in interface else interface
        # "=" selects exactly this name, not all that begin with it.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
