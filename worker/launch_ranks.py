"""Ranks that a rank table fixes, found out beforehand, so that logs and terminal lines bear them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from worker.config import load_settings
from worker.core.launch_plan import WorkerPlan
from worker.core.rank_table_file import ranks_of
from worker.errors import SettingsError


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
    file = env.get("RANK_TABLE_FILE", "").strip()
    if not file:
        return tuple(workers)
    from worker.launch_ranktable import read_json  # few launches have a rank table

    try:
        names, devices = _places([{**env, **worker.env} for worker in workers], root)
        ranks = ranks_of(read_json(Path(file).expanduser()), names, devices)
    except (SettingsError, RuntimeError):  # the latter: a home directory that is not known
        return tuple(workers)
    return tuple(replace(worker, rank=rank) for worker, rank in zip(workers, ranks, strict=True))


def _places(environments: Sequence[Mapping[str, str]], root: Path) -> tuple[tuple[str, ...], list[int]]:
    """What a table may call this host, and each worker's device: as the worker will tell the scheduler."""
    from worker.host import choose_device, describe_host

    settings = [load_settings(env) for env in environments]
    host = describe_host(settings[0])
    devices = [choose_device(each, root).device.index for each in settings]
    return (host.address, host.name, host.id), devices
