"""Finds this host's GPUs, cores and names. Nothing here loads CUDA."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from muster.worker.config import visible_devices
from muster.worker.errors import SettingsError
from muster.worker.launch.parsing import parse_numbers


def count_gpus(root: Path = Path("/")) -> int:
    """GPUs that this host or container has device files for."""
    return sum(path.name[6:].isdigit() for path in root.glob("dev/nvidia[0-9]*"))


def offered_devices(env: Mapping[str, str], option: str, gpus: int) -> tuple[str, ...]:
    """The devices that workers may have, in order, as names that CUDA_VISIBLE_DEVICES takes.

    Args:
        env: CUDA_VISIBLE_DEVICES narrows what the host has.
        option: ``all``, ``none``, or numbers such as ``4-7`` that must be among them.
        gpus: GPUs of the host.

    Raises:
        SettingsError: a device is named that is not there, or twice.
    """
    if option == "none":
        return ()
    visible = tuple(str(index) for index in range(gpus))
    # By the workers' rule: what they would refuse ends here already.
    narrowed = visible_devices(env) if "CUDA_VISIBLE_DEVICES" in env else None
    if narrowed is not None and gpus:
        unknown = [name for name in narrowed if name.isdigit() and name not in visible]
        if unknown:
            raise SettingsError(
                f"CUDA_VISIBLE_DEVICES is {env['CUDA_VISIBLE_DEVICES']!r}, but this host has {_have(gpus)}."
            )
        visible = narrowed
    if option == "all":
        return visible
    chosen = tuple(str(number) for number in parse_numbers(option, "--devices"))
    missing = [name for name in chosen if name not in visible]
    if missing:
        have = ", ".join(visible) or "none"
        raise SettingsError(f"--devices asks for {', '.join(missing)}; this host offers {have}.")
    return chosen


def _have(gpus: int) -> str:
    return "device 0" if gpus == 1 else f"devices 0 to {gpus - 1}"


def local_names(candidates: Iterable[str]) -> set[str]:
    """Returns those host names and addresses that mean this host; its own name is always among them."""
    own = socket.gethostname()
    names = {own, own.split(".")[0]}
    return names | {name for name in candidates if name not in names and _is_local(name)}


def _is_local(name: str) -> bool:
    """Whether an address of this name can be bound here, which only one's own can."""
    try:
        infos = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # the latter: no name service will ever know it
        return False
    for family, kind, protocol, _, address in infos:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def hold_port(host: str) -> socket.socket:
    """A socket bound to a port on which nothing listens. Until it is closed nobody is given that port.

    A server that asks for this very port still gets it, where it sets SO_REUSEADDR as gRPC does.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def cores() -> tuple[int, ...]:
    """The cores this process may use, in order."""
    return tuple(sorted(os.sched_getaffinity(0)))


def is_taken(host: str, port: int) -> bool:
    """Whether another process listens on this port of this host already."""
    with contextlib.suppress(OSError, UnicodeError):  # what else is wrong with them the scheduler reports
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(address)
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        return True
    return False
