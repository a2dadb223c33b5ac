"""Starts scheduler and workers as forks of one process that has imported what they need.

Most of a short start is imports: Python, NumPy, gRPC, cryptography, once per process. With ``--start
fork`` the launcher imports them once and each worker is a copy of it that runs the script as
``python SCRIPT`` would: same ``sys.argv``, ``__main__``, ``__file__``, ``sys.path``, exit code and
traceback. gRPC allows this as long as none of its objects exists before the fork. No module that is
imported here makes such an object, and the launcher checks for threads to be sure.

The scheduler is forked first, before gRPC and NumPy are imported. It does not need NumPy. gRPC reads its
variables when it is imported, and they differ: it traces handshakes in the scheduler and is silent in
workers.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import io
import logging
import os
import runpy
import signal
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NoReturn

from muster.launch.plan import SCHEDULER, Recipe
from muster.worker.ending import exit_noted, set_title

SAFE_PATH = "-P"
"""Python's option that keeps the working directory, and the script's directory, off the module path."""


def own_flags() -> tuple[str, ...]:
    """Returns Python's options for Muster's own programs: no ``queue.py`` in the directory can harm them.

    There are none if Muster itself is found only in the working directory, as with ``python -m muster`` in a
    checkout.
    """
    found_by = Path(sys.path[0] or os.curdir).resolve()
    return () if found_by == Path(__file__).resolve().parents[2] else (SAFE_PATH,)


WARM_FOR_ALL = (
    "asyncio",
    "concurrent.futures.thread",
    "muster.wire.codec",
    "muster.wire.grpc_stderr",
    "muster.wire.log_lines",
    "muster.wire.v1.watch_pb2",
)
"""Modules that scheduler and workers import, except gRPC."""

WARM_FOR_ALL_WITH_TLS = (
    "muster.certs.runtime.follower",
    "cryptography.hazmat.backends.openssl.backend",
)

WARM_MODULES = (
    "numpy",
    "muster.worker.host",
    "muster.worker.session.session",
    "muster.worker.runtime",
    "muster.worker.collectives",
    "muster.communicators.tcp.backend",
    "muster.communicators.tcp.probe",
    "muster.roles",
    "muster.worker.nccl_protection",
)
"""Modules that a CPU worker imports between ``import muster`` and its first collective, except gRPC."""

WARM_WITH_TLS = (
    "muster.worker.session.connection",
    "muster.certs.runtime.grpc_credentials",
    "muster.certs.runtime.preflight",
    "grpc",
    "grpc._channel",
    "grpc.experimental",
    "encodings.ascii",
    "encodings.idna",
)

AHEAD = "muster.certs.runtime.ahead"


def warmed_scheduler(recipe: Recipe, config_path: str) -> Recipe:
    """Imports the modules that a forked scheduler needs; returns the recipe to start it after that.

    Args:
        recipe: the scheduler's recipe.
        config_path: the job's config.json; empty for none.
    """
    if recipe.forked:
        _warm_up_for_all(config_path)
    return replace(recipe, forked=recipe.forked and threads() == 1)


def _warm_up_for_all(config_path: str) -> None:
    with _cheap_to_share():
        _import(WARM_FOR_ALL)
        if config_path:
            _import(WARM_FOR_ALL_WITH_TLS)


def warm_up(config_path: str, env: Mapping[str, str]) -> None:
    """Imports the modules that workers need, and opens their certificate until :func:`forget` is called.

    Args:
        config_path: the job's config.json; empty for none. gRPC reads its cipher list when it is
            imported, so without a configuration the workers import it themselves.
        env: the environment of a worker.
    """
    _warm_up_for_all(config_path)
    with _cheap_to_share():
        _import(WARM_MODULES)
        if config_path:
            certs_config = importlib.import_module("muster.certs.config")
            certs_config.apply_cipher_list(certs_config.load_config(config_path))
            with _quiet_grpc():
                _import(WARM_WITH_TLS)
            importlib.import_module(AHEAD).open_ahead(config_path, "worker", env)


def forget() -> None:
    """Drops the workers' key after they are forked, if it was opened in advance."""
    if AHEAD in sys.modules:
        sys.modules[AHEAD].close_again()


def _import(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)


@contextlib.contextmanager
def _cheap_to_share() -> Iterator[None]:
    """Hides the objects made in the block from the garbage collector, which would write to shared memory.

    Nothing is collected before, because hardly any object is garbage, and the search would take longer.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _quiet_grpc() -> Iterator[None]:
    """Sets gRPC's variables as a worker does before it imports gRPC."""
    quiet = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}
    added = {name: value for name, value in quiet.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:  # a restarted scheduler must choose its own values
            del os.environ[name]


def threads() -> int:
    """Counts the threads of this process; a fork is safe only with one."""
    return len(list(Path("/proc/self/task").iterdir()))


def leave(code: int) -> NoReturn:
    """Ends a launcher that has cleaned up, without tearing down the modules that it imported for workers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def become(recipe: Recipe) -> None:
    """Runs a recipe's ``python SCRIPT`` in this forked process.

    Exceptions leave this function as they would leave a script. The interpreter then ends as usual: it joins
    threads, runs exit functions and flushes streams.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    _reseed()
    argv, safe = recipe.argv, recipe.argv[1] == SAFE_PATH
    argv = (argv[0], *argv[2:]) if safe else argv
    who = f"rank {recipe.label}" if recipe.label.isdecimal() else f"worker {recipe.label}"
    who = recipe.label if recipe.last or recipe.label == SCHEDULER else who  # not a worker
    set_title(who, argv[2] if argv[1] == "-m" else argv[1])
    _share_to_the_end(dict(sys.modules))
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    sys.orig_argv[1:] = argv[1:]
    try:
        with exit_noted():
            if argv[1] == "-m":
                _run_module(argv[2], argv[3:], safe=safe)
            else:
                _run_script(argv[1], argv[1:], main)
    except SystemExit:
        raise
    except BaseException as error:
        _report(error)
        raise


def _share_to_the_end(modules: dict[str, types.ModuleType]) -> None:
    """Makes the interpreter, at its end, tear down only what the script made, and not inherited modules.

    Inherited memory is shared with the launcher and the other workers until a process writes to it. Tearing
    inherited modules down would write to all of it, and takes a third of a short worker's processor time. The
    script's own modules and objects are torn down as usual, so files that it left open are flushed. Inherited
    modules leave ``sys.modules`` after the last exit function, and are never freed.
    """
    kept = {name: each for name, each in modules.items() if name not in ("sys", "builtins", "__main__")}

    def keep() -> None:
        if gc.isenabled():
            gc.collect()  # as the interpreter would now; finalizers may still import modules
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        for name, module in kept.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    # The function that is registered last runs first. Nothing else is registered before a worker is forked.
    atexit.unregister(logging.shutdown)
    atexit.register(keep)
    atexit.register(logging.shutdown)


def _report(error: BaseException) -> None:
    """Shows a traceback without this file's frames, then silences the interpreter's own."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    sys.excepthook = lambda *_: None


def _reseed() -> None:
    """Seeds the random generators again, because forked workers would share the seeds otherwise."""
    legacy = sys.modules.get("numpy.random")
    if legacy is not None:
        legacy.seed()


def _run_script(script: str, argv: Sequence[str], main: types.ModuleType) -> None:
    path = os.path.abspath(script)  # noqa: PTH100 - Python does not resolve links in __file__ either
    sys.argv[:] = argv
    sys.path[0] = os.path.dirname(os.path.realpath(script))  # noqa: PTH120
    main.__dict__.update(__file__=path, __loader__=SourceFileLoader("__main__", path), __cached__=None)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _run_module(name: str, argv: Sequence[str], *, safe: bool) -> None:
    sys.argv[:] = ["-m", *argv]
    if not safe:
        sys.path[0] = os.getcwd()  # noqa: PTH109
    elif not sys.flags.safe_path:  # the launcher has added one
        del sys.path[0]
    for loaded in (name, f"{name}.__main__"):  # by the launcher; runpy would warn of it
        if not hasattr(sys.modules.get(loaded), "__path__"):
            sys.modules.pop(loaded, None)
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what python -m itself calls
