"""A worker that trains with dropout, AdamW, a scheduler and a scaler, and prints its loss in each step.

Arguments: the directory of checkpoints, and what to resume from: nothing, "latest" or a file.
"""

from __future__ import annotations

import sys

import torch

import muster
from muster.worker.training import checkpoint
from tests.worker.pytorch.test_resume import CASES, SAVED_AT, STEPS, Job

with muster.init("tcp") as session:
    torch.manual_seed(100 + session.rank)
    job = Job(CASES["all of it"], session, seed=session.rank)
    checkpoints = checkpoint.Folder(sys.argv[1], job.state)
    checkpoints.resume(sys.argv[2], say=lambda sentence: None)

    def after(job: Job) -> None:
        if job.state.step == SAVED_AT and session.rank == 0:
            checkpoints.save()

    first = job.state.step + 1
    for number, loss in enumerate(job.train(STEPS, after), first):
        print(f"rank {session.rank} step {number} loss {loss.hex()}", flush=True)
    weights = torch.stack([tensor.double().sum() for tensor in job.state.arrays.values()]).sum()
    print(f"rank {session.rank} ends with {float(weights).hex()}", flush=True)
