"""A plan: how each tensor is divided, costs and reasons; can be printed, asked, saved and loaded."""

from __future__ import annotations

import hashlib
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.errors import SettingsError
from muster.parallel.planning.buckets import (
    collectives,
    edge_layouts,
    gradient_buckets,
    holdings,
    move_collectives,
    node_collectives,
    split_text,
)
from muster.parallel.planning.costs import Collective, Machine
from muster.parallel.planning.graph import Graph
from muster.parallel.planning.layouts import Layout, Mesh, layout_text, local_shape, parts
from muster.parallel.planning.memory import step_memory
from muster.parallel.planning.parts import gone_with
from muster.parallel.planning.problem import Options, Pin, Problem, State, build, whole_mode
from muster.parallel.planning.search import solve
from muster.parallel.planning.timeline import Timeline, timeline

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color:
#1a1a1a; } table { border-collapse: collapse; width: 100%; margin: 1em 0; }
th, td { text-align: left; padding: .25em .6em; border-bottom: 1px solid #ddd; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.verdict { font-size: 1.35em; margin: .5em 0; }
.chip { display: inline-block; padding: 0 .5em; border-radius: .3em; border: 1px solid #0003; }
ol { padding-left: 3em; } li { margin: .15em 0; } li.hub { opacity: .6; }
details { margin-left: 1em; } code { font-size: .92em; } .moves { color: #a33; }
@media (prefers-color-scheme: dark) {
  body { background: #161616; color: #e8e8e8; } th, td { border-color: #444; } .chip { color: #111; }
  .moves { color: #f99; }
}
"""


def page(plan: Plan) -> str:
    """The page's HTML, which loads nothing else."""
    layouts = list(dict.fromkeys(layout for state in plan.states for layout in state.outs))
    colours = {layout: _colour(number, layout) for number, layout in enumerate(layouts)}
    facts = "".join(f"<li>{_text(line)}</li>" for line in plan._facts())
    buckets = "".join(f"<li>{_text(line)}</li>" for line in bucket_text(plan)) or "<li>none</li>"
    legend = " ".join(_chip(layout_text(layout), colour) for layout, colour in colours.items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Parallel plan</title>'
        f"<style>{_STYLE}</style></head><body><h1>Parallel plan</h1>"
        f'<p class="verdict">{_text(plan.verdict)}</p><ul>{facts}</ul>'
        f"<h2>Modules</h2>{_table(plan)}"
        f"<h2>Gradients</h2><ul>{buckets}</ul>"
        "<h2>Graph</h2><p>One entry for each mesh dimension: R whole, P a sum of parts, S0 split along"
        f" dimension 0.</p><p>{legend}</p><ol>{_graph(plan, colours)}</ol></body></html>\n"
    )


def _text(words: str) -> str:
    return html.escape(words)


def _chip(words: str, colour: str) -> str:
    return f'<span class="chip" style="background:{colour}">{_text(words)}</span>'


def _colour(number: int, layout: Layout) -> str:
    """Grey for what every rank has whole; otherwise hues far apart."""
    if all(entry == "R" for entry in layout):
        return "#ddd"
    return f"hsl({(number * 137) % 360} 65% 78%)"


def _table(plan: Plan) -> str:
    heads = (
        "module",
        "strategies",
        "local shapes",
        "collectives",
        "predicted ms",
        "measured forward ms",
        "GB",
    )
    head = "".join(f'<th class="{"number" if i > 3 else ""}">{name}</th>' for i, name in enumerate(heads))
    body = []
    for row in plan.rows():
        measured = "" if row.measured_ms is None else f"{row.measured_ms:.3f}"
        numbers: Sequence[str] = (f"{row.predicted_ms:.3f}", measured, f"{row.gigabytes:.4f}")
        words = (row.module, row.strategies, row.local, row.collectives)
        cells = "".join(f"<td>{_text(each)}</td>" for each in words)
        cells += "".join(f'<td class="number">{each}</td>' for each in numbers)
        body.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _graph(plan: Plan, colours: dict[Layout, str]) -> str:
    items = []
    for index, (node, state) in enumerate(zip(plan.graph.nodes, plan.states, strict=True)):
        chips = " ".join(_chip(layout_text(layout), colours[layout]) for layout in state.outs)
        moved = node_collectives(
            plan.graph, plan.states, plan.mesh, index, local_norm=plan.options.local_norm
        )
        moves = "; ".join(
            f"{each.phase}: {each.kind} over {math.prod(plan.mesh[d] for d in each.dims)} ranks,"
            f" {each.nbytes:,} bytes"
            for each in moved
        )
        shapes = ", ".join(str(list(plan.graph.values[v].shape)) for v in node.outputs)
        edges = "".join(f"<li>{_text(line)}</li>" for line in edges_text(plan, index))
        cut = split_text(plan.graph, node, state, plan.mesh) if node.outputs else ""
        line = f"<code>{_text(node.name)}</code> {_text(node.op)} {_text(shapes)} {chips}"
        if moves:
            line += f' <span class="moves">{_text(moves)}</span>'
        summary = _text(f"{state.key} {cut} {node.line}")
        more = f"<details><summary>{summary}</summary><ul>{edges}</ul></details>"
        items.append(f'<li class="{node.kind}">{line}{more if edges else ""}</li>')
    return "".join(items)


FORMAT = 1
SAME = 0.05
"""Data parallelism is chosen unless a plan promises to be faster by more than this share: predictions do not
count that its gradients travel beside the backward pass, and are not closer."""


@dataclass(frozen=True, slots=True)
class Row:
    """One module of a plan: times in ms, memory in GB, of one rank; ``measured_ms`` is the forward pass."""

    module: str
    strategies: str
    local: str
    collectives: str
    predicted_ms: float
    gigabytes: float
    measured_ms: float | None


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to run an operator, with the rest of the plan as good as it can be then."""

    axes: str
    strategies: str
    seconds: float
    gigabytes: float
    chosen: bool


@dataclass
class Plan:
    """What is divided how. ``print`` it; ask :meth:`why`; :meth:`save` it.

    Attributes:
        graph: of the forward pass.
        mesh: how the ranks are arranged.
        machine: what the costs are of.
        options: what was chosen by the user.
        states: one of each node's.
        mode: "data_parallel", "semi_auto", "auto" and so on.
        seconds: predicted of a step.
        nbytes: predicted of one rank.
        bound_s: no plan on this mesh within the memory limit is faster.
        baseline_s: the same of data parallelism; None: it does not fit into memory, or cannot be.
        baseline_nbytes: of data parallelism; 0: it cannot be, or was not looked for.
        gradients: "averaged" or "summed" over the parts of the batch.
        strategies: what the user fixed, as text by name.
        loaded: the file that it was loaded from; "": it was searched.
    """

    graph: Graph
    mesh: Mesh
    machine: Machine
    options: Options
    states: list[State]
    mode: str
    seconds: float
    nbytes: float
    bound_s: float
    baseline_s: float | None = None
    baseline_nbytes: float = 0.0
    gradients: str = "averaged"
    strategies: dict[str, str] = field(default_factory=dict)
    loaded: str = ""
    limit_bytes: float = math.inf
    step_times: list[float] = field(default_factory=list)
    forward_times: dict[str, float] = field(default_factory=dict)
    forward_steps: set[int] = field(default_factory=set)

    # ------------------------------------------------------------ facts

    @property
    def collectives(self) -> list[Collective]:
        """Every collective of one training step, as the communicators get them."""
        return collectives(self.graph, self.states, self.mesh, local_norm=self.options.local_norm)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the trained parameters that one rank's optimizer gets."""
        held = holdings(self.graph, self.states, self.mesh).values()
        return sum(each.own_bytes(0)[0] for each in held)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the tensors that one rank's optimizer keeps for them."""
        held = holdings(self.graph, self.states, self.mesh).values()
        return sum(each.own_bytes(self.options.optimizer_states)[1] for each in held)

    @property
    def is_data_parallel(self) -> bool:
        """Whether every rank holds all parameters whole."""
        return all(
            parts(state.outs[0], self.mesh) == 1
            for node, state in zip(self.graph.nodes, self.states, strict=True)
            if node.kind == "parameter"
        )

    @property
    def without_rule(self) -> list[str]:
        """The operators that are kept whole because no rule says how to divide them."""
        return self._problem().without_rule

    @property
    def gap(self) -> float:
        """By what share a better plan on this mesh might be faster, at most."""
        return max(0.0, 1 - self.bound_s / self.seconds) if self.seconds else 0.0

    def state_of(self, name: str) -> State:
        """The state of a node.

        Raises:
            SettingsError: there is no such node.
        """
        index = self.graph.by_name().get(name)
        if index is None:
            raise SettingsError(f"the plan has no operator {name!r}")
        return self.states[index]

    # ------------------------------------------------------------ words

    @property
    def verdict(self) -> str:
        """Says in a sentence what the plan is."""
        predicted = f"{self.seconds * 1e3:.3g} ms a step predicted"
        if self.loaded:
            return f"loaded from {self.loaded}: {predicted}; what else is possible was not searched."
        if self.mode in ("data_parallel", "stand_alone", "hybrid"):
            return f"{self.mode.replace('_', ' ')}, as asked: {predicted}."
        if self.baseline_s is None and not self.baseline_nbytes:
            return f"{predicted}; fed as dataset_strategy says, there is no data parallelism."
        if self.baseline_s is None:
            return (
                f"data parallel does not fit: it needs {_size(self.baseline_nbytes)} a rank, and there are"
                f" {_size(self.limit_bytes)}; this plan needs {_size(self.nbytes)}."
            )
        ratio = self.baseline_s / self.seconds
        if self.is_data_parallel and abs(ratio - 1) <= 0.1:
            return f"data parallel is best: no plan is predicted more than {SAME:.0%} faster."
        if ratio >= 1:
            return f"{_times(ratio)} data parallel: {self._reason()}."
        fixed = ", ".join(self.strategies)
        return f"{_times(ratio)} data parallel: that is the price of what is fixed ({fixed})."

    def _reason(self) -> str:
        """Says why the plan is better: what is no longer sent, or stored less often."""
        gone = []
        held = holdings(self.graph, self.states, self.mesh)
        for node in self.graph.nodes:
            each = held.get(node.name)
            value = self.graph.values[node.outputs[0]] if node.outputs else None
            if each is None or value is None:
                continue
            travels = each.numel * each.itemsize if each.dims else 0
            if travels < value.nbytes:
                gone.append((value.nbytes - travels, value.nbytes, node.module or node.name, travels))
        if not gone:
            return "activations are divided in a better way"
        _, nbytes, module, travels = max(gone)
        what = "no longer travels" if not travels else f"travels as {_size(travels)} only"
        return f"{module}'s gradient of {_size(nbytes)} {what}"

    def rows(self) -> list[Row]:
        """One row per module that computes, in the order of the forward pass."""
        order: dict[str, list[int]] = {}
        for index, node in enumerate(self.graph.nodes):
            if node.kind == "call":
                order.setdefault(node.module, []).append(index)
        own = self._parameters_of()
        return [self._row(module, indices, own.get(module, [])) for module, indices in order.items()]

    def _parameters_of(self) -> dict[str, list[int]]:
        """Parameters by the module that owns them."""
        found: dict[str, list[int]] = {}
        for index, node in enumerate(self.graph.nodes):
            if node.kind == "parameter":
                found.setdefault(node.module, []).append(index)
        return found

    def _row(self, module: str, indices: list[int], own: list[int]) -> Row:
        graph, mesh = self.graph, self.mesh
        texts, shapes = [], []
        for index in indices:
            node, state = graph.nodes[index], self.states[index]
            if whole_mode(state) and len(indices) > 1 and not node.inputs:
                continue
            texts.append(f"{node.op} {split_text(graph, node, state, mesh)}")
            local = [
                "x".join(map(str, local_shape(a, mesh, graph.values[v].shape))) or "1"
                for a, v in zip(state.ins, node.inputs, strict=True)
            ]
            shapes.append(" ".join(local))
        hubs = [
            i
            for i, node in enumerate(graph.nodes)
            if node.kind == "hub" and node.module == module and i not in indices
        ]
        moved: dict[tuple[str, tuple[int, ...]], int] = {}
        seconds = sum(self.states[i].seconds for i in (*indices, *own))
        for index in (*indices, *hubs):
            for each in node_collectives(graph, self.states, mesh, index, local_norm=self.options.local_norm):
                moved[each.kind, each.dims] = moved.get((each.kind, each.dims), 0) + each.nbytes
            for each in move_collectives(graph, self.states, mesh, index):
                ranks = math.prod(mesh[d] for d in each.dims)
                seconds += self.machine.collective_s(each.kind, ranks, each.nbytes)
        held = holdings(graph, self.states, mesh)
        for index in own:
            each_held = held.get(graph.nodes[index].name)
            if each_held is not None and each_held.dims:
                key = ("gradients", each_held.dims)
                moved[key] = moved.get(key, 0) + each_held.numel * each_held.itemsize
        text = ", ".join(
            f"{kind} over {self._ranks(dims)}: {_size(nbytes)}" for (kind, dims), nbytes in moved.items()
        )
        memory = sum(self.states[i].nbytes for i in (*indices, *own)) / 1e9
        measured = None
        if self.forward_steps and module in self.forward_times:
            measured = 1e3 * self.forward_times[module] / len(self.forward_steps)
        return Row(
            module or "(top)",
            "; ".join(texts),
            "; ".join(shapes),
            text or "-",
            1e3 * seconds,
            memory,
            measured,
        )

    def _ranks(self, dims: tuple[int, ...]) -> str:
        return "x".join(str(self.mesh[d]) for d in dims) + " ranks"

    def __str__(self) -> str:
        """The verdict, facts, and a table of the modules."""
        lines = [self.verdict, *self._facts()]
        rows = [
            [
                row.module,
                _short(row.strategies, 46),
                _short(row.local, 30),
                _short(row.collectives, 44),
                f"{row.predicted_ms:.3f}",
                "" if row.measured_ms is None else f"{row.measured_ms:.3f}",
                f"{row.gigabytes:.3f}",
            ]
            for row in self.rows()
        ]
        heads = ["module", "strategies", "local shapes", "collectives", "ms", "forward", "GB"]
        widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
        for row in [heads, *rows]:
            lines.append(
                "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            )
        return "\n".join(lines)

    @property
    def digest(self) -> str:
        """The same for plans that divide a graph alike."""
        text = f"{self.mesh} {[state.key for state in self.states]}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def timeline(self) -> Timeline:
        """When each part of a step runs, with sums of gradients beside the backward pass."""
        return timeline(
            self.graph,
            self.states,
            self.mesh,
            self.machine,
            optimizer_states=self.options.optimizer_states,
            local_norm=self.options.local_norm,
        )

    def _overlap_text(self) -> str:
        played = self.timeline
        memory = step_memory(
            self.graph, self.states, self.mesh, optimizer_states=self.options.optimizer_states
        )
        text = (
            f"played through: {played.seconds * 1e3:.3f} ms a step, memory peaks at {_size(memory.peak)}"
            f" ({_size(memory.held)} all the time)"
        )
        if not played.gradients_s:
            return f"{text}; no gradients travel"
        return (
            f"{text}; sums of gradients take {played.gradients_s * 1e3:.3f} ms,"
            f" of which the backward pass hides {played.hidden:.0%}"
        )

    def _loss_text(self) -> str:
        """What the loss of a host would mean for the state; without hosts, of any one rank."""
        hosts = self.options.hosts or tuple(map(str, range(math.prod(self.mesh))))
        who = "host" if len(set(hosts)) < len(hosts) else "rank"
        for host in dict.fromkeys(hosts):
            lost = {rank for rank, each in enumerate(hosts) if each == host}
            gone = gone_with(self.graph, self.states, self.mesh, lost)
            if gone:
                node = self.graph.nodes[self.graph.by_name()[gone[0]]]
                more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
                return (
                    f"if {who} {host} is lost, parts of {node.module or node.name}{more} are gone:"
                    " training goes on from a checkpoint (survive=1 keeps every part on two)"
                )
        return f"if any one {who} is lost, the others hold every part of the state"

    def _facts(self) -> list[str]:
        mesh = " x ".join(map(str, self.mesh))
        facts = [
            f"{math.prod(self.mesh)} ranks as {mesh}; mode {self.mode}; gradients are {self.gradients}"
            f" over the parts of the batch; costs of: {self.machine.name}",
            f"predicted {self.seconds * 1e3:.3f} ms a step, {_size(self.nbytes)} a rank; at most"
            f" {self.gap:.2%} from the best possible",
        ]
        if math.prod(self.mesh) > 1:
            facts += [self._overlap_text(), self._loss_text()]
        if self.step_times:
            middle = sorted(self.step_times)[len(self.step_times) // 2]
            facts.append(f"measured {middle * 1e3:.3f} ms a step (median of {len(self.step_times)})")
        if self.baseline_s is not None:
            facts.append(
                f"data parallel: {self.baseline_s * 1e3:.3f} ms a step, {_size(self.baseline_nbytes)} a rank"
            )
        if any(node.op == "batch_norm" for node in self.graph.nodes):
            which = "of each rank's part of the batch" if self.options.local_norm else "of the whole batch"
            facts.append(f"BatchNorm uses statistics {which}")
        sharded = sum(state.sharded for state in self.states)
        if sharded:
            facts.append(f"the updates of {sharded} parameters are divided among ranks (ZeRO-1)")
        whole = self.without_rule
        if whole:
            facts.append("kept whole, for want of a rule: " + ", ".join(whole))
        return facts

    # ------------------------------------------------------------ questions

    def why(self, name: str) -> str:
        """What else could be done with a module's operators, or with one operator, and what it would cost.

        Args:
            name: of a module, such as "fc", or of an operator of the graph.

        Raises:
            SettingsError: there is neither.
        """
        indices = [
            i
            for i, node in enumerate(self.graph.nodes)
            if node.kind == "call" and (node.name == name or node.module == name)
        ]
        if not indices:
            names = sorted({node.module for node in self.graph.nodes if node.kind == "call" and node.module})
            raise SettingsError(
                f"the plan has no module or operator {name!r}; it has: {', '.join(names[:30])}"
            )
        lines = []
        for index in indices:
            node = self.graph.nodes[index]
            lines.append(f"{node.name} ({node.op}{', ' + node.line if node.line else ''})")
            alternatives = self.alternatives(node.name)
            if not alternatives:
                lines.append("  cannot be split")
            for each in alternatives:
                mark = "->" if each.chosen else "  "
                lines.append(
                    f"  {mark} {each.axes}: {each.strategies} {1e3 * each.seconds:.3f} ms"
                    f" ({each.seconds / self.seconds - 1:+.1%}), {each.gigabytes:.3f} GB"
                )
            if node.op in ("chunk", "split", "split_with_sizes"):
                lines.append("     the dimension that it divides cannot be split: parts would mix")
        return "\n".join(lines)

    def alternatives(self, name: str) -> list[Alternative]:
        """All that may be done with an operator, the cheapest first, the rest of the plan chosen anew."""
        index = self.graph.by_name()[name]
        node, found = self.graph.nodes[index], []
        problem = self._problem()
        for state in problem.states[index]:
            pinned = self._problem({name: lambda _, other, key=state.key: other.key == key})  # type: ignore[misc]
            solution = solve(pinned, self.limit_bytes)
            if solution is not None:
                found.append(
                    Alternative(
                        state.key,
                        split_text(self.graph, node, state, self.mesh),
                        solution.seconds,
                        solution.nbytes / 1e9,
                        state.key == self.states[index].key,
                    )
                )
        return sorted(found, key=lambda each: each.seconds)

    def _problem(self, pins: Mapping[str, Pin] | None = None) -> Problem:
        return build(self.graph, self.mesh, self.machine, self.options, pins)

    # ------------------------------------------------------------ measurements

    def note_step(self, seconds: float) -> None:
        """Takes in the time of a whole step."""
        self.step_times.append(seconds)

    def note_forward(self, module: str, seconds: float, step: int) -> None:
        """Takes in the time of a module's part of a forward pass."""
        self.forward_times[module] = self.forward_times.get(module, 0.0) + seconds
        self.forward_steps.add(step)

    # ------------------------------------------------------------ files

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values, with what it is for."""
        return {
            "format": FORMAT,
            "fingerprint": self.graph.fingerprint(),
            "model": self.graph.signature(),
            "mesh": list(self.mesh),
            "mode": self.mode,
            "gradients": self.gradients,
            "strategies": self.strategies,
            "machine": self.machine.to_json(),
            "batch_norm": "local" if self.options.local_norm else "synchronised",
            "predicted_s": self.seconds,
            "predicted_bytes": self.nbytes,
            "bound_s": self.bound_s,
            "states": {
                node.name: state.key for node, state in zip(self.graph.nodes, self.states, strict=True)
            },
            "collectives": [
                {
                    "phase": each.phase,
                    "node": each.node,
                    "kind": each.kind,
                    "ranks": [self.mesh[d] for d in each.dims],
                    "dims": list(each.dims),
                    "bytes": each.nbytes,
                }
                for each in self.collectives
            ],
        }

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    def html(self) -> str:
        """One self-contained page: the verdict, the table, and the graph coloured by layout."""

        return page(self)


def check_saved(saved: Any, path: str | Path) -> dict[str, Any]:
    """Returns what a plan's file holds, if each part is what :meth:`Plan.save` writes there.

    Args:
        saved: the file's JSON.
        path: the file, for the error.

    Raises:
        SettingsError: it is no plan, of another format, or damaged; names the first part that is wrong.
    """
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise SettingsError(f"{path} is no plan of format {FORMAT}")
    for key, (kind, inside) in _SAVED.items():
        value = saved.get(key)
        members = value.values() if isinstance(value, dict) else value or ()
        if not isinstance(value, kind) or not all(type(each) is inside for each in members):
            raise SettingsError(
                f"the plan {path} is damaged: it has no {key}, or something else in its place"
            )
    if not all(size > 0 for size in saved["mesh"]):
        raise SettingsError(f"the plan {path} is damaged: its mesh is {saved['mesh']}")
    return saved


_SAVED: dict[str, tuple[type, type]] = {
    "mesh": (list, int),
    "model": (list, str),
    "states": (dict, str),
    "strategies": (dict, str),
    **dict.fromkeys(("fingerprint", "mode", "batch_norm"), (str, str)),
}
"""Each part of a saved plan: its type, and the type of what is in it."""


def check_model(saved: Mapping[str, Any], graph: Graph, path: str | Path) -> None:
    """Makes sure that a saved plan is of this model.

    Raises:
        SettingsError: it is not; names the first difference.
    """
    theirs, ours = list(saved["model"]), graph.signature()
    for number, (a, b) in enumerate(zip(theirs, ours, strict=False)):
        if a != b:
            raise SettingsError(
                f"the plan {path} is of another model: its node {number} is {a!r}, and the model's is {b!r}"
            )
    if len(theirs) != len(ours):
        longer = theirs if len(theirs) > len(ours) else ours
        whose = "the plan's" if longer is theirs else "the model's"
        raise SettingsError(
            f"the plan {path} is of another model: {whose} node {min(len(theirs), len(ours))} is"
            f" {longer[min(len(theirs), len(ours))]!r}, and the other has none"
        )
    if saved["fingerprint"] != graph.fingerprint():
        raise SettingsError(
            f"the plan {path} is of another model: operators are the same, with other arguments"
        )


def edges_text(plan: Plan, index: int) -> Iterable[str]:
    """What passes along the edges into a node, in words."""
    node = plan.graph.nodes[index]
    for position, value in enumerate(node.inputs):
        before, after, _, _ = edge_layouts(plan.graph, plan.states, index, position)
        arrow = layout_text(before) if before == after else f"{layout_text(before)} -> {layout_text(after)}"
        yield f"{plan.graph.values[value].name}: {arrow}"


def bucket_text(plan: Plan) -> list[str]:
    """The gradient buckets, one line each."""
    held = list(holdings(plan.graph, plan.states, plan.mesh).values())
    return [
        f"{'reduce_scatter + all_gather' if each.sharded else 'all_reduce'} over {each.dims}:"
        f" {_size(each.nbytes)} of {len(each.nodes)} parameters"
        for each in gradient_buckets(held)
    ]


def _size(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times" if ratio < 10 else f"{ratio:.0f} times"


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
