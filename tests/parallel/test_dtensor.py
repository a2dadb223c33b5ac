"""The rules beside torch's own: DTensor must come to the same output layouts without sending anything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from muster.parallel.operators import fill
from muster.parallel.planning.graph import names
from muster.parallel.planning.layouts import PARTIAL, REPLICATE, local_shape
from muster.parallel.planning.rules import modes_of
from muster.parallel.trace import trace
from tests.parallel.models import MODELS, make

NOT_COMPARED = names(
    "dropout batch_norm lstm conv1d conv2d scaled_dot_product_attention group_norm einsum expand"
)
"""Random, stateful, or what DTensor computes whole where it need not, or decomposes at length."""


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def placement(entry: Any) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    return Replicate() if entry == REPLICATE else Partial() if entry == PARTIAL else Shard(entry)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mlp", "gpt_fused_tied", "bert", "residual", "odd"])
def test_dtensor_comes_to_the_same_layouts(name: str, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.debug import CommDebugMode

    traced = trace(make(name), MODELS[name][1](0))
    graph = traced.graph
    compared = 0
    for node in graph.nodes:
        if node.kind != "call" or node.op in NOT_COMPARED or len(node.outputs) != 1:
            continue
        for mode in modes_of(graph, node)[0]:
            if (mode.size and mode.size % 2) or mode.name == "v":
                continue
            tensors = []
            for entry, value in zip(mode.ins, node.inputs, strict=True):
                shape = graph.values[value].shape
                if isinstance(entry, int) and shape[entry] % 2:
                    break
                local = torch.ones(
                    local_shape((entry,), (2,), shape), dtype=getattr(torch, graph.values[value].dtype)
                )
                tensors.append(DTensor.from_local(local, mesh, [placement(entry)], run_check=False))
            if len(tensors) < len(node.inputs):
                continue
            counted, result = CommDebugMode(), None
            with (
                contextlib.suppress(Exception),
                counted,
                torch.no_grad(),
            ):  # no rule there: nothing to compare
                result = traced.functions[node.name](*fill(node.args, tensors), **fill(node.kwargs, tensors))
            if counted.get_total_counts() or not isinstance(result, DTensor):
                continue
            got, want = result.placements[0], placement(mode.outs[0])
            assert tuple(result.shape) == graph.values[node.outputs[0]].shape
            same = got == want or (got.is_partial() and want.is_partial())
            assert same, f"{node.name} ({node.op}) as {mode.name}: DTensor says {got}, the rule {want}"
            compared += 1
    print(f"{name}: {compared} compared")
    assert compared >= 8
