"""The parallel module: its parameters are a rank's parts, and it runs the recorded forward pass on them."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from muster.communicators.base import Communicator
from muster.errors import ArrayError, SettingsError, WorkerError
from muster.parallel.gradients import Gradients, HeldParameter, share_of
from muster.parallel.instructions import Instruction, LayerAgain, first_gathered, make_instructions
from muster.parallel.mesh_communicator import MeshCommunicator, Move, Scale
from muster.parallel.operators import DRAWS_BY_GENERATOR, Began, ForwardPass
from muster.parallel.planning.buckets import (
    ParameterShard,
    gradient_buckets,
    parameter_shards,
)
from muster.parallel.planning.graph import Node, TensorValue
from muster.parallel.planning.layouts import (
    Placements,
    local_shape,
    parts,
    plan_move,
    replicated,
    slices,
)
from muster.parallel.planning.plan import Plan
from muster.parallel.planning.problem import State
from muster.parallel.settings import NO_FLOAT16
from muster.parallel.trace import Traced
from muster.torch import capture
from muster.torch.transfer import broadcast_tensors

_WARM_UP, _MEASURED = 2, 5
_UNMET = 'which a recorded graph cannot run: mode="data_parallel" keeps hooks'
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ParallelModule(torch.nn.Module):  # type: ignore[misc]
    """A module that is sharded over the ranks by a plan. :func:`muster.parallelize` makes it.

    ``forward`` takes this rank's batch and returns what the bare module returns. Scalars are whole, and the
    same on all ranks; if each rank feeds its part of the batch, results with a batch dimension are this
    rank's part. ``parameters()`` are this rank's parts, under their usual names. Any optimizer can train them
    that updates each element by itself.

    Attributes:
        plan: the layout of each tensor, with its costs; print it.
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
        planner: Callable[[Communicator], Plan] | None = None,
        connect: bool = True,
    ) -> None:
        super().__init__()
        self._planner = planner
        self._whole = (
            [] if connect else [module]
        )  # in a list, so that it does not become a submodule of this one
        self._traced, self._graph = traced, traced.graph
        self._run = ForwardPass(seed)
        self._summed = summed
        self._autocast = autocast
        self._take(plan, _mesh_communicator_of(plan, communicator, connect=connect))
        self._hold(module)
        self._instructions = self._make_instructions()
        self._step_started = 0.0
        self.updates_last = False
        self.before_update: Callable[[], None] = _nothing
        self._recorded = vars(module).keys() - vars(self).keys() - set(dir(self))

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute.

        Raises:
            SettingsError: the forward pass may have read its old value when it was recorded.
        """
        if name in vars(self).get("_recorded", ()):
            raise SettingsError(
                f"{name} was recorded with its old value: set it before parallelize(), or pass it to the"
                " forward pass as a tensor"
            )
        super().__setattr__(name, value)

    def _take(self, plan: Plan, mesh_communicator: MeshCommunicator) -> None:
        self.plan, self._states, self.mesh_communicator = plan, plan.states, mesh_communicator
        self._factors = self._gradient_factors()
        self._steps_timed = 0
        self._run.generators.clear()
        self._goes_on = False  # whether the next forward pass belongs to the same step as the last one
        self._captured_passes = 0

    def move(self, plan: Plan, communicator: Communicator, values: Mapping[str, Any]) -> None:
        """Changes to another plan on other ranks. All new ranks call this.

        Parameters stay the same objects, so that an optimizer keeps them; their contents and sizes change.

        Args:
            plan: a plan for the same graph.
            communicator: the communicator of the ranks of its mesh.
            values: what this rank holds by that plan, by node: local parts, flat if the update is sharded.
                The parameters use their memory.
        """
        before, mesh_communicator = self.mesh_communicator, _mesh_communicator_of(plan, communicator)
        self._whole = []
        self._take(plan, mesh_communicator)
        held = parameter_shards(self._graph, self._states, plan.mesh)
        with torch.no_grad():
            for name, kept in self.held_tensors():
                kept.grad = None
                kept.data = values[name]
                if name in held:
                    self._hold_parameter(name, held[name], kept)
        self._constants = self._local_constants()
        self._gradients = Gradients(
            self.held_parameters, gradient_buckets(list(held.values())), self.mesh_communicator
        )
        self._instructions = self._make_instructions()
        with contextlib.suppress(WorkerError):  # their generation may be over
            before.close()

    def _gradient_factors(self) -> list[float]:
        """Returns the factor of each output's gradient, by which gradients are averaged or summed."""
        mesh = self.plan.mesh
        fed = [state.outs[0] for node, state in self._nodes() if node.kind == "input"]
        batch = max((slices(layout, mesh, 1)[0] for layout in fed), default=1)
        outputs = next(state.ins for node, state in self._nodes() if node.kind == "output")
        self._batch_parts = batch
        return [(batch if self._summed else 1) / parts(layout, mesh) for layout in outputs]

    def _hold_parameter(self, name: str, shard: ParameterShard, parameter: torch.nn.Parameter) -> None:
        """Adds a parameter that is trained. A layerwise one gets the gradient of this rank's own loss."""
        place, mesh = self._graph.by_name()[name], self.plan.mesh
        layerwise = self._graph.nodes[place].layerwise
        factor = self._batch_parts if layerwise and not self._summed else 1
        divided = shard.sharded or parts(self._states[place].outs[0], mesh) > 1
        self.held_parameters[name] = HeldParameter(
            name,
            shard,
            parameter,
            self.mesh_communicator,
            factor,
            partial=divided or (layerwise and math.prod(mesh) > 1),
        )
        (self._divided.add if divided else self._divided.discard)(name)

    def _refuse_outside(self, node: str) -> Callable[[Any], None]:
        """Returns a hook on a sharded parameter that refuses its use outside the recorded forward pass.

        The recorded forward pass uses its own leaves, so only other code can reach the hook.
        """
        name, divided = self._traced.parameters[node], self._divided  # not self, which holds the parameter

        def reached(_: Any) -> None:
            if node in divided:
                raise SettingsError(
                    f"a loss outside the recorded forward pass uses {name}, of which this rank has only a"
                    " part: compute it in the forward pass, or in the loss= of parallelize()"
                )

        return reached

    def _nodes(self) -> Iterator[tuple[Node, State]]:
        return zip(self._graph.nodes, self._states, strict=True)

    # ------------------------------------------------------------ parameters

    def _hold(self, module: torch.nn.Module) -> None:
        mesh, traced = self.plan.mesh, self._traced
        tensors = dict(module.named_parameters(remove_duplicate=False))
        tensors.update(module.named_buffers(remove_duplicate=False))
        held = parameter_shards(self._graph, self._states, mesh)
        at = {traced.parameters[node.name]: (node, state) for node, state in self._holders()}
        self.held_parameters: dict[str, HeldParameter] = {}
        self._divided: set[str] = set()  # the parameters of which this rank has only a part
        kept: dict[int, Any] = {}
        nodes: dict[int, str] = {}
        for name, tensor in tensors.items():
            if name in at:
                node, state = at[name]
                nodes[id(tensor)] = node.name
                kept[id(tensor)] = self._own(node, state, tensor.detach(), held.get(node.name))
        saved = module.state_dict(keep_vars=True)
        self._node_of = {  # by the names in the bare module's state_dict; "": not used by the forward pass
            name: nodes.get(id(tensor), "")
            for name, tensor in saved.items()
            if isinstance(tensor, torch.Tensor)
        }
        self._places: dict[str, tuple[dict[str, Any], str]] = {}  # by node, where its tensor is registered
        for name, tensor in tensors.items():  # in the bare module's order, by which optimizers number them
            node_name = nodes.get(id(tensor), "")
            if id(tensor) not in kept:
                own = tensor.detach().clone()
                if isinstance(tensor, torch.nn.Parameter):
                    own = torch.nn.Parameter(own, requires_grad=tensor.requires_grad)
                kept[id(tensor)] = own
            place = self._register(name, kept[id(tensor)], persistent=name in saved)
            if node_name:
                self._places.setdefault(node_name, place)
        self._constants = self._local_constants()
        self._gradients = Gradients(
            self.held_parameters, gradient_buckets(list(held.values())), self.mesh_communicator
        )

    def _holders(self) -> Iterator[tuple[Node, State]]:
        """Yields the nodes of parameters and buffers that the forward pass uses, with their states."""
        return ((node, state) for node, state in self._nodes() if node.name in self._traced.parameters)

    def _own(self, node: Node, state: State, whole: Any, shard: ParameterShard | None) -> Any:
        """Returns this rank's part of a parameter or buffer, as users see it."""
        local = self._part(whole, state.outs[0]).clone()
        if shard is not None:
            parameter = torch.nn.Parameter(share_of(shard, local, self.mesh_communicator))
            self._hold_parameter(node.name, shard, parameter)
            parameter.register_hook(self._refuse_outside(node.name))
            return parameter
        return torch.nn.Parameter(local, requires_grad=node.trained) if node.kind == "parameter" else local

    def _local_constants(self) -> dict[str, Any]:
        """Returns this rank's parts of the constants of the forward pass, by node."""
        whole = self._traced.constants
        return {
            node.name: self._part(whole[node.name], state.outs[0])
            for node, state in self._nodes()
            if node.name in whole
        }

    def _part(self, whole: Any, layout: Placements) -> Any:
        steps = plan_move(replicated(self.plan.mesh), layout, self.plan.mesh, tuple(whole.shape))
        return self.mesh_communicator.run(whole, steps or ())

    def _register(self, name: str, tensor: Any, *, persistent: bool) -> tuple[dict[str, Any], str]:
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
            return place._parameters, last
        place.register_buffer(last, tensor, persistent=persistent)
        return place._buffers, last

    # ------------------------------------------------------------ the forward pass

    def _make_instructions(self) -> list[Instruction | LayerAgain]:
        shards = {name: each.shard for name, each in self.held_parameters.items()}
        return make_instructions(
            self._graph,
            self.plan,
            self._states,
            shards,
            self._traced.functions,
            self.mesh_communicator,
            self._run,
        )

    def forward(self, *batch: Any) -> Any:
        """Runs the recorded forward pass on this rank's batch.

        Raises:
            ArrayError: an argument does not match the example that the plan was made for.
            SettingsError: the module was changed in a way that the recorded forward pass does not include.
        """
        training = self.training and torch.is_grad_enabled()
        self._check_modes()
        self._run.training = self.training
        self._run.casts.clear()
        self._gradients.gather()
        self._gradients.begin([name for each in self._instructions for name in first_gathered(each)])
        recorded = capture.is_recording(next(self.parameters()).device)
        if not recorded and not self._goes_on:
            self._run.begin()
        values = self._start(batch)
        clock = self._clock(training)
        regathered = self._gradients.regathered
        result: Any = None
        with self._cast(), regathered.saving() if regathered else contextlib.nullcontext():
            for each in self._instructions:
                if isinstance(each, LayerAgain):
                    self._run_layer(each, values, clock, recorded=recorded)
                else:
                    result = self._call(each, values)
                    clock(each.module)
        self._run.casts.clear()
        self._goes_on = training and not self._gradients.synchronize
        if recorded:  # a captured pass computes nothing yet
            self._captured_passes += self.training
        else:
            self._run.step += self.training
        result = [
            Scale.apply(x, factor) if factor != 1 and x.requires_grad else x
            for x, factor in zip(result, self._factors, strict=True)
        ]
        return self._traced.unflatten(result)

    def _call(self, each: Instruction, values: dict[int, Any], *, again: bool = False) -> Any:
        """Runs one operator, and adds its results to the values."""
        if not self.training and each.name in self._traced.counters:
            return None
        gathered = self._gradients.gathered_again if again else self._gradients.gathered
        for name, value in each.gathered:
            values[value] = gathered(name)
        tensors = [
            values[source] if move is None else self._move(values[source], *move)
            for source, move in zip(each.sources, each.moves, strict=True)
        ]
        result = each.function(tensors)
        if self._gradients.regathered and each.of_parameters and not again:
            self._gradients.regathered.see(result)
        del tensors  # or a gathered parameter would stay in memory until those of the next operator arrive
        for value in each.done:
            values.pop(value, None)
        if len(each.outputs) == 1 and not isinstance(result, (tuple, list)):
            values[each.outputs[0]] = result
        else:
            values.update(zip(each.outputs, result, strict=False))
        return result

    def _run_layer(
        self, layer: LayerAgain, values: dict[int, Any], clock: Callable[[str], None], *, recorded: bool
    ) -> None:
        """Runs a layer that keeps only its inputs, and is recomputed in the backward pass."""
        given, held = ([values[value] for value in each] for each in (layer.given, layer.held))
        for value in layer.done:
            values.pop(value, None)
        began: list[Began] = []

        def run(*tensors: Any) -> tuple[Any, ...]:
            own = dict(zip((*layer.given, *layer.held), (*tensors, *held), strict=True))
            if began:
                # Running statistics are updated once only; their values have no effect in training.
                own.update({value: own[value].clone() for value in layer.changed})
                with self._run.once_more(began[0]):
                    for each in layer.instructions:
                        self._call(each, own, again=True)
            else:
                with self._run.within(layer.name, recorded=recorded) as start:
                    began.append(start)
                    for each in layer.instructions:
                        self._call(each, own)
                        clock(each.module)
            return tuple(own[value] for value in layer.left)

        if torch.is_grad_enabled():
            left = checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            left = run(*given)
        if self._gradients.regathered:
            self._gradients.regathered.will_read(layer.shared, layer.gathered)
        values.update(zip(layer.left, left, strict=True))

    def _start(self, batch: Sequence[Any]) -> dict[int, Any]:
        """Checks the batch, and returns the values that exist before the first operator."""
        graph, mesh = self._graph, self.plan.mesh
        tensors = iter(self._traced.tensors_of(batch))
        values: dict[int, Any] = {}
        for node, state in zip(graph.nodes, self._states, strict=True):
            if node.kind == "input":
                value = graph.values[node.outputs[0]]
                tensor = next(tensors)
                _check_input(tensor, node, value, local_shape(state.outs[0], mesh, value.shape))
                if node.name in self._traced.by_strides and not tensor.is_contiguous():
                    raise ArrayError(
                        f"The forward pass reads {node.name} by strides, and needs a contiguous tensor; it"
                        f" got one with the strides {list(tensor.stride())}.",
                        remedy="Pass it as .contiguous().",
                    )
                values[node.outputs[0]] = tensor
            elif node.name in self._constants:
                values[node.outputs[0]] = self._constants[node.name]
            elif node.name in self._places:
                tensors_here, last = self._places[node.name]
                held = self.held_parameters.get(node.name)
                self._check_parameter(node, tensors_here[last], held)
                if held is not None and held.shard.regathered:
                    continue  # gathered when it is read
                own = self._gradients.leaf(node.name) if held is not None else tensors_here[last].detach()
                values[node.outputs[0]] = own
        return values

    def _check_parameter(self, node: Node, registered: Any, held: HeldParameter | None) -> None:
        """Checks that a parameter's tensor is still the one that the plan shards, without hooks.

        Raises:
            SettingsError: the tensor was replaced or unfrozen, or has a hook.
        """
        name = self._traced.parameters[node.name]
        if held is not None and registered is not held.parameter:
            raise SettingsError(
                f"{name} was replaced by another tensor, and a parallel module uses its own: copy the values"
                " into it, and do not use functional_call or load_state_dict(assign=True)"
            )
        if held is None and node.kind == "parameter" and registered.requires_grad:
            raise SettingsError(f"{name} was frozen when the plan was made: unfreeze it before parallelize()")
        own = held is not None  # the number of its own hooks: that of _refuse_outside
        if len(registered._backward_hooks or ()) > own or registered._post_accumulate_grad_hooks:
            raise SettingsError(f"{name} has a hook, {_UNMET}")

    def _check_modes(self) -> None:
        """Checks that the recorded forward pass holds in the current modes of the module and its submodules.

        Raises:
            SettingsError: evaluation computes something else, a submodule is in another mode, or it has a
                hook.
        """
        if not self.training and self._traced.only_training:
            raise SettingsError(
                f"this module computes something else in evaluation ({self._traced.only_training}): evaluate"
                " the bare module, after load_state_dict(model.full_state_dict())"
            )
        for name, part in self.named_modules():
            if part.training != self.training:
                raise SettingsError(
                    f"{name} is not in the mode of the whole module: set the modes of submodules before"
                    " parallelize()"
                )
            if part is not self and any(vars(part)[hooks] for hooks in _HOOKS):
                raise SettingsError(f"{name} has a hook, {_UNMET}")

    def _move(self, x: Any, there: Any, back: Any) -> Any:
        if x.requires_grad:
            return Move.apply(x, self.mesh_communicator, there, back)
        return self.mesh_communicator.run(x, there)

    def _cast(self) -> Any:
        device = next(self.parameters()).device.type
        if self._autocast is not None:
            return torch.autocast(device, dtype=self._autocast)
        scaled = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
        if scaled and torch.is_grad_enabled():
            raise SettingsError(NO_FLOAT16)
        return contextlib.nullcontext()

    def _clock(self, training: bool) -> Callable[[str], None]:
        """Measures some steps after the first two; returns a function to call after each module."""
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

    @property
    def communicator(self) -> Communicator:
        """The communicator of all ranks of the mesh."""
        return self.mesh_communicator.world

    @property
    def capture_obstacle(self) -> str | None:
        """The reason why a step cannot be captured as a CUDA graph; None: no reason is known."""
        drawn = [
            node.name
            for node in self._graph.nodes
            if node.kind == "call" and node.draws and node.op not in DRAWS_BY_GENERATOR
        ]
        return f"{drawn[0]} draws random numbers that the host seeds in each step" if drawn else None

    def captured_generators(self) -> list[Any]:
        """Returns the generators that a captured step uses in addition to torch's own; capture begins now."""
        self._captured_passes = 0
        return list(self._run.generators.values())

    def before_replay(self) -> None:
        """Seeds the generators as an eager step does; the captured step draws from them."""
        self.mesh_communicator.replayed()
        self._run.begin()
        self._run.step += self._captured_passes

    uneven = False

    def check_step(self, *, begins: bool = False) -> None:
        """Does nothing, as each forward pass checks itself; see :class:`CapturedModel`."""

    def uneven_batch(self, samples: int) -> contextlib.AbstractContextManager[None]:
        """Does nothing, as a plan takes batches of one shape only; see :class:`CapturedModel`."""
        return contextlib.nullcontext()

    def held_by_graphs(self) -> list[Any]:
        """Returns nothing; see :class:`CapturedModel`."""
        return []

    def plan_for(self, communicator: Communicator) -> Plan:
        """Returns a plan for other ranks: the current one if the world size is the same.

        Raises:
            SettingsError: there is no plan for this world size.
        """
        world = communicator.world_size
        if math.prod(self.plan.mesh) == world:
            return self.plan
        if self._planner is None:
            raise SettingsError(f"the plan is for {math.prod(self.plan.mesh)} ranks, and there are {world}")
        return self._planner(communicator)

    @property
    def can_start(self) -> bool:
        """Whether the values of the whole module still exist, which is so until training begins."""
        return bool(self._whole)

    def start(self, plan: Plan, communicator: Communicator) -> None:
        """Broadcasts rank 0's values of the whole module, and shards them by a plan.

        Raises:
            SettingsError: the module was not made with ``elastic=True``, or has begun to train.
        """
        if not self._whole:
            raise SettingsError("training has begun, and the whole values are gone: call parallelize() again")
        whole = self._whole.pop()
        tensors = dict(whole.named_parameters(remove_duplicate=False))
        tensors.update(whole.named_buffers(remove_duplicate=False))
        distinct = {id(tensor): tensor.detach() for tensor in tensors.values() if tensor.numel()}
        if communicator.world_size > 1 and distinct:
            broadcast_tensors(communicator, list(distinct.values()), 0)
        mesh_communicator = _mesh_communicator_of(plan, communicator, connect=False)
        held = parameter_shards(self._graph, plan.states, plan.mesh)
        values = {}
        for node, state in zip(self._graph.nodes, plan.states, strict=True):
            if node.name not in self._places:
                continue
            tensor = tensors[self._traced.parameters[node.name]].detach()
            steps = plan_move(replicated(plan.mesh), state.outs[0], plan.mesh, tuple(tensor.shape))
            local = mesh_communicator.run(tensor, steps or ()).clone()
            values[node.name] = (
                share_of(held[node.name], local, mesh_communicator) if node.name in held else local
            )
        with torch.no_grad():
            for name, unused in self.unused_tensors():
                unused.copy_(tensors[name])
        self.move(plan, communicator, values)

    def draws(self) -> list[int]:
        """Returns what determines dropout: the seed and the number of training passes."""
        return [self._run.seed, self._run.step]

    def draw_on_from(self, draws: Sequence[int]) -> None:
        """Continues dropout from what :meth:`draws` returned."""
        self._run.seed, self._run.step = draws

    def held_tensors(self) -> Iterator[tuple[str, Any]]:
        """Yields this rank's parts of parameters and buffers with their nodes, in the graph's order."""
        return ((node, tensors[last]) for node, (tensors, last) in self._places.items())

    def unused_tensors(self) -> Iterator[tuple[str, Any]]:
        """Yields the parameters and buffers that the forward pass does not use; they are whole everywhere."""
        used = {id(tensor) for _, tensor in self.held_tensors()}
        named = (self.named_parameters(), self.named_buffers())
        return ((name, tensor) for each in named for name, tensor in each if id(tensor) not in used)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes only accumulate; the next one outside sums over ranks."""
        before, self._gradients.synchronize = self._gradients.synchronize, False
        try:
            yield
        finally:
            self._gradients.synchronize = before

    def clip_grad_norm_(self, max_norm: float) -> Any:
        """Scales the gradients so that the norm over all ranks is at most ``max_norm``. All ranks call it.

        A part counts once, even if several ranks hold it.

        Returns:
            The norm before scaling: a 0-dim float64 tensor, the same on all ranks.
        """
        mesh = self.plan.mesh
        every = tuple(range(len(mesh)))
        total: Any = None
        for node, state in self._nodes():
            held = self.held_parameters.get(node.name)
            if held is None or held.parameter.grad is None:
                continue
            shard = held.shard
            ranks = parts(state.outs[0], mesh) * (shard.ranks if shard.sharded else 1)
            square = held.parameter.grad.double().square().sum() * (
                ranks / self.mesh_communicator.size(every)
            )
            total = square if total is None else total + square
        if total is None:
            raise SettingsError("there are no gradients to clip: call backward() first")
        if self.mesh_communicator.size(every) > 1:
            total = self.mesh_communicator.all_reduce(total.reshape(1), every)[0]
        norm = total.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for held in self.held_parameters.values():
            if held.parameter.grad is not None:
                held.parameter.grad.mul_(factor.to(held.parameter.grad.dtype))
        return norm

    def full_state_dict(self) -> dict[str, Any]:
        """Returns the bare module's ``state_dict``: whole tensors, on every rank. All ranks call this."""
        self._gradients.gather()
        mesh = self.plan.mesh
        by_node: dict[str, Any] = {}
        holders = {node.name: (node, state) for node, state in self._holders()}
        divided = self._gradients.regathered
        local = ((name, self._local(name)) for name in holders if name not in divided)
        for name, own_part in itertools.chain(local, divided.wholes()):
            node, state = holders[name]
            shape = self._graph.values[node.outputs[0]].shape
            steps = plan_move(state.outs[0], replicated(mesh), mesh, shape) or ()
            by_node[name] = self.mesh_communicator.run(own_part.detach(), steps).clone()
        own = self.state_dict()
        return {name: by_node[node] if node else own[name].clone() for name, node in self._node_of.items()}

    def _local(self, node: str) -> Any:
        """Returns the local part that the forward pass uses."""
        if node in self.held_parameters:
            return self.held_parameters[node].whole
        tensors, last = self._places[node]
        return tensors[last]

    def load_full_state_dict(self, whole: Mapping[str, Any]) -> None:
        """Loads what :meth:`full_state_dict`, or ``state_dict`` of the bare module, returned.

        Args:
            whole: all whole tensors, on every rank; a tied parameter under at least one of its names.

        Raises:
            SettingsError: a tensor is missing, or has another shape.
        """
        states = {node.name: (node, state) for node, state in self._holders()}
        own = self.state_dict(keep_vars=True)
        done = set()
        for name, node_name in self._node_of.items():
            if node_name and (node_name in done or (name not in whole and self._is_under_other(name, whole))):
                continue  # a tied parameter needs one of its names only
            done.add(node_name)
            value = self._graph.values[states[node_name][0].outputs[0]] if node_name else own[name]
            shape = tuple(value.shape)
            if name not in whole or tuple(whole[name].shape) != shape:
                got = list(whole[name].shape) if name in whole else "missing"
                raise SettingsError(f"{name} has the shape {list(shape)}; what is loaded is {got}")
            with torch.no_grad():
                if not node_name:
                    own[name].copy_(whole[name])
                    continue
                local = self._part(whole[name], states[node_name][1].outs[0])
                if node_name in self.held_parameters:
                    self.held_parameters[node_name].load(local)
                else:
                    self._local(node_name).copy_(local)

    def _is_under_other(self, name: str, whole: Mapping[str, Any]) -> bool:
        node = self._node_of[name]
        return any(other in whole for other, its in self._node_of.items() if its == node)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses ``to()``, ``half()`` and the like, as the plan and the local parts would not follow.

        Raises:
            SettingsError: always.
        """
        raise SettingsError("a parallel module cannot be converted or moved: do so before parallelize()")

    def __deepcopy__(self, memo: Any) -> Any:
        """Refuses copies, as the other ranks would have no counterpart.

        Raises:
            SettingsError: always.
        """
        raise SettingsError(
            "a parallel module cannot be copied: keep an average of its parameters as a list of tensors,"
            " [p.detach().clone() for p in model.parameters()], and update that"
        )

    def forget_backward(self) -> None:
        """Drops all gradients, and the remains of a backward pass that raised an error."""
        self._gradients.forget()
        self._goes_on = False

    def close(self) -> None:
        """Closes the communicators of the mesh."""
        self.mesh_communicator.close()


def _check_input(tensor: Any, node: Node, value: TensorValue, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ArrayError(
            f"The plan takes {node.name} of shape {list(shape)} from each rank; it got {list(tensor.shape)}.",
            remedy="Plans are for one shape: drop the last, smaller batch, or plan again.",
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype != value.dtype:
        raise ArrayError(
            f"The plan takes {node.name} as {value.dtype} from each rank; it got {dtype}.",
            remedy="Convert it, or give parallelize() an example of this dtype.",
        )
    if tensor.requires_grad and not node.trained:
        raise ArrayError(
            f"{node.name} requires a gradient, and the plan has no backward pass to it.",
            remedy="Detach it, or let it require a gradient in parallelize()'s example too.",
        )


def _nothing() -> None:
    return None


def _mesh_communicator_of(
    plan: Plan, communicator: Communicator, *, connect: bool = True
) -> MeshCommunicator:
    needed = {each.dims for each in plan.collectives} | {tuple(range(len(plan.mesh)))}
    return MeshCommunicator(communicator, plan.mesh, needed if connect else ())
