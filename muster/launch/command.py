"""``muster run``: goes from the command line to running processes."""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from muster.errors import SettingsError
from muster.launch import fork as launch_fork
from muster.launch import options as launch_options
from muster.launch.hardware import read_hardware
from muster.launch.launcher import Launcher
from muster.launch.parsing import parse_addresses, parse_numbers
from muster.launch.placement import NOTHING_READ
from muster.launch.plan import (
    CLIENT_PASSWORD,
    SERVER_PASSWORD,
    TABLE_VARIABLES,
    LaunchPlan,
    Surroundings,
    WorkerPlan,
    plan_launch,
    with_file,
)
from muster.launch.programs import script_of, with_agent
from muster.launch.screen import Screen, say
from muster.wire.json_lines import process_lines
from muster.wire.rank_table import RankTable, devices_of, ranks_of
from muster.wire.settings import Environment
from muster.worker.config import load_settings, table_file, visible_devices
from muster.worker.host import nvidia_devices

NEEDED_MODULES = ("muster", "grpc", "numpy")
"""Modules that every worker imports."""

_NO_SUCH_NAME = (socket.EAI_NONAME, socket.EAI_NODATA)

HIDDEN_BY_SCRIPTS = ("google", "grpc", "numpy", "queue")
"""Modules that every worker imports and whose names scripts may have, too."""


def main(argv: Sequence[str]) -> int:
    """Launches and returns the exit code. In a forked worker it runs the worker's script instead."""
    process_lines.begin("launcher")
    try:
        with contextlib.ExitStack() as held:
            plan = plan_of(argv, os.environ, held)
            process_lines.job = plan.job_id
            outcome = Launcher(plan, Screen(os.environ, whole=plan.policy.whole)).run()
    except SettingsError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:  # at the prompt for a password; nothing runs yet
        say("interrupted")
        return 130
    if not isinstance(outcome, int):
        outcome()  # here, outside the try block, so that the script sees no exception of ours
        return 0
    return launch_fork.leave(outcome) if plan.forks else outcome


def plan_of(argv: Sequence[str], env: Mapping[str, str], held: contextlib.ExitStack) -> LaunchPlan:
    """Makes the plan of a launch from the command line and the facts about this machine; starts nothing.

    Args:
        argv: the options and the command.
        env: the launcher's environment.
        held: keeps a port free until it is closed, if the scheduler may use any port.

    Raises:
        SettingsError: the options contradict each other, the environment, or the machine.
    """
    options = launch_options.parse(argv)
    if options.join is not None:
        check_names(parse_addresses(options.join)[0].split(","))
    here = look(options, dict(env), held, count_gpus())
    plan = plan_launch(options, here)
    _check_python(resolved(options.command, env), env)
    if tuple(here.command) == resolved(options.command, env):  # an agent runs in another process
        _check_neighbours(here.command)
    if plan.scheduler is not None:
        check_port(*plan.address)
    password = _ask_password(plan, here)
    return plan_launch(options, replace(here, password=password)) if password else plan


def look(
    options: argparse.Namespace, env: Mapping[str, str], held: contextlib.ExitStack, gpus: int
) -> Surroundings:
    """Collects the facts about this machine on which the launch depends.

    Args:
        options: from :func:`muster.launch.options.parse`.
        env: the launcher's environment.
        held: keeps a port free until it is closed.
        gpus: how many GPUs the host has.

    Raises:
        SettingsError: a host list or rank table cannot be used, or a device or command does not exist.
    """
    request = launch_options.request(options, env)
    table_of_devices: tuple[int, ...] = ()
    by_table: Callable[[tuple[WorkerPlan, ...]], tuple[WorkerPlan, ...]] = tuple
    if any(env.get(name, "").strip() for name in TABLE_VARIABLES):
        table_of_devices = table_devices(env)
        by_table = functools.partial(with_table_ranks, env=env)
    in_place = options.in_place or Environment(env, SettingsError).flag("MS_IN_PLACE")
    command = with_agent(resolved(options.command, env), options.program, env.get("PATH"), in_place=in_place)
    devices = _offered(options, env, gpus, table_of_devices)
    bus_ids = _bus_ids(devices) if options.bind == "numa" else ()
    any_port = options.scheduler and options.join is None and not env.get("MS_SCHED_PORT")
    return Surroundings(
        env,
        request,
        command,
        host=socket.gethostname(),
        names=frozenset(local_names(filter(None, [request.meeting, *(host.name for host in request.hosts)]))),
        directory=Path.cwd(),
        python=sys.executable,
        python_flags=launch_fork.own_flags(),
        devices=devices,
        table_devices=table_of_devices,
        cores=cores(),
        bus_ids=bus_ids,
        hardware=read_hardware(bus_ids) if options.bind == "numa" else NOTHING_READ,
        free_port=_free_port(held) if any_port else "",
        no_fork="" if options.start == "exec" else why_not_forked(command, env),
        by_table=by_table,
    )


def _offered(
    options: argparse.Namespace, env: Mapping[str, str], gpus: int, table_devices: Sequence[int]
) -> tuple[str, ...]:
    """Returns the devices that workers may use: by the option, else by the rank table, else all."""
    offered = offered_devices(env, options.devices, gpus)
    asked = options.devices != "all" or "CUDA_VISIBLE_DEVICES" in env
    if asked or not offered or not table_devices:
        return offered
    numbers = ",".join(map(str, table_devices))
    try:
        return offered_devices(env, numbers, gpus)
    except SettingsError as error:
        raise SettingsError(
            f"The rank table gives devices {numbers} to this host, which offers {', '.join(offered)}."
        ) from error


def _bus_ids(devices: Sequence[str]) -> tuple[str, ...]:
    """Returns each device's PCI bus id; its name if that is not a number, or the driver knows no id."""
    present = nvidia_devices(Path("/"))
    return tuple(
        (present[int(name)][0] if name.isdigit() and int(name) < len(present) else "") or name
        for name in devices
    )


def _free_port(held: contextlib.ExitStack) -> str:
    """Reserves a port of 127.0.0.1 until the launch is over, because the scheduler binds it seconds later."""
    return str(held.enter_context(hold_port("127.0.0.1")).getsockname()[1])


def check_names(hosts: Sequence[str]) -> None:
    """Refuses schedulers' hosts if the name service says that none of them exists.

    Other failures of the name service may pass, and one host that exists is enough: the workers try for a
    while.

    Raises:
        SettingsError: none of the hosts exists.
    """
    for host in hosts:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno in _NO_SUCH_NAME:
                continue
        except UnicodeError:  # such a name can never exist
            continue
        return
    names = ", ".join(map(repr, hosts))
    raise SettingsError(
        f"--join names {names}, and the name service knows no such host.",
        remedy="Check the name; one that is known later goes into MS_SCHED_HOST, which is tried for a while.",
    )


def check_port(host: str, port: str) -> None:
    """Refuses a port of this host that is taken, because the workers would join whatever listens there.

    Raises:
        SettingsError: another process listens there.
    """
    if port.isdecimal() and len(port) <= 5 and is_taken(host, int(port)):
        raise SettingsError(
            f"Another process listens on port {port} of {host} already, so no scheduler can start there.",
            remedy="If it is your job's scheduler, leave --scheduler out, else choose another port"
            " (--join, MS_SCHED_PORT).",
        )


def _ask_password(plan: LaunchPlan, here: Surroundings) -> str:
    """Asks once for the certificates' password, instead of in every worker; empty: it is not needed."""
    if plan.password_file or not plan.config_path or not sys.stdin.isatty():
        return ""
    if takes_spiffe(plan.config_path):
        return ""
    roles = [CLIENT_PASSWORD, *([SERVER_PASSWORD] if plan.scheduler is not None else [])]
    if all(any(here.env.get(name) for name in with_file(role)) for role in roles):
        return ""
    return getpass.getpass(f"Password of the certificates of {plan.config_path}: ")


def takes_spiffe(config_path: str) -> bool:
    """Whether a config.json names the SPIFFE Workload API, so that there is no file with a password."""
    from muster.certs.config import load_config
    from muster.certs.errors import CertificateError

    try:
        return bool(load_config(config_path).spiffe_endpoint_socket)
    except CertificateError:  # the process that needs the certificate reports it
        return False


def _check_python(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Refuses a script that does not exist, and a Python that cannot import what a worker needs.

    Raises:
        SettingsError: the script does not exist, or Muster is not installed in the command's Python
            environment.
    """
    if not re.fullmatch(r"python[0-9.]*", Path(command[0]).name):
        return
    script = command[1] if len(command) > 1 and not command[1].startswith("-") else ""
    if script and not Path(script).exists():
        raise SettingsError(f"There is no script {script!r} in {Path.cwd()}.")
    if is_this_python(command[0], env):
        return
    program = shutil.which(command[0], path=env.get("PATH")) or command[0]
    beside = str(Path(script).resolve().parent) if script else str(Path.cwd())
    ask = (
        f"import importlib.util as u, sys; sys.path[0] = {beside!r}; "
        f"print(*[name for name in {NEEDED_MODULES!r} if u.find_spec(name) is None])"
    )
    try:
        done = subprocess.run(
            [program, "-c", ask], env=dict(env), capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return  # the workers' logs will say what is wrong with it
    lacking = done.stdout.split()
    if lacking:
        modules = f"the module {lacking[0]}" if len(lacking) == 1 else f"the modules {', '.join(lacking)}"
        raise SettingsError(
            f"The command's Python is {program}, which lacks {modules}; this one is {sys.executable}.",
            remedy="Name this one, or the script alone, or install Muster in that environment too.",
        )


def _check_neighbours(command: Sequence[str]) -> None:
    """Refuses a script beside which a file hides a module that Muster imports in the script's process.

    Raises:
        SettingsError: a file next to the script hides such a module.
    """
    script = script_of(command)
    if script is None or "-m" in command or "-P" in command:
        return
    for name in HIDDEN_BY_SCRIPTS:
        for path in (script.parent / f"{name}.py", script.parent / name / "__init__.py"):
            if path.is_file():
                raise SettingsError(
                    f"{path} hides the module {name}, which every worker imports: Python looks beside"
                    " the script first.",
                    remedy="Rename it.",
                )


def resolved(command: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the command as it will be run; a bare Python script is run by this Python."""
    program = command[0]
    if program.endswith(".py") and Path(program).is_file() and not os.access(program, os.X_OK):
        return (sys.executable, *command)
    if shutil.which(program, path=env.get("PATH")) is None:
        raise SettingsError(f"The command {program!r} is not found, or is not executable.")
    return tuple(command)


def why_not_forked(command: Sequence[str], env: Mapping[str, str]) -> str:
    """Returns why this command cannot be started as a fork; empty if it can."""
    if len(command) < 2 or not is_this_python(command[0], env):
        return "the command is not run by this Python"
    if command[1] == launch_fork.SAFE_PATH:
        command = (command[0], *command[2:])
    if command[1] == "-m":
        return "" if len(command) > 2 and not command[2].startswith("-") else "-m names no module"
    if command[1].startswith("-") or not command[1].endswith(".py") or not Path(command[1]).is_file():
        return "the command is not of the form python SCRIPT.py or python -m MODULE"
    if sys.orig_argv[1:2] != ["-m"] and sys.orig_argv[1:2] and sys.orig_argv[1].startswith("-"):
        return "this Python itself runs with options"
    shadowed = shadowed_by(Path(command[1]).resolve().parent)
    if shadowed:
        return f"{shadowed} beside the script would be hidden by a module that is loaded already"
    return ""


def is_this_python(program: str, env: Mapping[str, str]) -> bool:
    """Whether a command's first word is the Python of this environment."""
    found = shutil.which(program, path=env.get("PATH"))
    if found is None or not sys.executable:
        return False
    same_file = os.path.realpath(found) == os.path.realpath(sys.executable)
    # Interpreters of different virtual environments are often links to the same file.
    return same_file and Path(found).parent.resolve() == Path(sys.executable).parent.resolve()


def shadowed_by(directory: Path) -> str:
    """Returns a file beside the script that hides a module which the launcher has loaded; empty: none."""
    for entry in directory.iterdir():
        if entry.name == "__main__.py":  # no program imports that by name
            continue
        module = sys.modules.get(entry.stem if entry.suffix == ".py" else entry.name)
        origin = getattr(module, "__file__", None)
        if origin and not Path(origin).resolve().is_relative_to(directory):
            return entry.name
    return ""


# ---------------------------------------------------------------- this host: GPUs, cores, names and ports


def count_gpus(root: Path = Path("/")) -> int:
    """Counts the GPUs for which this host or container has device files."""
    return sum(path.name[6:].isdigit() for path in root.glob("dev/nvidia[0-9]*"))


def offered_devices(env: Mapping[str, str], option: str, gpus: int) -> tuple[str, ...]:
    """Returns the devices that workers may use, in order, as CUDA_VISIBLE_DEVICES names them.

    Args:
        env: the environment, in which CUDA_VISIBLE_DEVICES may limit the host's devices.
        option: ``all``, ``none``, or numbers such as ``4-7`` that must be among them.
        gpus: GPUs of the host.

    Raises:
        SettingsError: a device does not exist, or is named twice.
    """
    if option == "none":
        return ()
    visible = tuple(str(index) for index in range(gpus))
    # This is the workers' rule, so that a value which they would refuse is refused here already.
    narrowed = visible_devices(env) if "CUDA_VISIBLE_DEVICES" in env else None
    if narrowed is not None and gpus:
        unknown = [name for name in narrowed if name.isdigit() and name not in visible]
        if unknown:
            raise SettingsError(
                f"CUDA_VISIBLE_DEVICES is {env['CUDA_VISIBLE_DEVICES']!r}, but this host has {_have(gpus)}."
            )
        visible = narrowed
    if option == "all":
        return visible
    chosen = tuple(str(number) for number in parse_numbers(option, "--devices"))
    missing = [name for name in chosen if name not in visible]
    if missing:
        have = ", ".join(visible) or "none"
        raise SettingsError(f"--devices asks for {', '.join(missing)}; this host offers {have}.")
    return chosen


def _have(gpus: int) -> str:
    return "device 0" if gpus == 1 else f"devices 0 to {gpus - 1}"


def local_names(candidates: Iterable[str]) -> set[str]:
    """Returns the names and addresses among these that mean this host, and always its own name."""
    own = socket.gethostname()
    names = {own, own.split(".")[0]}
    return names | {name for name in candidates if name not in names and _is_local(name)}


def _is_local(name: str) -> bool:
    """Whether an address of this name can be bound here: only a host's own addresses can."""
    try:
        infos = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # UnicodeError: such a name can never exist
        return False
    for family, kind, protocol, _, address in infos:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def hold_port(host: str) -> socket.socket:
    """Binds a socket to a free port; until it is closed, no other process is given that port.

    A server that binds this very port still gets it if it sets SO_REUSEADDR, as gRPC does.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def cores() -> tuple[int, ...]:
    """Returns the cores that this process may use, in order."""
    return tuple(sorted(os.sched_getaffinity(0)))


def is_taken(host: str, port: int) -> bool:
    """Whether another process listens on this port of this host already."""
    with contextlib.suppress(OSError, UnicodeError):  # the scheduler reports other errors
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(address)
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        return True
    return False


# ---------------------------------------------------------------- the rank table's devices and ranks


def with_table_ranks(
    workers: Sequence[WorkerPlan], env: Mapping[str, str], root: Path = Path("/")
) -> tuple[WorkerPlan, ...]:
    """Gives workers the ranks of RANK_TABLE_FILE, if there is one.

    Args:
        workers: as planned.
        env: the launcher's environment.
        root: where ``dev`` and ``proc`` lie.

    Returns:
        The workers. If the file or the settings are wrong, their ranks stay unknown, and the scheduler or the
        worker reports the error.
    """
    table = _table(env)
    if table is None:
        return tuple(workers)
    try:
        names, devices = _places([{**env, **worker.env} for worker in workers], root)
    except SettingsError:
        return tuple(workers)
    ranks = ranks_of(table, names, devices)
    return tuple(replace(worker, rank=rank) for worker, rank in zip(workers, ranks, strict=True))


def table_devices(env: Mapping[str, str]) -> tuple[int, ...]:
    """Returns the devices that RANK_TABLE_FILE gives to this host, in order of rank; empty: it says nothing.

    If the file is wrong, the scheduler reports the error.

    Raises:
        SettingsError: its variable contradicts the old one.
    """
    table = _table(env)
    if table is None:
        return ()
    named = {entry.server_id for entry in table.entries}
    here = local_names(named) | {env.get("MS_HOST_ID", ""), env.get("MS_WORKER_ADDRESS", "")}
    return devices_of(table, here & named)


def _table(env: Mapping[str, str]) -> RankTable | None:
    """Returns the table that the environment names; None if there is none, or if it is wrong."""
    table_file(env)  # raises if the old and the new variable differ
    with contextlib.suppress(SettingsError):
        return Environment(env, SettingsError).rank_table()
    return None


def _places(environments: Sequence[Mapping[str, str]], root: Path) -> tuple[tuple[str, ...], list[int]]:
    """Returns the names that a table may use for this host, and each worker's device.

    Workers report the same to the scheduler.
    """
    from muster.worker.host import choose_device, describe_host

    settings = [load_settings(env) for env in environments]
    host = describe_host(settings[0])
    devices = [choose_device(each, root).device.index for each in settings]
    return (host.address, host.name, host.id), devices
