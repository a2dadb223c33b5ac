"""Finds and refuses what a module does and a recorded graph would leave out, such as hooks."""

from __future__ import annotations

import collections
import contextlib
import random
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch._functorch import eager_transforms, vmap

from muster.parallel.untraced import TraceError

_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_PLAIN = (bool, int, float, str, bytes, type(None))


@contextlib.contextmanager
def what_no_graph_shows(module: Any) -> Iterator[None]:
    """Context in which a forward pass is recorded: refuses what torch.export would leave out silently.

    Raises:
        TraceError: the module has hooks on gradients, or parameters that share memory; or its forward pass
            uses an autograd.Function or torch.func, registers a hook on a tensor, changes an attribute or its
            contents, or draws random numbers of Python or NumPy.
    """
    _refuse_hooks(module)
    _refuse_shared_memory(module)
    held, drawn, changed = _Held(module), _random_states(), list[str]()
    values = [(tensor, tensor._version, tensor.detach().clone()) for tensor in held.tensors]
    try:
        with _refused(), _noticed(module, changed):
            yield
    finally:
        held.restore()
        for tensor, version, value in values:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(value)
    if changed:
        raise TraceError(
            f"The forward pass changes {changed[0]}, which a recorded graph would not do.",
            remedy="Make it a buffer, or a tensor that is an argument of the forward pass.",
        )
    if drawn != _random_states():
        raise TraceError(
            "The forward pass draws random numbers by Python or NumPy, which a recorded graph would not do.",
            remedy="Draw them by torch, as a tensor.",
        )


def _random_states() -> list[Any]:
    numpys: Any = np.random.get_state()
    return [random.getstate(), numpys[1].tobytes(), numpys[2:]]


def _refuse_shared_memory(module: Any) -> None:
    """Refuses distinct parameters that share memory: their parts on a rank would not."""
    seen: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        if parameter.is_meta or not parameter.numel():
            continue
        other = seen.setdefault(parameter.data_ptr(), name)
        if other != name:
            raise TraceError(
                f"The parameters {other} and {name} share memory, which is lost when they are sharded.",
                remedy="Make them one parameter: b.weight = a.weight.",
            )


def _refuse_hooks(module: Any) -> None:
    remedy = 'mode="data_parallel" keeps hooks.'
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise TraceError(
                f"The parameter {name} has a hook, which is lost when it is sharded.", remedy=remedy
            )
    for name, each in module.named_modules():
        if each._backward_hooks or each._backward_pre_hooks:
            raise TraceError(f"{name or type(each).__name__} has a hook on its gradient.", remedy=remedy)


@contextlib.contextmanager
def _noticed(module: Any, changed: list[str]) -> Iterator[None]:
    """Records what each forward pass changes, and undoes it; torch.export undoes only some of it."""
    kind, getattr_before = torch.nn.Module, torch.nn.Module.__getattr__
    held: list[_Held] = []
    missed: set[tuple[int, str]] = set()

    def before(*_: Any) -> None:
        held[:] = [_Held(module)]  # with export's own parameters, which an LSTM also keeps in a list
        missed.clear()
        original, thread = kind.__getattr__, threading.get_ident()  # export has replaced it by its own

        def look_up(self: Any, name: str) -> Any:
            try:
                return original(self, name)
            except AttributeError:
                if threading.get_ident() == thread:
                    missed.add((id(self), name))
                raise

        kind.__getattr__ = look_up

    def after(*_: Any) -> None:
        changed.extend(held[0].changes(missed))
        held[0].restore()

    hooks = module.register_forward_pre_hook(before), module.register_forward_hook(after)
    try:
        yield
    finally:
        kind.__getattr__ = getattr_before
        for hook in hooks:
            hook.remove()


_TRANSFORMS = "transforms a function, by torch.vmap or torch.func"
_REFUSED = [
    (torch.autograd.Function, "apply", "has a gradient of its own"),
    (torch.Tensor, "register_hook", "hangs a hook on a tensor"),
    (torch.Tensor, "register_post_accumulate_grad_hook", "hangs a hook on a tensor"),
    (torch.inference_mode, "__enter__", "has a torch.inference_mode"),
    (vmap, "vmap_increment_nesting", _TRANSFORMS),
    (eager_transforms, "grad_increment_nesting", _TRANSFORMS),
    (eager_transforms, "jvp_increment_nesting", _TRANSFORMS),
    (eager_transforms, "_func_increment_nesting", _TRANSFORMS),
]
"""Functions whose effects no graph shows: class or module, name, and words for the error."""

_ALSO_TORCHS = {torch.inference_mode.__enter__}
"""Those that torch.export calls itself."""


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Context in which functions whose effects no graph shows raise a TraceError, in this thread only."""
    thread = threading.get_ident()

    def refusing(original: Callable[..., Any], words: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread or (original in _ALSO_TORCHS and not _is_called_by_users()):
                return original(*args, **kwargs)
            what = f"{words}, {args[0].__name__}" if args and isinstance(args[0], type) else words
            line = _calling_line()
            at = f" at {line}" if line else ""
            raise TraceError(
                f"The forward pass {what}{at}, which a graph cannot record.",
                line=line,
                remedy='mode="data_parallel" needs no graph.',
            )

        return call

    before = [(place, name, vars(place)[name]) for place, name, _ in _REFUSED if name in vars(place)]
    words = {(place, name): text for place, name, text in _REFUSED}
    for place, name, original in before:
        if isinstance(original, (classmethod, types.ClassMethodDescriptorType)):  # C's since torch 2.14
            called: Any = getattr(original, "__func__", original)
            setattr(place, name, classmethod(refusing(called, words[place, name])))
        else:
            setattr(place, name, refusing(original, words[place, name]))
    try:
        yield
    finally:
        for place, name, original in before:
            setattr(place, name, original)


def _is_called_by_users() -> bool:
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith("_contextlib.py"):  # as a decorator
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and is_users(frame.f_code.co_filename)


def _calling_line() -> str:
    """Returns the innermost line of user code that is running, as ``model.py:12``."""
    frame = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}" if frame is not None else ""


def is_users(path: str) -> bool:
    """Whether a file is user code: not part of torch, of Python, or of this package."""
    packages = f"{_STANDARD_LIBRARY}/site-packages"
    standard = path.startswith(_STANDARD_LIBRARY) and not path.startswith(packages)
    own = path.rpartition("/")[0] == __file__.rpartition("/")[0]
    return "/torch/" not in path and not own and not standard and not path.startswith("<")


# ---------------------------------------------------------------- what a module holds

_TORCHS = {*vars(torch.nn.Module()), "_flat_weights", "_flat_weight_refs"}  # parameters, parts, hooks, mode
_NOT_USERS = {*sys.stdlib_module_names, "torch", "numpy", "muster"}


class _Held:
    """The values of the attributes of a module and its submodules, also those in lists and dictionaries."""

    def __init__(self, module: Any) -> None:
        self._found: list[tuple[str, Any, Any]] = []  # a name, a module or container, what it holds
        self.tensors: list[Any] = []
        seen: set[int] = set()
        todo = [(type(each).__name__, each) for each in module.modules()]
        while todo:
            name, each = todo.pop()
            holds = _contents(each)
            if id(each) in seen:
                continue
            seen.add(id(each))
            if isinstance(each, torch.Tensor) and not each.is_inference():
                self.tensors.append(each)
            if holds is None:
                continue
            self._found.append((name, each, holds))
            entries = holds.items() if isinstance(holds, dict) else enumerate(holds)
            todo += [
                (_entry(name, each, key), value)
                for key, value in entries
                if not (_is_object(each) and _is_object(value))
            ]

    def changes(self, missed: set[tuple[int, str]]) -> Iterator[str]:
        """Yields the names of attributes and entries that have changed since this object was made.

        Args:
            missed: the ids of modules, with names of attributes that were read and missing. A new attribute
                of a module counts as changed only if it is among them.
        """
        for name, each, holds in self._found:
            now = _contents(each)
            if not isinstance(holds, dict):
                if len(now) != len(holds) or not all(map(_same, now, holds)):
                    yield name
                continue
            for key in {**holds, **now}:
                if key not in holds and isinstance(each, torch.nn.Module) and (id(each), key) not in missed:
                    continue
                if key not in holds or key not in now or not _same(holds[key], now[key]):
                    yield _entry(name, each, key)

    def restore(self) -> None:
        """Restores everything except the contents of tensors."""
        for _, each, holds in self._found:
            if isinstance(each, (tuple, frozenset)):
                continue
            if not isinstance(holds, dict):
                each.clear()
                each.update(holds) if isinstance(each, set) else each.extend(holds)
                continue
            place = each if isinstance(each, dict) else vars(each)
            for key in _contents(each).keys() - holds.keys():
                del place[key]
            place.update(holds)


def _is_object(each: Any) -> bool:
    """Whether the object is of a user's class; changes in objects of Python and torch are not checked."""
    if isinstance(each, types.SimpleNamespace):
        return True
    ours = type(each).__module__.partition(".")[0] in _NOT_USERS
    plain = isinstance(each, (type, types.FunctionType, torch.Tensor, torch.nn.Module, *_CONTAINERS))
    return not ours and not plain and isinstance(getattr(each, "__dict__", None), dict)


_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)


def _contents(each: Any) -> Any:
    """Returns the contents of a module (without parameters and submodules), container or user's object.

    Returns:
        A list, or a dictionary; None: the object is none of these.
    """
    if isinstance(each, torch.nn.Module):
        return {name: value for name, value in vars(each).items() if name not in _TORCHS}
    if isinstance(each, dict):
        return dict(each)
    if isinstance(each, _CONTAINERS):
        return list(each)
    return dict(vars(each)) if _is_object(each) else None


def _entry(name: str, holder: Any, key: Any) -> str:
    return f"{name}[{key!r}]" if isinstance(holder, _CONTAINERS) else f"{name}.{key}"


def _same(one: Any, other: Any) -> bool:
    if (
        one is other or getattr(one, "grad_fn", None) is not None
    ):  # a result of an earlier pass, which each pass makes again
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, _PLAIN) and bool(one == other)


# ---------------------------------------------------------------- evaluation


def in_evaluation(training: Any, evaluated: Any) -> tuple[str, frozenset[str]]:
    """Compares a module's graph in evaluation mode with that of training mode, which runs in its place.

    Evaluation may differ in three things only: no dropout, BatchNorm uses its running statistics, and
    counters are not increased.

    Args:
        training: the exported program in training mode.
        evaluated: the exported program in evaluation mode.

    Returns:
        The first operator that differs ("": none does), and the names of nodes that change a buffer in
        training only.
    """
    counters = set()
    ours, theirs = _Walk(training, training=True), _Walk(evaluated, training=False)
    other = theirs.step()
    for number in range(len(ours.nodes) + 1):
        own = ours.step()
        while own is not None and own != other and ours.is_counter():
            counters.add(ours.node.name)
            own = ours.step()
        if own != other:
            walk = ours if own is not None else theirs
            return f"{walk.node.name} differs", frozenset(counters)
        if own is None:
            break
        ours.number(number)
        theirs.number(number)
        other = theirs.step()
    return "", frozenset(counters)


class _Walk:
    """Iterates over the operators of a program. Arguments are named by the position of their operator."""

    def __init__(self, program: Any, *, training: bool) -> None:
        self.nodes = list(program.graph.nodes)
        self.node: Any = None
        self._at = 0
        self._training = training
        self._names: dict[str, Any] = {}
        specs = program.graph_signature.input_specs
        self._targets = {
            spec.arg.name: spec.target or f"input {number}"
            for number, spec in enumerate(specs)
            if hasattr(spec.arg, "name")
        }

    def number(self, number: int) -> None:
        """Gives the current node a number as its name."""
        self._names[self.node.name] = number

    def step(self) -> Any:
        """Returns the next operator with its arguments; None: there is none."""
        while self._at < len(self.nodes):
            self.node = self.nodes[self._at]
            self._at += 1
            if self.node.op == "placeholder":
                self._names[self.node.name] = self._targets.get(self.node.name, self.node.name)
            elif self._does_nothing():
                self._names[self.node.name] = self._plain(self.node.args[0])
            else:
                return self._entry()
        return None

    def is_counter(self) -> bool:
        """Whether the current node changes a buffer and does nothing else."""
        name = getattr(self.node.target, "_opname", "")
        return name.endswith("_") and not self.node.users and self.node.args[0].op == "placeholder"

    def _op(self) -> str:
        return str(getattr(self.node.target, "_opname", self.node.target))

    def _does_nothing(self) -> bool:
        """Whether the current node is a dropout that a sharded module leaves out in evaluation."""
        if self._op() != "dropout":
            return False
        return self._training or not self.node.args[2] or not self.node.args[1]

    def _entry(self) -> Any:
        op, args, kwargs = self._op(), list(self.node.args), dict(self.node.kwargs)
        if op == "batch_norm":
            if self._training:
                args[5] = args[3] is None
            if not args[5]:
                args[6] = None  # momentum, which has no effect where statistics are not updated
        if self._training and op == "scaled_dot_product_attention":
            kwargs.pop("dropout_p", None)
            args[4:5] = [0.0] if len(args) > 4 else []
        if self._training and op in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            args[-3] = False
        if op == "scaled_dot_product_attention":
            while len(args) > 3 and args[-1] in (None, 0.0, False):
                args.pop()
            kwargs = {name: value for name, value in kwargs.items() if value not in (None, 0.0, False)}
        if self.node.op == "get_attr":
            return "get_attr", self.node.target
        return op, self._plain(args), self._plain(kwargs)

    def _plain(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return "made", self._names.get(value.name)
        if isinstance(value, (list, tuple)):
            return tuple(self._plain(each) for each in value)
        if isinstance(value, dict):
            return tuple((name, self._plain(each)) for name, each in sorted(value.items()))
        return str(value)
