"""Determines the addresses that the scheduler listens on, and says why one cannot be bound."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from muster.scheduler.errors import BindError, SchedulerSettingsError
from muster.wire.settings import show_address


def resolve(hosts: Sequence[str]) -> list[str]:
    """Resolves host names or addresses to the numeric addresses to listen on.

    Raises:
        SchedulerSettingsError: none of the names can be resolved.
    """
    found: list[str] = []
    failure: SchedulerSettingsError | None = None
    for host in hosts:
        try:
            found += _addresses(host)
        except SchedulerSettingsError as error:
            failure = error
    if failure is not None and not found:
        raise failure
    return list(dict.fromkeys(found))


def _addresses(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SchedulerSettingsError(f"MS_SCHED_HOST {host!r} cannot be resolved: {reason}.") from error
    return [str(address[4][0]) for address in found]


def usable(addresses: list[str], port: int) -> list[str]:
    """Tries to bind each address, because gRPC's own message does not say why a bind fails.

    Returns:
        The addresses that this machine has; at least one.

    Raises:
        BindError: the port is taken or forbidden, or none of the addresses is this machine's.
    """
    good: list[str] = []
    foreign: list[str] = []
    for address in addresses:
        code = _try(address, port)
        where = show_address(address, port)
        if code == errno.EADDRINUSE:
            raise BindError(
                f"Another process already listens on {where}.",
                remedy="Is a scheduler running there? Ask it with python -m scheduler status,"
                " stop it, or choose another MS_SCHED_PORT.",
            )
        if code == errno.EACCES:
            raise BindError(
                f"Listening on {where} is not permitted.", remedy="Choose an MS_SCHED_PORT above 1023."
            )
        (foreign if code else good).append(address)
    if not good:
        raise BindError(
            f"None of this machine's interfaces has the address {' or '.join(foreign)}.",
            remedy="Run the scheduler on the machine that MS_SCHED_HOST names,"
            " or give the address to listen on with --bind.",
        )
    return good


def _try(address: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            info = socket.getaddrinfo(address, port, family, socket.SOCK_STREAM)[0]
            probe.bind(info[4])
            probe.listen(1)
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0
