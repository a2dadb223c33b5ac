"""``torch.func.functional_call`` on a DataParallel: a forward pass with the caller's tensors as parameters.

As in DDP, a gradient is averaged when it reaches a wrapped parameter, also through tensors computed from it.
The caller's own tensors get each rank's own gradients. Names may be those of the wrapper's
``named_parameters()``, or DDP's, which begin with "module.".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.nn.utils import stateless

from muster.errors import SettingsError
from muster.torch.wrapper import ModuleWrapper, parameters_are_lent

_PREFIX = "module."
_plain_call: Any = stateless._functional_call


def let_functional_call_know() -> None:
    """Replaces torch's ``functional_call`` by a function that knows the wrapper."""
    stateless._functional_call = functional_call


def functional_call(
    module: Any,
    tensors: dict[str, Any],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    """Calls a module, which may contain a DataParallel, with these tensors in place of its own.

    Raises:
        SettingsError: the module computes with bfloat16 weights, which are copies of float32 masters.
    """
    options: dict[str, Any] = {"tie_weights": tie_weights, "strict": strict}
    with parameters_are_lent():
        if not isinstance(module, ModuleWrapper):
            return _plain_call(module, tensors, args, kwargs, **options)
        if module.weights_dtype is not None:
            raise SettingsError(
                'functional_call needs the parameters that the module computes with; with weights="bf16" they'
                " follow from float32 masters. Leave weights out and use torch.autocast."
            )
        given = args if isinstance(args, tuple) else () if args is None else (args,)
        with (
            _named_as_within(module.module, tensors) as named,
            stateless._reparametrize_module(module.module, named, **options),
        ):
            return module(*given, **(kwargs or {}))


@contextlib.contextmanager
def _named_as_within(module: Any, tensors: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Context with the tensors by the module's names; what a forward pass replaces goes into ``tensors``."""
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    names = {name: name if name in known else name.removeprefix(_PREFIX) for name in tensors}
    named = {names[name]: tensor for name, tensor in tensors.items()}
    yield named
    tensors.update({name: named[names[name]] for name in tensors})
