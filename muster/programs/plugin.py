"""Muster's plug-in for torch: ``import torch`` runs :func:`autoload` by the entry point ``torch.backends``.

In a program that Muster has started, ``init_process_group()`` goes to Muster's store, by ``muster://`` and by
``env://``, which is the default, and there is the backend "muster". Anywhere else it does nothing and imports
nothing.
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
"""The same for workers of torchrun, which gives them stores by itself."""

IN_PLACE_VARIABLE = "MS_IN_PLACE"
STEP_TIMES_VARIABLE = "MS_STEP_TIMES"
"""The user's: "1" where each program is to live on as if its first line called ``keep_alive()``."""

STACKS_VARIABLE = "MUSTER_STACKS"
"""Where whoever may ask for the program's stacks wants them written."""

_CONNECT_TIMEOUT = timedelta(seconds=300)
_GLOO_THREAD = "pt_gloo_runloop"
_SETTLED_S = 0.02
"""Longer than a thread waits for the interpreter's lock at a time."""
_LONGEST_S = 5.0


def autoload() -> None:
    """Registers the rendezvous handlers and the backend in a program of Muster's."""
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
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]  # its package hides it by a function
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
"""What torch's client says to its server without waiting for an answer."""


def _let_writes_settle(variable: str) -> None:
    """Lets what Python writes to Muster's store return when the store has it.

    By torch's protocol nothing answers a write. Its own server sees it before whatever the writer does
    next; here it goes on to the scheduler, and others would read the old value. A check of no keys is
    answered when all that this client has written has been carried out.

    Args:
        variable: where the address of the store's listener stands; others, a program's own, stay as they are.
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
    """Waits until Gloo's threads have let go of the tensors of what is over; at most 5 s.

    They do so after they have woken who waited for a collective, and need the interpreter's lock for it. A
    thread that asks for that when the interpreter ends is ended, during a C++ destructor: the process aborts.
    """
    until = time.monotonic() + _LONGEST_S
    before: list[str] = []
    while (now := _gloo_threads()) and time.monotonic() < until:
        if now == before and all("State:\tS" in each for each in now):
            break
        before = now
        time.sleep(_SETTLED_S)


def _gloo_threads() -> list[str]:
    """What the kernel says of the threads that run collectives: their state, how often they have run."""
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
    """Gives torch this generation's store, with the rank and the size that the URL or environment says."""
    from urllib.parse import parse_qsl, urlsplit

    from torch.distributed import PrefixStore, TCPStore

    said = dict(parse_qsl(urlsplit(url).query))
    rank = int(said.get("rank") or _variable("RANK"))
    world_size = int(said.get("world_size") or _variable("WORLD_SIZE"))
    host, _, port = _variable(VARIABLE).rpartition(":")
    store = TCPStore(host, int(port), None, False, timeout=timeout, wait_for_workers=False)
    # Each time that the ranks of a world make a group they get keys of their own, also in other processes;
    # one that is made by one rank alone, as it rehearses, counts nowhere.
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
