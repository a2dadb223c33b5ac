"""Reads from sysfs which cores, GPUs and network cards of this host lie near each other."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from muster.launch.placement import HostHardware, PciPlace

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1
_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def read_hardware(bus_ids: Sequence[str], root: Path = Path("/")) -> HostHardware:
    """Reads where the host's cores, memory, GPUs and network cards are; leaves out what cannot be read.

    Args:
        bus_ids: the PCI bus ids of the requested GPUs, as the driver writes them.
        root: where ``sys`` and ``proc`` lie.
    """
    nodes = {}
    for folder in root.glob("sys/devices/system/node/node[0-9]*"):
        if cores := parse_list(_read(folder / "cpulist")):
            nodes[int(folder.name[4:])] = cores
    gpus = {bus_id: _place(root / "sys/bus/pci/devices" / _in_sysfs(bus_id)) for bus_id in bus_ids}
    adapters = {
        folder.name: _place(folder / "device")
        for folder in root.glob("sys/class/infiniband/*")
        if any(_read(port).startswith("4:") for port in folder.glob("ports/*/state"))  # 4: ACTIVE
    }
    interfaces = {
        folder.name: _place(folder / "device")
        for folder in root.glob("sys/class/net/*")
        if _read(folder / "operstate") == "up"
    }
    return HostHardware(
        dict(sorted(nodes.items())),
        _memory_nodes(root),
        {bus_id: place for bus_id, place in gpus.items() if place is not None},
        {name: place for name, place in sorted(adapters.items()) if place is not None},
        {name: place for name, place in sorted(interfaces.items()) if place is not None},
    )


def prefer_memory_of(node: int) -> None:
    """Makes this process, and those that it starts, prefer the memory of a NUMA node.

    The node is preferred, but not the only one allowed: a worker that needs more memory gets it from other
    nodes instead of being killed.

    Raises:
        OSError: the kernel, or a container's filter of system calls, refuses it.
    """
    _set_mempolicy(_MPOL_PREFERRED, node)


def parse_list(text: str) -> tuple[int, ...]:
    """Reads the kernel's lists of numbers: ``0-3,8`` is 0, 1, 2, 3, 8; empty if it is not such a list."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            return ()
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def _memory_nodes(root: Path) -> frozenset[int]:
    """Returns the nodes of ``Mems_allowed_list``, if a process here may choose among them at all."""
    found = re.search(r"^Mems_allowed_list:\s*(\S+)$", _read(root / "proc/self/status"), re.M)
    try:
        _set_mempolicy(_MPOL_DEFAULT, None)  # the present policy, so this asks without a change
    except OSError:
        return frozenset()
    return frozenset(parse_list(found[1])) if found else frozenset()


def _set_mempolicy(mode: int, node: int | None) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(f"memory cannot be chosen on {platform.machine()}")
    words = 0 if node is None else node // 64 + 1
    mask = (ctypes.c_uint64 * max(words, 1))()
    if node is not None:
        mask[node // 64] = 1 << node % 64
    bits = words * 64 + 1 if words else 0  # the kernel reads one bit fewer than this number
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(number, mode, mask if words else None, ctypes.c_ulong(bits)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _place(link: Path) -> PciPlace | None:
    with contextlib.suppress(OSError):
        target = link.resolve(strict=True)
        path = tuple(
            part for part in target.parts if part.startswith("pci") or _BUS_ID.fullmatch(part.lower())
        )
        node = _read(target / "numa_node")
        if path:
            return PciPlace(int(node) if node.isdigit() else -1, path)
    return None


def _in_sysfs(bus_id: str) -> str:
    """Converts a PCI address to sysfs' form: the driver writes some domains with eight digits, sysfs four."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
