"""Records a torch module by ``torch.export``, and makes of it the graph that is searched and run."""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from muster.errors import ArrayError
from muster.parallel.eager import in_evaluation, is_users, what_no_graph_shows
from muster.parallel.functions.alignment import RUN, recorded_as_one
from muster.parallel.functions.strides import BY_STRIDES, as_recorded, strided_function
from muster.parallel.functions.value_checks import without_value_checks
from muster.parallel.planning.graph import Graph, Node, Ref, TensorValue
from muster.parallel.planning.layouts import Shape
from muster.parallel.planning.rules import axes_of
from muster.parallel.quiet import exporter_is_quiet
from muster.parallel.untraced import ForwardError, TraceError

_CHECKS = ("_assert", "sym_constrain", "_functional_assert")
_COPIED = torch.ops.aten.lift_fresh_copy.default
_BY_VALUES = ("DataDependent", "DynamicOutputShape", "GuardOnDataDependent")
"""What torch raises begins so where control flow or a shape depends on what is in a tensor."""
_TENSOR = object()  # in place of a tensor among the arguments
_one_at_a_time = threading.Lock()  # torch.export has global state


@dataclass(slots=True)
class Traced:
    """A graph, and what is needed to run it.

    Attributes:
        graph: the graph, with fan-out nodes.
        functions: the function of each operator, by node.
        parameters: the names of parameters and buffers, by node.
        constants: tensors that the module holds without registering them, by node.
        unflatten: makes the module's result from the list of its tensors.
        arguments: the leaves of the arguments of the forward pass; a marker in place of each tensor.
        structure: the structure of the arguments, as pytree describes it.
        only_training: how evaluation differs from the graph; "": only in dropout and batch statistics.
        counters: the names of nodes that change a buffer in training only.
        by_strides: the names of inputs that are read by strides, and must therefore be contiguous.
    """

    graph: Graph
    functions: dict[str, Any]
    parameters: dict[str, str]
    constants: dict[str, Any]
    unflatten: Any
    arguments: tuple[Any, ...]
    structure: Any
    only_training: str = ""
    counters: frozenset[str] = frozenset()
    by_strides: frozenset[str] = frozenset()

    def tensors_of(self, batch: Sequence[Any]) -> list[Any]:
        """Returns the tensors of a batch, in the order of the graph's inputs.

        Raises:
            ArrayError: the arguments do not match the example.
        """
        leaves, structure = pytree.tree_flatten(tuple(batch))
        if structure != self.structure:
            raise ArrayError(
                "The arguments have another structure than those of the example that the plan was made for.",
                remedy="Give as many tensors, in the same lists and dictionaries.",
            )
        for number, (leaf, known) in enumerate(zip(leaves, self.arguments, strict=True)):
            if isinstance(leaf, torch.Tensor) != (known is _TENSOR) or (
                known is not _TENSOR and leaf != known
            ):
                what = "a tensor" if known is _TENSOR else repr(known)
                got = "a tensor" if isinstance(leaf, torch.Tensor) else repr(leaf)
                raise ArrayError(
                    f"Argument {number} was {what} when the plan was made, and is {got} now.",
                    remedy="What changes must be a tensor: the forward pass was recorded once.",
                )
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def trace(
    module: Any, example: Sequence[Any], *, layerwise: frozenset[str] = frozenset(), prefix: str = ""
) -> Traced:
    """Records the forward pass on whole tensors.

    Args:
        module: the module, in training mode, on any device including meta.
        example: tensors with the shapes of the whole job's batch; their values are not used.
        layerwise: the names of parameters that are not broadcast or averaged.
        prefix: a prefix of the names of parameters and modules that users do not know.

    Raises:
        TraceError: the forward pass depends on values, or does something that a graph cannot contain.
    """
    leaves, structure = pytree.tree_flatten(tuple(example))
    distinct = pytree.tree_unflatten(
        [torch.empty_like(x) if isinstance(x, torch.Tensor) else x for x in leaves], structure
    )
    with _one_at_a_time, warnings.catch_warnings(), exporter_is_quiet(), what_no_graph_shows(module):
        warnings.simplefilter("ignore")
        program = _exported(module, distinct)
        with _evaluating(module):
            try:
                evaluated = _exported(module, distinct)
            except TraceError:
                evaluated = None
    traced = _ProgramReader(program, module, layerwise, prefix).read([_is_trained(leaf) for leaf in leaves])
    traced.structure = structure
    traced.arguments = tuple(_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves)
    if evaluated is None:
        traced.only_training = "it cannot be recorded as a graph"
    else:
        traced.only_training, traced.counters = in_evaluation(program, evaluated)
    return traced


def _is_trained(leaf: Any) -> bool | None:
    return leaf.requires_grad if isinstance(leaf, torch.Tensor) else None


def _exported(module: Any, example: Sequence[Any]) -> Any:
    try:
        with recorded_as_one(), without_value_checks():
            return torch.export.export(module, tuple(example), strict=False)
    except Exception as error:
        raise _not_traced(error) from error


@contextlib.contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    modes = [(each, each.training) for each in module.modules()]
    for each, _ in modes:
        each.training = False
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training


def _not_traced(error: Exception) -> TraceError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TraceError):
            return cause
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    lines = re.findall(r'File "([^"]+)", line (\d+)', text)
    where = [f"{path}:{number}" for path, number in lines if is_users(path)]
    frame = error.__traceback__
    while frame is not None:
        path = frame.tb_frame.f_code.co_filename
        if is_users(path):
            where.append(f"{path}:{frame.tb_lineno}")
        frame = frame.tb_next
    line = where[-1].rsplit("/", 1)[-1] if where else ""
    first = text.strip().splitlines()[0] if text.strip() else ""
    at = f" at {line}" if line else ""
    if type(error).__name__.startswith(_BY_VALUES) or "data-dependent" in text:
        return TraceError(
            f"The forward pass cannot be recorded as a graph{at}: what it does there depends on values.",
            line=line,
            remedy='Use torch.where, or mode="data_parallel", which needs no graph.',
        )
    return ForwardError(
        f"The forward pass fails{at} when it is recorded: {type(error).__name__}: {first[:200]}",
        line=line,
        remedy="Give an example whose shapes and dtypes the module takes."
        ' If it does take them, mode="data_parallel" needs no graph.',
    )


class _ProgramReader:
    """Reads an exported program into a graph."""

    def __init__(self, program: Any, module: Any, layerwise: frozenset[str], prefix: str) -> None:
        self._program = program
        self._layerwise, self._prefix = layerwise, prefix
        self._tensors = dict(module.named_parameters(remove_duplicate=False))
        self._tensors.update(module.named_buffers(remove_duplicate=False))
        self._seen: dict[int, str] = {}
        self._graph = Graph()
        self._values: dict[tuple[str, int], int] = {}
        self._now: dict[str, str] = {}
        self._storages: dict[str, int] = {}
        self._memory: dict[int, list[Any]] = {}  # by storage, the nodes with results in it
        self._read: set[str] = set()
        self._functions: dict[str, Any] = {}
        self._parameters: dict[str, str] = {}
        self._constants: dict[str, Any] = {}
        self._regions: dict[str, Any] = {}
        self._within = 0
        self._by_strides: set[str] = set()

    def read(self, trained: Sequence[bool | None]) -> Traced:
        """Reads the program.

        Args:
            trained: whether each argument is a tensor that requires a gradient; None: it is not a tensor.

        Raises:
            TraceError: the program does something that a graph cannot contain.
        """
        self._trained = iter([each for each in trained if each is not None])
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
        for fx in self._program.graph.nodes:
            self._note_memory(fx)
            if fx.op == "placeholder":
                self._placeholder(fx, kinds.get(fx.name))
            elif fx.op == "get_attr":
                self._regions[fx.name] = getattr(self._program.graph_module, fx.target)
            elif fx.op == "call_function":
                self._call(fx)
            elif fx.op == "output":
                named = [each for each in fx.args[0] if hasattr(each, "name")]
                wanted = [each for each in named if each.name in user]
                if len(wanted) != len(fx.args[0]):
                    raise TraceError("The forward pass returns something that is no tensor.")
                inputs = tuple(self._values[self._current(each), 0] for each in wanted)
                self._graph.add(Node("output", "output", "output", inputs))
            else:
                raise TraceError(f"The forward pass holds {fx.op} {fx.target}, which cannot be divided.")
            self._read.add(fx.name)
        structure = self._program.call_spec.out_spec  # not the program itself, which holds all parameters
        return Traced(
            self._prune().with_fan_outs(),
            self._functions,
            self._parameters,
            self._constants,
            functools.partial(_unflatten, structure),
            (),
            None,
            by_strides=frozenset(self._by_strides),
        )

    def _add(self, node: Node, metas: Sequence[Any]) -> None:
        outputs = []
        for number, meta in enumerate(metas):
            if any(isinstance(size, torch.SymInt) for size in meta.shape):
                raise TraceError(
                    f"{node.line} makes a tensor whose shape depends on values.",
                    line=node.line,
                    remedy='Use torch.where, or a mask as a factor; mode="data_parallel" needs no graph.',
                )
            shape: Shape = tuple(meta.shape)
            value = TensorValue(
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
            self._add(Node(fx.name, "input", "input", trained=next(self._trained)), [meta])
            return
        tensor = self._tensors.get(spec.target)
        if tensor is not None and id(tensor) in self._seen:  # another name of the same parameter
            self._values[fx.name, 0] = self._values[self._seen[id(tensor)], 0]
            return
        name = spec.target.removeprefix(self._prefix)
        node = Node(fx.name, "parameter" if kind == "PARAMETER" else "buffer", kind.lower())
        node.module = name.rpartition(".")[0]
        if tensor is not None:
            self._seen[id(tensor)] = fx.name
        if kind == "PARAMETER" and tensor is not None:
            if tensor.requires_grad and meta.dtype.is_complex:
                raise TraceError(f"The parameter {name} is complex, and no rule divides complex gradients.")
            node.trained = tensor.requires_grad and meta.dtype.is_floating_point
            node.layerwise = name in self._layerwise
        if kind in ("PARAMETER", "BUFFER"):
            self._parameters[fx.name] = name
        else:
            constant = self._constants[fx.name] = self._program.constants[spec.target]
            if constant.requires_grad:
                raise TraceError(
                    f"{name} requires a gradient, but is not a parameter.", remedy="Make it an nn.Parameter."
                )
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
        if str(fx.target).startswith("wrap_with_"):
            self._region(fx)
            return
        if getattr(fx.target, "_opname", "") == "broadcast_tensors":
            self._broadcast(fx, meta)
            return
        function = RUN.get(fx.target, fx.target)
        op = getattr(function, "_opname", getattr(function, "__name__", str(function)))
        in_place = op.endswith("_") and not op.startswith("_") and hasattr(function, "_schema")
        _refuse_out(fx, function, in_place)
        if op in BY_STRIDES:
            function = strided_function(op, fx.args[0].meta["val"], fx.args[1:], _line(fx))
            self._note_strides(fx.args[0])
        elif "as_strided" in op:
            raise TraceError(
                f"{_line(fx)} calls {op}, for which there is no rule.",
                line=_line(fx),
                remedy="Write to an index of the tensor instead.",
            )
        metas = list(meta) if isinstance(meta, (tuple, list)) else [meta]
        if any(not isinstance(each, torch.Tensor) for each in metas):
            if not fx.users and (op.startswith(_CHECKS) or _gives(function)):
                return
            raise TraceError(
                f"{_line(fx)} makes something that is no tensor, by {fx.target}.",
                line=_line(fx),
                remedy="Leave it out.",
            )
        node, contiguous = self._node_of(fx, op, function)
        inputs = node.inputs
        if in_place:
            target = fx.args[0]
            self._check_unseen(fx, target)
            maker = self._graph.nodes[self._graph.values[inputs[0]].node]
            if maker.kind == "buffer" and maker.name not in self._constants:  # a counter of each rank's own
                maker.mutated = True
                self._functions[fx.name] = function
                self._add(node, metas)
                self._values[fx.name, 0] = inputs[0]  # the buffer itself: later operators change it again
                return
            self._check_may_write(fx, maker)
            node.op, function = op[:-1], _functional(fx, function)
            self._now[self._current(target)] = fx.name
        if op in ("batch_norm", "instance_norm") and bool(fx.args[5]):
            for index in inputs[-2:] if fx.args[3] is not None else ():
                self._graph.nodes[self._graph.values[index].node].mutated = True
        self._add(node, metas)
        if op not in BY_STRIDES and not in_place and axes_of(self._graph, node) is None:
            function = as_recorded(function, contiguous)
        self._functions[fx.name] = function

    def _node_of(self, fx: Any, op: str, function: Any) -> tuple[Node, list[bool]]:
        """Returns the node of a call, and whether each of its input tensors is contiguous."""
        inputs: list[int] = []
        contiguous: list[bool] = []

        def ref(each: Any) -> Ref:
            inputs.append(self._values[self._current(each), 0])
            contiguous.append(each.meta["val"].is_contiguous())
            return Ref(len(inputs) - 1)

        node = Node(fx.name, "call", op, module=self._module(fx), line=_line(fx))
        node.args = _plain(torch.fx.node.map_arg(fx.args, ref))
        node.kwargs = _plain(torch.fx.node.map_arg(fx.kwargs, ref))
        node.inputs = tuple(inputs)
        node.random = torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
        return node, contiguous

    def _check_may_write(self, fx: Any, maker: Node) -> None:
        """Checks that an in-place operator changes a tensor of the recorded forward pass only.

        Raises:
            TraceError: it changes a parameter, an argument or another tensor that exists outside.
        """
        remedy = "Write it without the in-place operator."
        if maker.name in self._constants:
            what = "changes a tensor in place that the module holds and has not registered"
            remedy = "Make it a buffer: self.register_buffer(name, tensor)."
        elif maker.kind == "input" and not self._within:
            what = "changes an argument of the forward pass in place, as its caller sees"
        elif maker.kind == "parameter":
            what, remedy = "changes a parameter in the forward pass", "Leave that to the optimizer."
        elif self._within:
            what = "changes a tensor in place under torch.no_grad()"
        else:
            return
        raise TraceError(f"{_line(fx)} {what}.", line=_line(fx), remedy=remedy)

    def _region(self, fx: Any) -> None:
        """Adds the operators of a torch.no_grad() block to the graph, and detaches its results."""
        if "set_grad_enabled" not in str(fx.target):
            raise TraceError(
                "The forward pass holds a torch.autocast of its own.",
                remedy="Give autocast= to parallelize() instead.",
            )
        enabled, region, *given = fx.args
        inner = self._regions[region.name].graph
        outer = iter(given)
        self._within += 1
        for each in list(inner.nodes):
            each._rename(f"{fx.name}_{each.name}")
            self._note_memory(each)
            if each.op == "placeholder":
                self._now[each.name] = self._current(next(outer))
            elif each.op == "get_attr":
                self._regions[each.name] = getattr(self._regions[region.name], each.target)
            elif each.op == "call_function":
                self._call(each)
                self._read.add(each.name)
            elif each.op == "output":
                for number, result in enumerate(each.args[0]):
                    value = self._values[self._current(result), 0]
                    self._values[fx.name, number] = (
                        value if enabled else self._detached(fx, number, result, value)
                    )
        self._within -= 1

    def _detached(self, fx: Any, number: int, result: Any, value: int) -> int:
        node = Node(f"{fx.name}.{number}", "call", "detach", module=self._module(result), line=_line(result))
        node.args, node.inputs = (Ref(0),), (value,)
        self._functions[node.name] = torch.ops.aten.detach.default
        self._add(node, [result.meta["val"]])
        return node.outputs[0]

    def _broadcast(self, fx: Any, metas: Sequence[Any]) -> None:
        """Adds an expand for each tensor that does not yet have the common shape."""
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

    def _note_memory(self, fx: Any) -> None:
        """Notes in which storage a result lies: export's fake tensors share memory like real ones."""
        meta = fx.meta.get("val")
        if not isinstance(meta, torch.Tensor) or meta.layout != torch.strided:
            return
        if fx.op == "placeholder" and all(user.target is _COPIED for user in fx.users):
            return  # a constant of the forward pass, which is copied before use
        storage = meta.untyped_storage()._cdata
        if fx.target is torch.ops.aten.dropout.default and not (fx.args[1] and fx.args[2]):
            storage = self._storages.get(fx.args[0].name, storage)  # a real one returns its input itself
        self._storages[fx.name] = storage
        self._memory.setdefault(storage, []).append(fx)

    def _note_strides(self, fx: Any) -> None:
        """Notes that an input is read by the strides of the example, if this tensor lies in its memory."""
        for other in self._memory.get(self._storages.get(fx.name, 0), ()):
            if other.op == "placeholder" and (other.name, 0) in self._values:
                maker = self._graph.nodes[self._graph.values[self._values[other.name, 0]].node]
                if maker.kind == "input":
                    self._by_strides.add(maker.name)

    def _check_unseen(self, fx: Any, target: Any) -> None:
        """Checks that a tensor that is changed in place is not read through another tensor afterwards.

        Raises:
            TraceError: a view of the tensor is read later.
        """
        own = self._values[self._current(target), 0]
        for other in self._memory.get(self._storages.get(target.name, 0), ()):
            value = self._values.get((self._current(other), 0), own)
            stays = self._graph.nodes[self._graph.values[value].node].kind != "call"
            later = any(user is not fx and user.name not in self._read for user in other.users)
            if value != own and (stays or later):
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
        """Removes nodes on which nothing depends, except inputs."""
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
    """Converts arguments to plain values; lists of torch.fx become lists."""
    if isinstance(value, (list, tuple)):
        kind = tuple if isinstance(value, tuple) else list
        return kind(_plain(each) for each in value)
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, torch.device):  # tensors are created on the module's device at run time
        return str(value)
    return value


def _unflatten(structure: Any, tensors: Sequence[Any]) -> Any:
    return pytree.tree_unflatten(list(tensors), structure)


def _refuse_out(fx: Any, function: Any, in_place: bool) -> None:
    """Refuses operators that write to an argument and are not in-place operators.

    Raises:
        TraceError: this operator writes to an argument.
    """
    arguments: list[Any] = list(getattr(getattr(function, "_schema", None), "arguments", ()))
    written = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    if written and not (in_place and written == [arguments[0].name]):
        raise TraceError(
            f"{_line(fx)} writes into its argument {written[-1]}.",
            line=_line(fx),
            remedy="Write it without out= or the like.",
        )


def _gives(function: Any) -> bool:
    """Whether an operator returns something; one that does not has effects that no graph shows."""
    return not hasattr(function, "_schema") or bool(function._schema.returns)


def _copied(x: Any, source: Any, non_blocking: bool = False) -> Any:
    """Returns the value of ``x`` after ``x.copy_(source)``; ``x`` gets zeros as its gradient, not None."""
    return torch.where(x.new_zeros((), dtype=torch.bool), x, source.to(x.dtype))


def _functional(fx: Any, function: Any) -> Any:
    if function is torch.ops.aten.copy_.default:
        return _copied
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


def _line(fx: Any) -> str:
    lines = re.findall(r'File "([^"]+)", line (\d+)', fx.meta.get("stack_trace") or "")
    own = [(path, number) for path, number in lines if is_users(path)] or lines
    return f"{own[-1][0].rsplit('/', 1)[-1]}:{own[-1][1]}" if own else ""
