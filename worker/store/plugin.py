"""Muster's plug-in for torch: ``import torch`` runs :func:`autoload` by the entry point ``torch.backends``.

In a program that Muster has started, ``init_process_group()`` goes to Muster's store, by ``muster://`` and by
``env://``, which is the default, and there is the backend "muster". Anywhere else it does nothing and imports
nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

VARIABLE = "MUSTER_STORE"
_CONNECT_TIMEOUT = timedelta(seconds=300)


def autoload() -> None:
    """Registers the rendezvous handlers and the backend in a program of Muster's."""
    if VARIABLE not in os.environ:
        return
    import torch.distributed

    if not torch.distributed.is_available():
        return
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]  # its package hides it by a function
    rendezvous._rendezvous_handlers["muster"] = _handler
    rendezvous._rendezvous_handlers["env"] = _handler
    from muster.worker.process_group import registration

    registration.register(os.environ.get(registration.VARIABLE, ""))


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
    # Each time that the ranks of a world make a group they get keys of their own, also in other processes.
    count = store.add(f"groups/{world_size}/{rank}", 1)
    yield PrefixStore(f"group/{world_size}/{count}", store), rank, world_size
    raise RuntimeError("A process group is made once; the next generation has a new one.")


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ValueError(f"{name} is not set, which muster run does for torch programs.")
    return value
