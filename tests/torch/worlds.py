"""The end of a process's groups of torch.

With torch 2.5 the end of a Gloo group holds the interpreter's lock and waits for threads that may want it.
"""

from __future__ import annotations

import os

import torch

from muster.programs.plugin import let_gloo_settle


def end_world() -> None:
    """Ends all groups of this process once Gloo's threads rest."""
    let_gloo_settle()
    torch.distributed.destroy_process_group()


def end_rank() -> None:
    """Ends this process, one of several ranks, when all have come here; its groups are not ended."""
    torch.distributed.barrier()
    os._exit(0)
