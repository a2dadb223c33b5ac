"""``muster plan``: finds the plan of a sharded model without GPUs, or measures a machine for such plans."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from muster.errors import SettingsError, WorkerError
from muster.parallel.planning.context import MODES, SEARCH_NAMES
from muster.parallel.planning.costs import MACHINES, Hardware
from muster.parallel.planning.graph import Graph
from muster.parallel.planning.plan import Plan
from muster.parallel.planning.planner import RESTS, find_plan
from muster.parallel.planning.precision import mark_autocast
from muster.parallel.planning.problem import ALWAYS
from muster.parallel.untraced import ForwardError, TraceError, WithoutGraph
from muster.version import how_to_install

WHETHER: dict[str, bool | str] = {"auto": True, "always": ALWAYS, "never": False}
"""Values of options that save memory, as ``parallelize`` takes them; auto: where memory needs it."""

EXAMPLES = """\
examples:
  the best plan for 8 GPUs of the model that make() in models.py returns with a batch of one rank:
    muster plan models:make --gpus 8
  on eight hosts of eight, with what passes between hosts at its own speed:
    muster plan models:make --hosts 8 --gpus 64 --machine h100
  with one layer fixed, saved for parallelize(..., plan="plan.json"):
    muster plan models:make --gpus 8 --strategy "fc=((1, 1), (8, 1))" --out plan.json
  this machine's own costs, its collectives too, and a plan with them:
    muster run -n 4 --scheduler -- muster plan --measure machine.json
    muster plan models:make --gpus 4 --machine machine.json

make() returns (module, example) or (module, example, loss); large tensors that it makes have no contents, so
that no memory is needed, and example is a tuple of the tensors that one rank feeds in a step."""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options = _parser().parse_args(argv)
    try:
        if importlib.util.find_spec("torch") is None:
            lacks = "it needs torch, which this Python does not have"
            raise SettingsError(lacks, remedy=how_to_install("torch"))
        if options.measure is not None:
            _measure(options.measure)
            return 0
        if options.model is None:
            raise SettingsError("name a model, as in muster plan models:make --gpus 8, or give --measure")
        plan = _plan(options)
        print(plan)
        for name in options.why:
            print(plan.why(name))
        if isinstance(plan, WithoutGraph):
            if options.out or options.html:
                raise SettingsError("there is no plan to save: the forward pass is no graph")
            return 0
        if options.out:
            plan.save(options.out)
        if options.html:
            Path(options.html).write_text(plan.html(), encoding="utf-8")
    except WorkerError as error:
        print(f"muster plan: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"muster plan: {error.filename} cannot be written: {error.strerror}", file=sys.stderr)
        return SettingsError.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="muster plan",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", nargs="?", help="MODULE:FUNCTION that makes the model and an example")
    add("--gpus", type=int, default=8, help="number of ranks (8)")
    add("--mode", choices=sorted(MODES), default="auto")
    add("--search", choices=sorted(SEARCH_NAMES), default="exact")
    add("--strategy", action="append", default=[], metavar="NAME=SLICES", help="fix an operator or module")
    add("--rest", choices=RESTS, default="search", help="what the other operators do in mode semi_auto")
    add("--mesh", help="how the ranks are arranged, such as 2,4; default: the best")
    add("--memory", type=float, default=0.9, help="share of a rank's memory that may be used (0.9)")
    add("--machine", metavar="FILE", default="h200", help="h100, h200, or a file that --measure wrote (h200)")
    add("--dataset", choices=("data_parallel", "full_batch"), default="data_parallel")
    add("--batch-norm", choices=("local", "synchronised"), default="synchronised")
    add("--shard-updates", choices=WHETHER, default="auto", help="each rank updates a share (ZeRO-1)")
    add("--shard-parameters", choices=WHETHER, default="auto", help="each rank holds a share (ZeRO-3)")
    add("--checkpoint-activations", choices=WHETHER, default="auto", help="layers compute theirs again")
    add("--autocast", choices=("bfloat16",), help="the precision of torch.autocast; default: none")
    add("--survive", type=int, choices=(0, 1), default=0, help="1: every part of the state on two hosts")
    add("--hosts", type=int, default=0, help="hosts that share the GPUs evenly; default: the machine's")
    add("--optimizer-states", type=int, default=2, help="tensors kept for each parameter: 2 for Adam (2)")
    add(
        "--why", action="append", default=[], metavar="NAME", help="alternatives of a module, and their costs"
    )
    add("--out", metavar="FILE", help="save the plan as JSON")
    add("--html", metavar="FILE", help="write the plan as a page")
    add("--measure", metavar="FILE", help="measure this machine into FILE; under muster run, collectives too")
    return parser


def _plan(options: argparse.Namespace) -> Plan | WithoutGraph:
    from muster.parallel.measure import load_machine

    if options.gpus < 1:
        raise SettingsError(f"--gpus is at least 1, not {options.gpus}")
    if options.hosts < 0 or (options.hosts and options.gpus % options.hosts):
        raise SettingsError(f"--hosts must share {options.gpus} GPUs evenly; it is {options.hosts}")
    if options.optimizer_states < 0:
        raise SettingsError(f"--optimizer-states is at least 0, not {options.optimizer_states}")
    machine = MACHINES.get(options.machine.lower()) or load_machine(options.machine)
    if options.hosts:
        machine = replace(machine, host_ranks=options.gpus // options.hosts)
    mode = MODES[options.mode]
    mesh, strategies = _mesh(options.mesh), _strategies(options.strategy)
    try:
        graph = _graph(options)
    except TraceError as error:
        asked = mode in ("semi_auto", "stand_alone") or strategies or isinstance(error, ForwardError)
        if asked:
            raise
        return WithoutGraph(f"data parallel, because nothing else can be searched. {error}")
    if options.autocast:
        mark_autocast(graph, 2)
    return find_plan(
        graph,
        options.gpus,
        machine=machine,
        mode="data_parallel" if mode in ("data_parallel", "hybrid") else mode,
        search=SEARCH_NAMES[options.search],
        strategies=strategies,
        rest=options.rest,
        memory=options.memory,
        dataset=options.dataset,
        mesh=mesh,
        optimizer_states=options.optimizer_states,
        local_norm=options.batch_norm == "local",
        shard_updates=WHETHER[options.shard_updates],
        shard_parameters=WHETHER[options.shard_parameters],
        checkpoint_activations=WHETHER[options.checkpoint_activations],
        hosts=_hosts(options) if options.survive and options.gpus > 1 else (),
    )


def _graph(options: argparse.Namespace) -> Graph:
    """Records the graph of the model that the user names.

    Raises:
        TraceError: the forward pass cannot be recorded as a graph, or fails.
        SettingsError: there is no such model, or what its function returns is not a model.
    """
    import torch

    from muster.parallel.api import graph_of
    from muster.parallel.unset import LargeTensorsUnset

    with LargeTensorsUnset():
        made = _made(options.model)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise SettingsError(f"{options.model} returns (module, example) or (module, example, loss)")
    net, example, *loss = made
    if loss and not callable(loss[0]):
        raise SettingsError(f"the loss that {options.model} returns is no function: {loss[0]!r}")
    meta = isinstance(net, torch.nn.Module) and any(each.is_meta for each in net.parameters())
    with torch.device("meta") if meta else contextlib.nullcontext():
        return graph_of(net, example, options.gpus, options.dataset, loss[0] if loss else None)


def _hosts(options: argparse.Namespace) -> tuple[str, ...]:
    count = options.hosts or options.gpus
    if count == 1:
        raise SettingsError("--survive 1 needs 2 hosts or more; --hosts is 1")
    return tuple(str(rank // (options.gpus // count)) for rank in range(options.gpus))


def _made(name: str) -> Any:
    """Calls the user's function and returns its result.

    Raises:
        SettingsError: the function cannot be found, or raised an error, whose line the message gives.
    """
    module, _, function = name.partition(":")
    module = module.removesuffix(".py")
    if not function or not all(part.isidentifier() for part in module.split(".")):
        raise SettingsError(f"a model is named MODULE:FUNCTION, not {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"{name} cannot be found: {error}") from error
    except Exception as error:
        raise SettingsError(f"{module} cannot be imported: {_told(error)}") from error
    try:
        return make()
    except Exception as error:
        raise SettingsError(f"{name} failed: {_told(error)}") from error


def _told(error: Exception) -> str:
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"


def _mesh(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError as error:
        raise SettingsError(f"--mesh is the ranks along each dimension, such as 2,4, not {text!r}") from error


def _strategies(texts: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name in found:
            raise SettingsError(f"--strategy is given twice for {name!r}")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError) as error:
            raise SettingsError(
                f"--strategy is NAME=SLICES, such as fc=((2, 4), (4, 1)), not {text!r}"
            ) from error
    return found


def _measure(path: str) -> None:
    from muster.parallel.measure import measure

    if os.environ.get("MS_ROLE") != "MS_WORKER":
        machine = measure()
        _write(path, machine)
        return
    from muster.worker.runtime import init

    with init() as session:
        machine = measure(session.communicator)
        if session.communicator.rank == 0:
            _write(path, machine)


def _write(path: str, machine: Hardware) -> None:
    Path(path).write_text(json.dumps(machine.to_json(), indent=1) + "\n", encoding="utf-8")
    print(
        f"{machine.name}: {machine.flops_per_s / 1e12:.3g} Tflop/s,"
        f" memory {machine.memory_bytes_per_s / 1e9:.3g} GB/s,"
        f" {machine.memory_bytes / 1e9:.3g} GB; collectives {machine.bus_bytes_per_s / 1e9:.3g} GB/s,"
        f" {machine.latency_s * 1e6:.3g} us; written to {path}"
    )
