"""Models autocast: which operators run in the lower precision, and the size of values then. Pure."""

from __future__ import annotations

from muster.parallel.planning.graph import FAN_OUT, Graph, Node, names

RUNS_LOW = names(
    "linear matmul mm bmm addmm baddbmm addbmm addmv mv einsum conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d scaled_dot_product_attention lstm gru rnn_tanh rnn_relu prelu"
)
"""Operators whose inputs autocast casts to its dtype."""

RUNS_EXACT = names(
    "layer_norm group_norm softmax log_softmax _softmax _log_softmax cross_entropy_loss nll_loss nll_loss_nd "
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits exp expm1 log log1p log2 "
    "log10 pow rsqrt reciprocal softplus sum prod cumsum cumprod norm tan acos asin cosh sinh"
)
"""Operators whose inputs autocast casts to float32."""

FUSED_FROM = 16 * 2**20
"""The number of a rank's scores from which a fused cross entropy of whole rows beats torch's on a GPU."""

_BY_FIRST = names("batch_norm embedding")
_VIEWS = names("view reshape flatten unflatten squeeze unsqueeze _unsafe_view")
_KEEPS_NO_RESULT = names("linear addmm mm matmul")
_EXACT_BYTES = 4


def mark_autocast(graph: Graph, itemsize: int) -> None:
    """Sets the element sizes of a graph's values to those in a step under autocast, in place.

    Their ``dtype`` stays the recorded one, by which a plan recognizes its model.

    Args:
        graph: the graph, with fan-out nodes.
        itemsize: the size of an element of autocast's dtype, in bytes.
    """
    for node in graph.nodes:
        if node.kind not in ("call", FAN_OUT):
            continue
        for index in node.outputs:
            value = graph.values[index]
            if value.floating and value.itemsize <= _EXACT_BYTES:
                value.itemsize = _itemsize(graph, node, value.itemsize, itemsize)


def _itemsize(graph: Graph, node: Node, recorded: int, low: int) -> int:
    if node.op in RUNS_LOW:
        return low
    if node.op in RUNS_EXACT:
        return max(recorded, _EXACT_BYTES)
    sizes = [graph.values[v].itemsize for v in node.inputs if graph.values[v].floating]
    if not sizes or (node.op in ("to", "_to_copy", "type_as") and not feeds_a_loss(graph, node)):
        return recorded
    return sizes[0] if node.op in _BY_FIRST else max(sizes)


# ---------------------------------------------------------------- what the graph says of scores


def is_plain_loss(graph: Graph, node: Node) -> bool:
    """Whether a node is a cross entropy of rows with class indices, without class weights or smoothing."""
    if node.op != "cross_entropy_loss" or len(node.inputs) != 2:
        return False
    smoothing = node.args[5] if len(node.args) > 5 else node.kwargs.get("label_smoothing", 0.0)
    scores, target = (graph.values[v] for v in node.inputs)
    return len(scores.shape) == 2 and not target.floating and not smoothing


def reads_alone(graph: Graph, node: Node) -> bool:
    """Whether this cross entropy is the only reader of its scores, backward passes included."""
    value = node.inputs[0]
    while len(_readers(graph, value)) == 1:
        maker = graph.nodes[graph.values[value].node]
        if maker.kind != "call" or maker.op in _KEEPS_NO_RESULT:
            return maker.kind == "call"
        if maker.op not in _VIEWS and not is_cast(graph, maker):
            return False
        value = maker.inputs[0]
    return False


def is_cast(graph: Graph, node: Node) -> bool:
    """Whether a node does nothing but cast to float32."""
    if node.op != "to" or len(node.args) != 2 or str(node.args[1]) != "torch.float32" or node.kwargs:
        return False
    return graph.values[node.inputs[0]].dtype in ("float32", "bfloat16", "float16")


def feeds_a_loss(graph: Graph, node: Node) -> bool:
    """Whether a cast's only reader is a cross entropy, which computes in float32 anyway."""
    if not is_cast(graph, node):
        return False
    value = node.outputs[0]
    while len(readers := _readers(graph, value)) == 1:
        if is_plain_loss(graph, readers[0]):
            return readers[0].inputs[0] == value
        if readers[0].op not in _VIEWS and not is_cast(graph, readers[0]):
            return False
        value = readers[0].outputs[0]
    return False


def _readers(graph: Graph, value: int) -> list[Node]:
    found = [node for node in graph.nodes if value in node.inputs]
    return found if all(node.kind != FAN_OUT for node in found) else []
