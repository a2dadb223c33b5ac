"""``muster.parallelize``: shards a module over the ranks of the job."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from muster.communicators.base import Communicator
from muster.errors import CollectiveMismatchError, SettingsError
from muster.parallel.measure import load_machine, neighbours
from muster.parallel.module import ParallelModule
from muster.parallel.planning import context
from muster.parallel.planning.costs import Hardware
from muster.parallel.planning.feeding import whole_shape
from muster.parallel.planning.graph import Graph
from muster.parallel.planning.layouts import Mesh
from muster.parallel.planning.memory import peak_of
from muster.parallel.planning.plan import Plan
from muster.parallel.planning.plan_file import check_model
from muster.parallel.planning.planner import find_plan, options_for
from muster.parallel.planning.precision import mark_autocast
from muster.parallel.planning.problem import Options, build
from muster.parallel.planning.recomputed import recomputed_in
from muster.parallel.planning.strategies import Slices, Strategy, check_divides, strategy_text
from muster.parallel.saved import read_plan
from muster.parallel.settings import ParallelSettings, settings_of
from muster.parallel.trace import Traced, trace
from muster.parallel.untraced import TraceError, WithoutGraph
from muster.torch.data_parallel import DataParallel
from muster.torch.transfer import broadcast_tensors, gather_numbers

log = logging.getLogger("muster.worker")
_LOSS = "net."


def layerwise(parameter: Any) -> Any:
    """Marks a parameter that each rank keeps for itself: it is not broadcast, and its gradient not averaged.

    The gradient is that of this rank's own part of the loss; the script decides what to do with it. Mode
    "hybrid" is data parallelism with such parameters. All modes that shard or average parameters refuse them.

    Returns:
        The same parameter.
    """
    parameter.layerwise_parallel = True
    return parameter


class StandAlone(torch.nn.Module):  # type: ignore[misc]
    """A module that each rank trains by itself, with the plan that says why."""

    def __init__(self, module: torch.nn.Module, plan: Any) -> None:
        super().__init__()
        self.module = module
        self.plan = plan

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        return self.module(*args, **kwargs)


class _WithLoss(torch.nn.Module):  # type: ignore[misc]
    """A module and its loss as one module, which takes the tensors of a batch."""

    def __init__(self, net: torch.nn.Module, loss: Any) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def forward(self, *batch: Any) -> Any:
        return self.loss(self.net(*batch[:-1]), batch[-1])


def parallelize(
    net: torch.nn.Module,
    example: Sequence[Any],
    *,
    session: Any = None,
    communicator: Communicator | None = None,
    mode: str | None = None,
    strategies: Mapping[str, Strategy] | None = None,
    search: str | None = None,
    memory: float = 0.9,
    dataset_strategy: str | Sequence[Slices] | None = None,
    gradients_mean: bool | None = None,
    parameter_broadcast: bool | None = None,
    plan: str | Path | None = None,
    loss: Any = None,
    mesh: Mesh | None = None,
    machine: Hardware | str | Path | None = None,
    batch_norm: str | None = None,
    optimizer_states: int = 2,
    shard_updates: bool | str | None = None,
    shard_parameters: bool | str | None = None,
    checkpoint_activations: bool | str | None = None,
    rest: str = "search",
    autocast: Any = None,
    seed: int | None = None,
    elastic: bool = False,
    survive: int = 0,
) -> Any:
    """Shards a module over the ranks, by a plan that a search finds or that you fix.

    ::

        model = muster.parallelize(net, example=(x, y), loss=torch.nn.functional.cross_entropy)
        print(model.plan)
        optimizer = torch.optim.AdamW(model.parameters())
        model(x, y).backward()
        optimizer.step()

    Every rank calls this with the same arguments. An argument that is None takes its value from
    ``set_auto_parallel_context``, if it was set there. The defaults are mode "auto", search "exact",
    dataset_strategy "data_parallel", gradients_mean True and parameter_broadcast True.

    Args:
        net: a module, or a :class:`muster.AutoParallel` with its settings. It takes the batch's tensors, and
            returns a loss or tensors. It must be in training mode and have real parameters; submodules may be
            in evaluation mode or frozen, and stay so.
        example: one rank's batch: tensors, also in lists and dictionaries. All batches must have its shapes,
            its dtypes and its values that are not tensors. With dataset_strategy "data_parallel" the first
            dimension of each tensor is the batch dimension.
        session: the session that has the communicator; None: that of ``muster.init()``.
        communicator: the communicator to use instead of a session's.
        mode: "auto" (search), "semi_auto" (search around ``strategies``, see ``rest``), "data_parallel",
            "hybrid" (with :func:`layerwise` parameters) or "stand_alone".
        strategies: by name of an operator or module: the number of slices of each dimension of each input, or
            the number of slices by axis.
        search: "exact", or "propagation", which minimises communication only.
        memory: the share of the machine's memory that a plan may use, above 0 and up to 1.
        dataset_strategy: "data_parallel": each rank feeds its part of the batch; "full_batch": each rank
            feeds all of it; or the slices of each input, which ranks take row by row: of two slices, the
            first half of the ranks feeds the first one.
        gradients_mean: whether gradients are averaged over the parts of the batch; False: they are summed.
        parameter_broadcast: whether parameters and buffers are broadcast from rank 0 now.
        plan: a file. The plan is loaded from it if it exists, and saved to it otherwise.
        loss: a function; the sharded module then computes loss(net(all but the last tensor), last tensor).
        mesh: the number of ranks along each mesh dimension; None: the best mesh of one or two dimensions.
        machine: the machine's costs, or a file of them that ``muster plan --measure`` wrote; None: an H200.
        batch_norm: "synchronised": statistics of the whole batch, as in one process; "local": statistics of
            each rank's part, as with DataParallel. None: "local" in the modes "data_parallel" and "hybrid",
            and otherwise "synchronised".
        optimizer_states: number of tensors that the optimizer keeps per parameter: 2 for Adam, 1 for
            momentum, 0 for plain SGD.
        shard_updates: whether optimizer updates are sharded (ZeRO-1). True: where the search finds it faster;
            "always": wherever possible, also in mode "data_parallel"; False: never. None: "always" if
            ``enable_parallel_optimizer`` is set, otherwise True.
        shard_parameters: whether each rank holds only a shard of a parameter, which is gathered when it is
            used in either pass (ZeRO-3, as FSDP). None or True: where memory requires it, unless
            shard_updates is False; "always": wherever possible, also in mode "data_parallel"; False: never.
        checkpoint_activations: whether activations are recomputed in the backward pass instead of kept. None
            or True: in as many layers as memory requires; "always": in all layers where this frees memory,
            also in mode "data_parallel"; False: in none.
        rest: how operators without a strategy are split in mode "semi_auto": by "search" (the cheapest way),
            or "data_parallel" (each computes its part of the batch, as in MindSpore).
        autocast: the dtype of ``torch.autocast`` in the forward pass; not float16.
        seed: the seed of dropout; None: rank 0's seed of torch.
        elastic: whether the module is for a :class:`muster.ParallelTrainingState`. Nothing is communicated
            here then: the state does that when the loop begins, so that a replacement may start later.
        survive: 1: two hosts hold every part of the state (two ranks, if there is one host only), so that
            the loss of any one needs no checkpoint; 0: no such guarantee.

    Returns:
        A module with ``plan``, ``no_sync()`` and ``clip_grad_norm_()``: a :class:`ParallelModule`, or a
        :class:`muster.DataParallel` if the forward pass cannot be recorded as a graph, or if that does the
        same in mode "data_parallel". In mode "stand_alone": the module, wrapped to have ``plan``.

    Raises:
        SettingsError: an argument is wrong, does not fit the model, or no plan fits the arguments.
        CollectiveMismatchError: the ranks found different plans.
    """
    net, inherited = context.inherited_by(net)
    chosen = settings_of(
        inherited.keywords,
        plan=plan,
        batch_norm=batch_norm,
        mode=mode,
        search=search,
        dataset_strategy=dataset_strategy,
        gradients_mean=gradients_mean,
        parameter_broadcast=parameter_broadcast,
        shard_updates=shard_updates,
        shard_parameters=shard_parameters,
        checkpoint_activations=checkpoint_activations,
        rest=rest,
        autocast=autocast,
    )
    own = net if loss is None else _WithLoss(net, loss)
    _check_layerwise(own, chosen.mode)
    if chosen.mode == "stand_alone":
        check_divides(chosen.mode, strategies or {})
        return StandAlone(own, WithoutGraph("stand alone, as asked: nothing is sharded or communicated."))
    group = communicator if communicator is not None else _communicator_of(session)
    if communicator is None:
        inherited.check_place(group.world_size, group.rank)
    if elastic:
        _check_elastic(chosen)
    elif chosen.parameter_broadcast:
        _broadcast(own, group)
    given = _Given(
        chosen,
        strategies or {},
        memory,
        mesh,
        load_machine(machine) if isinstance(machine, (str, Path)) else machine or Hardware(),
        optimizer_states=optimizer_states,
        survive=survive,
    )
    try:
        traced = _trace(own, example, group.world_size, chosen.dataset_strategy)
    except TraceError as error:
        asked = strategies or chosen.load or chosen.mode in ("hybrid", "semi_auto")
        if elastic or asked or not chosen.simple:
            raise
        return _without_graph(own, group, chosen, error)
    return _planned(own, traced, given, group, seed=seed, elastic=elastic)


@dataclass(frozen=True, slots=True)
class _Given:
    """The inputs of the search, apart from the graph; see :func:`parallelize`."""

    chosen: ParallelSettings
    strategies: Mapping[str, Strategy]
    memory: float
    mesh: Mesh | None
    machine: Hardware
    optimizer_states: int
    survive: int

    def __post_init__(self) -> None:
        if self.survive not in (0, 1):
            raise SettingsError(f"survive is 0 or 1, not {self.survive!r}")

    def plan(self, graph: Graph, group: Communicator, *, search_again: bool = False) -> Plan:
        """Returns the saved plan; the result of a search if there is none, or with ``search_again``."""
        load = self.chosen.load and not search_again
        found = self._loaded(graph, group) if load else self._searched(graph, group)
        found.gradients = "averaged" if self.chosen.gradients_mean else "summed"
        return found

    def _searched(self, graph: Graph, group: Communicator) -> Plan:
        if self.chosen.plain and self.strategies:
            raise SettingsError(
                f'mode "{self.chosen.mode}" divides the batch only: strategies need "semi_auto" or "auto"'
            )
        found = find_plan(
            graph,
            group.world_size,
            hosts=self._hosts(group),
            machine=_on_hosts_of(group, self.machine),
            mode="data_parallel" if self.chosen.plain else self.chosen.mode,
            search=self.chosen.search,
            strategies=self.strategies,
            memory=self.memory,
            dataset=self.chosen.dataset_strategy,
            mesh=self.mesh,
            optimizer_states=self.optimizer_states,
            local_norm=self.chosen.local_norm,
            shard_updates=self.chosen.shard_updates,
            shard_parameters=self.chosen.shard_parameters,
            checkpoint_activations=self.chosen.checkpoint_activations,
            rest=self.chosen.rest,
        )
        found.mode = self.chosen.mode
        return found

    def _hosts(self, group: Communicator) -> tuple[str, ...]:
        """Returns each rank's host for ``survive=1``; on a single host each rank counts as a host."""
        if not self.survive or group.world_size == 1:
            return ()
        hosts = tuple(peer.host_id for peer in group.membership.peers)
        return hosts if len(set(hosts)) > 1 else tuple(str(rank) for rank in range(group.world_size))

    def _loaded(self, graph: Graph, group: Communicator) -> Plan:
        path, world = self.chosen.load, group.world_size
        saved = read_plan(path)
        check_model(saved, graph, path)
        mesh = tuple(saved["mesh"])
        if math.prod(mesh) != world:
            raise SettingsError(f"the plan {path} is for {math.prod(mesh)} ranks, and the job has {world}")
        norm = "local" if self.chosen.local_norm else "synchronised"
        if saved["batch_norm"] != norm:
            raise SettingsError(f"the plan {path} is for batch_norm={saved['batch_norm']!r}, not {norm!r}")
        if self.mesh is not None and tuple(self.mesh) != mesh:
            raise SettingsError(f"the plan {path} is for the mesh {list(mesh)}, not {list(self.mesh)}")
        fixed = {name: strategy_text(strategy) for name, strategy in self.strategies.items()}
        if fixed and fixed != saved["strategies"]:
            raise SettingsError(
                f"the plan {path} was made with the strategies {saved['strategies']}, not {fixed}: delete the"
                " file, or leave out strategies"
            )
        hosts = self._hosts(group)
        base = Options(
            (),
            (),
            self.optimizer_states,
            self.chosen.local_norm,
            self.chosen.shard_updates,
            self.chosen.shard_parameters,
            self.chosen.checkpoint_activations,
            recomputed_in(graph, saved["states"]),
            hosts=hosts,
        )
        options = options_for(graph, mesh, self.chosen.dataset_strategy, base)
        if options is None:
            raise SettingsError(
                f"the plan {path} does not fit dataset_strategy={self.chosen.dataset_strategy!r}"
            )
        machine = _on_hosts_of(group, self.machine)
        problem = build(graph, mesh, machine, options)
        try:
            choice = problem.choice_of(saved["states"])
        except KeyError as error:
            raise SettingsError(f"the plan {path} does not fit: {error.args[0]}") from error
        seconds = problem.seconds(choice)
        nbytes = peak_of(problem, self.optimizer_states)(choice)
        if not math.isfinite(seconds):
            raise SettingsError(f"the plan {path} cannot be run with these inputs")
        found = Plan(
            graph,
            mesh,
            machine,
            options,
            problem.chosen(choice),
            saved["mode"],
            seconds,
            nbytes,
            seconds,
        )
        if nbytes > self.memory * self.machine.memory_bytes:
            raise SettingsError(
                f"the plan {path} needs {nbytes / 1e9:.1f} GB per rank, more than memory={self.memory} of"
                f" {self.machine.memory_bytes / 1e9:.1f} GB"
            )
        if self.chosen.plain and not found.is_data_parallel:
            raise SettingsError(
                f'the plan {path} divides parameters, which mode "{self.chosen.mode}" does not'
            )
        found.strategies, found.loaded = dict(saved["strategies"]), str(path)
        return found


def _on_hosts_of(group: Communicator, machine: Hardware) -> Hardware:
    """Returns the machine with as many ranks per host as the job has; the fewest, if hosts differ."""
    runs = neighbours(group)
    if len(runs) == 1 and runs[0] <= machine.host_ranks:
        return machine
    return replace(machine, host_ranks=min(runs))


def _planned(
    own: Any, traced: Traced, given: _Given, group: Communicator, *, seed: int | None, elastic: bool
) -> Any:
    """Finds a plan for a recorded module, checks that all ranks found the same, and wraps the module."""
    chosen, autocast = given.chosen, given.chosen.autocast
    if autocast is not None:
        mark_autocast(traced.graph, autocast.itemsize)
    found = given.plan(traced.graph, group)
    seed = _seed(group, seed, shared=not elastic)
    if not elastic:
        _check_same(group, found, chosen.mode, chosen.gradients_mean, autocast, seed)
    if chosen.save and group.rank == 0:
        found.save(chosen.save)
    if chosen.mode == "data_parallel" and chosen.simple:
        return _data_parallel(own, group, chosen, found)
    return ParallelModule(
        _bare(own) if isinstance(own, _WithLoss) else own,
        traced,
        found,
        group,
        summed=not chosen.gradients_mean,
        seed=seed,
        autocast=autocast,
        planner=lambda ranks: given.plan(traced.graph, ranks, search_again=True),
        connect=not elastic,
    )


def _trace(own: Any, example: Sequence[Any], world: int, dataset: Any) -> Traced:
    leaves, structure = pytree.tree_flatten(tuple(example) if isinstance(example, list) else example)
    if not isinstance(example, (tuple, list)) or not any(isinstance(x, torch.Tensor) for x in leaves):
        raise SettingsError("example is a tuple of the tensors that one rank feeds in a step")
    net, prefix = (own.net, _LOSS) if isinstance(own, _WithLoss) else (own, "")
    if not isinstance(net, torch.nn.Module):
        raise SettingsError(f"net is a torch.nn.Module, not {net!r}")
    if not net.training:
        raise SettingsError(
            "net is in evaluation mode, and training is to be recorded: call net.train() first"
            " (submodules may stay in evaluation mode)"
        )
    number = 0
    for at, each in enumerate(leaves):
        if isinstance(each, torch.Tensor):
            shape = whole_shape(tuple(each.shape), number, world, dataset)
            leaves[at] = torch.empty(shape, dtype=each.dtype, device=each.device)
            leaves[at].requires_grad_(each.requires_grad)
            number += 1
    whole = pytree.tree_unflatten(leaves, structure)
    marked = frozenset(
        name.removeprefix(prefix)
        for name, parameter in own.named_parameters(remove_duplicate=False)
        if getattr(parameter, "layerwise_parallel", False)
    )
    return trace(own, whole, layerwise=marked, prefix=prefix)


def graph_of(
    net: Any, example: Sequence[Any], world: int, dataset: Any = "data_parallel", loss: Any = None
) -> Graph:
    """Records the graph that a job of ``world`` ranks would plan with; takes modules on meta, too.

    Raises:
        TraceError: the forward pass cannot be recorded as a graph.
        SettingsError: the example does not fit the strategy of the data.
    """
    return _trace(net if loss is None else _WithLoss(net, loss), example, world, dataset).graph


def _bare(own: Any) -> Any:
    """Returns a module with the parameters of ``own.net``, under the same names, and those of the loss.

    Raises:
        SettingsError: a submodule of the net has the name of the loss.
    """
    bare = copy.copy(own.net)
    bare._modules = dict(own.net._modules)
    if isinstance(own.loss, torch.nn.Module):
        if "loss" not in bare._modules:
            bare._modules["loss"] = own.loss
        elif [*own.loss.parameters(), *own.loss.buffers()]:
            raise SettingsError('net has a submodule "loss", a name that the loss needs: rename it')
    return bare


def _check_elastic(chosen: ParallelSettings) -> None:
    if chosen.plain or not chosen.parameter_broadcast:
        raise SettingsError(
            'elastic needs mode "auto" or "semi_auto", and parameter_broadcast: for data parallelism use'
            " muster.DataParallel(elastic=True) with a muster.TorchTrainingState"
        )


def _check_layerwise(own: Any, mode: str) -> None:
    marked = [name for name, each in own.named_parameters() if getattr(each, "layerwise_parallel", False)]
    if marked and mode not in ("hybrid", "stand_alone"):
        raise SettingsError(
            f'{marked[0].removeprefix(_LOSS)} is layerwise, which mode "{mode}" does not support:'
            ' use mode="hybrid"'
        )


def _communicator_of(session: Any) -> Communicator:
    if session is not None:
        found: Communicator = session.communicator
        return found
    from muster.worker.runtime import current

    return current().communicator


def _broadcast(net: Any, group: Communicator) -> None:
    tensors = [
        p.detach() for p in net.parameters() if not getattr(p, "layerwise_parallel", False) and p.numel()
    ]
    tensors += [buffer for buffer in net.buffers() if buffer.numel()]
    if group.world_size > 1 and tensors:
        broadcast_tensors(group, tensors, 0)


def _seed(group: Communicator, seed: int | None, *, shared: bool) -> int:
    if seed is not None:
        return seed
    own = torch.initial_seed() % 2**62
    return gather_numbers(group, _device_of(group), own)[0] if shared else own


def _check_same(group: Communicator, found: Plan, *others_too: Any) -> None:
    """Checks that all ranks have the same plan and the same further values.

    Raises:
        CollectiveMismatchError: a plan or a value differs.
    """
    keys = "\n".join(state.key for state in found.states)
    text = f"{found.graph.fingerprint()} {found.mesh} {keys} {found.options} {others_too}"
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    digests = gather_numbers(group, _device_of(group), digest)
    others = [rank for rank, each in enumerate(digests) if each != digests[0]]
    if others:
        raise CollectiveMismatchError(
            f"The ranks {others} came to another plan than rank 0: model, example or arguments differ.",
            remedy="Give all ranks the same model and arguments, or a plan in a file.",
        )


def _device_of(group: Communicator) -> Any:
    return torch.device("cuda" if group.on_device else "cpu")


def _without_graph(own: Any, group: Communicator, chosen: ParallelSettings, error: TraceError) -> Any:
    """Wraps a module that cannot be recorded as a graph in plain data parallelism."""
    verdict = f"data parallel, because nothing else can be searched. {error}"
    if chosen.mode != "data_parallel":
        log.warning("%s", verdict)
    return _data_parallel(own, group, chosen, WithoutGraph(verdict))


def _data_parallel(own: Any, group: Communicator, chosen: ParallelSettings, plan: Any) -> Any:
    model = DataParallel(
        own, communicator=group, gradients_mean=chosen.gradients_mean, parameter_broadcast=False
    )
    model.plan = plan
    return model
