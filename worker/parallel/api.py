"""``muster.parallelize``: one call from a module to one that is divided among the ranks of the job."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from muster.worker.communicators.base import Communicator
from muster.worker.errors import CollectiveMismatchError, SettingsError
from muster.worker.parallel.module import ParallelModule
from muster.worker.parallel.planning import context
from muster.worker.parallel.planning import plan as plans
from muster.worker.parallel.planning.costs import Machine
from muster.worker.parallel.planning.graph import Graph
from muster.worker.parallel.planning.layouts import Mesh
from muster.worker.parallel.planning.plan import Plan
from muster.worker.parallel.planning.planner import (
    SEARCHES,
    Slices,
    Strategy,
    find_plan,
    options_for,
    whole_shape,
)
from muster.worker.parallel.planning.problem import Options, build
from muster.worker.parallel.trace import Traced, TraceError, trace
from muster.worker.pytorch.data_parallel import DataParallel
from muster.worker.pytorch.transfer import broadcast_tensors, gather_numbers

log = logging.getLogger("muster.worker")
_LOSS = "net."


def layerwise(parameter: Any) -> Any:
    """Leaves a parameter out of broadcasts and of the averaging of gradients: each rank keeps its own.

    It gets the gradient of this rank's own part of the loss; what ranks do with it is up to the script. Mode
    "hybrid" is data parallelism with such parameters.

    Returns:
        The parameter.
    """
    parameter.layerwise_parallel = True
    return parameter


class StandAlone(torch.nn.Module):  # type: ignore[misc]
    """A module that each rank trains by itself, with what its plan says of that."""

    def __init__(self, module: torch.nn.Module, plan: Any) -> None:
        super().__init__()
        self.module = module
        self.plan = plan

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        return self.module(*args, **kwargs)


class WithoutGraph:
    """Stands for a plan where the forward pass cannot be recorded: plain data parallelism, and why."""

    def __init__(self, verdict: str) -> None:
        self.verdict = verdict

    def __str__(self) -> str:
        """The verdict."""
        return self.verdict

    def why(self, name: str) -> str:
        """The verdict: there are no operators to ask about."""
        return self.verdict


class _WithLoss(torch.nn.Module):  # type: ignore[misc]
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
    machine: Machine | None = None,
    batch_norm: str | None = None,
    optimizer_states: int = 2,
    shard_updates: bool = True,
    autocast: Any = None,
    seed: int | None = None,
) -> Any:
    """Divides a module among the ranks, as a search or you decide.

    ::

        model = worker.parallelize(net, example=(x, y), loss=torch.nn.functional.cross_entropy)
        print(model.plan)
        optimizer = torch.optim.AdamW(model.parameters())
        model(x, y).backward()
        optimizer.step()

    Every rank calls this with the same arguments. What is None is what ``set_auto_parallel_context`` says if
    anything was set there, and otherwise: mode "auto", search "exact", dataset_strategy "data_parallel",
    gradients_mean and parameter_broadcast True.

    Args:
        net: takes the batch's tensors; returns a loss, or tensors. In training mode, with real parameters.
        example: a batch as one rank feeds it; the shapes count, and stay the same for all batches.
        session: whose communicator to use; None: that of ``muster.init()``.
        communicator: use this one instead of a session's.
        mode: "auto" (search), "semi_auto" (search around ``strategies``), "data_parallel", "hybrid" (with
            :func:`layerwise` parameters) or "stand_alone".
        strategies: by operator or module, the slices of each dimension of each input, or slices by axis.
        search: "exact", or "propagation": only communication counts.
        memory: the share of the machine's memory that a plan may use, 0 to 1.
        dataset_strategy: "data_parallel": each rank feeds its part of the batch; "full_batch": all of it; or
            the slices of each input.
        gradients_mean: average gradients over the parts of the batch; False: sum.
        parameter_broadcast: take parameters and buffers from rank 0 now.
        plan: a file: the plan is loaded from it if it exists, and saved there if not.
        loss: if given, the module is loss(net(all but the last tensor), the last tensor).
        mesh: how the ranks are arranged; None: the best of all arrangements in one or two dimensions.
        machine: what things cost, as ``muster plan --measure`` writes it; None: an H200.
        batch_norm: "synchronised": statistics of the whole batch, as one process has them; "local": of each
            rank's part, as with DataParallel. None: "local" in the modes "data_parallel" and "hybrid".
        optimizer_states: tensors that the optimizer keeps for each parameter: 2 for Adam, 1 for momentum, 0.
        shard_updates: whether the search may divide updates among ranks (ZeRO-1).
        autocast: a dtype: the forward pass runs in ``torch.autocast`` of it.
        seed: of dropout; None: torch's, of rank 0.

    Returns:
        A module with ``plan``, ``no_sync()`` and ``clip_grad_norm_()``: a :class:`ParallelModule`; in mode
        "data_parallel", or where the forward pass is no graph, a :class:`muster.DataParallel`.

    Raises:
        SettingsError: something given is wrong, does not fit the model, or fits no plan.
        CollectiveMismatchError: the ranks came to different plans.
    """
    chosen = _Chosen(mode, search, dataset_strategy, gradients_mean, parameter_broadcast, plan)
    if batch_norm not in (None, "local", "synchronised"):
        raise SettingsError(f'batch_norm is "local" or "synchronised", not {batch_norm!r}')
    if chosen.mode == "stand_alone":
        module = net if loss is None else _WithLoss(net, loss)
        return StandAlone(module, WithoutGraph("stand alone, as asked: nothing is divided, nothing travels."))
    group = communicator if communicator is not None else _communicator_of(session)
    own = net if loss is None else _WithLoss(net, loss)
    if chosen.broadcast:
        _broadcast(net, group)
    local = batch_norm == "local" or (batch_norm is None and chosen.mode in ("data_parallel", "hybrid"))
    given = _Given(
        chosen, strategies, memory, mesh, machine or Machine(), local, optimizer_states, shard_updates
    )
    try:
        traced = _trace(own, net, example, group.world_size, chosen.dataset, "" if loss is None else _LOSS)
    except TraceError as error:
        return _without_graph(own, group, chosen, strategies, error)
    found = given.plan(traced.graph, group.world_size)
    _check_same(group, found, example)
    if chosen.save and group.rank == 0:
        found.save(chosen.save)
    if chosen.mode == "data_parallel":
        model = DataParallel(own, communicator=group, gradients_mean=chosen.mean, parameter_broadcast=False)
        model.plan = found
        return model
    return ParallelModule(
        net if loss is None else _bare(own),
        traced,
        found,
        group,
        summed=not chosen.mean,
        seed=_seed(group, seed),
        autocast=autocast,
    )


class _Chosen:
    """Arguments, the context, and defaults, in this order."""

    def __init__(
        self,
        mode: str | None,
        search: str | None,
        dataset: Any,
        mean: bool | None,
        broadcast: bool | None,
        plan: str | Path | None,
    ) -> None:
        settings = context.in_force() or {}

        def first(value: Any, name: str, default: Any) -> Any:
            return value if value is not None else settings.get(name, default)

        name = first(mode, "parallel_mode", "auto")
        if name not in context.MODES:
            raise SettingsError(
                f'mode is "auto", "semi_auto", "data_parallel", "hybrid" or "stand_alone", not {name!r}'
            )
        self.mode = context.MODES[name]
        self.search = first(search, "search_mode", "exact")
        if self.search not in SEARCHES:
            raise SettingsError(f"search is one of {', '.join(SEARCHES)}, not {self.search!r}")
        self.dataset = first(dataset, "dataset_strategy", "data_parallel")
        self.mean = bool(first(mean, "gradients_mean", True))
        self.broadcast = bool(first(broadcast, "parameter_broadcast", True))
        load, save = settings.get("strategy_ckpt_load_file", ""), settings.get("strategy_ckpt_save_file", "")
        if plan is not None:
            load, save = (str(plan), "") if Path(plan).exists() else ("", str(plan))
        self.load, self.save = load, save


class _Given:
    """What a plan is made of, beside the graph."""

    def __init__(
        self,
        chosen: _Chosen,
        strategies: Mapping[str, Strategy] | None,
        memory: float,
        mesh: Mesh | None,
        machine: Machine,
        local_norm: bool,
        optimizer_states: int,
        shard_updates: bool,
    ) -> None:
        self.chosen, self.strategies, self.memory, self.mesh = chosen, strategies, memory, mesh
        self.machine, self.local_norm = machine, local_norm
        self.optimizer_states, self.shard_updates = optimizer_states, shard_updates

    def plan(self, graph: Graph, world: int) -> Plan:
        """The loaded plan, or the one that a search finds."""
        found = self._loaded(graph, world) if self.chosen.load else self._searched(graph, world)
        found.gradients = "averaged" if self.chosen.mean else "summed"
        return found

    def _searched(self, graph: Graph, world: int) -> Plan:
        plain = self.chosen.mode in ("data_parallel", "hybrid")
        if plain and self.strategies:
            raise SettingsError(
                f'mode "{self.chosen.mode}" divides the batch only: strategies need "semi_auto" or "auto"'
            )
        found = find_plan(
            graph,
            world,
            machine=self.machine,
            mode="data_parallel" if plain else self.chosen.mode,
            search=self.chosen.search,
            strategies=self.strategies,
            memory=self.memory,
            dataset=self.chosen.dataset,
            mesh=self.mesh,
            optimizer_states=self.optimizer_states,
            local_norm=self.local_norm,
            shard_updates=self.shard_updates,
        )
        found.mode = self.chosen.mode
        return found

    def _loaded(self, graph: Graph, world: int) -> Plan:
        path = self.chosen.load
        saved = plans.read(path)
        plans.check_model(saved, graph, path)
        mesh = tuple(saved["mesh"])
        if math.prod(mesh) != world:
            raise SettingsError(f"the plan {path} is for {math.prod(mesh)} ranks, and the job has {world}")
        norm = "local" if self.local_norm else "synchronised"
        if saved["batch_norm"] != norm:
            raise SettingsError(f"the plan {path} is for batch_norm={saved['batch_norm']!r}, not {norm!r}")
        base = Options((), (), self.optimizer_states, self.local_norm, self.shard_updates)
        options = options_for(graph, mesh, self.chosen.dataset, base)
        if options is None:
            raise SettingsError(f"the plan {path} does not fit dataset_strategy={self.chosen.dataset!r}")
        problem = build(graph, mesh, self.machine, options)
        try:
            choice = problem.choice_of(saved["states"])
        except KeyError as error:
            raise SettingsError(f"the plan {path} does not fit: {error.args[0]}") from error
        seconds, nbytes = problem.seconds(choice), problem.nbytes(choice)
        if not math.isfinite(seconds):
            raise SettingsError(f"the plan {path} cannot be run with these inputs")
        found = Plan(
            graph,
            mesh,
            self.machine,
            options,
            problem.chosen(choice),
            saved["mode"],
            seconds,
            nbytes,
            seconds,
        )
        found.strategies = dict(saved["strategies"])
        found.baseline_s = seconds
        found.notes.append(f"loaded from {path}; what else is possible was not searched")
        return found


def _trace(own: Any, net: Any, example: Sequence[Any], world: int, dataset: Any, prefix: str) -> Traced:
    if not isinstance(example, (tuple, list)) or not any(isinstance(x, torch.Tensor) for x in example):
        raise SettingsError("example is a tuple of the tensors that one rank feeds in a step")
    whole = []
    number = 0
    for each in example:
        if isinstance(each, torch.Tensor):
            shape = whole_shape(tuple(each.shape), number, world, dataset)
            whole.append(torch.empty(shape, dtype=each.dtype, device=each.device))
            number += 1
        else:
            whole.append(each)
    marked = frozenset(
        name
        for name, parameter in net.named_parameters(remove_duplicate=False)
        if getattr(parameter, "layerwise_parallel", False)
    )
    return trace(own, whole, layerwise=marked, prefix=prefix)


def graph_of(
    net: Any, example: Sequence[Any], world: int, dataset: Any = "data_parallel", loss: Any = None
) -> Graph:
    """The graph of a module, on meta tensors too, as a job of ``world`` ranks would plan with it.

    Raises:
        TraceError: the forward pass is no graph.
        SettingsError: the example and the strategy of the data do not fit.
    """
    own = net if loss is None else _WithLoss(net, loss)
    return _trace(own, net, example, world, dataset, "" if loss is None else _LOSS).graph


def _bare(own: Any) -> Any:
    """A module whose parameters have the names of ``own.net``, and of its loss."""
    bare = copy.copy(own.net)
    bare._modules = dict(own.net._modules)
    if isinstance(own.loss, torch.nn.Module) and "loss" not in bare._modules:
        bare._modules["loss"] = own.loss
    return bare


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


def _seed(group: Communicator, seed: int | None) -> int:
    if seed is not None:
        return seed
    return gather_numbers(group, _device_of(group), torch.initial_seed() % 2**62)[0]


def _check_same(group: Communicator, found: Plan, example: Sequence[Any]) -> None:
    keys = "\n".join(state.key for state in found.states)
    text = f"{found.graph.fingerprint()} {found.mesh} {keys}"
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    digests = gather_numbers(group, _device_of(group), digest)
    others = [rank for rank, each in enumerate(digests) if each != digests[0]]
    if others:
        raise CollectiveMismatchError(
            f"The ranks {others} came to another plan than rank 0: model, example or arguments differ.",
            remedy="Give all ranks the same model and arguments, or a plan in a file.",
        )


def _device_of(group: Communicator) -> Any:
    return torch.device("cuda" if group.name == "nccl" else "cpu")


def _without_graph(own: Any, group: Communicator, chosen: _Chosen, strategies: Any, error: TraceError) -> Any:
    """Plain data parallelism for a module that is no graph, if nothing else was asked for."""
    if (
        strategies
        or chosen.load
        or chosen.mode in ("hybrid", "semi_auto")
        or chosen.dataset != "data_parallel"
    ):
        raise error
    verdict = f"data parallel, because nothing else can be searched. {error}"
    if chosen.mode != "data_parallel":
        log.warning("%s", verdict)
    model = DataParallel(own, communicator=group, gradients_mean=chosen.mean, parameter_broadcast=False)
    model.plan = WithoutGraph(verdict)
    return model
