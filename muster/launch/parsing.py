"""Parses values of the launcher's options: hosts, hostfiles, number lists, addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muster.errors import SettingsError
from muster.wire.variables import default_of

DEFAULT_PORT: int = default_of("MS_SCHED_PORT")


@dataclass(frozen=True, slots=True)
class HostShare:
    """One host of ``-H`` or of a hostfile, with its number of workers."""

    name: str
    slots: int


def _whole_number(text: str, what: str, low: int, high: int) -> int:
    digits = text.isascii() and text.isdigit() and len(text) <= 9  # int() refuses thousands of them
    if not (digits and low <= int(text) <= high):
        raise SettingsError(f"{what} is {text[:80]!r}; it must be a whole number from {low} to {high}.")
    return int(text)


def parse_hosts(text: str) -> tuple[HostShare, ...]:
    """Reads ``-H``: ``host1:8,host2:8``; without a count a host takes one; ``[::1]:8`` for IPv6."""
    return _refuse_repeats([_parse_host(item.strip()) for item in text.split(",")], "-H")


def _parse_host(item: str) -> HostShare:
    name, colon, count = item.rpartition(":")
    if not colon or item.endswith("]"):
        name, count = item, "1"
    if not name.strip("[]") or (":" in name and not name.startswith("[")):
        raise SettingsError(f"-H has {item!r}; write HOST:COUNT, an IPv6 address as [ADDRESS]:COUNT.")
    return HostShare(name.strip("[]"), _whole_number(count, f"The count of {name!r} in -H", 1, 4096))


def parse_hostfile(text: str, path: str) -> tuple[HostShare, ...]:
    """Reads a hostfile with a line ``HOST slots=COUNT`` per host; ignores ``#`` comments and ``max_slots=``.

    Raises:
        SettingsError: names the file and the line.
    """
    shares = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        name = words[0]
        rest = [word for word in words[1:] if not word.startswith(("max_slots=", "max-slots="))]
        key, equals, count = rest[0].partition("=") if rest else ("slots", "=", "1")
        if len(rest) > 1 or key != "slots" or not equals:
            raise SettingsError(f"{where}: {line.strip()!r} is not of the form HOST slots=COUNT.")
        shares.append(HostShare(name.strip("[]"), _whole_number(count, f"{where}: slots", 1, 4096)))
    if not shares:
        raise SettingsError(f"{path} names no host; write one HOST slots=COUNT a line.")
    return _refuse_repeats(shares, path)


def _refuse_repeats(shares: Sequence[HostShare], where: str) -> tuple[HostShare, ...]:
    names = [share.name for share in shares]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"{where} names {name!r} twice; add its counts up in one entry.")
    return tuple(shares)


def parse_numbers(text: str, what: str) -> tuple[int, ...]:
    """Reads ``4-7,9`` as (4, 5, 6, 7, 9)."""
    numbers: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        first = _whole_number(low, what, 0, 4095)
        last = _whole_number(high, what, 0, 4095) if dash else first
        if last < first:
            raise SettingsError(f"{what} has the range {part.strip()!r}, which runs backwards.")
        numbers += range(first, last + 1)
    if len(set(numbers)) != len(numbers):
        raise SettingsError(f"{what} is {text!r}; it names a number twice.")
    return tuple(numbers)


def parse_addresses(text: str) -> tuple[str, str]:
    """Reads the ``HOST:PORT`` of one or, separated by commas, several schedulers; returns hosts and port.

    Raises:
        SettingsError: an entry is not an address, or the ports differ.
    """
    each = [parse_address(part.strip()) for part in text.split(",")]
    if len({port for _, port in each}) > 1:
        raise SettingsError(f"--join is {text!r}; all schedulers of a job have the same port.")
    return ",".join(host for host, _ in each), each[0][1]


def parse_address(text: str) -> tuple[str, str]:
    """Reads ``HOST:PORT`` (``[::1]:6667`` for IPv6); the port may be missing."""
    name, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        name, port = text, str(DEFAULT_PORT)
    if not name.strip("[]") or (":" in name and not name.startswith("[")):
        raise SettingsError(f"--join is {text!r}; write HOST:PORT, an IPv6 address as [ADDRESS]:PORT.")
    return name.strip("[]"), str(_whole_number(port, "The port of --join", 1, 65535))
