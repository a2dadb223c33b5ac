"""Makes the backend "muster" known to torch.distributed and, where that is wanted, gives it the name "gloo".

What a group needs is imported when one is made: most programs that torch is imported in make none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from muster.worker.errors import SettingsError

NAME = "muster"
GLOO = "gloo"
VARIABLE = "MS_TORCH_GLOO"


def register(said: str) -> None:
    """Registers the backend; idempotent.

    Args:
        said: the value of MS_TORCH_GLOO. "muster": groups of the backend "gloo" are Muster's, too.

    Raises:
        SettingsError: it is something else.
    """
    if said not in ("", NAME):
        raise SettingsError(f"{VARIABLE} is {said!r}; legal is {NAME!r}, or nothing.")
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    if NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    if said == NAME:
        from muster.worker.process_group.group import GroupNamedGloo

        c10d.ProcessGroupGloo = dist.ProcessGroupGloo = GroupNamedGloo
        c10d._GLOO_AVAILABLE = True
    c10d._new_process_group_helper = _checked(c10d._new_process_group_helper, {NAME, said and GLOO})


def _create(options: Any, _backend_options: Any = None) -> Any:
    from muster.worker.process_group.group import MusterProcessGroup

    return MusterProcessGroup(
        options.store, options.group_rank, options.group_size, options.timeout, name=options.group_id
    )


def _checked(helper: Callable[..., Any], ours: set[str]) -> Callable[..., Any]:
    """Torch's function that makes a group, with a check of what cannot be held side by side.

    A group made in Python stands for all backends of a group: one with another for GPUs would lose that.
    """

    def checked(*args: Any, **kwargs: Any) -> Any:
        backend = kwargs.get("backend", args[3] if len(args) > 3 else None)
        config = sys.modules["torch.distributed.distributed_c10d"].BackendConfig(dist.Backend(str(backend)))
        devices = config.get_device_backend_map()
        used = set(map(str, devices.values()))
        if used & ours and not used <= ours:
            asked = ",".join(f"{device}:{name}" for device, name in devices.items())
            raise SettingsError(
                f"A process group of {asked} cannot be made: Muster's takes tensors on the CPU only, and"
                " torch holds none beside it.",
                remedy='Make one with backend="nccl", and another by new_group(backend="muster").',
            )
        return helper(*args, **kwargs)

    return checked
