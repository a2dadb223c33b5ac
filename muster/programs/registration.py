"""Registers the backend "muster" with torch.distributed, and puts it in the place of "gloo" if asked to.

What a group needs is imported when one is made, because most programs that import torch make none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from muster.errors import SettingsError
from muster.programs import BACKEND

GLOO = "gloo"
VARIABLE = "MS_TORCH_GLOO"
BUILTIN_HOOK = "_register_builtin_comm_hook"


def register(said: str) -> None:
    """Registers the backend; idempotent.

    Args:
        said: the value of MS_TORCH_GLOO; with "muster", groups of the backend "gloo" are Muster's, too.

    Raises:
        SettingsError: ``said`` is neither empty nor the backend's name.
    """
    if said not in ("", BACKEND):
        raise SettingsError(f"{VARIABLE} is {said!r}; legal is {BACKEND!r}, or nothing.")
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    if BACKEND.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
    if said == BACKEND:
        from muster.programs.group import GroupNamedGloo

        c10d.ProcessGroupGloo = dist.ProcessGroupGloo = GroupNamedGloo
        c10d._GLOO_AVAILABLE = True
    _serve_hooks(c10d)
    c10d._new_process_group_helper = _checked(c10d._new_process_group_helper, {BACKEND, said and GLOO})


def _create(options: Any, _backend_options: Any = None) -> Any:
    from muster.programs.group import MusterProcessGroup

    return MusterProcessGroup(
        options.store, options.group_rank, options.group_size, options.timeout, name=options.group_id
    )


def _serve_hooks(c10d: Any) -> None:
    """Adapts DDP's communication hooks that do not work with a group made in Python.

    The builtin hook that compresses to 16 bits needs a C++ list, which Python cannot make, so the Python hook
    that computes the same takes its place. The hooks that quantize read results in NCCL's form, and fail with
    Gloo, too; they are refused.
    """
    from torch.nn.parallel import DistributedDataParallel

    builtin = getattr(DistributedDataParallel, BUILTIN_HOOK)
    register = DistributedDataParallel.register_comm_hook

    def is_ours(model: Any) -> bool:
        return type(model.process_group).__module__.startswith(__package__)

    @functools.wraps(builtin)
    def register_builtin(model: Any, comm_hook_type: Any) -> None:
        if comm_hook_type != dist.BuiltinCommHookType.FP16_COMPRESS or not is_ours(model):
            builtin(model, comm_hook_type)
            return
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        register(model, model.process_group, fp16_compress_hook)

    @functools.wraps(register)
    def register_python(model: Any, state: object, hook: Callable[..., Any]) -> None:
        if getattr(hook, "__module__", "").endswith(".quantization_hooks") and is_ours(model):
            raise SettingsError(
                f"{hook.__name__} works only with NCCL and tensors on GPUs, neither with the backend"
                f" {BACKEND!r} nor with Gloo.",
                remedy="Use fp16_compress_hook, bf16_compress_hook or PowerSGD.",
            )
        register(model, state, hook)

    setattr(DistributedDataParallel, BUILTIN_HOOK, register_builtin)
    DistributedDataParallel.register_comm_hook = register_python


def _checked(helper: Callable[..., Any], ours: set[str]) -> Callable[..., Any]:
    """Wraps torch's function that makes a group with a check for combinations that cannot work.

    A group made in Python takes the place of all its backends, so a group with another backend for GPUs would
    lose that backend.

    Args:
        helper: torch's function.
        ours: the names of Muster's backends.
    """

    @functools.wraps(helper)
    def checked(*args: Any, **kwargs: Any) -> Any:
        backend = kwargs.get("backend", args[3] if len(args) > 3 else None)
        config = sys.modules["torch.distributed.distributed_c10d"].BackendConfig(dist.Backend(str(backend)))
        devices = config.get_device_backend_map()
        used = set(map(str, devices.values()))
        if used & ours and not used <= ours:
            asked = ",".join(f"{device}:{name}" for device, name in devices.items())
            raise SettingsError(
                f"A process group of {asked} cannot be made: torch cannot combine Muster's backend, which is"
                " for tensors on the CPU, with another backend.",
                remedy='Make one group with backend="nccl", and another by new_group(backend="muster").',
            )
        return helper(*args, **kwargs)

    return checked
