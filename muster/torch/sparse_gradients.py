"""Reduces gradients of embeddings with ``sparse=True``: gathers the used rows, after the buckets."""

from __future__ import annotations

from typing import Any

import torch

from muster.communicators.reduce_ops import ReduceOp
from muster.errors import SettingsError
from muster.torch.transfer import CommStream, array_of, bytes_of, gather_rows

_NONE = -1


class SparseGradients:
    """The parameters of a module whose gradients are sparse, and how they are summed over ranks.

    The number of rows of each rank is not known beforehand, so the host waits for it, on a GPU too. Such a
    step cannot be captured. If a rank's gradient is dense after all (because a dense layer shares the
    weight), it becomes dense on all ranks.

    Args:
        module: the module; its ``Embedding`` and ``EmbeddingBag`` layers with ``sparse=True`` count.
    """

    def __init__(self, module: Any) -> None:
        kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        weights = [each.weight for each in module.modules() if isinstance(each, kinds) and each.sparse]
        self.parameters = list({id(weight): weight for weight in weights}.values())
        self._known = {id(weight) for weight in self.parameters}

    def __contains__(self, parameter: Any) -> bool:
        """Whether this parameter's gradient is sparse."""
        return id(parameter) in self._known

    def reduce(self, comm_stream: CommStream, op: ReduceOp, scale: Any | None) -> None:
        """Sums or averages the gradients over all ranks, which all call it; None if no rank has one.

        Args:
            comm_stream: runs the collectives.
            op: MEAN or SUM.
            scale: 0-dim tensor by which this rank's gradients are multiplied; None: 1.

        Raises:
            SettingsError: a CUDA graph is being captured.
        """
        if not self.parameters:
            return
        if comm_stream.capturing():
            raise SettingsError(
                "sparse gradients cannot be captured: how many rows there are is read in each step"
            )
        with torch.no_grad(), comm_stream.on_side_stream(awaited=self.parameters[0]):
            mine = [_rows_of(parameter.grad) for parameter in self.parameters]
            numbers = [number for each in mine for number in (_NONE if each is None else each[0].numel(),)]
            dense = [int(p.grad is not None and p.grad.layout is torch.strided) for p in self.parameters]
            table = gather_rows(comm_stream.communicator, comm_stream.device, [*numbers, *dense])
            for index, parameter in enumerate(self.parameters):
                counts = [row[index] for row in table]
                if max(counts) == _NONE:
                    continue
                total = self._sum(comm_stream, parameter, mine[index], counts, op, scale)
                made_dense = any(row[len(self.parameters) + index] for row in table)
                parameter.grad = total.to_dense() if made_dense else total

    @staticmethod
    def _sum(
        comm_stream: CommStream,
        parameter: Any,
        mine: tuple[Any, Any] | None,
        counts: list[int],
        op: ReduceOp,
        scale: Any | None,
    ) -> Any:
        most, ranks, communicator = max(counts), len(counts), comm_stream.communicator
        options = {"dtype": parameter.dtype, "device": parameter.device}
        places = torch.zeros(most, dtype=torch.int64, device=parameter.device)
        values = torch.zeros(most, *parameter.shape[1:], **options)
        if mine is not None:
            places[: mine[0].numel()] = mine[0]
            values[: mine[0].numel()] = mine[1]
        if op is ReduceOp.MEAN:
            values /= ranks
        if scale is not None:
            values *= scale
        gathered = []
        for each in (places, values):
            whole = torch.empty(ranks, *each.shape, dtype=each.dtype, device=each.device)
            if most:
                arrays = (array_of(communicator, bytes_of(part)) for part in (each, whole))
                communicator.all_gather(*arrays)
            gathered.append(whole)
        total = torch.sparse_coo_tensor(size=parameter.shape, check_invariants=False, **options)
        for rank, count in enumerate(counts):
            if count > 0:
                rows = gathered[0][rank, :count].unsqueeze(0), gathered[1][rank, :count]
                total = total + torch.sparse_coo_tensor(*rows, parameter.shape, check_invariants=False)
        return total.coalesce()


def _rows_of(gradient: Any) -> tuple[Any, Any] | None:
    """Returns row numbers, int64, and the rows; None if there is no gradient."""
    if gradient is None:
        return None
    sparse = (gradient.to_sparse(1) if gradient.layout is torch.strided else gradient).coalesce()
    return sparse.indices()[0], sparse.values()
