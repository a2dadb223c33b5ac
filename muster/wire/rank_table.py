"""Rank tables: fixed ranks by host and device, in both of MindSpore's JSON layouts.

``server_list`` (from r1.x on) lists servers with their devices. ``group_list`` (r0.x) lists instances, each
with its server, device and rank. Numbers may be JSON numbers or strings, because existing tables use both.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from muster.wire.messages import Value
from muster.wire.variables import MAX_DEVICES, MAX_WORKERS

MAX_TOLD = 300
"""The largest number of characters of a table's own text that an error message shows."""

MAX_NAME = 253
"""The largest number of characters of a server's name, as for any host name."""


class RankTableEntry(Value):
    """One entry of a rank table: the rank of one device of one server."""

    rank: int
    server_id: str
    device_index: int


class RankTable(Value):
    """Fixed ranks by host and device; entries in order of rank, ranks dense from 0."""

    entries: tuple[RankTableEntry, ...]

    @functools.cached_property
    def rank_at(self) -> Mapping[tuple[str, int], int]:
        """Ranks by server and device index."""
        return {(entry.server_id, entry.device_index): entry.rank for entry in self.entries}


class RankTableError(ValueError):
    """A rank table cannot be used.

    Attributes:
        where: the place in the document, such as ``server_list[0].device[3].rank_id``.
        what: the fault at that place.
    """

    def __init__(self, where: str, what: str) -> None:
        self.where = where
        self.what = what if len(what) <= MAX_TOLD else f"{what[: MAX_TOLD - 3]}..."
        super().__init__(f"{where}: {self.what}")


def parse_rank_table(document: object) -> RankTable:
    """Reads a JSON-decoded rank table of either layout.

    Raises:
        RankTableError: the table is not valid; the error says where and why.
    """
    placed = placed_entries(document)
    status = document.get("status", "completed") if isinstance(document, Mapping) else ""
    if status != "completed":
        raise RankTableError("status", f"is {status!r}; only a completed table can be used")
    return _checked(placed)


def placed_entries(document: object) -> list[tuple[str, RankTableEntry]]:
    """Returns the entries of a JSON-decoded table of either layout, each with its place; checks no ranks.

    Raises:
        RankTableError: an entry is not valid; the error says where and why.
    """
    root = _mapping(document, "the document")
    if "server_list" in root and "group_list" in root:
        raise RankTableError("the document", "has both server_list and group_list; keep one of them")
    if "server_list" not in root and "group_list" not in root:
        raise RankTableError("the document", "has neither server_list nor group_list")
    placed = list(_server_list(root) if "server_list" in root else _group_list(root))
    if len(placed) > MAX_WORKERS:
        raise RankTableError("the document", f"names {len(placed)} devices; {MAX_WORKERS} are allowed")
    return placed


def ranks_of(table: RankTable, names: Collection[str], devices: Sequence[int]) -> tuple[int | None, ...]:
    """Returns the ranks that a table gives to one host's workers.

    Args:
        table: the table.
        names: the names by which a server_id may refer to this host.
        devices: the device index of each worker.

    Returns:
        The rank of each worker; None if the table has no rank for its device, or if another worker has the
            same device.
    """
    ranks: dict[int, int] = {}
    for entry in table.entries:
        if entry.server_id in names:
            ranks.setdefault(entry.device_index, entry.rank)
    counts = Counter(devices)
    return tuple(ranks.get(device) if counts[device] == 1 else None for device in devices)


def devices_of(table: RankTable, names: Collection[str]) -> tuple[int, ...]:
    """Returns the devices of the host with these names in a table, in order of rank."""
    return tuple(dict.fromkeys(entry.device_index for entry in table.entries if entry.server_id in names))


def _server_list(root: Mapping[str, object]) -> Iterator[tuple[str, RankTableEntry]]:
    servers = _sequence(root, "server_list", "")
    _expect_count(root, "server_count", len(servers), "")
    for number, item in enumerate(servers):
        where = f"server_list[{number}]"
        server = _mapping(item, where)
        server_id = _text(server, "server_id", where)
        for index, device_item in enumerate(_sequence(server, "device", where)):
            place = f"{where}.device[{index}]"
            device = _mapping(device_item, place)
            yield place, _entry(device, device, server_id, place)


def _group_list(root: Mapping[str, object]) -> Iterator[tuple[str, RankTableEntry]]:
    groups = _sequence(root, "group_list", "")
    _expect_count(root, "group_count", len(groups), "")
    for number, item in enumerate(groups):
        where = f"group_list[{number}]"
        yield from _group(_mapping(item, where), where)


def _group(group: Mapping[str, object], where: str) -> Iterator[tuple[str, RankTableEntry]]:
    instances = _sequence(group, "instance_list", where)
    _expect_count(group, "instance_count", len(instances), where)
    _expect_count(group, "device_num", len(instances), where)
    servers = set()
    for index, item in enumerate(instances):
        place = f"{where}.instance_list[{index}]"
        instance = _mapping(item, place)
        server_id = _text(instance, "server_id", place)
        devices = _sequence(instance, "devices", place)
        if len(devices) != 1:
            raise RankTableError(
                f"{place}.devices", f"has {len(devices)} devices; one rank drives one device"
            )
        device = _mapping(devices[0], f"{place}.devices[0]")
        servers.add(server_id)
        yield place, _entry(instance, device, server_id, place)
    _expect_count(group, "server_num", len(servers), where)


def _entry(
    ranked: Mapping[str, object], device: Mapping[str, object], server_id: str, where: str
) -> RankTableEntry:
    return RankTableEntry(
        rank=_number(ranked, "rank_id", where),
        server_id=server_id,
        device_index=_device(device, where),
    )


def _device(device: Mapping[str, object], where: str) -> int:
    number = _number(device, "device_id", where)
    if number >= MAX_DEVICES:
        raise RankTableError(f"{where}.device_id", f"must be from 0 to {MAX_DEVICES - 1}, not {number}")
    return number


def _checked(placed: list[tuple[str, RankTableEntry]]) -> RankTable:
    if not placed:
        raise RankTableError("the document", "names no device")
    ranks: dict[int, str] = {}
    for where, entry in placed:
        if entry.rank >= len(placed):
            raise RankTableError(
                f"{where}.rank_id",
                f"is {entry.rank}; with {len(placed)} devices ranks go from 0 to {len(placed) - 1}",
            )
        if entry.rank in ranks:
            raise RankTableError(f"{where}.rank_id", f"is {entry.rank}, as is that of {ranks[entry.rank]}")
        ranks[entry.rank] = where
    refuse_device_twice(placed)
    return RankTable(tuple(sorted((entry for _, entry in placed), key=lambda entry: entry.rank)))


def refuse_device_twice(placed: list[tuple[str, RankTableEntry]]) -> None:
    """Checks that no two entries name the same device.

    Raises:
        RankTableError: two entries name the same device.
    """
    devices: dict[tuple[str, int], str] = {}
    for where, entry in placed:
        device = (entry.server_id, entry.device_index)
        if device in devices:
            raise RankTableError(
                where, f"names device {device[1]} of server {device[0]}, as does {devices[device]}"
            )
        devices[device] = where


def _mapping(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise RankTableError(where, f"must be a JSON object, not {_kind(value)}")
    return value


def _sequence(parent: Mapping[str, object], key: str, where: str) -> list[object]:
    path = f"{where}.{key}" if where else key
    if key not in parent:
        raise RankTableError(path, "is missing")
    value = parent[key]
    if not isinstance(value, list):
        raise RankTableError(path, f"must be a JSON array, not {_kind(value)}")
    if not value:
        raise RankTableError(path, "is empty")
    return value


def _text(parent: Mapping[str, object], key: str, where: str) -> str:
    value = parent.get(key)
    if value is None:
        raise RankTableError(f"{where}.{key}", "is missing")
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise RankTableError(f"{where}.{key}", f"must be a string of printable characters, not {value!r}")
    if len(value) > MAX_NAME:
        raise RankTableError(f"{where}.{key}", f"has {len(value)} characters; {MAX_NAME} are allowed")
    return value


def _number(parent: Mapping[str, object], key: str, where: str) -> int:
    path = f"{where}.{key}" if where else key
    if key not in parent:
        raise RankTableError(path, "is missing")
    value = parent[key]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 9:
        return int(value)
    raise RankTableError(path, f"must be an integer from 0 on, not {value!r}")


def _expect_count(parent: Mapping[str, object], key: str, found: int, where: str) -> None:
    if key in parent and _number(parent, key, where) != found:
        path = f"{where}.{key}" if where else key
        raise RankTableError(path, f"is {parent[key]!r}, but {found} are listed")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
