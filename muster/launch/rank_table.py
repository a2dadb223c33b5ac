"""``muster ranktable`` writes a rank table, or merges several."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from muster.errors import SettingsError
from muster.launch.command import count_gpus
from muster.launch.rank_table_file import Table, make_table, merge_tables, parse_interval
from muster.launch.screen import say
from muster.wire.files import beside, read_regular
from muster.wire.settings import RANK_TABLE_MAX_BYTES

EXAMPLES = """\
examples:
  this host's devices 0 to 7:
    muster ranktable --device_num "[0,8)"
  two hosts with the same devices, in one file:
    muster ranktable --device_num "[0,8)" --hosts node1,node2 --output table.json
  the files that two hosts wrote, joined in this order:
    muster ranktable merge node1.json node2.json --output table.json

Start scheduler and workers with RANK_TABLE_FILE=table.json; the ranks are then those of the file."""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options = parser().parse_args(argv)
    try:
        if options.action == "merge":
            table = merge_files(options.files)
        elif options.files:
            raise SettingsError("Files are named without an action: write merge before them.")
        else:
            table = _of_hosts(options)
        write_table(options.output or Path(_default_name(table)), table, force=options.force)
    except SettingsError as error:
        say(str(error))
        return error.exit_code
    return 0


def merge_files(paths: Sequence[Path]) -> Table:
    """Joins the tables in these files, in this order.

    Raises:
        SettingsError: a file cannot be read, or does not contain a table.
    """
    return merge_tables([(str(path), read_json(path)) for path in paths])


def parser() -> argparse.ArgumentParser:
    """Makes the parser of ``muster ranktable``."""
    made = argparse.ArgumentParser(
        prog="muster ranktable",
        description="Writes a rank table (server_list format): fixed ranks by host and device.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("action", nargs="?", choices=("merge",), help="merge: join the FILEs of several hosts")
    made.add_argument("files", nargs="*", type=Path, metavar="FILE")
    made.add_argument("--device_num", "--device-num", metavar="[A,B)", help="devices (default: all GPUs)")
    made.add_argument("--hosts", default="", metavar="HOST,...", help="hosts (default: this one)")
    made.add_argument("--output", type=Path, metavar="FILE", help="default: named after devices and host")
    made.add_argument("--force", action="store_true", help="overwrite the output")
    return made


def _of_hosts(options: argparse.Namespace) -> Table:
    gpus = count_gpus()
    if options.device_num is not None:
        devices = parse_interval(options.device_num)
    elif gpus:
        devices = tuple(range(gpus))
    else:
        raise SettingsError('This host has no GPU to count: name the devices with --device_num "[0,8)".')
    names = [name.strip() for name in options.hosts.split(",") if name.strip()]
    if not names and gpus and devices[-1] >= gpus:
        raise SettingsError(f"--device_num asks for device {devices[-1]}; this host has 0 to {gpus - 1}.")
    if len(set(names)) != len(names):
        raise SettingsError(f"--hosts is {options.hosts!r}; it names a host twice.")
    return make_table([(name, _address(name)) for name in names or [socket.gethostname()]], devices)


def _address(name: str) -> str:
    """Returns the host's address for ``device_ip``; its name if this host knows no address for it."""
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        return name


def _default_name(table: Table) -> str:
    servers = table["server_list"]
    count = sum(len(server["device"]) for server in servers)
    names = [str(device["device_id"]) for device in servers[0]["device"]]
    digits = "".join(names) if len(names) <= 16 else f"{names[0]}-{names[-1]}"
    where = servers[0]["server_id"] if len(servers) == 1 else f"{len(servers)}hosts"
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"rank_table_{count}p_{digits}_{where[:128]}.json")


def read_json(path: Path) -> object:
    """Parses a file.

    Raises:
        SettingsError: the file cannot be read, is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(read_regular(path, RANK_TABLE_MAX_BYTES).decode())
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path} cannot be read as JSON: {error}.") from error


def to_text(table: Table) -> str:
    """Serializes a table.

    Raises:
        SettingsError: entries of others that merging keeps are nested too deeply.
    """
    try:
        return json.dumps(table, indent=4) + "\n"
    except RecursionError as error:
        raise SettingsError(f"The table is nested too deeply to be written: {error}.") from error


def write_table(path: Path, table: Table, *, force: bool) -> None:
    """Writes the table to a temporary file and renames that, so that no process reads half a table."""
    text = to_text(table)
    part = beside(path)
    try:
        if path.exists() and not force:
            raise SettingsError(f"{path} exists already; name another with --output, or pass --force.")
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)  # noqa: PTH105
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}.") from error
    print(f"{path}: {sum(len(server['device']) for server in table['server_list'])} ranks")
