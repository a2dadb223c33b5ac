"""Drops what a broken step has left in a module of torch's FSDP2, so that the next step begins cleanly.

Torch 2.14 does this itself (``_reset_iter_state``). For earlier releases the same is done here, by their
private names. If one of these is missing, nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# What a step leaves behind: in the context that all groups share, and in each group of parameters.
_LISTS_OF_ALL = ("reduce_scatter_states", "_last_post_reduce_events", "post_forward_order")
_GROUP_RESULTS = (
    "_all_gather_result",
    "_post_reduce_event",
    "_all_reduce_state",
    "_reshard_after_forward_event",
    "_partial_reduce_output",
)


def reset_fsdp(state: Any) -> bool:
    """Drops a module's part of a broken step; returns False if this torch cannot do it.

    Args:
        state: ``module._get_fsdp_state()`` of any module that was passed to ``fully_shard``. The root's
            state resets itself and the states of all modules within it.
    """
    for group in _groups(state):
        group._all_gather_result = None  # it has failed, so waiting for it would raise
    if not state._is_root:
        return True
    if hasattr(state, "_reset_iter_state"):
        state._reset_iter_state()
        return True
    return _reset_by_hand(state)


def _reset_by_hand(root: Any) -> bool:
    shared, common, states = root._state_ctx, root._comm_ctx, root._state_ctx.all_states
    groups = [group for state in states for group in _groups(state)]
    known = all(hasattr(group, name) for group in groups for name in (*_GROUP_RESULTS, "_to_sharded"))
    if not known or not hasattr(common, "all_gather_state"):
        return False
    if groups:  # work on other streams may still read memory that is freed below
        torch.get_device_module(groups[0].device).synchronize()
    common.all_gather_state = None
    if hasattr(common, "reduce_scatter_state"):  # torch 2.11 keeps one
        common.reduce_scatter_state = None
    for name in _LISTS_OF_ALL:
        if hasattr(common, name):
            getattr(common, name).clear()
    for state in states:
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
    for group in groups:
        for name in _GROUP_RESULTS:
            setattr(group, name, None)
        group._post_forward_indices.clear()
        group._training_state = type(group._training_state).IDLE
        group._to_sharded()
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False
    return True


def _groups(state: Any) -> Iterator[Any]:
    """Yields the groups of parameters of one state; torch 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        yield from state._fsdp_param_groups
    elif state._fsdp_param_group is not None:
        yield state._fsdp_param_group
