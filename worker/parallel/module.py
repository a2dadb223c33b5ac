"""The parallel module: parameters are this rank's parts, the recorded forward pass runs on local tensors."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from muster.worker.communicators.base import Communicator
from muster.worker.errors import ArrayError, SettingsError
from muster.worker.parallel.fabric import Fabric, Move, Scale
from muster.worker.parallel.gradients import Gradients, HeldParameter
from muster.worker.parallel.operators import Local, Run, local_function
from muster.worker.parallel.planning.buckets import edge_layouts, gradient_buckets, holdings
from muster.worker.parallel.planning.graph import Node
from muster.worker.parallel.planning.layouts import Layout, local_shape, parts, plan_move, replicated
from muster.worker.parallel.planning.plan import Plan
from muster.worker.parallel.planning.problem import State
from muster.worker.parallel.trace import Traced

_WARM_UP, _MEASURED = 2, 5


@dataclass(slots=True)
class _Instruction:
    """One call: where its tensors come from, how they get there, what is called, where results go."""

    name: str
    module: str
    sources: tuple[int, ...]
    moves: tuple[tuple[Any, Any] | None, ...]
    function: Local
    outputs: tuple[int, ...]
    done: tuple[int, ...] = ()


class ParallelModule(torch.nn.Module):  # type: ignore[misc]
    """A module divided among the ranks as a plan says. Made by :func:`muster.parallelize`.

    ``forward`` takes what this rank feeds and returns what the bare module does: numbers whole, the same on
    all ranks; what has a batch dimension split like the batch, if each rank feeds its part. ``parameters()``
    are this rank's parts under their usual names, trained by any optimizer that treats elements one by one.

    Attributes:
        plan: what is divided how, what it costs; print it.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        traced: Traced,
        plan: Plan,
        communicator: Communicator,
        *,
        summed: bool = False,
        seed: int = 0,
        autocast: Any = None,
    ) -> None:
        super().__init__()
        self.plan = plan
        self._traced = traced
        self._graph, self._states, mesh = traced.graph, plan.states, plan.mesh
        needed = {each.dims for each in plan.collectives} | {tuple(range(len(mesh)))}
        self._fabric = Fabric(communicator, mesh, needed)
        self._run = Run(seed)
        self._factors = self._gradient_factors(summed)
        self._autocast = autocast
        self._own_buffers: dict[str, Any] = {}
        self._hold(module)
        self._program = self._compile()
        self._steps_timed = 0
        self._times: dict[str, float] = {}
        self._step_started = 0.0

    def _gradient_factors(self, summed: bool) -> list[float]:
        """By output: a mean over the parts of the batch, or their sum, of what each rank's loss asks for."""
        mesh = self.plan.mesh
        fed = [state.outs[0] for node, state in self._nodes() if node.kind == "input"]
        batch = parts(fed[0], mesh) if fed else 1
        outputs = next(state.ins for node, state in self._nodes() if node.kind == "output")
        self._batch_parts = batch
        self._summed = summed
        return [(batch if summed else 1) / parts(layout, mesh) for layout in outputs]

    def _nodes(self) -> Iterator[tuple[Node, State]]:
        return zip(self._graph.nodes, self._states, strict=True)

    # ------------------------------------------------------------ parameters

    def _hold(self, module: torch.nn.Module) -> None:
        mesh, traced = self.plan.mesh, self._traced
        tensors = dict(module.named_parameters(remove_duplicate=False))
        tensors.update(module.named_buffers(remove_duplicate=False))
        held = holdings(self._graph, self._states, mesh)
        self._held: dict[str, HeldParameter] = {}
        self._fixed: dict[str, Any] = {}
        names: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        for node, state in self._nodes():
            if node.name in traced.constants:
                self._fixed[node.name] = traced.constants[node.name]
                continue
            if node.kind not in ("parameter", "buffer"):
                continue
            name = traced.parameters[node.name]
            tensor = tensors[name]
            local = self._part(tensor.detach(), state.outs[0]).clone()
            if node.name in held:
                self._held[node.name] = HeldParameter(node.name, held[node.name], local, self._fabric)
                if node.layerwise and not self._summed:  # its owner gets what this rank's own loss asks for
                    self._held[node.name].factor = self._batch_parts
                kept = self._held[node.name].parameter
            elif node.kind == "parameter":
                kept = torch.nn.Parameter(local, requires_grad=node.trained)
                self._fixed[node.name] = kept.detach()
            else:
                kept = self._fixed[node.name] = local
            for each in names[id(tensor)]:
                self._register(each, kept)
            del names[id(tensor)]
        for unused in names.values():  # what the forward pass does not use stays as it is
            tensor = tensors[unused[0]]
            kept = tensor.detach().clone()
            if isinstance(tensor, torch.nn.Parameter):
                kept = torch.nn.Parameter(kept, requires_grad=tensor.requires_grad)
            for each in unused:
                self._register(each, kept)
        self._gradients = Gradients(self._held, gradient_buckets(list(held.values())), self._fabric)

    def _part(self, whole: Any, layout: Layout) -> Any:
        steps = plan_move(replicated(self.plan.mesh), layout, self.plan.mesh, tuple(whole.shape))
        return self._fabric.run(whole, steps or ())

    def _register(self, name: str, tensor: Any) -> None:
        *path, last = name.split(".")
        place: torch.nn.Module = self
        for part in path:
            if part not in place._modules:
                place.add_module(part, torch.nn.Module())
            place = place._modules[part]
        if hasattr(type(place), last):
            raise SettingsError(f"a parameter cannot be called {name!r} in a parallel module")
        if isinstance(tensor, torch.nn.Parameter):
            place.register_parameter(last, tensor)
        else:
            place.register_buffer(last, tensor)

    # ------------------------------------------------------------ the forward pass

    def _compile(self) -> list[_Instruction]:
        graph, mesh = self._graph, self.plan.mesh
        last_use = {value: index for index, node in enumerate(graph.nodes) for value in node.inputs}
        program = []
        for index, (node, state) in enumerate(zip(graph.nodes, self._states, strict=True)):
            if node.kind not in ("call", "hub", "output"):
                continue
            moves: list[tuple[Any, Any] | None] = []
            for position, value_index in enumerate(node.inputs):
                value = graph.values[value_index]
                before, after, grad, grad_after = edge_layouts(graph, self._states, index, position)
                there = plan_move(before, after, mesh, value.shape) or ()
                flows = graph.edge_needs_grad(node, position)
                back = (plan_move(grad, grad_after, mesh, value.shape) or ()) if flows else ()
                moves.append((there, back) if there or back else None)
            function: Local = list
            if node.kind != "output":
                function = local_function(
                    graph,
                    node,
                    state,
                    self._traced.functions.get(node.name),
                    self._fabric,
                    self._run,
                    local_norm=self.plan.options.local_norm,
                )
            done = tuple({v for v in node.inputs if last_use[v] == index})
            program.append(
                _Instruction(node.name, node.module, node.inputs, tuple(moves), function, node.outputs, done)
            )
        return program

    def forward(self, *batch: Any) -> Any:
        """The module's forward pass on this rank's part of the batch.

        Raises:
            ArrayError: a tensor has another shape than the plan was made for.
        """
        training = self.training and torch.is_grad_enabled()
        self._run.training = self.training
        self._gradients.gather()
        values = self._start(batch)
        clock = self._clock(training)
        with self._cast():
            for each in self._program:
                tensors = [
                    values[source] if move is None else self._move(values[source], *move)
                    for source, move in zip(each.sources, each.moves, strict=True)
                ]
                result = each.function(tensors)
                for value in each.done:
                    del values[value]
                if not each.outputs:
                    break
                if len(each.outputs) == 1 and not isinstance(result, (tuple, list)):
                    values[each.outputs[0]] = result
                else:
                    values.update(zip(each.outputs, result, strict=False))
                clock(each.module)
        if training:
            self._run.step += 1
        result = [
            Scale.apply(x, factor) if factor != 1 and x.requires_grad else x
            for x, factor in zip(result, self._factors, strict=True)
        ]
        return self._traced.unflatten(result)

    def _start(self, batch: Sequence[Any]) -> dict[int, Any]:
        """What is there before the first operator, by value."""
        graph, mesh = self._graph, self.plan.mesh
        tensors = iter(x for x in batch if isinstance(x, torch.Tensor))
        values: dict[int, Any] = {}
        for node, state in zip(graph.nodes, self._states, strict=True):
            if node.kind == "input":
                shape = local_shape(state.outs[0], mesh, graph.values[node.outputs[0]].shape)
                tensor = next(tensors, None)
                if tensor is None or tuple(tensor.shape) != shape:
                    got = "nothing" if tensor is None else str(list(tensor.shape))
                    raise ArrayError(
                        f"The plan takes {node.name} of shape {list(shape)} from each rank; it got {got}.",
                        remedy="Plans are for one shape: drop the last, smaller batch, or plan anew.",
                    )
                values[node.outputs[0]] = tensor
            elif node.name in self._held:
                values[node.outputs[0]] = self._gradients.leaf(node.name)
            elif node.name in self._fixed:
                values[node.outputs[0]] = self._fixed[node.name]
        return values

    def _move(self, x: Any, there: Any, back: Any) -> Any:
        if x.requires_grad:
            return Move.apply(x, self._fabric, there, back)
        return self._fabric.run(x, there)

    def _cast(self) -> Any:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(next(self.parameters()).device.type, dtype=self._autocast)

    def _clock(self, training: bool) -> Callable[[str], None]:
        """Measures the forward pass of modules, and whole steps, for some steps after the first two."""
        now = time.perf_counter()
        if not training or self._steps_timed > _WARM_UP + _MEASURED or not self._gradients.synchronize:
            return lambda module: None
        if self._steps_timed > _WARM_UP:
            self.plan.note_step(now - self._step_started)
        self._step_started = now
        self._steps_timed += 1
        if self._steps_timed <= _WARM_UP or next(self.parameters()).is_cuda:
            return lambda module: None
        last = [now]

        def tick(module: str) -> None:
            moment = time.perf_counter()
            self.plan.note_forward(module, moment - last[0], self._steps_timed)
            last[0] = moment

        return tick

    # ------------------------------------------------------------ what users call

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the first one outside sums over ranks."""
        before, self._gradients.synchronize = self._gradients.synchronize, False
        try:
            yield
        finally:
            self._gradients.synchronize = before

    def clip_grad_norm_(self, max_norm: float) -> Any:
        """Scales the gradients of all ranks down to a common norm of at most ``max_norm``.

        Each part counts once, however many ranks hold it.

        Returns:
            The norm of the whole gradient before, a 0-dim tensor, the same on all ranks.
        """
        mesh = self.plan.mesh
        every = tuple(range(len(mesh)))
        total: Any = None
        for node, state in self._nodes():
            held = self._held.get(node.name)
            if held is None or held.parameter.grad is None:
                continue
            holding = held.holding
            ranks = parts(state.outs[0], mesh) * (holding.ranks if holding.sharded else 1)
            square = held.parameter.grad.double().square().sum() * (ranks / self._fabric.size(every))
            total = square if total is None else total + square
        if total is None:
            raise SettingsError("there are no gradients to clip: call backward() first")
        if self._fabric.size(every) > 1:
            total = self._fabric.all_reduce(total.reshape(1), every)[0]
        norm = total.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for held in self._held.values():
            if held.parameter.grad is not None:
                held.parameter.grad.mul_(factor.to(held.parameter.grad.dtype))
        return norm

    def full_state_dict(self) -> dict[str, Any]:
        """Parameters and buffers as the bare module has them, whole, on every rank. All ranks call this."""
        self._gradients.gather()
        mesh = self.plan.mesh
        found: dict[str, Any] = {}
        by_node: dict[str, Any] = {}
        for node, state in self._nodes():
            if node.kind not in ("parameter", "buffer") or node.name not in self._traced.parameters:
                continue
            local = self._held[node.name].whole if node.name in self._held else self._fixed[node.name]
            shape = self._graph.values[node.outputs[0]].shape
            steps = plan_move(state.outs[0], replicated(mesh), mesh, shape) or ()
            by_node[node.name] = self._fabric.run(local.detach(), steps).clone()
            found[self._traced.parameters[node.name]] = by_node[node.name]
        for name, tensor in self.state_dict(keep_vars=True).items():  # tied ones have several names
            for node_name, held in self._held.items():
                if held.parameter is tensor:
                    found.setdefault(name, by_node[node_name])
        return found

    def load_full_state_dict(self, whole: Mapping[str, Any]) -> None:
        """Takes parameters and buffers as :meth:`full_state_dict` or the bare module gives them.

        Args:
            whole: each under one of its names at least; every rank gives all of them.

        Raises:
            SettingsError: one is missing, or has another shape.
        """
        for node, state in self._nodes():
            name = self._traced.parameters.get(node.name)
            if name is None:
                continue
            shape = self._graph.values[node.outputs[0]].shape
            if name not in whole or tuple(whole[name].shape) != shape:
                got = list(whole[name].shape) if name in whole else "missing"
                raise SettingsError(f"{name} has the shape {list(shape)}; what is loaded is {got}")
            local = self._part(whole[name], state.outs[0])
            with torch.no_grad():
                if node.name in self._held:
                    self._held[node.name].load(local, self._fabric)
                else:
                    self._fixed[node.name].copy_(local)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses ``to()``, ``half()`` and the like, which would leave plan and parts behind."""
        raise SettingsError("a parallel module stays what and where it is: convert it before parallelize()")

    def forget_backward(self) -> None:
        """Forgets a backward pass that broke off, and all gradients."""
        self._gradients.forget()

    def close(self) -> None:
        """Ends the communicators of the mesh."""
        self._fabric.close()
