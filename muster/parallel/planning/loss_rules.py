"""The axes of losses."""

from __future__ import annotations

from muster.parallel.planning.axes import EXCHANGED, MEAN, Axis, OperatorCall, rule


@rule("cross_entropy_loss", "nll_loss", "nll_loss_nd")
def _cross_entropy(call: OperatorCall) -> list[Axis] | None:
    scores = call.ins[0]
    reduction = call.argument(3, "reduction", MEAN)
    smoothing = call.argument(5, "label_smoothing", 0.0) if call.op == "cross_entropy_loss" else 0.0
    if len(scores) < 2:
        return None
    weights = len(call.ins) - 2
    axes = [Axis("m", scores[0], (0, 0, *(None,) * weights), (0,) if reduction == 0 else (None,))]
    plain = not weights and not call.floating[1] and not smoothing
    if call.op == "cross_entropy_loss" and len(scores) == 2 and plain and reduction != 0:
        axes.append(_classes(scores[1]))
    return axes


def _classes(size: int) -> Axis:
    """Returns the axis of a loss's classes, over which the ranks exchange maxima and sums."""
    return Axis("v", size, (1, None), (EXCHANGED,))


REDUCTION_AT = {
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
    "cosine_embedding_loss": 4,
    "ctc_loss": 5,
    "margin_ranking_loss": 4,
    "triplet_margin_loss": 7,
}
"""The position of the reduction among a loss's arguments; 2 for losses that are not listed."""


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss")
@rule("binary_cross_entropy", "binary_cross_entropy_with_logits", "margin_ranking_loss")
def _pointwise_loss(call: OperatorCall) -> list[Axis] | None:
    """All dimensions can be split; weights may lack some, and are broadcast along them."""
    reduction = call.argument(REDUCTION_AT.get(call.op, 2), "reduction", MEAN)
    shape = call.ins[0]
    if call.ins[1] != shape or any(len(each) > len(shape) for each in call.ins):
        return None
    axes = []
    for d, size in enumerate(shape):
        places = [d - (len(shape) - len(each)) for each in call.ins]
        ins = tuple(
            place if place >= 0 and each[place] == size else None
            for place, each in zip(places, call.ins, strict=True)
        )
        axes.append(Axis(f"d{d}", size, ins, (d if reduction == 0 else None,)))
    return axes


@rule("triplet_margin_loss", "cosine_embedding_loss")
def _loss_of_vectors(call: OperatorCall) -> list[Axis] | None:
    reduction = call.argument(REDUCTION_AT[call.op], "reduction", MEAN)
    if len(call.ins[0]) != 2 or len({shape[0] for shape in call.ins if shape}) != 1:
        return None
    return [Axis("m", call.ins[0][0], (0,) * len(call.ins), (0 if reduction == 0 else None,))]


@rule("pairwise_distance", "cosine_similarity")
def _of_pairs(call: OperatorCall) -> list[Axis] | None:
    """All dimensions can be split but the one along which vectors are compared."""
    if call.ins[0] != call.ins[1]:
        return None
    gone = call.dim(call.argument(2, "dim", 1) if call.op == "cosine_similarity" else -1)
    keeps = len(call.outs[0]) == len(call.ins[0])
    return [
        Axis(f"d{d}", size, (d, d), (d if keeps else d - (d > gone),))
        for d, size in enumerate(call.ins[0])
        if d != gone
    ]


@rule("ctc_loss")
def _ctc_loss(call: OperatorCall) -> list[Axis] | None:
    """The batch can be split if each sample has a row of targets; the mean is one over samples."""
    if [len(shape) for shape in call.ins] != [3, 2, 1, 1]:
        return None
    reduction = call.argument(REDUCTION_AT[call.op], "reduction", MEAN)
    return [Axis("m", call.ins[0][1], (1, 0, 0, 0), (0 if reduction == 0 else None,))]
