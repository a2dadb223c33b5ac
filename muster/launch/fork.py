"""Starts workers as forks of one process that has imported what they need.

Most of a short start is imports: Python, NumPy, gRPC, cryptography, once per worker. With ``--start
fork`` the launcher imports them once and each worker is a copy of it that runs the script as
``python SCRIPT`` would: same ``sys.argv``, ``__main__``, ``__file__``, ``sys.path``, exit code and
traceback. gRPC allows this as long as none of its objects exists before the fork. Nothing that is
imported here makes one, and the launcher looks for threads to be sure.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import io
import os
import runpy
import signal
import sys
import types
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NoReturn

from muster.launch.plan import Recipe
from muster.worker.ending import exit_noted, set_title

SAFE_PATH = "-P"
"""Python's option that keeps the working directory, and the script's, off the module path."""


def own_flags() -> tuple[str, ...]:
    """Python's options for Muster's own programs: no ``queue.py`` in the working directory harms them.

    None where Muster itself is only found there, as by ``python -m muster`` in a checkout.
    """
    found_by = Path(sys.path[0] or os.curdir).resolve()
    return () if found_by == Path(__file__).resolve().parents[2] else (SAFE_PATH,)


WARM_MODULES = (
    "numpy",
    "muster.worker.host",
    "muster.worker.session.session",
    "muster.worker.runtime",
    "muster.worker.collectives",
    "muster.communicators.tcp.backend",
)
"""What a CPU worker imports between ``import muster`` and its first collective, gRPC excepted."""

WARM_WITH_TLS = (
    "muster.worker.session.connection",
    "muster.certs.runtime.follower",
    "muster.certs.runtime.grpc_credentials",
    "muster.certs.runtime.preflight",
    "cryptography.hazmat.backends.openssl.backend",
    "grpc",
    "grpc._channel",
    "grpc.experimental",
    "encodings.ascii",
    "encodings.idna",
)


def warm_up(config_path: str) -> None:
    """Imports what workers will need, then makes the heap cheap to share.

    Args:
        config_path: the job's config.json; empty for none. gRPC reads its cipher list when it is
            imported, so without a configuration that is left to the workers.
    """
    for name in WARM_MODULES:
        importlib.import_module(name)
    if config_path:
        certs_config = importlib.import_module("muster.certs.config")
        certs_config.apply_cipher_list(certs_config.load_config(config_path))
        with _quiet_grpc():
            for name in WARM_WITH_TLS:
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def _quiet_grpc() -> Iterator[None]:
    """Sets gRPC's variables as a worker does before it imports gRPC."""
    quiet = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}
    added = {name: value for name, value in quiet.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:  # a scheduler that is started again is to choose for itself
            del os.environ[name]


def threads() -> int:
    """Threads of this process; a fork is safe with one only."""
    return len(list(Path("/proc/self/task").iterdir()))


def leave(code: int) -> NoReturn:
    """Ends a launcher that has cleaned up, without tearing down the modules it imported for others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def become(recipe: Recipe) -> None:
    """Runs a recipe's ``python SCRIPT`` in this process, forked for it, to the interpreter's own end.

    Exceptions leave this function as they would leave a script; the interpreter then ends as usual:
    threads joined, exit functions run, streams flushed.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    _reseed()
    argv, safe = recipe.argv, recipe.argv[1] == SAFE_PATH
    argv = (argv[0], *argv[2:]) if safe else argv
    who = f"rank {recipe.label}" if recipe.label.isdecimal() else f"worker {recipe.label}"
    who = recipe.label if recipe.last else who  # an uplink
    set_title(who, argv[2] if argv[1] == "-m" else argv[1])
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


def _report(error: BaseException) -> None:
    """Shows a traceback without this file's frames, then silences the interpreter's own."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    sys.excepthook = lambda *_: None


def _reseed() -> None:
    """Seeds random generators anew, which forked workers would share otherwise."""
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
    for loaded in (name, f"{name}.__main__"):  # by the launcher; runpy would warn of it
        if not hasattr(sys.modules.get(loaded), "__path__"):
            sys.modules.pop(loaded, None)
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what python -m itself calls
