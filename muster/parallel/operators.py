"""Runs operators on local tensors: how the split of a tensor changes an operator's call."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from muster.parallel.functions import losses, products, strides
from muster.parallel.mesh_communicator import MeshCommunicator
from muster.parallel.planning import precision
from muster.parallel.planning.axes import MEAN
from muster.parallel.planning.costs import CONVOLUTIONS, is_training_norm
from muster.parallel.planning.graph import FAN_OUT, Graph, Node, Ref, names
from muster.parallel.planning.layouts import PARTIAL, local_shape
from muster.parallel.planning.loss_rules import REDUCTION_AT
from muster.parallel.planning.problem import State

_RESHAPES = names("view reshape flatten unflatten _unsafe_view squeeze unsqueeze view_as")
_LOSSES = REDUCTION_AT.keys() | names("mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss")
_GROUPS_AT = {"convolution": 8} | dict.fromkeys(CONVOLUTIONS - {"convolution"}, 6)
_EXACT_UP_TO = 25
"""Rows up to which torch by default computes distances one by one, and not by a matrix product."""
_WEIGHTS = {"linear": 1, "matmul": 1, "mm": 1, "addmm": 2}
DRAWS_BY_GENERATOR = names("dropout scaled_dot_product_attention")
_generators = threading.Lock()


Where = tuple[tuple[int, ...], tuple[int, ...]]
"""The mesh dimensions along which a tensor is split, and a rank's place in each."""


@dataclass(frozen=True, slots=True)
class Began:
    """The random state at the beginning of a layer that will be recomputed.

    Attributes:
        layer: the name of the layer.
        step: the number of earlier training passes.
        training: see :class:`ForwardPass`.
        states: the states of the layer's generators, if it had any; None while a CUDA graph is captured, in
            which the generators of both runs continue in step.
    """

    layer: str
    step: int
    training: bool
    states: dict[Where, Any] | None


@dataclass(slots=True)
class ForwardPass:
    """The state of a forward pass on which dropout and batch statistics depend.

    There is a random generator for each way to split a tensor. Operators use it one after the other, and it
    is the same on all ranks that hold the same part. A CUDA graph cannot seed generators, but continues from
    the state that the host has set. A recomputed layer has two generators, one for each run.

    Attributes:
        seed: the seed, which is the same on all ranks.
        step: the number of training passes so far.
        training: whether dropout is applied and batch statistics are used.
        casts: the casts of the pass's weights.
        generators: the generators by part, layer ("": all layers that run once), and whether this is the
            recomputation.
        layer: the recomputed layer that runs now; "": none.
        again: where that layer began, in its recomputation; None in its first run.
    """

    seed: int
    step: int = 0
    training: bool = True
    casts: products.Casts = field(default_factory=products.Casts)
    generators: dict[tuple[Where, str, bool], Any] = field(default_factory=dict)
    layer: str = ""
    again: Began | None = None

    def begin(self) -> None:
        """Seeds the generators for this step."""
        for (where, layer, _), generator in self.generators.items():
            generator.manual_seed(self._seed(where, layer))

    def generator(self, where: Where, device: Any) -> Any:
        """Returns the generator for a part; creates it at its first use."""
        key = where, self.layer, self.again is not None
        if key not in self.generators:
            self.generators[key] = torch.Generator(device).manual_seed(self._seed(where, self.layer))
            if self.again is not None:
                self._go_back(where, self.again)
        return self.generators[key]

    def _go_back(self, where: Where, began: Began) -> None:
        """Sets a part's generator of the recomputation to the state at the beginning of the first run."""
        if began.states is None:
            return
        generator = self.generators[where, began.layer, True]
        if where in began.states:
            generator.set_state(began.states[where])
        else:
            generator.manual_seed(self._seed(where, began.layer))

    def _seed(self, where: Where, layer: str) -> int:
        return seed_of(self, f"{where[0]}{layer}", where[1])

    @contextlib.contextmanager
    def within(self, layer: str, *, recorded: bool) -> Iterator[Began]:
        """Context for the first run of a layer that is recomputed; yields what :meth:`once_more` needs."""
        states: dict[Where, Any] | None = None
        if not recorded:
            states = {
                where: each.get_state()
                for (where, of, again), each in self.generators.items()
                if of == layer and not again
            }
        casts, self.layer, self.casts = self.casts, layer, products.Casts()
        try:
            yield Began(layer, self.step, self.training, states)
        finally:
            self.layer, self.casts = "", casts

    @contextlib.contextmanager
    def once_more(self, began: Began) -> Iterator[None]:
        """Context for the recomputation of a layer, with the random numbers of its first run."""
        before = self.step, self.training, self.casts
        self.step, self.training, self.casts = began.step, began.training, products.Casts()
        self.layer, self.again = began.layer, began
        for where in [where for where, layer, again in self.generators if again and layer == began.layer]:
            self._go_back(where, began)
        try:
            yield
        finally:
            self.step, self.training, self.casts = before
            self.layer, self.again = "", None


Local = Callable[[Sequence[Any]], Any]


def local_function(
    graph: Graph,
    node: Node,
    state: State,
    function: Any,
    mesh_communicator: MeshCommunicator,
    run: ForwardPass,
    *,
    local_norm: bool,
) -> Local:
    """Returns a function that computes an operator's local outputs from its local inputs."""
    if node.kind == FAN_OUT:
        return lambda tensors: tensors[0]
    call = LocalFunction(graph, node, state, function, mesh_communicator, run, local_norm)
    return call.choose()


def fill(arguments: Any, tensors: Sequence[Any]) -> Any:
    """Returns arguments with tensors in place of references."""
    if isinstance(arguments, Ref):
        return tensors[arguments.position]
    if isinstance(arguments, (list, tuple)):
        return type(arguments)(fill(each, tensors) for each in arguments)
    if isinstance(arguments, dict):
        return {name: fill(each, tensors) for name, each in arguments.items()}
    return arguments


def seed_of(run: ForwardPass, name: str, shard: Sequence[int]) -> int:
    """Returns the seed of a random draw in this step; ranks that hold the same part get the same seed."""
    text = f"{run.seed} {run.step} {name} {tuple(shard)}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def keep_mask(run: ForwardPass, where: Where, shape: Sequence[int], p: float, like: Any) -> Any:
    """Returns a part's dropout mask: 0 with probability ``p``, otherwise 1 / (1 - p); all 0 if ``p`` is 1."""
    generator = run.generator(where, like.device)
    mask = torch.rand(tuple(shape), generator=generator, device=like.device) >= p
    return mask.to(like.dtype) / (1 - p if p < 1 else 1)


class LocalFunction:
    """Runs one operator on this rank's parts."""

    def __init__(
        self,
        graph: Graph,
        node: Node,
        state: State,
        function: Any,
        mesh_communicator: MeshCommunicator,
        run: ForwardPass,
        local_norm: bool,
    ) -> None:
        self.node, self.state, self.function = node, state, function
        self.mesh_communicator, self.run, self.local_norm = mesh_communicator, run, local_norm
        mesh = mesh_communicator.mesh
        self.along: dict[str, tuple[int, ...]] = {}
        for m, name in enumerate(state.modes):
            self.along[name] = (*self.along.get(name, ()), m)
        self.split = tuple(m for m, name in enumerate(state.modes) if name not in ("-", "grad", "sum"))
        self.shapes = [
            local_shape(layout, mesh, graph.values[v].shape)
            for layout, v in zip(state.outs, node.outputs, strict=True)
        ]
        self.whole = [graph.values[v].shape for v in node.inputs]
        sums = [m for m, entry in enumerate(state.outs[0]) if entry == PARTIAL and state.modes[m] != "sum"]
        self.summed = math.prod(mesh[m] for m in sums) if state.outs else 1
        ends = [*node.inputs[:1], *node.outputs[:1]]
        self.dtypes = [getattr(torch, graph.values[v].dtype) for v in ends]  # as recorded
        self.weight = _WEIGHTS.get(node.op, len(node.inputs))
        self.has_weight = (
            self.weight < len(node.inputs) and graph.source(node.inputs[self.weight]).kind == "parameter"
        )
        self.plain_loss = precision.is_plain_loss(graph, node)
        self.overwrites = self.plain_loss and precision.reads_alone(graph, node)
        self.needless = PARTIAL not in state.outs[0] and precision.feeds_a_loss(graph, node)

    def choose(self) -> Local:
        """Returns the function for this operator."""
        op = self.node.op
        if op in _RESHAPES and (op != "view" or isinstance(self.node.args[1], (list, tuple))):
            return lambda tensors: tensors[0].reshape(self.shapes[0])
        if self.needless:
            return lambda tensors: tensors[0] if tensors[0].dtype.itemsize < 4 else self.plain(tensors)
        if op in ("view", "view_as_complex"):  # here view changes the dtype, and not the shape
            readable = strides.dense if op == "view" else strides.as_pairs
            return lambda tensors: self.plain([readable(tensors[0])])
        if op == "expand":
            return lambda tensors: tensors[0].expand(self.shapes[0])
        if op == "cross_entropy_loss" or op.startswith("nll_loss"):
            return self._cross_entropy
        if op in ("linear", "addmm") or op in CONVOLUTIONS:
            return self.with_bias
        if op in _WEIGHTS:
            return lambda tensors: self._product(fill(self.node.args, tensors))
        if op == "embedding" and "v" in self.along:
            return self.embedding
        if op in ("embedding_bag", "_embedding_bag") and "b" in self.along:
            return lambda tensors: self.plain([*tensors[:2], tensors[2] - tensors[2][0], *tensors[3:]])
        if op == "index" and "each" in self.along:
            return lambda tensors: self.plain([tensors[0], tensors[1] - tensors[1][0], *tensors[2:]])
        if op == "repeat_interleave" and self.split:  # the recorded size of the result is that of the whole
            return lambda tensors: self.function(tensors[0], *self.node.args[1:3])
        if op in ("cdist", "_cdist_forward"):
            return self._distances
        if op == "batch_norm":
            return self._batch_norm
        if op == "dropout":
            return self._dropout
        if op == "scaled_dot_product_attention" and self._argument(4, "dropout_p", 0.0):
            return self._attention
        if op in ("lstm", "gru", "rnn_tanh", "rnn_relu") and isinstance(self.node.args[-1], bool):
            return self._recurrent
        if (op == "mean" or (op in _LOSSES and self._reduces_to_mean())) and self.summed > 1:
            return lambda tensors: self.plain(tensors) / self.summed
        if self.node.draws:
            return self._drawn
        return self.plain

    def plain(self, tensors: Sequence[Any]) -> Any:
        """Calls the recorded operator."""
        return self.function(*fill(self.node.args, tensors), **fill(self.node.kwargs, tensors))

    def _argument(self, index: int, name: str, default: Any) -> Any:
        if index < len(self.node.args):
            return self.node.args[index]
        return self.node.kwargs.get(name, default)

    def _reduces_to_mean(self) -> bool:
        place = REDUCTION_AT.get(self.node.op, 2)
        return bool(self._argument(place, "reduction", MEAN) == MEAN)

    def _shard(self) -> tuple[int, ...]:
        return tuple(self.mesh_communicator.place[m] for m in self.split)

    # ------------------------------------------------------------ contractions

    def with_bias(self, tensors: Sequence[Any]) -> Any:
        """Runs a product with a bias; if ranks sum their results, each adds its share of the bias."""
        args = list(fill(self.node.args, tensors))
        place = 0 if self.node.op == "addmm" else 2
        if "k" in self.along and place < len(args) and isinstance(args[place], torch.Tensor):
            args[place] = args[place] / self.mesh_communicator.size(self.along["k"])
        if "g" in self.along:
            args[_GROUPS_AT[self.node.op]] //= self.mesh_communicator.size(self.along["g"])
        if self.node.op in _WEIGHTS and not self.node.kwargs:
            return self._product(args)
        return self.function(*args, **fill(self.node.kwargs, tensors))

    def _product(self, args: Sequence[Any]) -> Any:
        """Runs a product; by :class:`Product` if its weight is a parameter that autocast would cast."""
        x, weight = args[self.weight - 1], args[self.weight]
        bias = args[0] if self.node.op == "addmm" else (*args, None)[2]
        if not self.has_weight or not products.applies(x, weight, bias):
            return self.function(*args)
        again = getattr(weight, "regathered", False)
        low = weight.detach().to(torch.bfloat16) if again else self.run.casts.of(weight, torch.bfloat16)
        return products.Product.apply(x, weight, bias, low, self.node.op != "linear", again)

    def embedding(self, tensors: Sequence[Any]) -> Any:
        """Runs an embedding whose rows are split: ids in other ranks' rows give zeros."""
        weight, ids = tensors[:2]
        rows = weight.shape[0]
        own = ids - self.mesh_communicator.index(self.along["v"]) * rows
        here = (own >= 0) & (own < rows)
        found = functional.embedding(own.clamp(0, rows - 1), weight)
        return found * here.unsqueeze(-1).to(found.dtype)

    def _distances(self, tensors: Sequence[Any]) -> Any:
        """Computes distances by the method that torch would choose for the number of rows of the whole."""
        p, mode = self._argument(2, "p", 2.0), self._argument(3, "compute_mode", None)
        if not mode:
            mode = 1 if any(shape[-2] > _EXACT_UP_TO for shape in self.whole) else 2
        return self.function(*tensors, p, mode)

    # ------------------------------------------------------------ losses and normalisation

    def _cross_entropy(self, tensors: Sequence[Any]) -> Any:
        scores, target = tensors[:2]
        reduction = self._argument(3, "reduction", MEAN)
        if target.is_floating_point():  # probabilities: a mean over samples; each rank has as many of them
            return self.plain(tensors) / (self.summed if reduction == MEAN else 1)
        weight = tensors[2] if len(tensors) > 2 else None
        ignored = self._argument(4, "ignore_index", -100)
        fused = self.plain_loss and reduction != 0 and ("v" in self.along or losses.pays(scores))
        if not fused and self.plain_loss:  # the cast of the scores may have been left out
            scores = scores.to(self.dtypes[0])
        if not fused and (reduction == 0 or "m" not in self.along):
            return self.plain([scores, *tensors[1:]])
        if fused:
            dims = self.along.get("v", ())
            gather = functools.partial(self.mesh_communicator.gather_stacked, dims=dims) if dims else None
            first = self.mesh_communicator.index(dims) * scores.shape[1]
            each = losses.CrossEntropy.apply(scores, target, first, gather, ignored, self.overwrites)
        elif self.node.op == "cross_entropy_loss":
            smoothing = self._argument(5, "label_smoothing", 0.0)
            each = functional.cross_entropy(
                scores, target, weight, reduction="none", ignore_index=ignored, label_smoothing=smoothing
            )
        else:
            each = functional.nll_loss(scores, target, weight, reduction="none", ignore_index=ignored)
        exact = torch.promote_types(each.dtype, torch.float32)  # float16 overflows above 65,504
        total = each.sum(dtype=exact)
        if reduction == MEAN:
            counts = target != ignored
            shares = counts if weight is None else counts * weight[target.where(counts, 0)]
            count = shares.sum().to(exact).reshape(1)
            if "m" in self.along:  # ranks may ignore different numbers of targets
                count = self.mesh_communicator.all_reduce(count, self.along["m"])
            total = total / count[0]
        return total.to(self.dtypes[1])

    def _batch_norm(self, tensors: Sequence[Any]) -> Any:
        training = is_training_norm(self.node) and self.run.training
        if training and "b" in self.along and not self.local_norm:
            x: Any
            mean: Any
            var: Any
            x, weight, bias, mean, var = (fill(each, tensors) for each in self.node.args[:5])
            momentum, epsilon = self.node.args[6], self.node.args[7]
            out, batch_mean, batch_var = BatchNorm.apply(
                x, weight, bias, self.mesh_communicator, self.along["b"], epsilon
            )
            if mean is not None:
                with torch.no_grad():
                    count = x.numel() // x.shape[1] * self.mesh_communicator.size(self.along["b"])
                    mean.lerp_(batch_mean.to(mean.dtype), momentum)
                    var.lerp_((batch_var * (count / max(1, count - 1))).to(var.dtype), momentum)
            return out
        args = list(fill(self.node.args, tensors))
        args[5] = training or args[3] is None
        return self.function(*args)

    # ------------------------------------------------------------ random numbers

    def _dropout(self, tensors: Sequence[Any]) -> Any:
        x, p = tensors[0], self.node.args[1]
        if not (self.run.training and self._argument(2, "train", True)) or p == 0:
            return x.view_as(x)
        return x * keep_mask(self.run, (self.split, self._shard()), x.shape, p, x)

    def _attention(self, tensors: Sequence[Any]) -> Any:
        """Computes attention with dropout step by step, so that this module's mask is used."""
        args = list(fill(self.node.args, tensors))
        kwargs = dict(fill(self.node.kwargs, tensors))
        p = args[4] if len(args) > 4 else kwargs.pop("dropout_p")
        if not self.run.training:
            if len(args) > 4:
                args[4] = 0.0
            return self.function(*args, **kwargs)
        q, k, v = args[:3]
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        causal = args[5] if len(args) > 5 else kwargs.get("is_causal", False)
        if kwargs.get("enable_gqa"):
            k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        scale = kwargs.get("scale")
        scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        weights = torch.ops.aten._safe_softmax(scores, -1)  # a fully masked row gives zeros
        kept = keep_mask(self.run, (self.split, self._shard()), weights.shape, p, weights)
        return (weights * kept) @ v

    def _recurrent(self, tensors: Sequence[Any]) -> Any:
        args = list(fill(self.node.args, tensors))
        dropout, train = len(args) - 4, len(args) - 3
        args[train] = bool(args[train]) and self.run.training
        if args[train] and args[dropout]:
            return self._seeded(lambda: self.function(*args))
        return self.function(*args)

    def _drawn(self, tensors: Sequence[Any]) -> Any:
        return self._seeded(lambda: self.plain(tensors))

    def _seeded(self, draw: Callable[[], Any]) -> Any:
        """Calls a function that takes no generator: seeds torch's default one, and restores it afterwards."""
        # Only this rank's device: by default torch saves the generators of all devices, and warns about that.
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with _generators, torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed_of(self.run, self.node.name, self._shard()))
            return draw()


class BatchNorm(torch.autograd.Function):  # type: ignore[misc]
    """BatchNorm of a batch that is split over ranks, with the statistics of all ranks' samples."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        weight: Any,
        bias: Any,
        mesh_communicator: MeshCommunicator,
        dims: tuple[int, ...],
        epsilon: float,
    ) -> Any:
        """Returns the normalised tensor, and the batch's mean and biased variance, of shape [channels]."""
        over = [0, *range(2, x.dim())]
        exact = x if x.dtype in (torch.float32, torch.float64) else x.float()
        count = x.numel() // x.shape[1]
        var, mean = torch.var_mean(exact, over, correction=0)
        parts = mesh_communicator.gather_stacked(torch.stack([mean, var]), dims)
        mean = parts[:, 0].mean(0)
        var = (parts[:, 1] + (parts[:, 0] - mean).square()).mean(0)
        shape = (1, -1, *(1,) * (x.dim() - 2))
        inverse = (var + epsilon).rsqrt()
        normal = (exact - mean.view(shape)) * inverse.view(shape)
        out = normal
        if weight is not None:
            out = out * weight.to(out.dtype).view(shape)
        if bias is not None:
            out = out + bias.to(out.dtype).view(shape)
        ctx.save_for_backward(normal, inverse, weight)
        ctx.where = (
            mesh_communicator,
            dims,
            over,
            shape,
            count * mesh_communicator.size(dims),
            bias is not None,
        )
        ctx.mark_non_differentiable(mean, var)
        return out.to(x.dtype), mean, var

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Any, *others: Any) -> Any:
        """Returns the gradients of input, weight and bias; those of the last two still have to be summed."""
        normal, inverse, weight = ctx.saved_tensors
        mesh_communicator, dims, over, shape, count, has_bias = ctx.where
        exact = grad.to(normal.dtype)
        own = torch.stack([exact.sum(over), (exact * normal).sum(over)])
        sums = mesh_communicator.all_reduce(own, dims) / count
        x_grad = (exact - sums[0].view(shape) - normal * sums[1].view(shape)) * inverse.view(shape)
        if weight is not None:
            x_grad = x_grad * weight.to(x_grad.dtype).view(shape)
        weight_grad = own[1].to(weight.dtype) if weight is not None else None
        bias_grad = own[0].to(weight.dtype if weight is not None else grad.dtype) if has_bias else None
        return x_grad.to(grad.dtype), weight_grad, bias_grad, None, None, None
