"""Rank tables as the launcher sees them: one host's devices, several hosts' tables joined, ranks looked up.

What is written has the server_list format. The scheduler judges tables; what is written here it accepts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from muster.worker.errors import SettingsError

Table = dict[str, Any]


FILE_VARIABLE, OLD_FILE_VARIABLE = "RANK_TABLE_FILE", "MINDSPORE_HCCL_CONFIG_PATH"


def table_file(env: Mapping[str, str]) -> str:
    """The rank table that the environment names, by its present name or its old one; empty: none.

    Raises:
        SettingsError: the two name different files.
    """
    new, old = (env.get(name, "").strip() for name in (FILE_VARIABLE, OLD_FILE_VARIABLE))
    if new and old and new != old:
        raise SettingsError(
            f"{FILE_VARIABLE} is {new[:80]!r}, and {OLD_FILE_VARIABLE}, its old name, is {old[:80]!r}; "
            "set only one of them."
        )
    return new or old


def parse_interval(text: str) -> tuple[int, ...]:
    """Reads ``[0,8)`` as (0, ..., 7): from the first number up to, without, the second."""
    inner = text.strip()
    low, comma, high = inner[1:-1].partition(",")
    numbers = [part.strip() for part in (low, high)]
    first, end = map(_number, numbers)
    if not (inner.startswith("[") and inner.endswith(")") and comma) or first is None or end is None:
        raise SettingsError(f'--device_num is {text[:80]!r}; write it as "[0,8)" for devices 0 to 7.')
    if not first < end <= 4096:
        raise SettingsError(f"--device_num is {text!r}; the first must be below the second, at most 4096.")
    return tuple(range(first, end))


def _number(value: object) -> int | None:
    """A number of a table, which may be a JSON number or a string of digits; None: it is neither."""
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) <= 9 else None
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < 10**9 else None


def make_table(hosts: Sequence[tuple[str, str]], devices: Sequence[int]) -> Table:
    """Makes a table in which each host offers the same devices.

    Args:
        hosts: (name or address as the workers know it, address of its network interface) of each.
        devices: indices of the devices; ranks are given in this order, host after host.
    """
    servers = []
    for number, (server_id, address) in enumerate(hosts):
        ranked = enumerate(devices, number * len(devices))
        servers.append(
            {
                "server_id": server_id,
                "device": [
                    {"device_id": str(device), "device_ip": address, "rank_id": str(rank)}
                    for rank, device in ranked
                ],
                "host_nic_ip": "reserve",
            }
        )
    return _table(servers)


def merge_tables(tables: Sequence[tuple[str, object]]) -> Table:
    """Joins the tables of several hosts; ranks are numbered anew, in the order given.

    Args:
        tables: (where it is from, the parsed JSON) of each.

    Raises:
        SettingsError: there is none, one is no server_list table, or a host stands in two of them.
    """
    if not tables:
        raise SettingsError("There is nothing to merge: name the FILEs of the hosts after merge.")
    servers: list[dict[str, Any]] = []
    seen: dict[str, str] = {}
    rank = 0
    for where, document in tables:
        for server in _servers(where, document):
            name = server["server_id"]
            if name in seen:
                raise SettingsError(f"{where}: the host {name!r} stands in {seen[name]} too.")
            seen[name] = where
            devices = sorted(server["device"], key=lambda device: _number(device["rank_id"]) or 0)
            ranked = [{**device, "rank_id": str(rank + index)} for index, device in enumerate(devices)]
            servers.append({**server, "device": ranked})
            rank += len(ranked)
    return _table(servers)


def _table(servers: Sequence[Mapping[str, Any]]) -> Table:
    return {
        "version": "1.0",
        "server_count": str(len(servers)),
        "server_list": list(servers),
        "status": "completed",
    }


def _servers(where: str, document: object) -> list[Mapping[str, Any]]:
    servers = document.get("server_list") if isinstance(document, dict) else None
    if not isinstance(servers, list) or not servers:
        raise SettingsError(f"{where} has no server_list; only tables of that format can be merged.")
    for server in servers:
        name, devices = (
            server.get(key) if isinstance(server, dict) else None for key in ("server_id", "device")
        )
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise SettingsError(f"{where}: each server_id must be a string of printable characters.")
        if not isinstance(devices, list) or not devices:
            raise SettingsError(f"{where}: the host {name!r} needs a device list that is not empty.")
        _check_devices(f"{where}: the host {name!r}", devices)
    return servers


def _check_devices(whose: str, devices: Sequence[object]) -> None:
    seen = set()
    for device in devices:
        index, rank = (
            _number(device.get(key)) if isinstance(device, dict) else None for key in ("device_id", "rank_id")
        )
        if index is None or rank is None:
            raise SettingsError(f"{whose}: each device needs device_id and rank_id, as numbers.")
        if index in seen:
            raise SettingsError(f"{whose} has device {index} twice.")
        seen.add(index)


# ---------------------------------------------------------------- looking ranks up


def ranks_of(document: object, names: Sequence[str], devices: Sequence[int]) -> tuple[int | None, ...]:
    """The ranks that a table of either layout gives to one host's devices.

    Args:
        document: the parsed JSON; lines that make no sense are passed over, the scheduler refuses them.
        names: what a server_id may call this host.
        devices: index of each worker's device.

    Returns:
        The rank of each; None where the table has none, or the same for two of them.
    """
    lines = _lines(document)
    found = [
        min((lines[name, device] for name in names if (name, device) in lines), default=None)
        for device in devices
    ]
    counts = Counter(found)
    return tuple(rank if counts[rank] == 1 else None for rank in found)


def server_ids(document: object) -> tuple[str, ...]:
    """What a table of either layout calls its hosts."""
    names = [server_id for server_id, _, _ in _placed(document) if isinstance(server_id, str)]
    return tuple(dict.fromkeys(names))


def devices_of(document: object, names: Collection[str]) -> tuple[int, ...]:
    """The devices that a table of either layout gives to one host, in order of rank.

    Args:
        document: the parsed JSON; lines that make no sense are passed over.
        names: what a server_id may call this host.
    """
    mine = [(rank, device) for (name, device), rank in _lines(document).items() if name in names]
    return tuple(dict.fromkeys(device for _, device in sorted(mine)))


def _lines(document: object) -> dict[tuple[str, int], int]:
    lines = {}
    for server_id, ranked, device in _placed(document):
        rank, index = _number(ranked.get("rank_id")), _number(device.get("device_id"))
        if isinstance(server_id, str) and rank is not None and index is not None:
            lines[server_id, index] = rank
    return lines


def _placed(document: object) -> Iterator[tuple[object, Mapping[str, object], Mapping[str, object]]]:
    """(server_id, the object with rank_id, the object with device_id) of each line."""
    for server in _objects(document, "server_list"):
        for device in _objects(server, "device"):
            yield server.get("server_id"), device, device
    for group in _objects(document, "group_list"):
        for instance in _objects(group, "instance_list"):
            for device in _objects(instance, "devices"):
                yield instance.get("server_id"), instance, device


def _objects(parent: object, key: str) -> list[Mapping[str, object]]:
    listed = parent.get(key) if isinstance(parent, dict) else None
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
