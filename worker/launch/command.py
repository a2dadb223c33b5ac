"""From the command line to running processes: ``muster run -n 2 --scheduler -- python train.py``."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from muster.worker.errors import SettingsError
from muster.worker.launch import devices as launch_devices
from muster.worker.launch import fork as launch_fork
from muster.worker.launch import options as launch_options
from muster.worker.launch import rank_table as launch_ranks
from muster.worker.launch.launcher import Launcher, Policy
from muster.worker.launch.parsing import DEFAULT_PORT, parse_address
from muster.worker.launch.plan import WorkerPlan, plan_layout, plan_workers
from muster.worker.launch.process import Forked, Recipe, say
from muster.worker.launch.report import parse_tail

NEEDED_MODULES = ("worker", "certs", "rendezvous", "grpc", "numpy")
"""What every worker imports."""

_SERVER_PASSWORD, _CLIENT_PASSWORD = "MS_SERVER_PASSWORD", "MS_CLIENT_PASSWORD"


def main(argv: Sequence[str]) -> int:
    """Launches and returns the exit code. In a forked worker it runs the worker's script instead."""
    try:
        with contextlib.ExitStack() as held:
            return _launch(argv, held)
    except Forked as fork:
        recipe = fork.recipe
    launch_fork.become(recipe.argv)  # outside the handler: the script must not see our exception
    return 0


def _launch(argv: Sequence[str], held: contextlib.ExitStack) -> int:
    try:
        launch = Launch(launch_options.parse(argv), dict(os.environ), launch_devices.count_gpus(), held)
        scheduler = launch.scheduler_recipe()
    except SettingsError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:  # at the question for a password: nothing runs yet
        say("interrupted")
        return 130
    launcher = Launcher(launch.policy())
    try:
        launcher.start_scheduler(scheduler)
        code = launcher.run(launch.worker_recipes())
        return launch_fork.leave(code) if launch.warm else code
    except Forked:
        launcher.forget()
        raise
    except SettingsError as error:
        launcher.abandon()
        say(str(error))
        return error.exit_code
    except BaseException:
        launcher.abandon()
        raise


class Launch:
    """One launch worked out: options, machine and environment brought together.

    Args:
        options: from :func:`muster.worker.launch.options.parse`.
        env: the launcher's environment.
        gpus: how many GPUs the host has.
        held: what is closed when the launch is over.

    Raises:
        SettingsError: something is asked for that cannot be.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        env: Mapping[str, str],
        gpus: int,
        held: contextlib.ExitStack,
    ) -> None:
        self._options = options
        self._held = held
        self._env = env
        self._asked = ""
        self.warm = False
        request = launch_options.request(options, env)
        self._meeting = request.meeting
        self._table_devices = launch_ranks.table_devices(env)
        self._devices = self._offered(gpus)
        here = launch_devices.local_names(
            filter(None, [request.meeting, *(host.name for host in request.hosts)])
        )
        cores = len(launch_devices.cores())
        count = len(self._devices or self._table_devices)
        self.layout = plan_layout(request, here=here, devices=count, cores=cores)
        self.command = _resolved(options.command, env)
        _check_python(self.command, env)
        host, port = self._scheduler_address()
        self._common = {"MS_SCHED_HOST": host, "MS_SCHED_PORT": port, **self._job_variables()}
        self.workers = self._planned()
        labels = [worker.label for worker in self.workers]
        self._shown = parse_tail(options.tail, [*labels, "scheduler"])
        _prepare(options.log_dir)

    def _planned(self) -> tuple[WorkerPlan, ...]:
        workers = plan_workers(
            self.layout,
            self._env,
            common={**self._common, **self._device_variables(), **self._leave_timeout()},
            host=socket.gethostname(),
            devices=len(self._devices),
            cores=launch_devices.cores() if self._options.bind_cores else (),
            device_ids=self._table_devices,
        )
        workers = launch_ranks.with_table_ranks(workers, self._env)
        launch_ranks.check_rank_ids(workers, self._env)
        return workers

    def _offered(self, gpus: int) -> tuple[str, ...]:
        """The devices that workers may have: those asked for, else those of the rank table, else all."""
        offered = launch_devices.offered_devices(self._env, self._options.devices, gpus)
        asked = self._options.devices != "all" or "CUDA_VISIBLE_DEVICES" in self._env
        if asked or not offered or not self._table_devices:
            return offered
        numbers = ",".join(map(str, self._table_devices))
        try:
            return launch_devices.offered_devices(self._env, numbers, gpus)
        except SettingsError as error:
            told = f"The rank table gives devices {numbers} to this host, which offers {', '.join(offered)}."
            raise SettingsError(told) from error

    def policy(self) -> Policy:
        """How the launcher is to act when processes end."""
        chosen = self._options
        return Policy(chosen.grace, chosen.max_restarts, chosen.min_workers, chosen.timestamps)

    # ------------------------------------------------------------ the processes

    def scheduler_recipe(self) -> Recipe | None:
        """The scheduler of this host, if it is to run here."""
        if not (self._options.scheduler and self.layout.first_host):
            if self._meeting:  # should no host have that address, this is all that tells why nothing starts
                say(f"the scheduler is not started here: {self._meeting} is no address of this host")
            return None
        self._check_port()
        env = {
            **self._common,
            **self._password(_SERVER_PASSWORD),
            "MS_ROLE": "MS_SCHED",
            "MS_WORKER_NUM": str(self.layout.world_size),
        }
        argv = (sys.executable, "-m", "muster.scheduler")
        hidden = self._hidden(_SERVER_PASSWORD, _CLIENT_PASSWORD)
        shown = "scheduler" in self._shown
        return self._recipe("scheduler", argv, env, hidden, "scheduler.log", shown=shown)

    def _check_port(self) -> None:
        """Before any worker is started: they would join whatever listens there."""
        host, port = self._common["MS_SCHED_HOST"], self._common["MS_SCHED_PORT"]
        if port.isdecimal() and len(port) <= 5 and launch_devices.is_taken(host, int(port)):
            raise SettingsError(
                f"Another process listens on port {port} of {host} already, so no scheduler can start there.",
                remedy="If it is your job's scheduler, leave --scheduler out, else choose another port.",
            )

    def worker_recipes(self) -> list[Recipe]:
        """The workers of this host. Imports what they share if they are to be forked."""
        forked = self._prepare_fork()
        return [self._worker_recipe(worker, forked=forked) for worker in self.workers]

    def _worker_recipe(self, worker: WorkerPlan, *, forked: bool) -> Recipe:
        env = {**worker.env, **self._password(_CLIENT_PASSWORD)}
        if not forked:
            env.setdefault("PYTHONUNBUFFERED", self._env.get("PYTHONUNBUFFERED", "1"))
        log = f"worker_{worker.label}.log"
        return self._recipe(
            worker.label,
            self.command,
            env,
            self._hidden(_CLIENT_PASSWORD, _SERVER_PASSWORD),
            log,
            cores=worker.cores,
            forked=forked,
            shown=bool(self._shown & {worker.label, worker.number}),
        )

    def _recipe(
        self,
        label: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        removed: frozenset[str],
        log: str,
        *,
        shown: bool,
        cores: tuple[int, ...] = (),
        forked: bool = False,
    ) -> Recipe:
        path = self._options.log_dir / log
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise SettingsError(f"The log {path} cannot be written: {error.strerror}.") from error
        return Recipe(label, tuple(argv), env, path, removed, cores, forked, quiet=not shown)

    def _prepare_fork(self) -> bool:
        start = self._options.start
        if start == "exec" or (start == "auto" and (self._devices or len(self.workers) < 2)):
            return False
        reason = launch_fork.refusal(self.command, self._env)
        if not reason:
            self.warm = True
            os.environ.update(self._common_to_all())  # some libraries read theirs when they are loaded
            self._warm_up()
            if launch_fork.threads() > 1:
                reason = "a library has started threads"
        if reason and start == "fork":
            say(f"--start fork: {reason}; starting each worker afresh")
        return not reason

    def _warm_up(self) -> None:
        from muster.certs.errors import CertificateError

        try:
            launch_fork.warm_up(self._config_path)
        except CertificateError as error:
            raise SettingsError(error.message, remedy=error.remedy) from error

    def _common_to_all(self) -> dict[str, str]:
        first, *others = (worker.env for worker in self.workers)
        return {key: value for key, value in first.items() if all(env.get(key) == value for env in others)}

    # ------------------------------------------------------------ the environment

    def _job_variables(self) -> dict[str, str]:
        options = self._options
        found = {}
        if options.config is not None:
            found["MS_CONFIG_FILE"] = str(options.config.absolute())
        if options.job_id:
            found["MS_JOB_ID"] = options.job_id
        if options.min_workers:
            if options.min_workers > self.layout.world_size:
                raise SettingsError(
                    f"--min-workers is {options.min_workers}; the job has {self.layout.world_size} workers."
                )
            found["MS_WORKER_MIN"] = str(options.min_workers)
        return found

    @property
    def _config_path(self) -> str:
        return self._common.get("MS_CONFIG_FILE") or self._env.get("MS_CONFIG_FILE", "")

    def _hidden(self, own: str, other: str) -> frozenset[str]:
        """Password variables that a process must not get: the other role's; its own where a file is named."""
        return _with_file(other) | (_with_file(own) if self._options.password_file else frozenset())

    def _password(self, variable: str) -> dict[str, str]:
        """The password as the options give it, or asked for once instead of in every worker."""
        if self._options.password_file is not None:
            return {f"{variable}_FILE": str(self._options.password_file.absolute())}
        missing = not any(self._env.get(name) for name in _with_file(variable))
        if missing and self._config_path and sys.stdin.isatty():
            if not self._asked:
                self._asked = getpass.getpass(f"Password of the certificates of {self._config_path}: ")
            return {variable: self._asked}
        return {}

    def _leave_timeout(self) -> dict[str, str]:
        """Workers that are asked to end know when they will be killed, and save what they have before."""
        if self._env.get("MS_LEAVE_TIMEOUT"):
            return {}
        return {"MS_LEAVE_TIMEOUT": f"{max(0.8 * self._options.grace, 1.0):g}"}

    def _device_variables(self) -> dict[str, str]:
        """Narrowed devices reach the workers as CUDA_VISIBLE_DEVICES; ``none`` hides them all."""
        narrowed = self._table_devices and self._devices and "CUDA_VISIBLE_DEVICES" not in self._env
        if self._options.devices == "all" and not narrowed:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._devices)}

    def _scheduler_address(self) -> tuple[str, str]:
        options, env, layout = self._options, self._env, self.layout
        port = env.get("MS_SCHED_PORT", "")
        if options.join is not None:
            return parse_address(options.join)
        if env.get("MS_SCHED_HOST"):
            return env["MS_SCHED_HOST"], port or str(DEFAULT_PORT)
        if layout.scheduler_host:
            return layout.scheduler_host, port or str(DEFAULT_PORT)
        if layout.world_size > layout.local_size:
            raise SettingsError(
                "The workers of the other hosts need to know where the scheduler runs: "
                "give its address on every host with --join HOST:PORT."
            )
        if options.scheduler:
            return "127.0.0.1", port or self._hold_port("127.0.0.1")
        if port:
            return "127.0.0.1", port
        raise SettingsError(
            "No scheduler is known: start one here with --scheduler, or say where it runs: --join HOST:PORT."
        )

    def _hold_port(self, host: str) -> str:
        """A free port, kept so until the launch is over: the scheduler takes seconds to come to it."""
        port = self._held.enter_context(launch_devices.hold_port(host))
        return str(port.getsockname()[1])


def _prepare(log_dir: Path) -> None:
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        if not os.access(log_dir, os.W_OK | os.X_OK):
            raise PermissionError(None, "permission denied")
    except OSError as error:
        raise SettingsError(f"--log-dir {log_dir} cannot be written: {error.strerror}.") from error


def _check_python(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Refuses a Python that is not this one and cannot import what a worker needs.

    Raises:
        SettingsError: it belongs to another environment, in which Muster is not installed.
    """
    is_python = re.fullmatch(r"python[0-9.]*", Path(command[0]).name)
    if not is_python or launch_fork.is_this_python(command[0], env):
        return
    program = shutil.which(command[0], path=env.get("PATH")) or command[0]
    script = next((word for word in command[1:] if not word.startswith("-")), "")
    beside = str(Path(script).resolve().parent) if script.endswith(".py") else str(Path.cwd())
    ask = (
        f"import importlib.util as u, sys; sys.path[0] = {beside!r}; "
        f"print(*[name for name in {NEEDED_MODULES!r} if u.find_spec(name) is None])"
    )
    try:
        done = subprocess.run(
            [program, "-c", ask], env=dict(env), capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return  # what is wrong with it the workers' logs will say
    lacking = done.stdout.split()
    if lacking:
        modules = f"the module {lacking[0]}" if len(lacking) == 1 else f"the modules {', '.join(lacking)}"
        raise SettingsError(
            f"The command's Python is {program}, which lacks {modules}; this one is {sys.executable}.",
            remedy="Name this one, or the script alone, or install Muster in that environment too.",
        )


def _with_file(variable: str) -> frozenset[str]:
    return frozenset({variable, f"{variable}_FILE"})


def _resolved(command: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """The command as it will be run; a bare Python script is run by this Python."""
    program = command[0]
    if program.endswith(".py") and Path(program).is_file() and not os.access(program, os.X_OK):
        return (sys.executable, *command)
    if shutil.which(program, path=env.get("PATH")) is None:
        raise SettingsError(f"The command {program!r} is not found, or is not executable.")
    return tuple(command)
