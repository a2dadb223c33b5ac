"""From a torch module to the graph that is searched and run: ``torch.export``, made functional and plain."""

from __future__ import annotations

import operator
import re
import sysconfig
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from muster.worker.errors import WorkerError
from muster.worker.parallel.planning.graph import Graph, Node, Ref, Value, names
from muster.worker.parallel.planning.layouts import Shape

_one_at_a_time = threading.Lock()  # torch.export has global state
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_ALIASES = names(
    "view reshape flatten unflatten squeeze unsqueeze transpose t permute numpy_T slice select chunk "
    "split split_with_sizes unbind contiguous alias expand narrow to dropout detach view_as"
)


class TraceError(WorkerError):
    """The module's forward pass is no graph that could be divided; names the line of its source.

    Attributes:
        line: such as ``model.py:12``, or "".
    """

    def __init__(self, message: str, *, line: str = "", remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.line = line


@dataclass(slots=True)
class Traced:
    """A graph, and what is needed to run it.

    Attributes:
        graph: with hubs.
        functions: by node, what to call.
        parameters: by node, the name of the parameter or buffer.
        constants: by node, a tensor that the module holds without registering it.
        inputs: names of the input nodes, in order.
        outputs: how many tensors come out.
        unflatten: makes the module's result of them.
    """

    graph: Graph
    functions: dict[str, Any]
    parameters: dict[str, str]
    constants: dict[str, Any]
    inputs: list[str]
    outputs: int
    unflatten: Any


def trace(
    module: Any, example: Sequence[Any], *, layerwise: frozenset[str] = frozenset(), prefix: str = ""
) -> Traced:
    """Records the forward pass on whole tensors.

    Args:
        module: in training mode, on any device, meta too.
        example: tensors of the shapes of the whole job's batch; their values do not count.
        layerwise: names of parameters that are left out of broadcasts and reductions.
        prefix: what names of parameters and modules begin with that users know without it.

    Raises:
        TraceError: the forward pass depends on values, or changes tensors in ways that cannot be followed.
    """
    distinct = tuple(torch.empty_like(x) if isinstance(x, torch.Tensor) else x for x in example)
    with _one_at_a_time, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(module, distinct, strict=False)
        except Exception as error:
            raise _not_traced(error) from error
    return _Reader(program, module, layerwise, prefix).read()


def _not_traced(error: Exception) -> TraceError:
    text = str(error)
    lines = re.findall(r'File "([^"]+)", line (\d+)', text)
    where = [f"{path}:{number}" for path, number in lines if _is_users(path)]
    frame = error.__traceback__
    while frame is not None:
        path = frame.tb_frame.f_code.co_filename
        if _is_users(path):
            where.append(f"{path}:{frame.tb_lineno}")
        frame = frame.tb_next
    line = where[-1].rsplit("/", 1)[-1] if where else ""
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    at = f" at {line}" if line else ""
    return TraceError(
        f"The forward pass cannot be recorded as a graph{at}: {first[:200]}",
        line=line,
        remedy='Control flow must not depend on values. mode="data_parallel" needs no graph.',
    )


class _Reader:
    """Reads an exported program into a graph."""

    def __init__(self, program: Any, module: Any, layerwise: frozenset[str], prefix: str) -> None:
        self._program = program
        self._layerwise, self._prefix = layerwise, prefix
        self._tensors = dict(module.named_parameters(remove_duplicate=False))
        self._seen: dict[int, str] = {}
        self._graph = Graph()
        self._values: dict[tuple[str, int], int] = {}
        self._now: dict[str, str] = {}
        self._aliased: dict[str, set[str]] = {}
        self._functions: dict[str, Any] = {}
        self._parameters: dict[str, str] = {}
        self._constants: dict[str, Any] = {}
        self._inputs: list[str] = []

    def read(self) -> Traced:
        kinds = {
            spec.arg.name: spec
            for spec in self._program.graph_signature.input_specs
            if hasattr(spec.arg, "name")
        }
        user = {
            spec.arg.name
            for spec in self._program.graph_signature.output_specs
            if spec.kind.name in ("USER_OUTPUT", "LOSS_OUTPUT") and hasattr(spec.arg, "name")
        }
        outputs = 0
        for fx in self._program.graph.nodes:
            if fx.op == "placeholder":
                self._placeholder(fx, kinds.get(fx.name))
            elif fx.op == "call_function":
                self._call(fx)
            elif fx.op == "output":
                named = [each for each in fx.args[0] if hasattr(each, "name")]
                wanted = [each for each in named if each.name in user]
                if len(wanted) != len(fx.args[0]):
                    raise TraceError("The forward pass returns something that is no tensor.")
                outputs = len(wanted)
                inputs = tuple(self._values[self._current(each), 0] for each in wanted)
                self._graph.add(Node("output", "output", "output", inputs))
            else:
                raise TraceError(f"The forward pass holds {fx.op} {fx.target}, which cannot be divided.")
        return Traced(
            self._prune().with_hubs(),
            self._functions,
            self._parameters,
            self._constants,
            self._inputs,
            outputs,
            self._unflatten,
        )

    def _unflatten(self, tensors: Sequence[Any]) -> Any:
        return torch.utils._pytree.tree_unflatten(list(tensors), self._program.call_spec.out_spec)

    def _add(self, node: Node, metas: Sequence[Any]) -> None:
        outputs = []
        for number, meta in enumerate(metas):
            shape: Shape = tuple(int(size) for size in meta.shape)
            value = Value(
                node.name if len(metas) == 1 else f"{node.name}.{number}",
                shape,
                str(meta.dtype).removeprefix("torch."),
                meta.element_size(),
                meta.dtype.is_floating_point or meta.dtype.is_complex,
            )
            outputs.append(self._graph.add_value(value))
            self._values[node.name, number] = outputs[-1]
        node.outputs = tuple(outputs)
        self._graph.add(node)

    def _placeholder(self, fx: Any, spec: Any) -> None:
        kind = spec.kind.name if spec is not None else "USER_INPUT"
        meta = fx.meta.get("val")
        if not isinstance(meta, torch.Tensor):
            return
        if kind == "USER_INPUT":
            self._inputs.append(fx.name)
            self._add(Node(fx.name, "input", "input"), [meta])
            return
        tensor = self._tensors.get(spec.target)
        if tensor is not None and id(tensor) in self._seen:  # another name of the same parameter
            self._values[fx.name, 0] = self._values[self._seen[id(tensor)], 0]
            return
        name = spec.target.removeprefix(self._prefix)
        node = Node(fx.name, "parameter" if kind == "PARAMETER" else "buffer", kind.lower())
        node.module = name.rpartition(".")[0]
        if kind == "PARAMETER" and tensor is not None:
            self._seen[id(tensor)] = fx.name
            node.trained = tensor.requires_grad and meta.dtype.is_floating_point
            node.layerwise = name in self._layerwise
        if kind in ("PARAMETER", "BUFFER"):
            self._parameters[fx.name] = name
        else:
            self._constants[fx.name] = self._program.constants[spec.target]
        self._add(node, [meta])

    def _current(self, fx: Any) -> str:
        name: str = fx.name
        while name in self._now:
            name = self._now[name]
        return name

    def _call(self, fx: Any) -> None:
        if fx.target is operator.getitem:
            source = self._current(fx.args[0])
            self._values[fx.name, 0] = self._values[source, fx.args[1]]
            return
        meta = fx.meta.get("val")
        if getattr(fx.target, "_opname", "") == "broadcast_tensors":
            self._broadcast(fx, meta)
            return
        metas = list(meta) if isinstance(meta, (tuple, list)) else [meta]
        if any(not isinstance(each, torch.Tensor) for each in metas):
            if not fx.users:
                return  # an assertion, say
            raise TraceError(
                f"{fx.target} makes something that is no tensor.", line=_line(fx), remedy="Leave it out."
            )
        function = fx.target
        op = getattr(function, "_opname", getattr(function, "__name__", str(function)))
        in_place = op.endswith("_") and not op.startswith("_") and hasattr(function, "_schema")
        inputs: list[int] = []

        def ref(each: Any) -> Ref:
            inputs.append(self._values[self._current(each), 0])
            return Ref(len(inputs) - 1)

        args = torch.fx.node.map_arg(fx.args, ref)
        kwargs = torch.fx.node.map_arg(fx.kwargs, ref)
        node = Node(fx.name, "call", op, module=self._module(fx), line=_line(fx))
        node.args, node.kwargs, node.inputs = _plain(args), _plain(kwargs), tuple(inputs)
        tags = getattr(function, "tags", ())
        node.random = torch.Tag.nondeterministic_seeded in tags
        if in_place:
            target = fx.args[0]
            maker = self._graph.nodes[self._graph.values[inputs[0]].node]
            if maker.kind == "buffer":  # a counter, which every rank counts for itself
                maker.mutated = True
            elif maker.kind == "parameter":
                raise TraceError(
                    f"{_line(fx)} changes a parameter in the forward pass.",
                    line=_line(fx),
                    remedy="Leave that to the optimizer.",
                )
            else:
                self._check_unaliased(fx, target)
                node.op, function = op[:-1], _functional(fx, function)
                self._now[self._current(target)] = fx.name
        elif op in _ALIASES:
            self._aliased.setdefault(self._current(fx.args[0]), set()).add(fx.name)
            self._aliased.setdefault(fx.name, set()).add(self._current(fx.args[0]))
        if op == "batch_norm" and bool(fx.args[5]):
            for index in inputs[-2:] if fx.args[3] is not None else ():
                self._graph.nodes[self._graph.values[index].node].mutated = True
        self._functions[fx.name] = function
        self._add(node, metas)

    def _broadcast(self, fx: Any, metas: Sequence[Any]) -> None:
        """Tensors that have the shape already stay what they are; the others are expanded."""
        for number, (source, meta) in enumerate(zip(fx.args[0], metas, strict=True)):
            value = self._values[self._current(source), 0]
            if self._graph.values[value].shape != tuple(meta.shape):
                shape = [int(size) for size in meta.shape]
                node = Node(f"{fx.name}.{number}", "call", "expand", module=self._module(fx), line=_line(fx))
                node.args, node.inputs = (Ref(0), shape), (value,)
                self._functions[node.name] = torch.ops.aten.expand.default
                self._add(node, [meta])
                value = node.outputs[0]
            self._values[fx.name, number] = value

    def _check_unaliased(self, fx: Any, target: Any) -> None:
        """What is changed in place must not be seen under another name too."""
        name = self._current(target)
        later, seen = {name}, set()
        while later:
            each = later.pop()
            seen.add(each)
            later |= self._aliased.get(each, set()) - seen
        if len(seen) > 1:
            raise TraceError(
                f"{_line(fx)} changes a tensor in place that is also seen through a view.",
                line=_line(fx),
                remedy="Write it without the in-place operator.",
            )

    def _module(self, fx: Any) -> str:
        stack = fx.meta.get("nn_module_stack") or {}
        path = [entry[0] for entry in stack.values()]
        own = str(path[-1]) if path else ""
        return "" if own == self._prefix.rstrip(".") else own.removeprefix(self._prefix)

    def _prune(self) -> Graph:
        """Leaves out what nothing depends on, but for the inputs."""
        needed: set[int] = set()
        keep = [False] * len(self._graph.nodes)
        for index in reversed(range(len(self._graph.nodes))):
            node = self._graph.nodes[index]
            writes = any(self._graph.nodes[self._graph.values[v].node].mutated for v in node.inputs)
            keep[index] = (
                node.kind in ("input", "output")
                or (writes and node.op.endswith("_"))
                or bool(needed & set(node.outputs))
            )
            if keep[index]:
                needed |= set(node.inputs)
        graph = Graph(values=self._graph.values)
        for node, stays in zip(self._graph.nodes, keep, strict=True):
            if stays:
                graph.add(node)
        return graph


def _plain(value: Any) -> Any:
    """Arguments as plain values: lists of torch.fx become lists."""
    if isinstance(value, (list, tuple)):
        kind = tuple if isinstance(value, tuple) else list
        return kind(_plain(each) for each in value)
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, torch.device):  # tensors are made where the module is when it runs
        return str(value)
    return value


def _functional(fx: Any, function: Any) -> Any:
    packet = getattr(torch.ops.aten, function._opname[:-1], None)
    overload = function._overloadname
    found = getattr(packet, overload, None) if packet is not None else None
    if found is None:
        raise TraceError(
            f"{_line(fx)} changes a tensor in place by {function._opname}.",
            line=_line(fx),
            remedy="Write it without the in-place operator.",
        )
    return found


def _is_users(path: str) -> bool:
    """Whether a file is neither torch's, nor Python's, nor this one."""
    packages = f"{_STANDARD_LIBRARY}/site-packages"
    standard = path.startswith(_STANDARD_LIBRARY) and not path.startswith(packages)
    return "/torch/" not in path and path != __file__ and not standard and not path.startswith("<")


def _line(fx: Any) -> str:
    lines = re.findall(r'File "([^"]+)", line (\d+)', fx.meta.get("stack_trace") or "")
    own = [(path, number) for path, number in lines if _is_users(path)] or lines
    return f"{own[-1][0].rsplit('/', 1)[-1]}:{own[-1][1]}" if own else ""
