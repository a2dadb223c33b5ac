"""``muster ranktable``: writes a rank table for this host, or merges several hosts' files."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from muster.worker.config import load_settings
from muster.worker.errors import SettingsError
from muster.worker.launch.devices import count_gpus, local_names
from muster.worker.launch.plan import WorkerPlan
from muster.worker.launch.process import say
from muster.worker.launch.rank_table_file import (
    Table,
    devices_of,
    make_table,
    merge_tables,
    parse_interval,
    ranks_of,
    server_ids,
    table_file,
)

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
    options = _parser().parse_args(argv)
    try:
        if options.action == "merge":
            table = merge_files(options.files)
        elif options.files:
            raise SettingsError("Files are named without an action: write merge before them.")
        else:
            table = _of_hosts(options)
        _write(options.output or Path(_default_name(table)), table, force=options.force)
    except SettingsError as error:
        say(str(error))
        return error.exit_code
    return 0


def merge_files(paths: Sequence[Path]) -> Table:
    """Joins the tables in these files, in this order.

    Raises:
        SettingsError: a file cannot be read, or holds no table.
    """
    return merge_tables([(str(path), read_json(path)) for path in paths])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="muster ranktable",
        description="Writes a rank table (server_list format): fixed ranks by host and device.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "action", nargs="?", choices=("merge",), help="merge: join the FILEs of several hosts"
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--device_num", "--device-num", metavar="[A,B)", help="devices (default: all GPUs)")
    parser.add_argument("--hosts", default="", metavar="HOST,...", help="hosts (default: this one)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: named after devices and host")
    parser.add_argument("--force", action="store_true", help="overwrite the output")
    return parser


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
    """The host's address for ``device_ip``; its name where it has none here."""
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
        SettingsError: it is not there, no JSON, or nested beyond measure.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path} cannot be read as JSON: {error}.") from error


def to_text(table: Table) -> str:
    """What the file of a table says.

    Raises:
        SettingsError: entries of others that merging keeps are nested beyond measure.
    """
    try:
        return json.dumps(table, indent=4) + "\n"
    except RecursionError as error:
        raise SettingsError(f"The table is nested too deeply to be written: {error}.") from error


def _write(path: Path, table: Table, *, force: bool) -> None:
    """Writes beside and renames, so that nobody reads half a table."""
    text = to_text(table)
    part = path.with_name(f"{path.name}.part")
    try:
        if path.exists() and not force:
            raise SettingsError(f"{path} exists already; name another with --output, or pass --force.")
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)  # noqa: PTH105
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}.") from error
    print(f"{path}: {sum(len(server['device']) for server in table['server_list'])} ranks")


def with_table_ranks(
    workers: Sequence[WorkerPlan], env: Mapping[str, str], root: Path = Path("/")
) -> tuple[WorkerPlan, ...]:
    """Gives workers the ranks of RANK_TABLE_FILE, if there is one.

    Args:
        workers: as planned.
        env: the launcher's environment.
        root: where ``dev`` and ``proc`` lie.

    Returns:
        The workers. Where file or settings are wrong their ranks stay unknown: the scheduler, or the worker,
        says what is wrong.
    """
    file = table_file(env)
    if not file:
        return tuple(workers)

    try:
        names, devices = _places([{**env, **worker.env} for worker in workers], root)
        ranks = ranks_of(read_json(Path(file).expanduser()), names, devices)
    except (SettingsError, RuntimeError):  # the latter: a home directory that is not known
        return tuple(workers)
    return tuple(replace(worker, rank=rank) for worker, rank in zip(workers, ranks, strict=True))


def table_devices(env: Mapping[str, str]) -> tuple[int, ...]:
    """The devices that RANK_TABLE_FILE gives to this host, in order of rank; empty: it says nothing.

    Where the file is wrong, the scheduler says what is.

    Raises:
        SettingsError: its variable contradicts the old one.
    """
    file = table_file(env)
    if not file:
        return ()

    try:
        table = read_json(Path(file).expanduser())
    except (SettingsError, RuntimeError):
        return ()
    named = set(server_ids(table))
    here = local_names(named) | {env.get("MS_HOST_ID", ""), env.get("MS_WORKER_ADDRESS", "")}
    return devices_of(table, here & named)


def check_rank_ids(workers: Sequence[WorkerPlan], env: Mapping[str, str]) -> None:
    """Refuses a RANK_ID that is not the rank of each worker that gets it.

    Raises:
        SettingsError: a worker has another rank.
    """
    raw = env.get("RANK_ID", "").strip()
    other = next((each.rank for each in workers if each.rank is not None and raw != str(each.rank)), None)
    if raw and other is not None:
        raise SettingsError(
            f"RANK_ID is {raw[:80]!r}, but a worker of this launch has rank {other}.",
            remedy="Unset it: the launcher, or RANK_TABLE_FILE, gives the ranks.",
        )


def _places(environments: Sequence[Mapping[str, str]], root: Path) -> tuple[tuple[str, ...], list[int]]:
    """What a table may call this host, and each worker's device: as the worker will tell the scheduler."""
    from muster.worker.host import choose_device, describe_host

    settings = [load_settings(env) for env in environments]
    host = describe_host(settings[0])
    devices = [choose_device(each, root).device.index for each in settings]
    return (host.address, host.name, host.id), devices
