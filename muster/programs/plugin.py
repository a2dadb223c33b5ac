"""Muster's plug-in for torch: ``import torch`` runs :func:`autoload` by the entry point ``torch.backends``.

In a program that Muster has started, it registers the backend "muster", and ``init_process_group()`` uses
Muster's store, for ``muster://`` and for the default, ``env://``. In any other program it does nothing and
imports nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

VARIABLE = "MUSTER_STORE"
TORCHRUN_VARIABLE = "MUSTER_TORCHRUN_STORE"
"""Variables with the address of the store's listener; the second one is for workers of torchrun, which opens
their stores by itself.
"""

IN_PLACE_VARIABLE = "MS_IN_PLACE"
STEP_TIMES_VARIABLE = "MS_STEP_TIMES"
"""Variables that users set: MS_IN_PLACE=1 calls ``keep_alive()`` at a program's start, and MS_STEP_TIMES=0
turns the measurement of step times off."""

STACKS_VARIABLE = "MUSTER_STACKS"
"""Names the file into which the program writes its stacks when it is asked for them."""

_CONNECT_TIMEOUT = timedelta(seconds=300)
_GLOO_THREAD = "pt_gloo_runloop"
_SETTLED_S = 0.02
"""The pause between looks at Gloo's threads, in seconds: longer than one wait for the interpreter's lock."""
_LONGEST_S = 5.0


def autoload() -> None:
    """Registers the rendezvous handlers and the backend in a program that Muster has started."""
    if STACKS_VARIABLE in os.environ:
        from muster.worker.stacks.handler import answer_signal

        answer_signal(os.environ)
    if VARIABLE not in os.environ:
        if TORCHRUN_VARIABLE in os.environ:
            _let_writes_settle(TORCHRUN_VARIABLE)
            from muster.worker.program_environment import NCCL_SECRET_VARIABLE

            if NCCL_SECRET_VARIABLE in os.environ:
                from muster.programs.sealed_nccl import take_secret_of_torchrun

                take_secret_of_torchrun(os.environ)
        return
    import torch.distributed

    if not torch.distributed.is_available():
        return
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]  # hidden by a function of that name
    rendezvous._rendezvous_handlers["muster"] = _handler
    rendezvous._rendezvous_handlers["env"] = _handler
    from muster.programs import registration

    registration.register(os.environ.get(registration.VARIABLE, ""))
    _let_writes_settle(VARIABLE)
    atexit.register(let_gloo_settle)
    if os.environ.get(STEP_TIMES_VARIABLE) != "0":
        from muster.programs import step_times

        step_times.install()
    if os.environ.get(IN_PLACE_VARIABLE) == "1":
        from muster.programs.keep_alive import keep_alive

        keep_alive()


WRITES = ("set", "append", "multi_set", "queue_push")
"""The operations that torch's client sends to the store without waiting for an answer."""


def _let_writes_settle(variable: str) -> None:
    """Makes writes from Python to Muster's store return only once the store has them.

    In torch's protocol a write has no answer. Torch's own server has it before the writer's next action, but
    Muster's listener passes it on to the scheduler, and until then others would read the old value. So each
    write is followed by a check of no keys, which is answered once all writes of this client are carried out.

    Args:
        variable: the environment variable with the address of the store's listener. Writes to other stores,
            such as a program's own, do not change.
    """
    from torch.distributed import PrefixStore, Store, TCPStore

    def settle(store: Any) -> None:
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if isinstance(store, TCPStore) and f"{store.host}:{store.port}" == os.environ.get(variable):
            store.check([])

    def settling(write: Any) -> Any:
        @functools.wraps(write)
        def written(store: Any, *args: Any, **kwargs: Any) -> Any:
            result = write(store, *args, **kwargs)
            settle(store)
            return result

        return written

    for name in WRITES:
        if write := getattr(Store, name, None):
            setattr(Store, name, settling(write))


def let_gloo_settle() -> None:
    """Waits until Gloo's threads have released the tensors of completed collectives; at most 5 s.

    They release them after they have woken the caller, and need the interpreter's lock for it. A thread that
    requests the lock when the interpreter ends is terminated, here within a C++ destructor, which aborts the
    process.
    """
    until = time.monotonic() + _LONGEST_S
    before: list[str] = []
    while (now := _gloo_threads()) and time.monotonic() < until:
        if now == before and all("State:\tS" in each for each in now):
            break
        before = now
        time.sleep(_SETTLED_S)


def _gloo_threads() -> list[str]:
    """Reads the state and the counts of context switches of the threads that run Gloo's collectives."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            name, *lines = (thread / "status").read_text().splitlines()
            if name == f"Name:\t{_GLOO_THREAD}":
                found.append(
                    "".join(each for each in lines if each.startswith("State:") or "_switches:" in each)
                )
    return found


def _handler(
    url: str, timeout: timedelta = _CONNECT_TIMEOUT, **_options: object
) -> Iterator[tuple[Any, int, int]]:
    """Yields this generation's store, with the rank and world size from the URL or the environment.

    Raises:
        ValueError: a variable that ``muster run`` sets is missing.
        RuntimeError: torch asks for another rendezvous by the same URL.
    """
    from urllib.parse import parse_qsl, urlsplit

    from torch.distributed import PrefixStore, TCPStore

    said = dict(parse_qsl(urlsplit(url).query))
    rank = int(said.get("rank") or _variable("RANK"))
    world_size = int(said.get("world_size") or _variable("WORLD_SIZE"))
    host, _, port = _variable(VARIABLE).rpartition(":")
    store = TCPStore(host, int(port), None, False, timeout=timeout, wait_for_workers=False)
    # Each group that the ranks of a world make gets keys of its own, in other processes too. A group that a
    # rank makes alone while it rehearses is not counted.
    living = sys.modules.get("muster.programs.keep_alive")
    program = living and living.living_program()
    count = 0 if program and program.rehearses else store.add(f"groups/{world_size}/{rank}", 1)
    yield PrefixStore(f"group/{world_size}/{count}", store), rank, world_size
    raise RuntimeError("A process group is made once; the next generation has a new one.")


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ValueError(f"{name} is not set, which muster run does for torch programs.")
    return value
