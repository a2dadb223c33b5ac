"""Finds the ranks that can go on when others are missing: the ranks of complete replicas of the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist

from muster.torch.snapshot_tensors import SnapshotTensor, is_dtensor


def replica_of(objects: Mapping[str, Any]) -> list[int] | None:
    """Returns the ranks that hold this rank's replica of the model; None: only all ranks together hold one.

    A DDP module over all ranks has a replica on each. FSDP2 on a mesh with a replicate dimension (HSDP) has
    one on each row of the other dimensions.

    Args:
        objects: the objects of the state, by name.
    """
    modules = [each for each in objects.values() if isinstance(each, torch.nn.Module)]
    found = [_replica_of_module(each) for each in modules]
    divided = any(type(each).__name__ == "ZeroRedundancyOptimizer" for each in objects.values())
    if not found or divided or any(each != found[0] for each in found):
        return None
    return found[0]


def _replica_of_module(module: Any) -> list[int] | None:
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return [dist.get_rank()] if module.process_group.size() == dist.get_world_size() else None
    rows = [_row_of(parameter) for parameter in module.parameters()]
    if not rows or any(row is None or row != rows[0] for row in rows):
        return None
    return rows[0]


def _row_of(parameter: Any) -> list[int] | None:
    """Returns the ranks of a DTensor's mesh that differ from this rank only in sharded dimensions.

    None if the tensor is not replicated in any dimension, or its mesh lacks some ranks.
    """
    if not is_dtensor(parameter):
        return None
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    replicated = [each.is_replicate() for each in parameter.placements]
    if coordinate is None or not any(replicated) or mesh.mesh.numel() != dist.get_world_size():
        return None
    index = tuple(at if same else slice(None) for at, same in zip(coordinate, replicated, strict=True))
    return sorted(mesh.mesh[index].flatten().tolist())


def active_ranks(replicas: Sequence[Sequence[int] | None]) -> list[int]:
    """Returns the ranks whose replica of the model is complete.

    Args:
        replicas: by rank, the ranks that hold its replica; None: the rank is absent.
    """
    there = {rank for rank, each in enumerate(replicas) if each is not None}
    return [rank for rank, each in enumerate(replicas) if each is not None and there >= set(each)]


def what_it_holds(tensors: Sequence[SnapshotTensor]) -> str:
    """Returns a hash of the parts of tensors that a rank holds; the same for replicas of each other."""
    parts = [[each.name, each.shape, astuple(each.wanted)] for each in tensors]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
