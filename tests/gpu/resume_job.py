"""A worker that trains with dropout, AdamW, a scheduler and a scaler, and prints its loss in each step.

Arguments: the directory of checkpoints, what to resume from (nothing, "latest" or a file), and who is killed,
once each: "RANK:STEP:MOMENT ...", with STEP steps done, "between" two steps or "during" the next one.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import muster
from muster.training import checkpoint
from tests.torch.test_resume import CASES, SAVED_AT, STEPS, Job

with muster.init("tcp") as session:
    torch.manual_seed(100 + session.rank)
    job = Job(CASES["all of it"], session, seed=session.rank)
    checkpoints = checkpoint.Folder(sys.argv[1], job.state)
    checkpoints.resume(sys.argv[2], say=lambda sentence: None)

    def die(moment: str) -> None:
        mark = Path(f"{sys.argv[1]}-{session.rank}-{job.state.step}-{moment}")
        if f"{session.rank}:{job.state.step}:{moment}" in sys.argv[3].split() and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def during(parameter: Any) -> None:
        die("during")

    next(job.net.parameters()).register_post_accumulate_grad_hook(during)

    def after(job: Job) -> None:
        print(f"rank {session.rank} step {job.state.step} loss {job.losses[-1].hex()}", flush=True)
        die("between")
        if job.state.step == SAVED_AT and session.rank == 0:
            checkpoints.save()

    job.train(STEPS, after)
    weights = torch.stack([tensor.double().sum() for tensor in job.state.arrays.values()]).sum()
    print(f"rank {session.rank} ends with {float(weights).hex()}", flush=True)
