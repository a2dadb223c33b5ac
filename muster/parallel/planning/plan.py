"""A plan: the layout of each tensor, with costs and reasons; it can be printed, queried and saved."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.errors import SettingsError
from muster.parallel.planning.buckets import collectives, parameter_shards, split_text
from muster.parallel.planning.costs import Hardware, PlannedCollective
from muster.parallel.planning.graph import Graph
from muster.parallel.planning.layouts import Mesh, parts
from muster.parallel.planning.memory import peak_of, step_memory
from muster.parallel.planning.page import page
from muster.parallel.planning.parts import gone_with
from muster.parallel.planning.plan_file import FORMAT
from muster.parallel.planning.problem import Options, Pin, Problem, State, build
from muster.parallel.planning.recomputed import chosen_layers, layers_text
from muster.parallel.planning.rows import Row, module_rows
from muster.parallel.planning.search import solve
from muster.parallel.planning.timeline import Timeline, timeline
from muster.parallel.planning.undivided import Undivided, undivided
from muster.parallel.planning.words import shortened, size_text, times_text

SAME = 0.05
"""The share by which a plan must be predicted to be faster than data parallelism to be chosen. Predictions
are no more accurate, and do not count that data parallelism overlaps gradients with the backward pass."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to run an operator, with the costs of the best plan that runs it like that."""

    axes: str
    strategies: str
    seconds: float
    gigabytes: float
    chosen: bool


@dataclass
class Plan:
    """How a model is split over ranks. ``print`` it; ask :meth:`why`; :meth:`save` it.

    Attributes:
        graph: the graph of the forward pass.
        mesh: the number of ranks along each mesh dimension.
        machine: the machine whose costs are predicted.
        options: the user's choices.
        states: the chosen state of each node.
        mode: the parallel mode, such as "data_parallel", "semi_auto" or "auto".
        seconds: the predicted time of a step.
        nbytes: the predicted memory of a rank, in bytes.
        bound_s: a lower bound in seconds: no plan on the searched meshes within the memory limit is faster.
        baseline_s: the predicted time of a step of data parallelism; None if it does not fit into memory, or
            is not possible.
        baseline_nbytes: the memory of a rank in data parallelism, in bytes; 0 if it is not possible, or was
            not computed.
        gradients: "averaged" or "summed" over the parts of the batch.
        strategies: the strategies that the user fixed, as text by name.
        loaded: the file that the plan was loaded from; empty if it was searched.
        skipped: the meshes that were too large for the search.
        limit_bytes: the memory limit of a rank, in bytes.
        step_times: measured times of steps, in seconds.
        forward_times: measured forward times by module, in seconds, summed over ``forward_steps``.
        forward_steps: the steps in which forward times were measured.
    """

    graph: Graph
    mesh: Mesh
    machine: Hardware
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
    skipped: tuple[str, ...] = ()
    limit_bytes: float = math.inf
    step_times: list[float] = field(default_factory=list)
    forward_times: dict[str, float] = field(default_factory=dict)
    forward_steps: set[int] = field(default_factory=set)

    # ------------------------------------------------------------ facts

    @property
    def collectives(self) -> list[PlannedCollective]:
        """Every collective of one training step."""
        return collectives(self.graph, self.states, self.mesh, local_norm=self.options.local_norm)

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
        """The operators that are kept whole because no rule says how to split them."""
        return self._problem().without_rule

    @property
    def undivided(self) -> list[Undivided]:
        """The operators of at least 1 % of the step that every rank computes whole, for want of a rule."""
        return undivided(self.graph, self.states, self.mesh, self.machine, self.seconds)

    @property
    def gap(self) -> float:
        """The largest share by which a better plan might be faster, 0 to 1."""
        return max(0.0, 1 - self.bound_s / self.seconds) if self.seconds else 0.0

    # ------------------------------------------------------------ words

    @property
    def verdict(self) -> str:
        """A sentence about the plan as a whole, compared with data parallelism."""
        predicted = f"{self.seconds * 1e3:.3g} ms a step predicted"
        if self.loaded:
            return f"loaded from {self.loaded}: {predicted}; what else is possible was not searched."
        if self.mode in ("data_parallel", "stand_alone", "hybrid"):
            seconds = self.seconds if self.baseline_s is None else self.baseline_s
            return f"{self.mode.replace('_', ' ')}, as asked: {seconds * 1e3:.3g} ms a step predicted."
        if self.baseline_s is None and not self.baseline_nbytes:
            return f"{predicted}; fed as dataset_strategy says, there is no data parallelism."
        if self.baseline_s is None:
            return (
                f"data parallel does not fit: it needs {size_text(self.baseline_nbytes)} a rank, and there"
                f" are {size_text(self.limit_bytes)}; this plan needs {size_text(self.nbytes)}."
            )
        ratio = self.baseline_s / self.seconds
        whole = self.undivided
        if whole:
            return self._not_the_best(ratio, whole)
        if self.is_data_parallel and abs(ratio - 1) <= 2 * SAME:
            return f"data parallel is best: no plan is predicted more than {SAME:.0%} faster."
        if ratio >= 1:
            return f"{times_text(ratio)} data parallel: {self._reason()}."
        if self._fixed:
            return f"{times_text(ratio)} data parallel: that is the price of what is fixed ({self._fixed})."
        own = "loss and BatchNorm's statistics are" if self._sums_statistics else "loss is"
        faster = f'mode="data_parallel" is predicted {times_text(1 / ratio)} as fast'
        return f"data parallel is best, and {faster} as this plan: its {own} of each rank's part."

    @property
    def _fixed(self) -> str:
        """What users have fixed, in words; empty if nothing."""
        mesh = f"the mesh {' x '.join(map(str, self.mesh))}" if len(self.mesh) > 1 else ""
        return ", ".join(self.strategies) or mesh

    @property
    def _sums_statistics(self) -> bool:
        """Whether BatchNorm takes its statistics from the samples of all ranks."""
        return any(node.op == "batch_norm" for node in self.graph.nodes) and not self.options.local_norm

    def _not_the_best(self, ratio: float, whole: Sequence[Undivided]) -> str:
        """Returns the verdict if operators are kept whole: names them, and compares with data parallelism."""
        more = f" and {len(whole) - 3} more" if len(whole) > 3 else ""
        names = ", ".join(map(str, whole[:3])) + more
        missing = f"no rule divides {names}, so each rank does all of it"
        if ratio < 1 / (1 + SAME):
            return f'mode="data_parallel" is predicted {times_text(1 / ratio)} as fast: {missing}.'
        if ratio <= 1 + SAME:
            return f"as fast as data parallel, and perhaps not the best: {missing}."
        return f"{times_text(ratio)} data parallel, and perhaps not the best: {missing}."

    def _reason(self) -> str:
        """Returns why the plan is faster: it names the gradient whose traffic shrinks most."""
        gone = []
        held = parameter_shards(self.graph, self.states, self.mesh)
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
        what = "no longer travels" if not travels else f"travels as {size_text(travels)} only"
        return f"{module}'s gradient of {size_text(nbytes)} {what}"

    def rows(self) -> list[Row]:
        """Returns one row per module that computes, in the order of the forward pass."""
        steps = len(self.forward_steps)
        return module_rows(
            self.graph,
            self.states,
            self.mesh,
            self.machine,
            local_norm=self.options.local_norm,
            measured_ms={name: 1e3 * each / steps for name, each in self.forward_times.items() if steps},
        )

    def __str__(self) -> str:
        """Returns the verdict, the facts, and a table of the modules."""
        lines = [self.verdict, *self._facts()]
        rows = [
            [
                row.module,
                shortened(row.strategies, 46),
                shortened(row.local, 30),
                shortened(row.collectives, 44),
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
        """A hash that is the same for plans with the same mesh and states."""
        text = f"{self.mesh} {[state.key for state in self.states]}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def timeline(self) -> Timeline:
        """The predicted times of a step's parts, with gradient communication beside the backward pass."""
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
            f"played through: {played.seconds * 1e3:.3f} ms a step, memory peaks at {size_text(memory.peak)}"
            f" ({size_text(memory.held)} all the time)"
        )
        if not played.gradients_s:
            return f"{text}; no gradients travel"
        text += (
            f"; sums of gradients take {played.gradients_s * 1e3:.3f} ms,"
            f" of which the backward pass hides {played.hidden:.0%}"
        )
        if not played.gathers_s:
            return text
        return (
            f"{text}; gathering parameters takes {played.gathers_s * 1e3:.3f} ms,"
            f" of which both passes hide {played.gathers_hidden:.0%}"
        )

    def _loss_text(self) -> str:
        """Returns what the loss of one host, or of one rank if hosts are unknown, means for the state."""
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
        searched = " on the meshes that were searched" if self.skipped else ""
        world = math.prod(self.mesh)
        hosts = -(-world // self.machine.host_ranks)
        where = f" on {hosts} hosts" if hosts > 1 else ""
        facts = [
            f"{world} ranks as {mesh}{where}; mode {self.mode}; gradients are {self.gradients}"
            f" over the parts of the batch; costs of: {self.machine.name}",
            f"predicted {self.seconds * 1e3:.3f} ms a step, {size_text(self.nbytes)} a rank; at most"
            f" {self.gap:.2%} from the best possible{searched}",
        ]
        if self.skipped:
            facts.append(
                "not searched, for the graph is too connected there, or too large and others promise more:"
                f" ranks as {', '.join(self.skipped)}"
            )
        if math.prod(self.mesh) > 1:
            facts += [self._overlap_text(), self._loss_text()]
        if self.step_times:
            middle = sorted(self.step_times)[len(self.step_times) // 2]
            facts.append(f"measured {middle * 1e3:.3f} ms a step (median of {len(self.step_times)})")
        if self.baseline_s is not None:
            facts.append(
                f"data parallel: {self.baseline_s * 1e3:.3f} ms a step,"
                f" {size_text(self.baseline_nbytes)} a rank"
            )
        if any(node.op == "batch_norm" for node in self.graph.nodes):
            which = "of each rank's part of the batch" if self.options.local_norm else "of the whole batch"
            facts.append(f"BatchNorm uses statistics {which}")
        regathered = sum(state.regathered for state in self.states)
        sharded = sum(state.sharded for state in self.states) - regathered
        if regathered:
            facts.append(
                f"{regathered} parameters are divided among ranks, and gathered when they are computed with,"
                " in both passes (ZeRO-3)"
            )
        layers = chosen_layers(self.graph, [state.recomputed for state in self.states])
        if layers:
            facts.append(
                f"the activations of {len(layers)} layers ({layers_text(layers)}) are not kept, but computed"
                " again in the backward pass (activation checkpointing)"
            )
        if sharded:
            facts.append(f"the updates of {sharded} parameters are divided among ranks (ZeRO-1)")
        whole = [] if self.mode in ("data_parallel", "hybrid") else self.without_rule
        if whole:
            facts.append("kept whole, for want of a rule: " + ", ".join(whole))
        return facts

    # ------------------------------------------------------------ questions

    def why(self, name: str) -> str:
        """Returns the alternatives of a module's operators, or of one operator, with their costs, as text.

        Args:
            name: the name of a module, such as "fc", or of an operator of the graph.

        Raises:
            SettingsError: the plan has no such module or operator.
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
        """Returns all ways to run an operator, each with the best rest of the plan, the fastest first."""
        index = self.graph.by_name()[name]
        node, found = self.graph.nodes[index], []
        problem = self._problem()
        for state in problem.states[index]:
            pinned = self._problem({name: lambda _, other, key=state.key: other.key == key})  # type: ignore[misc]
            solution = solve(pinned, self.limit_bytes, peak_of(pinned, self.options.optimizer_states))
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
        """Records the measured time of a step."""
        self.step_times.append(seconds)

    def note_forward(self, module: str, seconds: float, step: int) -> None:
        """Records the measured time of a module in the forward pass of a step."""
        self.forward_times[module] = self.forward_times.get(module, 0.0) + seconds
        self.forward_steps.add(step)

    # ------------------------------------------------------------ files

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON values, with the model's signature."""
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
        """Returns a self-contained page: the verdict, the table, and the graph coloured by layout."""
        return page(
            self.graph,
            self.states,
            self.mesh,
            verdict=self.verdict,
            facts=self._facts(),
            rows=self.rows(),
            local_norm=self.options.local_norm,
        )
