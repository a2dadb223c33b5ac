"""Decides what a launch starts, from its options and this machine. Pure.

:mod:`muster.launch.command` reads the options and the facts about the machine, :func:`plan_launch` makes the
plan, and the :class:`~muster.launch.launcher.Launcher` carries it out.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muster.errors import SettingsError
from muster.launch.parsing import DEFAULT_PORT, parse_addresses
from muster.launch.placement import (
    ANYWHERE,
    NOTHING_READ,
    HostHardware,
    Placement,
    propose_cards,
    spread_over_cores,
    spread_over_nodes,
)
from muster.launch.worker_counts import Request, WorkerCounts, count_workers
from muster.wire.variables import default_of
from muster.worker.uplink.door import DOOR_VARIABLES

TABLE_VARIABLES = ("RANK_TABLE_FILE", "MINDSPORE_HCCL_CONFIG_PATH")
"""Variables of which each names a rank table, which then determines the ranks."""

SERVER_PASSWORD, CLIENT_PASSWORD = "MS_SERVER_PASSWORD", "MS_CLIENT_PASSWORD"

UPLINK_FROM_WORKERS = 1000
"""Number of workers from which on each host of a job has an uplink, unless the options say otherwise."""

ENDED_VARIABLE = "MS_PROCESSES_ENDED"
"""See :mod:`muster.launch.last_word`: JSON, a list of node id, incarnation and how it ended."""

SCHEDULER = "scheduler"
"""The label of the scheduler's recipe."""

_OF_ONE_WORKER = ("MS_NODE_ID", "MS_LOCAL_INDEX", "DEVICE_ID", "RANK_ID", "MS_WORKER_SPARE")

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker of this host. ``rank`` is None if the scheduler decides it."""

    index: int
    rank: int | None
    host: str
    env: Mapping[str, str]
    spare: str = ""
    """A spare's name; empty: the worker has a place from the beginning."""

    @property
    def label(self) -> str:
        """The name of its log file and of its terminal lines; different on hosts that share a directory."""
        if self.spare:
            return self.spare
        return f"{self.host}_{self.index}" if self.rank is None else str(self.rank)

    @property
    def number(self) -> str:
        """Its name for ``--tail``: its rank, or its index on this host if the rank is not known."""
        if self.spare:
            return self.spare
        return str(self.index if self.rank is None else self.rank)


# ---------------------------------------------------------------- the environment of each worker


def plan_workers(
    counts: WorkerCounts,
    env: Mapping[str, str],
    *,
    common: Mapping[str, str],
    host: str = "localhost",
    devices: int = 0,
    device_ids: Sequence[int] = (),
) -> tuple[WorkerPlan, ...]:
    """Decides the name and environment of each worker of this host.

    Args:
        counts: from :func:`count_workers`.
        env: the launcher's own environment; variables that the user set there are kept if that makes sense.
        common: variables that all workers get (the scheduler's address, the config file).
        host: this host's name, for the labels of workers whose rank is not known.
        devices: number of GPUs that the host offers. Each worker takes the GPU with its local index; if there
            are more workers than GPUs, workers share them.
        device_ids: the devices that a rank table gives to workers without GPUs.

    Returns:
        The workers; ``env`` of each holds only what differs from the launcher's.
    """
    plans = []
    count = counts.local_size + counts.spares
    for index in range(count):
        spare = index - counts.local_size  # from 0; negative: none
        rank = _own_rank(index, counts, env) if spare < 0 else None
        own = {
            **common,
            **_thread_limits(count, env),
            "MS_ROLE": "MS_WORKER",
            "MS_WORKER_NUM": str(counts.world_size),
            "MS_LOCAL_INDEX": str(index),
            **_node_id(index, rank if spare < 0 else _number_of_spare(spare, counts), count, env),
        }
        if spare >= 0:
            own["MS_WORKER_SPARE"] = "1"
        if devices and not (count == 1 and env.get("DEVICE_ID")):
            own["DEVICE_ID"] = str(index * devices // max(count, devices))
            if count > devices:
                own |= sharing_environment(f"{host}-{index}")
        elif index < len(device_ids) and not devices and not env.get("DEVICE_ID"):
            own["DEVICE_ID"] = str(device_ids[index])
        name = _in_file_names(host)
        called = "" if spare < 0 else _name_of_spare(spare, counts, name)
        plans.append(WorkerPlan(index, rank, name, own, called))
    return tuple(plans)


def _number_of_spare(spare: int, counts: WorkerCounts) -> int | None:
    """Returns a spare worker's integer node id, which follows those of the ranks; None: it is not known."""
    known = counts.first_rank is not None and counts.first_spare is not None
    return counts.world_size + (counts.first_spare or 0) + spare if known else None


def _name_of_spare(spare: int, counts: WorkerCounts, host: str) -> str:
    if counts.first_spare is None:
        return f"{host}_spare_{spare}"
    return f"spare_{counts.first_spare + spare}"


def sharing_environment(name: str) -> dict[str, str]:
    """Returns variables that let ranks share a GPU, which NCCL refuses to ranks with the same host id.

    With a host id for each rank, data goes through sockets, and ranks take turns on the GPU. Results are
    right, but speeds mean nothing.

    Args:
        name: the name of the rank; no other rank of the job has it.
    """
    return {"NCCL_HOSTID": name, "NCCL_MIN_CTAS": "1", "NCCL_MAX_CTAS": "2"}


def _own_rank(index: int, counts: WorkerCounts, env: Mapping[str, str]) -> int | None:
    """Returns the rank of a worker whose node id is an integer; None if the scheduler decides."""
    if counts.world_size == 1:
        return 0
    if counts.first_rank is None or env.get("MS_NODE_ID") or _has_table(env):
        return None
    return counts.first_rank + index


def _has_table(env: Mapping[str, str]) -> bool:
    return any(env.get(name, "").strip() for name in TABLE_VARIABLES)


def _in_file_names(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", host)


def _thread_limits(local_size: int, env: Mapping[str, str]) -> dict[str, str]:
    """Limits math libraries to one thread per worker, unless the user set them otherwise."""
    if local_size < 2:
        return {}
    return {name: "1" for name in THREAD_VARIABLES if name not in env}


def _node_id(index: int, number: int | None, local_size: int, env: Mapping[str, str]) -> dict[str, str]:
    given = env.get("MS_NODE_ID", "")
    if given:
        return {} if local_size == 1 else {"MS_NODE_ID": f"{given}-{index}"}
    if number is None or _has_table(env):
        return {}
    return {"MS_NODE_ID": str(number)}


# ---------------------------------------------------------------- the whole launch


@dataclass(frozen=True, slots=True)
class Recipe:
    """The instructions to start a process: command, changes of the environment, and log file.

    Attributes:
        label: the worker's rank, or its host and index there; or ``scheduler``.
        argv: the command.
        env: variables in addition to the launcher's environment.
        log: the name of its log in the launch's directory.
        removed: variables of the launcher that it must not get.
        placement: the cores to which it is bound, and the memory that it prefers.
        forked: whether it continues as a copy of the launcher instead of executing ``argv``.
        quiet: whether its output goes only to its log.
        inherits: a descriptor of the launcher that it inherits; -1: none.
        last: whether it is killed after the others if the launcher is killed, because it reports their end.
    """

    label: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: str
    removed: frozenset[str] = frozenset()
    placement: Placement = ANYWHERE
    forked: bool = False
    quiet: bool = True
    inherits: int = -1
    last: bool = False

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The complete environment of the process."""
        kept = {name: value for name, value in base.items() if name not in self.removed}
        return {**kept, **self.env}


@dataclass(frozen=True, slots=True)
class Policy:
    """The launcher's rules: what it does when a process ends, and how it shows output."""

    grace_s: float = 10.0
    max_restarts: int = 0
    min_workers: int = 0
    """Number of workers with which the job may go on; 0: all of them."""

    spares: int = 0
    """Number of workers, on all hosts, that wait for the place of a lost one."""

    timestamps: bool = False
    whole: bool = False
    """Whether Muster's own log lines are shown with a worker's output, and not only written to its log."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The facts about the machine that a launch reads before it plans anything.

    Attributes:
        env: the launcher's environment.
        request: which workers start where, as far as options and host list say.
        command: the command of each worker, as it can be run here.
        host: this host's name.
        names: the names that a host list may use for this host.
        directory: the working directory.
        python: the interpreter that runs the launcher.
        python_flags: its options for Muster's own programs.
        devices: the devices for workers, in the form of CUDA_VISIBLE_DEVICES; empty: CPU workers.
        table_devices: the names of this host's devices in a rank table.
        cores: the cores that the launcher may use.
        bus_ids: the PCI bus id of each of ``devices``, or its name if the id is not known.
        hardware: the topology of the host, for ``--bind numa``.
        free_port: a port that is kept free on 127.0.0.1; empty: none is needed.
        password: the password of the certificates, if the user was asked for it.
        no_fork: the reason why the command cannot be started as a fork; empty: it can.
        by_table: a function that gives workers the ranks of a rank table.
    """

    env: Mapping[str, str]
    request: Request
    command: tuple[str, ...]
    host: str = "localhost"
    names: frozenset[str] = frozenset()
    directory: Path = Path("/")
    python: str = "python"
    python_flags: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    table_devices: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()
    bus_ids: tuple[str, ...] = ()
    hardware: HostHardware = NOTHING_READ
    free_port: str = ""
    password: str = ""
    no_fork: str = ""
    by_table: Callable[[tuple[WorkerPlan, ...]], tuple[WorkerPlan, ...]] = tuple


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything that a launch starts, and its policy.

    Attributes:
        counts: the number of workers, and which of them are this host's.
        workers: this host's workers, with the environment of each.
        recipes: the recipes to start them, in the same order.
        scheduler: the recipe of the scheduler; None: it runs elsewhere.
        uplink: the recipe of the process that carries the workers' streams; None: each worker has its own.
        address: the scheduler's host and port.
        policy: the rules for the end of a process.
        job_id: the job.
        config_path: the job's config.json; empty: none.
        password_file: the file with the certificates' password; empty: it is not in a file.
        log_dir: the directory of the logs; None: a new directory of this launch.
        notes: sentences for the user before anything starts.
        start: the way to start workers, as the options say.
        last_word: the recipe of the process that reports ended workers if there are several schedulers; None:
            there is one scheduler, which sees their end by itself.
    """

    counts: WorkerCounts
    workers: tuple[WorkerPlan, ...]
    recipes: tuple[Recipe, ...]
    scheduler: Recipe | None
    uplink: Recipe | None
    address: tuple[str, str]
    policy: Policy
    job_id: str
    config_path: str = ""
    password_file: str = ""
    log_dir: Path | None = None
    notes: tuple[str, ...] = ()
    start: str = "auto"
    last_word: Recipe | None = None

    @property
    def forks(self) -> bool:
        """Whether the workers are forked from a process that has imported what they need."""
        return bool(self.recipes) and self.recipes[0].forked

    @property
    def common(self) -> dict[str, str]:
        """The variables that all workers get with the same value."""
        first, *others = (worker.env for worker in self.workers)
        return {key: value for key, value in first.items() if all(env.get(key) == value for env in others)}


def plan_launch(options: argparse.Namespace, here: Surroundings) -> LaunchPlan:
    """Decides what a launch starts, and with which environment.

    Args:
        options: from :func:`muster.launch.options.parse`.
        here: the facts about the machine.

    Raises:
        SettingsError: the options contradict each other, the environment, or the machine.
    """
    if options.spares and _has_table(here.env):
        raise SettingsError(
            "--spares has no meaning with a rank table, which gives each place to one device.",
            remedy="Leave one of the two out.",
        )
    count = len(here.devices or here.table_devices)
    counts = count_workers(here.request, here=here.names, devices=count, cores=len(here.cores))
    address = _scheduler_address(options, counts, here)
    if options.scheduler and "," in address[0]:
        raise SettingsError(
            f"--scheduler starts the one scheduler of a job, and {address[0]!r} are several.",
            remedy="Start each of them on its host with muster scheduler; see deploy/README.md.",
        )
    common = {
        "MS_SCHED_HOST": address[0],
        "MS_SCHED_PORT": address[1],
        **_job_variables(options, counts, here),
    }
    workers = plan_workers(
        counts,
        here.env,
        common={**common, **_device_variables(options, here), **_leave_timeout(options, here)},
        host=here.host,
        devices=len(here.devices),
        device_ids=here.table_devices,
    )
    workers = here.by_table(workers)
    placements, cards, placed = _place(workers, options, here)
    workers = tuple(replace(worker, env={**worker.env, **cards}) for worker in workers)
    check_rank_ids(workers, here.env)
    shown = parse_tail(options.tail, workers, counts.world_size)
    starts = options.scheduler and counts.first_host
    forked = _forks(options, here, len(workers))
    return LaunchPlan(
        counts=counts,
        workers=workers,
        recipes=tuple(
            _worker_recipe(worker, placement, options, here, shown, forked=forked)
            for worker, placement in zip(workers, placements, strict=True)
        ),
        scheduler=_scheduler_recipe(options, here, common, counts, shown, forked=forked) if starts else None,
        uplink=_uplink_recipe(workers, options, here, counts, forked=forked),
        address=address,
        policy=Policy(
            options.grace,
            options.max_restarts,
            options.min_workers,
            counts.all_spares,
            options.timestamps,
            bool(options.tail),
        ),
        job_id=common.get("MS_JOB_ID") or here.env.get("MS_JOB_ID") or default_of("MS_JOB_ID"),
        config_path=common.get("MS_CONFIG_FILE") or here.env.get("MS_CONFIG_FILE", ""),
        password_file=str(here.directory / options.password_file) if options.password_file else "",
        log_dir=options.log_dir,
        notes=(*_notes(options, here, len(workers), starts=starts), *placed),
        start=options.start,
        last_word=_last_word_recipe(workers, options, here) if "," in address[0] else None,
    )


def _notes(options: argparse.Namespace, here: Surroundings, workers: int, *, starts: bool) -> tuple[str, ...]:
    """Returns notes for the user before anything starts; ``starts``: the scheduler starts here."""
    notes = list(options.notes)
    meeting = here.request.meeting
    if meeting and not starts:  # if no host has that address, nothing else explains why nothing starts
        notes.append(f"the scheduler is not started here: {meeting} is no address of this host")
    gpus = len(here.devices)
    if gpus and workers > gpus:
        which = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        notes.append(f"{workers} workers share {which}, for trying: results hold, speeds mean nothing")
    if here.no_fork and options.start == "fork":
        notes.append(f"--start fork: {here.no_fork}; starting each worker afresh")
    return tuple(notes)


def _place(
    workers: Sequence[WorkerPlan], options: argparse.Namespace, here: Surroundings
) -> tuple[tuple[Placement, ...], dict[str, str], tuple[str, ...]]:
    """Applies ``--bind``: returns each worker's placement, variables for all of them, and notes."""
    if options.bind == "cores":
        return spread_over_cores(here.cores, len(workers)), {}, ()
    if options.bind != "numa":
        return (ANYWHERE,) * len(workers), {}, ()
    gpus = []
    for worker in workers:
        number = worker.env.get("DEVICE_ID") or here.env.get("DEVICE_ID", "")
        gpus.append(here.bus_ids[int(number)] if number.isdigit() and int(number) < len(here.bus_ids) else "")
    placements, notes = spread_over_nodes(here.hardware, here.cores, gpus)
    cards, proposed = propose_cards(here.hardware, sorted(filter(None, set(gpus))), here.env)
    return placements, cards, (*notes, *proposed)


def _forks(options: argparse.Namespace, here: Surroundings, count: int) -> bool:
    if options.start == "exec" or (options.start == "auto" and (here.devices or count < 2)):
        return False
    return not here.no_fork


def _worker_recipe(
    worker: WorkerPlan,
    placement: Placement,
    options: argparse.Namespace,
    here: Surroundings,
    shown: frozenset[str],
    *,
    forked: bool,
) -> Recipe:
    env = {**worker.env, **_password(CLIENT_PASSWORD, options, here)}
    if not forked:
        env.setdefault("PYTHONUNBUFFERED", here.env.get("PYTHONUNBUFFERED", "1"))
    return Recipe(
        worker.label,
        here.command,
        env,
        f"worker_{worker.label}.log",
        _hidden(CLIENT_PASSWORD, SERVER_PASSWORD, options),
        placement,
        forked,
        quiet=not shown & {worker.label, worker.number},
    )


def _scheduler_recipe(
    options: argparse.Namespace,
    here: Surroundings,
    common: Mapping[str, str],
    counts: WorkerCounts,
    shown: frozenset[str],
    *,
    forked: bool,
) -> Recipe:
    env = {
        **common,
        **_password(SERVER_PASSWORD, options, here),
        "MS_ROLE": "MS_SCHED",
        "MS_WORKER_NUM": str(counts.world_size),
        **_spare_places(counts, here.env),
        **({"MS_DRAIN_STRAGGLERS": options.drain_stragglers} if options.drain_stragglers else {}),
    }
    hidden = _hidden(SERVER_PASSWORD, CLIENT_PASSWORD, options)
    argv = (here.python, *here.python_flags, "-m", "muster.scheduler")
    quiet = SCHEDULER not in shown
    return Recipe(SCHEDULER, argv, env, "scheduler.log", hidden, forked=forked, quiet=quiet)


def _spare_places(counts: WorkerCounts, env: Mapping[str, str]) -> dict[str, str]:
    """Returns MS_SPARES for the scheduler: the number of spares, or the user's number if that is larger."""
    own = env.get("MS_SPARES", "").strip()
    enough = own.isascii() and own.isdigit() and len(own) <= 9 and int(own) >= counts.all_spares
    return {} if enough or not counts.all_spares else {"MS_SPARES": str(counts.all_spares)}


def _uplink_recipe(
    workers: Sequence[WorkerPlan],
    options: argparse.Namespace,
    here: Surroundings,
    counts: WorkerCounts,
    *,
    forked: bool,
) -> Recipe | None:
    """Returns the uplink's recipe, for jobs that are large enough; otherwise None."""
    several = len(workers) > 1 and counts.world_size > counts.local_size
    wanted = several and counts.world_size >= UPLINK_FROM_WORKERS
    if options.uplink == "off" or (options.uplink == "auto" and not wanted):
        return None
    label = f"uplink_{workers[0].host}" if counts.world_size > counts.local_size else "uplink"
    recipe = _own_recipe(label, "muster.worker.uplink", workers, options, here)
    return replace(recipe, forked=forked, last=True)


def _last_word_recipe(
    workers: Sequence[WorkerPlan], options: argparse.Namespace, here: Surroundings
) -> Recipe | None:
    if not workers:
        return None
    return _own_recipe(f"last_word_{workers[0].label}", "muster.launch.last_word", workers, options, here)


def _own_recipe(
    label: str,
    module: str,
    workers: Sequence[WorkerPlan],
    options: argparse.Namespace,
    here: Surroundings,
) -> Recipe:
    """Returns the recipe of a process that acts for the workers of this launch, with their certificate."""
    return Recipe(
        label,
        (here.python, *here.python_flags, "-m", module),
        {
            **{name: value for name, value in workers[0].env.items() if name not in _OF_ONE_WORKER},
            **_password(CLIENT_PASSWORD, options, here),
        },
        f"{label}.log",
        _hidden(CLIENT_PASSWORD, SERVER_PASSWORD, options),
    )


def _scheduler_address(
    options: argparse.Namespace, counts: WorkerCounts, here: Surroundings
) -> tuple[str, str]:
    env, port = here.env, here.env.get("MS_SCHED_PORT", "")
    if options.join is not None:
        return parse_addresses(options.join)
    if env.get("MS_SCHED_HOST"):
        return env["MS_SCHED_HOST"], port or str(DEFAULT_PORT)
    if counts.scheduler_host:
        return counts.scheduler_host, port or str(DEFAULT_PORT)
    if counts.world_size > counts.local_size:
        raise SettingsError(
            "The workers of the other hosts need to know where the scheduler runs: "
            "give its address on every host with --join HOST:PORT."
        )
    if options.scheduler:
        return "127.0.0.1", port or here.free_port
    if port:
        return "127.0.0.1", port
    raise SettingsError(
        "No scheduler is known: start one here with --scheduler, or say where it runs: --join HOST:PORT."
    )


def _job_variables(options: argparse.Namespace, counts: WorkerCounts, here: Surroundings) -> dict[str, str]:
    found = dict(export.split("=", 1) for export in options.exports if "=" in export)
    if options.config is not None:
        found["MS_CONFIG_FILE"] = str(here.directory / options.config)
    if options.job_id:
        found["MS_JOB_ID"] = options.job_id
    if options.encrypt_nccl:
        found["MS_NCCL_ENCRYPTION"] = options.encrypt_nccl
    if options.in_place:
        found["MS_IN_PLACE"] = "1"
    if options.min_workers:
        if options.min_workers > counts.world_size:
            raise SettingsError(
                f"--min-workers is {options.min_workers}; the job has {counts.world_size} workers."
            )
        found["MS_WORKER_MIN"] = str(options.min_workers)
    return found


def _device_variables(options: argparse.Namespace, here: Surroundings) -> dict[str, str]:
    """Returns CUDA_VISIBLE_DEVICES for the workers, if devices are limited; ``none`` hides them all."""
    narrowed = here.table_devices and here.devices and "CUDA_VISIBLE_DEVICES" not in here.env
    if options.devices == "all" and not narrowed:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(here.devices)}


def _leave_timeout(options: argparse.Namespace, here: Surroundings) -> dict[str, str]:
    """Returns MS_LEAVE_TIMEOUT, so that workers save a checkpoint before the launcher kills them."""
    if here.env.get("MS_LEAVE_TIMEOUT"):
        return {}
    return {"MS_LEAVE_TIMEOUT": f"{max(0.8 * options.grace, 1.0):g}"}


def _hidden(own: str, other: str, options: argparse.Namespace) -> frozenset[str]:
    """Returns variables that a process must not inherit, such as the other role's password."""
    doors = frozenset(DOOR_VARIABLES)  # this launch may itself run in a worker of another one
    return with_file(other) | doors | (with_file(own) if options.password_file else frozenset())


def with_file(variable: str) -> frozenset[str]:
    """Returns the variable of a password, and the variable that names a file with that password."""
    return frozenset({variable, f"{variable}_FILE"})


def _password(variable: str, options: argparse.Namespace, here: Surroundings) -> dict[str, str]:
    """Returns the variable with the password, from the options or as the user has typed it."""
    if options.password_file is not None:
        return {f"{variable}_FILE": str(here.directory / options.password_file)}
    if here.password and not any(here.env.get(name) for name in with_file(variable)):
        return {variable: here.password}
    return {}


def parse_tail(text: str | None, workers: Sequence[WorkerPlan], world_size: int) -> frozenset[str]:
    """Reads ``--tail``: ``all``, ``none`` or a comma-separated list of labels and numbers; None: rank 0.

    Ranks that run on another host are accepted.

    Raises:
        SettingsError: a number is not a rank of the job, or a word is not a label.
    """
    labels = [*(worker.label for worker in workers), SCHEDULER]
    if text is None:
        return frozenset({"0"})
    if text in ("all", "none"):
        return frozenset(labels) if text == "all" else frozenset()
    placed = [worker for worker in workers if not worker.spare]
    known = all(worker.rank is not None for worker in placed)
    count = world_size if known else len(placed)
    wanted = [item.strip() for item in text.split(",")]
    for item in wanted:
        if item.isascii() and item.isdigit() and len(item) <= 9:
            if int(item) >= count:
                have = f"ranks 0 to {count - 1}" if known else f"workers 0 to {count - 1} of this host"
                raise SettingsError(f"--tail names {int(item)}; there are {have}.")
        elif item not in labels:
            raise SettingsError(
                f"--tail is {text[:80]!r}; it must be all, none, scheduler or ranks such as 0,3."
            )
    return frozenset(str(int(item)) if item.isdigit() else item for item in wanted)


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
