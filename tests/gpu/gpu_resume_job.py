"""A worker on a GPU that trains with dropout, AdamW and a scheduler, and prints its loss in each step.

Arguments: the directory of checkpoints, "eager" or "captured", and "" (save after step 7), "latest" (resume),
or "differ": rank 1 sets another rate after step 9.
"""

from __future__ import annotations

import sys

import torch

import muster
from muster.errors import RanksDifferError
from muster.torch.state import TorchTrainingState
from muster.training import checkpoint
from muster.training.loop import ElasticLoop
from muster.training.sampler import ShardedSampler

STEPS, SAVED_AT, DIFFERS_AT = 16, 7, 9
directory, capture, what = sys.argv[1:]

with muster.init("nccl") as session:
    device = torch.device("cuda", session.device_ordinal)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    images, labels = torch.randn(256, 32, device=device), torch.randint(0, 4, (256,), device=device)
    layers = torch.nn.Linear(32, 64), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(64, 4)
    model = muster.DataParallel(torch.nn.Sequential(*layers).to(device), session, elastic=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, capturable=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 if what != "differ" else 100, 0.9)
    sampler = ShardedSampler(256, 16 * session.world_size, drop_last=True)
    state = TorchTrainingState(model, optimizer, sampler, also={"scheduler": scheduler})
    train = muster.capture_step(
        lambda x, y: torch.nn.functional.cross_entropy(model(x), y),
        model,
        optimizer,
        capture=capture == "captured",
    )
    torch.manual_seed(100 + session.rank)
    checkpoints = checkpoint.Folder(directory, state)
    checkpoints.resume("latest" if what == "latest" else "", say=lambda sentence: None)
    try:
        for step in ElasticLoop(session, state, epochs=100, steps=STEPS):
            with step:
                rows = torch.as_tensor(step.batch.indices, device=device)
                loss = train(images[rows], labels[rows])
                scheduler.step()
            print(f"rank {session.rank} step {state.step} loss {float(loss).hex()}", flush=True)
            if state.step == SAVED_AT and session.rank == 0 and not what:
                checkpoints.save()
            if state.step == DIFFERS_AT and session.rank == 1 and what == "differ":
                optimizer.param_groups[0]["lr"] = 0.05
        print("ends", "captured" if train.captured else "eager", flush=True)
    except RanksDifferError as error:
        print(f"differ after step {state.step}: {error}", flush=True)
