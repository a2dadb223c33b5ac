"""What this worker can tell about its machine: identity, address, devices. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import socket
import struct
from pathlib import Path

from muster.rendezvous.value import Value
from muster.worker.config import Settings
from muster.worker.control.messages import Device, Host
from muster.worker.errors import SettingsError

_SIOCGIFADDR = 0x8915


class UnresolvedHostError(SettingsError):
    """MS_SCHED_HOST has no address yet: a mistake, or a name service that is behind."""


class DeviceChoice(Value):
    """The device of this worker.

    Attributes:
        device: as the scheduler is told; its index is that of the host, not of CUDA_VISIBLE_DEVICES.
        ordinal: index among the devices that this process sees, as CUDA counts; -1: its local rank.
        visible_count: devices that this process sees; 0: it computes on the CPU.
    """

    device: Device
    ordinal: int = -1
    visible_count: int = 0


def host_identity() -> str:
    """A hash of what tells machines apart: boot id and network namespace, not the host name."""
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
    """This machine, as the scheduler and the peers are told.

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
    """The node id: as set, else of host and local index, else of host and chance.

    A part of the host's identity keeps two machines with one name apart.
    """
    if settings.node_id:
        return settings.node_id
    name = f"{host.name[:80]}-{hashlib.sha256(host.id.encode()).hexdigest()[:4]}"
    return f"{name}-{settings.local_index}" if settings.local_index >= 0 else f"{name}-{random_hex}"


def _local_address(settings: Settings) -> str:
    if settings.worker_address:
        return settings.worker_address
    if settings.interface:
        return _interface_address(settings.interface, six_first=":" in settings.scheduler_host)
    try:
        found = socket.getaddrinfo(settings.scheduler_host, settings.scheduler_port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        # Connecting a datagram socket sends nothing; it only asks for the route.
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]).partition("%")[0]
    except UnicodeError:  # no name service will ever know it
        raise SettingsError(
            "MS_SCHED_HOST must be an address or a host name, whose parts have 1 to 63 characters;"
            f" it is {settings.scheduler_host!r}."
        ) from None
    except OSError as error:
        raise UnresolvedHostError(
            f"MS_SCHED_HOST is {settings.scheduler_host!r}, and there is no way to it: {error.strerror}.",
            remedy="Check the name and the network, or set MS_WORKER_ADDRESS to an address of this host.",
        ) from None


def _interface_address(name: str, *, six_first: bool) -> str:
    """An address of a network interface, of the scheduler's kind if it has one (Linux)."""
    kinds = (_interface_ipv6, _interface_ipv4) if six_first else (_interface_ipv4, _interface_ipv6)
    for find in kinds:
        address = find(name)
        if address:
            return address
    names = ", ".join(each for _, each in socket.if_nameindex())
    raise SettingsError(
        f"MS_INTERFACE must be a network interface with an address, one of {names}; it is {name!r}."
    )


def _interface_ipv4(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
        return socket.inet_ntoa(answer[20:24])
    return ""


def _interface_ipv6(name: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, scope, _, interface = line.split()
            if interface == name and scope != "20":  # link-local addresses need a zone
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return ""


def choose_device(settings: Settings, root: Path = Path("/")) -> DeviceChoice:
    """Finds out which device this worker computes on, without loading a GPU library.

    Args:
        settings: CUDA_VISIBLE_DEVICES, DEVICE_ID and MS_LOCAL_INDEX.
        root: where ``dev`` and ``proc`` lie.

    Raises:
        SettingsError: DEVICE_ID or MS_LOCAL_INDEX names a device that is not there.
    """
    present = _nvidia_devices(root)
    names = settings.visible_devices
    visible = [str(i) for i in range(len(present))] if names is None else list(names)
    if not present or not visible:
        # It is only a name here, but rank tables list devices by it.
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


def _nvidia_devices(root: Path) -> list[tuple[str, str]]:
    """(PCI bus id, model) of each GPU, in the order of their device files; a container may have but some."""
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
