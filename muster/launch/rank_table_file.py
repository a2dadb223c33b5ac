"""Makes rank tables of one host's devices, and joins several hosts' tables.

The tables have the server_list format. The scheduler checks tables, and accepts those that are written here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from muster.errors import SettingsError
from muster.wire.rank_table import RankTableError, placed_entries, refuse_device_twice

Table = dict[str, Any]


def parse_interval(text: str) -> tuple[int, ...]:
    """Reads ``[0,8)`` as (0, ..., 7): the second number is excluded."""
    inner = text.strip()
    found = re.fullmatch(r"\[\s*([0-9]{1,9})\s*,\s*([0-9]{1,9})\s*\)", inner)
    if found is None:
        raise SettingsError(f'--device_num is {text[:80]!r}; write it as "[0,8)" for devices 0 to 7.')
    first, end = map(int, found.groups())
    if not first < end <= 4096:
        raise SettingsError(f"--device_num is {text!r}; the first must be below the second, at most 4096.")
    return tuple(range(first, end))


def make_table(hosts: Sequence[tuple[str, str]], devices: Sequence[int]) -> Table:
    """Makes a table in which each host offers the same devices.

    Args:
        hosts: for each host, its name or address as workers know it, and its network interface's address.
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
    """Joins the tables of several hosts; ranks get new numbers, in the order given.

    Args:
        tables: for each table, its source and the parsed JSON.

    Raises:
        SettingsError: no table is given, one is not a server_list table, or two have the same host.
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
            devices = sorted(server["device"], key=lambda device: int(device["rank_id"]))
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
    try:
        refuse_device_twice(placed_entries({"server_list": servers}))
    except RankTableError as error:
        raise SettingsError(f"{where}: {error}.") from error
    return servers
