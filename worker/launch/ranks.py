"""Ranks that a rank table fixes, found out beforehand, so that logs and terminal lines bear them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from muster.worker.config import load_settings
from muster.worker.errors import SettingsError
from muster.worker.launch.devices import local_names
from muster.worker.launch.plan import WorkerPlan
from muster.worker.launch.rank_table_file import devices_of, ranks_of, server_ids, table_file


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
    from muster.worker.launch.rank_table import read_json  # few launches have a rank table

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
    from muster.worker.launch.rank_table import read_json

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
